"""The fleet's books in SQL: who holds which instance, until when, and which runs are alive.

Every time in these tables is the database's own clock, so workers with wrong clocks agree (fault K1). A lease carries
an epoch that only grows per instance: a holder whose lease lapsed cannot renew, release or end anything any more.
SQLite by default, Postgres in a deployment; one writer transaction each.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

RunState = Literal["waiting", "leased", "ended"]


class RunEnded(Exception):
    """The run was declared dead while it was silent. It may have a successor: it leases nothing any more."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id} gave no heartbeat and was declared dead; another run continues its work")


class database_now(FunctionElement[float]):
    """Unix seconds by the database's clock."""

    type = sa.Float()
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now)
def _standard_now(element: Any, compiler: Any, **kw: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


_metadata = sa.MetaData()

_runs = sa.Table(
    "batch_runs",
    _metadata,
    sa.Column("run_id", sa.String(64), primary_key=True),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("first_key", sa.String(16), nullable=False),
    sa.Column("last_key", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("note", sa.String(300), nullable=False),
    sa.Column("rows_done", sa.Integer, nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("beat_at", sa.Float, nullable=False),
)

_leases = sa.Table(
    "leases",
    _metadata,
    sa.Column("instance", sa.String(200), primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("acquired_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("released_at", sa.Float),
)

_datasets = sa.Table(
    "datasets",
    _metadata,
    sa.Column("dataset", sa.String(128), primary_key=True),
    sa.Column("instances", sa.Integer, nullable=False),
)


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


@dataclass(frozen=True, slots=True)
class Lease:
    """One run's exclusive right to an instance. Two leases of one instance never share an epoch."""

    instance: str
    epoch: int
    run_id: str
    dataset: str


class FleetBook:
    """The tables, and the few transactions that are allowed on them. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        sqlite = url.startswith("sqlite")
        self.engine = sa.create_engine(url, pool_pre_ping=not sqlite, connect_args={"timeout": 30} if sqlite else {})
        if sqlite:
            sa.event.listen(self.engine, "connect", _configure_sqlite)
            sa.event.listen(self.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        with contextlib.suppress(sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.IntegrityError):
            _metadata.create_all(self.engine)  # another process may create the same tables at this moment
        _metadata.create_all(self.engine)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self.engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("LOCK TABLE leases IN EXCLUSIVE MODE")
            yield connection

    # runs

    def begin_run(self, run_id: str, dataset: str, first_key: str, last_key: str) -> None:
        """First heartbeat of a run, before it holds anything."""
        with self.engine.begin() as connection:
            connection.execute(_runs.delete().where(_runs.c.run_id == run_id))
            connection.execute(
                _runs.insert().values(
                    run_id=run_id,
                    dataset=dataset,
                    first_key=first_key,
                    last_key=last_key,
                    state="waiting",
                    note="",
                    rows_done=0,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    started_at=database_now(),
                    beat_at=database_now(),
                )
            )

    def beat(self, run_id: str, state: RunState, note: str, rows_done: int) -> bool:
        """Say that the run lives, and what it does. False: it was declared dead meanwhile, and stays so."""
        change = _runs.update().where((_runs.c.run_id == run_id) & (_runs.c.state != "ended"))
        values = {"state": state, "note": note[:300], "rows_done": rows_done, "beat_at": database_now()}
        with self.engine.begin() as connection:
            return connection.execute(change.values(**values)).rowcount == 1

    def runs(self) -> list[RunBeat]:
        """Every run that has not ended, oldest beat first."""
        columns = [_runs.c[name] for name in RunBeat.__dataclass_fields__ if name != "age"]
        query = sa.select(*columns, (database_now() - _runs.c.beat_at).label("age"))
        with self.engine.connect() as connection:
            lines = connection.execute(query.where(_runs.c.state != "ended").order_by(_runs.c.beat_at)).all()
        return [RunBeat(*line) for line in lines]

    def end_run(self, run_id: str) -> None:
        """The run's last word, or what is said of a dead one: it is over, it holds nothing and leases nothing."""
        with self._transaction() as connection:
            connection.execute(
                _runs.update().where(_runs.c.run_id == run_id).values(state="ended", beat_at=database_now())
            )
            self._release_run(connection, run_id)

    # leases

    def try_lease(
        self, instance: str, run_id: str, dataset: str, ttl: float, *, limit: int | None = None
    ) -> Lease | None:
        """Take the instance for `ttl` seconds if no live lease stands on it, with an epoch above all before.

        None also when the dataset holds `limit` leases already. Raises RunEnded for a run that was declared dead.
        """
        with self._transaction() as connection:
            state = connection.execute(sa.select(_runs.c.state).where(_runs.c.run_id == run_id)).scalar()
            if state == "ended":
                raise RunEnded(run_id)
            if limit is not None and connection.execute(_live_leases(dataset)).scalar_one() >= limit:
                return None
            newest = connection.execute(
                sa.select(_leases.c.epoch, _leases.c.released_at, _leases.c.expires_at - database_now())
                .where(_leases.c.instance == instance)
                .order_by(_leases.c.epoch.desc())
                .limit(1)
            ).first()
            if newest is not None and newest[1] is None and newest[2] > 0:
                return None
            lease = Lease(instance, (newest[0] if newest else 0) + 1, run_id, dataset)
            connection.execute(
                _leases.insert().values(
                    instance=instance,
                    epoch=lease.epoch,
                    run_id=run_id,
                    dataset=dataset,
                    acquired_at=database_now(),
                    expires_at=database_now() + ttl,
                )
            )
            return lease

    def holder(self, instance: str) -> str | None:
        """Run that holds a live lease on the instance, or None."""
        live = (_leases.c.instance == instance) & _leases.c.released_at.is_(None)
        query = sa.select(_leases.c.run_id).where(live & (_leases.c.expires_at > database_now()))
        with self.engine.connect() as connection:
            return connection.execute(query).scalar()

    def leases_of(self, dataset: str) -> int:
        """How many live leases the dataset's runs hold."""
        with self.engine.connect() as connection:
            return int(connection.execute(_live_leases(dataset)).scalar_one())

    def _fenced(self, lease: Lease) -> sa.ColumnElement[bool]:
        """The lease is live, and no later epoch exists (a later one exists only after this one ended)."""
        mine = (_leases.c.instance == lease.instance) & (_leases.c.epoch == lease.epoch)
        return mine & _leases.c.released_at.is_(None) & (_leases.c.expires_at > database_now())

    def renew(self, lease: Lease, ttl: float) -> bool:
        """Extend the lease. False: it lapsed or was ended; the holder must stand down."""
        with self._transaction() as connection:
            change = _leases.update().where(self._fenced(lease)).values(expires_at=database_now() + ttl)
            return connection.execute(change).rowcount == 1

    def release(self, lease: Lease) -> bool:
        """Give the instance back. False when it was no longer ours."""
        with self._transaction() as connection:
            change = _leases.update().where(self._fenced(lease)).values(released_at=database_now())
            return connection.execute(change).rowcount == 1

    def release_run(self, run_id: str) -> int:
        """End every lease of a run that is known to be dead; returns how many there were."""
        with self._transaction() as connection:
            return self._release_run(connection, run_id)

    @staticmethod
    def _release_run(connection: sa.Connection, run_id: str) -> int:
        held = (_leases.c.run_id == run_id) & _leases.c.released_at.is_(None)
        return connection.execute(_leases.update().where(held).values(released_at=database_now())).rowcount

    def history(self, run_id: str) -> list[tuple[str, int, bool]]:
        """(instance, epoch, released) of every lease a run ever had."""
        query = sa.select(_leases.c.instance, _leases.c.epoch, _leases.c.released_at).where(_leases.c.run_id == run_id)
        with self.engine.connect() as connection:
            return [(line[0], line[1], line[2] is not None) for line in connection.execute(query)]

    # the capacity number

    def instances(self, dataset: str) -> int:
        """How many instances the dataset may lease now; 1 until somebody commands otherwise."""
        query = sa.select(_datasets.c.instances).where(_datasets.c.dataset == dataset)
        with self.engine.connect() as connection:
            found = connection.execute(query).scalar()
        return 1 if found is None else int(found)

    def set_instances(self, dataset: str, instances: int) -> None:
        """Command how many instances the dataset may lease."""
        with self.engine.begin() as connection:
            connection.execute(_datasets.delete().where(_datasets.c.dataset == dataset))
            connection.execute(_datasets.insert().values(dataset=dataset, instances=instances))


def _live_leases(dataset: str) -> sa.Select[tuple[int]]:
    live = (_leases.c.dataset == dataset) & _leases.c.released_at.is_(None)
    return sa.select(sa.func.count()).where(live & (_leases.c.expires_at > database_now()))


def _configure_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy's BEGIN IMMEDIATE below is the only BEGIN
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=30000")
    cursor.close()
