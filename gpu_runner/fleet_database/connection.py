"""The database of the fleet: its clock, and how it is opened and written to.

SQLite by default, Postgres in a deployment. Every write is one transaction that no other writer interleaves with, and
takes the time once, from the database: so workers with wrong clocks agree (fault K1), and a process that is stopped
in the middle of a transaction holds everyone else off until it goes on. In Postgres, what is said all the time waits
for less: beats write a row beside everybody, and renewals of leases beside each other. A clock that is set meanwhile
ends no lease and makes no bill longer (`gpu_runner.fleet_database.clock_jumps`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from gpu_runner.boot_clock import ClockReading, Steady, boot_name, boot_seconds, jump
from gpu_runner.fleet_database.clock_jumps import (
    KEPT_SECONDS,
    Agreed,
    ClockJump,
    jumps_since,
    keep,
    kept,
    settle,
    total_of_jumps,
)
from gpu_runner.fleet_database.migrations import HEAD, upgrade, version_of
from gpu_runner.fleet_database.tables import CLAIMS, DATASETS, FACTS, INSTANCES, LEASES, OFFER_FAILURES, RUNS
from gpu_runner.sqlite_files import sqlite_engine
from gpu_runner.table_versions import ONE_UPGRADE

__all__ = ["CLAIMS", "DATASETS", "FACTS", "INSTANCES", "LEASES", "OFFER_FAILURES", "RUNS", "Tables", "database_now"]


BUSY_SECONDS = 30  # how long a call waits for another writer of a SQLite file
PSYCOPG2 = "psycopg2"
TURNS, QUERY_CANCELED = 8, "57014"  # of `statement_timeout`, 15 s each

P = ParamSpec("P")
T = TypeVar("T")


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


class Tables:
    """The open database. Safe to use from several threads.

    In tests `now` replaces the database's clock, which then is never set unless a `steady` clock is given, too.
    """

    def __init__(
        self, url: str, *, now: Callable[[], float] | None = None, steady: Steady | None = None, host: str | None = None
    ) -> None:
        self._injected_now = now
        self._steady = steady or (boot_seconds if now is None else None)
        self._host = boot_name() if host is None else host
        self._seen: Agreed | None = None
        self._kept_at = -math.inf  # by the steady clock: when it was written down for others
        try:
            self.engine = _open(url)
        except (sa.exc.ArgumentError, ValueError):  # its text may hold parts of the address, and so the password
            raise ValueError("database of the fleet: expected a SQLAlchemy URL, found what cannot be read") from None
        with self._reader() as connection:
            found = version_of(connection)
        if found != HEAD:
            with ONE_UPGRADE:
                self._upgrade(url)

    def _upgrade(self, url: str) -> None:
        if self.engine.dialect.name == "sqlite":
            with self.engine.begin() as connection:
                upgrade(connection)
            return
        engine = sa.create_engine(url, poolclass=sa.NullPool)  # a change of large tables takes its time
        with engine.begin() as connection:
            upgrade(connection)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def clock_jumps(self, horizon: float) -> list[ClockJump]:
        """When the database's clock was set in the last `horizon` seconds, the latest first."""
        with self._reading() as (connection, now):
            return jumps_since(connection, now, horizon)

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[tuple[sa.Connection, float]]:
        """The only writer, and the time at which it writes. Not `durable`: a crash of Postgres may lose it within its
        last second, so that no other writer waits for the disk meanwhile. For what is said again all the time.
        """
        with self.engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                if not durable:
                    connection.exec_driver_sql(_NOT_DURABLE)
                connection.exec_driver_sql("LOCK TABLE leases IN EXCLUSIVE MODE")
            now = self._look(connection)
            due = self._is_due(now)
            if due:
                now = settle(connection, self._host, now, self._seen)
            yield connection, now.moment.wall
        if due or self._seen is not None:  # not before the commit: what was not written must be found again
            self._seen = now
        if due:
            self._kept_at = now.moment.low

    @contextlib.contextmanager
    def _beside_its_like(self) -> Iterator[tuple[sa.Connection, float, bool]]:
        """A writer to one row of `leases` that only its holder writes: connection, time, and whether it is the only
        writer, as in SQLite and when the clock was set. In Postgres such writers hold each other not off, but everybody
        else: none of them begins while one of `_transaction` is under way, nor that before they have ended. Its last
        second may be lost.
        """
        with self._beside("LOCK TABLE leases IN ROW EXCLUSIVE MODE") as found:
            if found is not None:
                yield *found, False
                return
        with self._transaction(durable=False) as (connection, moment):
            yield connection, moment, True

    @contextlib.contextmanager
    def _own_row(self) -> Iterator[tuple[sa.Connection, float]]:
        """A writer to one row whose times nobody counts against others'. In Postgres it holds nobody off, and waits
        only for who moves times along because the clock was set; its last second may be lost, as in `_transaction`.
        """
        with self._beside("LOCK TABLE clock_jumps IN ROW SHARE MODE") as found:
            if found is not None:
                yield found
                return
        with self._transaction(durable=False) as found:
            yield found

    @contextlib.contextmanager
    def _beside(self, lock: str) -> Iterator[tuple[sa.Connection, float] | None]:
        """A writer in Postgres that holds a lock with which nobody else settles the clock; None where the clock is to
        be settled, and in SQLite.
        """
        if self.engine.dialect.name != "postgresql":
            yield None
            return
        with self.engine.begin() as connection:
            connection.exec_driver_sql(_NOT_DURABLE)
            connection.exec_driver_sql(lock)
            now = self._look(connection)
            due = self._is_due(now)
            settled = not due or keep(connection, self._host, now, self._seen)
            if settled:
                yield connection, now.moment.wall
        if not settled:
            yield None
        elif due:
            self._seen, self._kept_at = now, now.moment.low

    def _is_due(self, now: Agreed) -> bool:
        """Whether this moment is to be compared with what the database keeps, or kept there."""
        return self._steady is not None and (self._jumped(now) or now.moment.low - self._kept_at > KEPT_SECONDS)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[tuple[sa.Connection, float]]:
        """A reader, and the time; it waits for no writer, unless it is the first to see that the clock was set."""
        with self._reader() as connection:
            now = self._look(connection)
            if self._steady is not None and self._seen is None:
                self._seen = kept(connection, self._host)
            if not self._jumped(now):
                yield connection, now.moment.wall
                return
        with self._transaction():
            pass
        with self._reader() as connection:
            yield connection, self._look(connection).moment.wall

    def _reader(self) -> contextlib.AbstractContextManager[sa.Connection]:
        return self.engine.connect().execution_options(reading=True)

    def _look(self, connection: sa.Connection) -> Agreed:
        """Now by all clocks, and the jumps that the fleet's database knows; one question to the database."""
        if self._steady is None:
            wall = self._injected_now() if self._injected_now else 0.0
            return Agreed(ClockReading(wall, 0.0, 0.0), 0.0)
        low = self._steady()
        wall, jumps = connection.execute(_LOOK).one()
        wall = float(wall) if self._injected_now is None else self._injected_now()
        return Agreed(ClockReading(wall, low, self._steady()), float(jumps))

    def _jumped(self, now: Agreed) -> bool:
        """Whether the clock was set since this process has looked, and that is not settled in the database yet."""
        return self._seen is not None and jump(self._seen.since(now.jumps), now.moment) != 0.0


