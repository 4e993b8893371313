"""The fleet's database in SQL: which runs are alive, who holds which instance until when, and what each instance costs.

Every time in these tables is the database's own clock, so workers with wrong clocks agree (fault K1).
FleetDatabase is the
one way in; leases are in `leases`, rented instances in `instances`, requests and commands in `targets`, reports in
`fleet_reports`, who writes which batch in `claims`, which service plans for the fleet in `services`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from gpu_runner.cost_meter import LeaseUsage
from gpu_runner.fleet_database.accounting.bill_split import InstanceCost, Split
from gpu_runner.fleet_database.accounting.request_budget import BudgetReached, Spend
from gpu_runner.fleet_database.after_restore import AfterRestore
from gpu_runner.fleet_database.claims import Claim, Claims
from gpu_runner.fleet_database.connection import CLAIMS, LEASES, RUNS, database_now, patient
from gpu_runner.fleet_database.grants import Grants
from gpu_runner.fleet_database.instances import FleetFull, Instances, InstanceState
from gpu_runner.fleet_database.leases import Lease, RunEnded, release_leases
from gpu_runner.fleet_database.reporting.backup_note import BackupNotes
from gpu_runner.fleet_database.reporting.fleet_figures import Figures
from gpu_runner.fleet_database.reporting.reports import Instance, Reports
from gpu_runner.fleet_database.services import Services
from gpu_runner.fleet_database.targets import DatasetTarget, Targets
from gpu_runner.fleet_database.wait_reason import (
    WAIT_COLUMNS,
    RunActivity,
    WaitKind,
    WaitReason,
    read_wait,
    wait_columns,
)
from gpu_runner.offers.selection import OfferFailure

__all__ = [
    "BudgetReached",
    "Claim",
    "DatasetTarget",
    "FleetDatabase",
    "FleetFull",
    "Instance",
    "InstanceCost",
    "InstanceState",
    "Lease",
    "LeaseUsage",
    "OfferFailure",
    "RunBeat",
    "RunEnded",
    "RunState",
    "Spend",
    "Split",
    "database_now",
]

RunState = Literal["waiting", "leased", "ended"]

# Of a run that somebody else ended: its note, which workers of version 0002 obey. The column is what we go by.
_DEAD_NOTE = "declared dead"

# Whatever the database says no with: it is away, locked, or full.
FleetDatabaseError = sa.exc.SQLAlchemyError


@dataclass(frozen=True, slots=True)
class RunBeat:
    """A run's heartbeat row: its worker's host and process id; `age` is seconds since the last beat by the database.

    `note`: what it does, for people; `wait`: what it waits for. `declared_dead`: somebody else ended it. One that says
    so itself has ended an op, and may begin another.
    """

    run_id: str
    dataset: str
    first_key: str
    last_key: str
    state: RunState
    note: str
    rows_done: int
    host: str
    pid: int
    age: float
    declared_dead: bool = False
    wait: WaitReason | None = None


class FleetDatabase(Instances, Targets, Reports, Claims, Figures, Services, Grants, BackupNotes, AfterRestore):
    """The tables, and the few transactions that are allowed on them. Safe to use from several threads."""

    # runs

    @patient
    def begin_run(self, run_id: str, dataset: str, first_key: str, last_key: str) -> None:
        """First heartbeat of a run's op, before it holds anything. Raises RunEnded for one that was declared dead."""
        with self._transaction() as (connection, now):
            if connection.execute(sa.select(RUNS.c.run_id).where((RUNS.c.run_id == run_id) & _DEAD)).first():
                raise RunEnded(run_id)
            connection.execute(RUNS.delete().where(RUNS.c.run_id == run_id))
            connection.execute(CLAIMS.delete().where(CLAIMS.c.run_id == run_id))
            keys = {"dataset": dataset, "first_key": first_key, "last_key": last_key}
            worker = {"host": socket.gethostname(), "pid": os.getpid()}
            _add_run(connection, now, run_id, keys | worker | {"state": "waiting", "note": ""})

    def beat(self, run_id: str, state: RunState, activity: RunActivity, rows_done: int) -> bool:
        """Say that the run lives, and what it does. False: it was declared dead meanwhile, and stays so."""
        change = RUNS.update().where((RUNS.c.run_id == run_id) & (RUNS.c.state != "ended"))
        with self._own_row() as (connection, now):
            values = {"state": state, "note": activity.note[:300], "rows_done": rows_done, "beat_at": now}
            values |= wait_columns(activity.wait) | {"wait_since": _wait_since(activity.wait, now)}
            return connection.execute(change.values(**values)).rowcount == 1

    def runs(self) -> list[RunBeat]:
        """Every run that has not ended, oldest beat first."""
        return self._beats(RUNS.c.state != "ended")

    def run_beat(self, run_id: str) -> RunBeat | None:
        """The heartbeat row of a run, of an ended one too; None: it never had one."""
        return next(iter(self._beats(RUNS.c.run_id == run_id)), None)

    def shared_by_others(self, dataset: str, silent: float) -> bool:
        """Whether another process sends interactive requests to the engines that runs of this dataset lease.

        It says so with a run that waits for such requests; one that was silent for `silent` seconds is gone.
        """
        shares = (RUNS.c.dataset == dataset) & (RUNS.c.state != "ended")
        shares &= RUNS.c.wait_kind == WaitKind.INTERACTIVE.value
        shares &= (RUNS.c.host != socket.gethostname()) | (RUNS.c.pid != os.getpid())
        with self._reading() as (connection, now):
            query = sa.select(RUNS.c.run_id).where(shares & (RUNS.c.beat_at > now - silent))
            return connection.execute(query.limit(1)).first() is not None

    def _beats(self, which: sa.ColumnElement[bool]) -> list[RunBeat]:
        made = ("age", "declared_dead")
        plain = [name for name in RunBeat.__dataclass_fields__ if name not in (*made, "wait")]
        with self._reading() as (connection, now):
            ages = ((now - RUNS.c.beat_at).label("age"), (now - RUNS.c.wait_since).label("wait_age"))
            computed = (*ages, _DEAD.label("declared_dead"))
            query = sa.select(*(RUNS.c[name] for name in (*plain, *WAIT_COLUMNS)), *computed)
            rows = connection.execute(query.where(which).order_by(RUNS.c.beat_at)).mappings().all()
        return [RunBeat(**{name: row[name] for name in (*plain, *made)}, wait=read_wait(row)) for row in rows]

    def end_run(self, run_id: str) -> None:
        """The run's last word in an op: it holds nothing and leases nothing. One that was declared dead stays so."""
        with self._transaction() as (connection, now):
            own = (RUNS.c.run_id == run_id) & ~_DEAD
            connection.execute(RUNS.update().where(own).values(state="ended", note="", beat_at=now))
            _take_all(connection, now, run_id)

    def declare_dead(self, run_id: str) -> None:
        """What others say of a run: it holds nothing, leases nothing, and begins no op, also if it had no row yet."""
        with self._transaction() as (connection, now):
            said = {"state": "ended", "note": _DEAD_NOTE, "declared_dead_at": now}
            if connection.execute(sa.select(RUNS.c.run_id).where(RUNS.c.run_id == run_id)).first() is None:
                unknown = {"dataset": "", "first_key": "", "last_key": "", "host": "", "pid": 0}
                _add_run(connection, now, run_id, unknown | said)
            else:
                alive = (RUNS.c.run_id == run_id) & ~_DEAD
                connection.execute(RUNS.update().where(alive).values(**said, beat_at=now))
            _take_all(connection, now, run_id)


_DEAD = RUNS.c.declared_dead_at.is_not(None)


def _wait_since(wait: WaitReason | None, now: float) -> sa.ColumnElement[float] | None:
    """Since when a run waits: while it is for the same kind of thing, since it said so first."""
    if wait is None:
        return None
    began = sa.literal(now - wait.seconds)
    same = RUNS.c.wait_kind == wait.kind.value
    return sa.case((same, sa.func.coalesce(RUNS.c.wait_since, began)), else_=began)


def _add_run(connection: sa.Connection, now: float, run_id: str, values: Mapping[str, object]) -> None:
    times = {"started_at": now, "beat_at": now}
    connection.execute(RUNS.insert().values(run_id=run_id, rows_done=0, **times, **values))


def _take_all(connection: sa.Connection, now: float, run_id: str) -> None:
    connection.execute(CLAIMS.delete().where(CLAIMS.c.run_id == run_id))
    release_leases(connection, now, LEASES.c.run_id == run_id, "run ended")
