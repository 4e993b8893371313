"""The fleet's books in SQL: which runs are alive, who holds which instance until when, and what each instance costs.

Every time in these tables is the database's own clock, so workers with wrong clocks agree (fault K1). FleetBook is the
one way in; leases are in `leases`, rented instances in `instances`, requests and commands in `targets`, reports in
`fleet_reports`, who writes which batch in `claims`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from gpu_runner.accounts import InstanceCost, Split
from gpu_runner.budget import BudgetReached, Spend
from gpu_runner.choice import OfferFailure
from gpu_runner.claims import Claim, Claims
from gpu_runner.fleet_reports import Instance, Reports
from gpu_runner.fleet_tables import CLAIMS, LEASES, RUNS, database_now
from gpu_runner.instances import Instances, InstanceState
from gpu_runner.leases import Lease, RunEnded, release_leases
from gpu_runner.spend import Spent
from gpu_runner.targets import DatasetTarget, Targets

__all__ = [
    "BudgetReached",
    "Claim",
    "DatasetTarget",
    "FleetBook",
    "Instance",
    "InstanceCost",
    "InstanceState",
    "Lease",
    "OfferFailure",
    "RunBeat",
    "RunEnded",
    "RunState",
    "Spend",
    "Spent",
    "Split",
    "database_now",
]

RunState = Literal["waiting", "leased", "ended"]


# Whatever the database says no with: it is away, locked, or full.
BookError = sa.exc.SQLAlchemyError


@dataclass(frozen=True, slots=True)
class RunBeat:
    """A run's heartbeat row: its worker's host and process id; `age` is seconds since the last beat by the database."""

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


class FleetBook(Instances, Targets, Reports, Claims):
    """The tables, and the few transactions that are allowed on them. Safe to use from several threads."""

    # runs

    def begin_run(self, run_id: str, dataset: str, first_key: str, last_key: str) -> None:
        """First heartbeat of a run, before it holds anything."""
        with self._transaction() as (connection, now):
            connection.execute(RUNS.delete().where(RUNS.c.run_id == run_id))
            connection.execute(CLAIMS.delete().where(CLAIMS.c.run_id == run_id))
            connection.execute(
                RUNS.insert().values(
                    run_id=run_id,
                    dataset=dataset,
                    first_key=first_key,
                    last_key=last_key,
                    state="waiting",
                    note="",
                    rows_done=0,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    started_at=now,
                    beat_at=now,
                )
            )

    def beat(self, run_id: str, state: RunState, note: str, rows_done: int) -> bool:
        """Say that the run lives, and what it does. False: it was declared dead meanwhile, and stays so."""
        change = RUNS.update().where((RUNS.c.run_id == run_id) & (RUNS.c.state != "ended"))
        with self._transaction() as (connection, now):
            values = {"state": state, "note": note[:300], "rows_done": rows_done, "beat_at": now}
            return connection.execute(change.values(**values)).rowcount == 1

    def runs(self) -> list[RunBeat]:
        """Every run that has not ended, oldest beat first."""
        columns = [RUNS.c[name] for name in RunBeat.__dataclass_fields__ if name != "age"]
        with self._reading() as (connection, now):
            query = sa.select(*columns, (now - RUNS.c.beat_at).label("age"))
            lines = connection.execute(query.where(RUNS.c.state != "ended").order_by(RUNS.c.beat_at)).all()
        return [RunBeat(*line) for line in lines]

    def end_run(self, run_id: str) -> None:
        """The run's last word, or what is said of a dead one: it is over, it holds nothing and leases nothing."""
        with self._transaction() as (connection, now):
            connection.execute(RUNS.update().where(RUNS.c.run_id == run_id).values(state="ended", beat_at=now))
            connection.execute(CLAIMS.delete().where(CLAIMS.c.run_id == run_id))
            release_leases(connection, now, LEASES.c.run_id == run_id, "run ended")