_NOT_DURABLE = "SET LOCAL synchronous_commit = off"
_LOOK = sa.select(database_now(), total_of_jumps())  # begins every transaction: to build it took longer than to ask it


def patient(call: Callable[P, T]) -> Callable[P, T]:
    """Of a call that may be made again: it has several turns to wait for other writers before it gives up. For the
    first word of a run, which fails with it; one that only says something again is better without.
    """

    @functools.wraps(call)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        for _ in range(TURNS - 1):
            try:
                return call(*arguments, **named)
            except sa.exc.OperationalError as error:
                if getattr(error.orig, "pgcode", None) != QUERY_CANCELED:
                    raise
        return call(*arguments, **named)

    return called


def _open(url: str) -> sa.Engine:
    """An engine each of whose calls ends, in Postgres as `gpu_runner.bounded_postgres` says."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return sqlite_engine(parsed, BUSY_SECONDS)
    if parsed.get_dialect().driver == PSYCOPG2:
        from gpu_runner.bounded_postgres import bounded_engine

        engine = bounded_engine(parsed, pool_pre_ping=True)
    else:
        engine = sa.create_engine(parsed, pool_pre_ping=True)
    sa.event.listen(engine, "connect", _configure_postgres)
    return engine


def _configure_postgres(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    # A worker that is stopped in the middle of a transaction would hold the fleet's lock for as long as it is stopped.
    cursor.execute("SET idle_in_transaction_session_timeout = '10s'")
    connection.commit()
    cursor.close()
