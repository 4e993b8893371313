"""What is known of the last backups, in the fleet's database: for `status`, metrics and alerts, which ask no store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from gpu_runner.fleet_database.connection import FACTS, Tables

_NAME = "backup"
LONGEST_FAILURE = 150  # letters; with the rest less than a fact may have


@dataclass(frozen=True, slots=True)
class BackupNote:
    """The last backup, `age_seconds` ago (None: there was none), and why a later one failed (""; none did)."""

    backup: str = ""
    age_seconds: float | None = None
    stored_bytes: int = 0
    took_seconds: float = 0.0
    failure: str = ""


class BackupNotes(Tables):
    """The transactions on what is known of backups."""

    def backup_made(self, backup: str, stored_bytes: int, took_seconds: float) -> None:
        """A backup is complete."""
        with self._transaction() as (connection, now):
            said = {"backup": backup, "at": now, "bytes": stored_bytes, "took": round(took_seconds, 1)}
            _write(connection, said)

    def backup_failed(self, reason: str) -> None:
        """A backup was begun, and is not to be had."""
        with self._transaction() as (connection, _):
            plain = reason.encode("ascii", "replace").decode().replace('"', "'").replace("\\", "/")
            _write(connection, _read(connection) | {"failure": plain[:LONGEST_FAILURE]})

    def last_backup(self) -> BackupNote:
        """What is known."""
        with self._reading() as (connection, now):
            said = _read(connection)
        age = None if "at" not in said else max(0.0, now - said["at"])
        backup, size, took = said.get("backup", ""), said.get("bytes", 0), said.get("took", 0.0)
        return BackupNote(backup, age, size, took, said.get("failure", ""))


def _read(connection: sa.Connection) -> dict[str, Any]:
    found = connection.execute(sa.select(FACTS.c.value).where(FACTS.c.name == _NAME)).scalar()
    return {} if found is None else dict(json.loads(found))


def _write(connection: sa.Connection, said: dict[str, Any]) -> None:
    connection.execute(FACTS.delete().where(FACTS.c.name == _NAME))
    connection.execute(FACTS.insert().values(name=_NAME, value=json.dumps(said)))
