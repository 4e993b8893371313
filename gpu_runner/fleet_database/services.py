"""Services that plan for a fleet beside Dagster's sensors: those of one owner at a time.

Processes of one owner share what they plan with. Two owners would each overwrite the command of the other, so the
second is refused while one of the first's lives: while it has given a sign of life within `silent` seconds.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass

import sqlalchemy as sa

from gpu_runner.fleet_database.connection import FACTS, Tables

_PREFIX = "service:"
LONGEST_NAME = 64 - len(_PREFIX)
LONGEST_NOTE = 120  # letters; with the rest of the value less than a fact may have


@dataclass(frozen=True, slots=True)
class ServiceBeat:
    """The last sign of life of a service's process, `age` seconds ago. `note`: what it is, for people."""

    owner: str
    host: str
    pid: int
    note: str
    age: float


class Services(Tables):
    """The transactions on services."""

    def beat_service(self, name: str, owner: str, note: str, silent: float) -> ServiceBeat | None:
        """A sign of life of the process `name`, the first one or a later one. None: it is written.

        Else one of another owner lives, which is returned, and this process plans nothing. So it goes to one that was
        silent for too long while another has begun.
        """
        with self._transaction() as (connection, now):
            rows = connection.execute(sa.select(FACTS).where(FACTS.c.name.startswith(_PREFIX, autoescape=True)))
            beats = {row.name: _read(row.value, now) for row in rows}
            own = _PREFIX + name[:LONGEST_NAME]
            for key, beat in list(beats.items()):
                if key != own and not 0 <= beat.age <= silent:
                    connection.execute(FACTS.delete().where(FACTS.c.name == key))
                    del beats[key]
            rival = next((beat for beat in beats.values() if beat.owner != owner), None)
            if rival is not None:
                connection.execute(FACTS.delete().where(FACTS.c.name == own))
                return rival
            said = {"owner": owner, "host": socket.gethostname()[:60], "pid": os.getpid(), "at": now}
            value = json.dumps({**said, "note": note.encode("ascii", "replace").decode()[:LONGEST_NOTE]})
            if own in beats:
                connection.execute(FACTS.update().where(FACTS.c.name == own).values(value=value))
            else:
                connection.execute(FACTS.insert().values(name=own, value=value))
        return None

    def end_service(self, name: str) -> None:
        """The process has ended in order."""
        with self._transaction() as (connection, _):
            connection.execute(FACTS.delete().where(FACTS.c.name == _PREFIX + name[:LONGEST_NAME]))


def _read(value: str, now: float) -> ServiceBeat:
    found = json.loads(value)
    return ServiceBeat(found["owner"], found["host"], found["pid"], found["note"], now - found["at"])
