"""The fleet's tables, the database's clock, and how a database is opened and written to.

SQLite by default, Postgres in a deployment. Every write is one transaction that no other writer interleaves with, and
takes the time once, from the database: so workers with wrong clocks agree (fault K1), and a process that is stopped
in the middle of a transaction holds everyone else off until it goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


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

RUNS = sa.Table(
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

# `renewed_at`: when the holder last said what it had done; what comes after it, until the lease's end, was lost.
LEASES = sa.Table(
    "leases",
    _metadata,
    sa.Column("instance", sa.String(200), primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("acquired_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("released_at", sa.Float),
    sa.Column("renewed_at", sa.Float),
    sa.Column("draining_at", sa.Float),
    sa.Column("useful_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("wasted_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("rows", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("reason", sa.String(300), nullable=False, server_default=""),
)

# `instances`, `offers`, `pause`: the command. `request`: what is made now ("": nothing), since when. What an operator
# overrides holds for that request. `memory`, `plan`: what the capacity sensor keeps and shows, as JSON. `counted_…`:
# what was spent, and US dollars per second, when it was last added up (NULL: that is not the most any more).
DATASETS = sa.Table(
    "datasets",
    _metadata,
    sa.Column("dataset", sa.String(128), primary_key=True),
    sa.Column("instances", sa.Integer, nullable=False),
    sa.Column("request", sa.String(200), nullable=False, server_default=""),
    sa.Column("since", sa.Float, nullable=False, server_default="0"),
    sa.Column("deadline_at", sa.Float),
    sa.Column("deadline_override", sa.Float),
    sa.Column("budget_usd", sa.Float),
    sa.Column("budget_override", sa.Float),
    sa.Column("objective", sa.String(32), nullable=False, server_default=""),
    sa.Column("max_instances", sa.Integer),
    sa.Column("offers", sa.Text, nullable=False, server_default="[]"),
    sa.Column("pause", sa.Text, nullable=False, server_default=""),
    sa.Column("memory", sa.Text, nullable=False, server_default="{}"),
    sa.Column("plan", sa.Text, nullable=False, server_default="{}"),
    sa.Column("updated_at", sa.Float),
    sa.Column("counted_at", sa.Float),
    sa.Column("counted_usd", sa.Float, nullable=False, server_default="0"),
    sa.Column("counted_rate", sa.Float, nullable=False, server_default="0"),
)

# `created_at`: billing starts. `notice_at`: it is taken away. `seen_at`: first in the provider's list. `retire_at`:
# since when it takes no new lease and is to end with its last one. `missing_since`: not in the provider's list; kept
# when that is all that is known of its end.
INSTANCES = sa.Table(
    "instances",
    _metadata,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("provider", sa.String(300), nullable=False),
    sa.Column("region", sa.String(300), nullable=False),
    sa.Column("instance_type", sa.String(300), nullable=False),
    sa.Column("gpu", sa.String(300), nullable=False),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("gpu_memory_gib", sa.Float, nullable=False),
    sa.Column("spot", sa.Boolean, nullable=False),
    sa.Column("price_per_hour", sa.Float, nullable=False),
    sa.Column("clock", sa.Float, nullable=False),
    sa.Column("boot_seconds", sa.Float, nullable=False),
    sa.Column("engine_key", sa.String(300), nullable=False),
    sa.Column("model", sa.String(300), nullable=False),
    sa.Column("max_num_seqs", sa.Integer),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("endpoint", sa.String(300)),
    sa.Column("machine_id", sa.String(200)),
    sa.Column("reason", sa.String(300), nullable=False, server_default=""),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ready_at", sa.Float),
    sa.Column("ending_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("notice_at", sa.Float),
    sa.Column("seen_at", sa.Float),
    sa.Column("retire_at", sa.Float),
    sa.Column("missing_since", sa.Float),
)

OFFER_FAILURES = sa.Table(
    "offer_failures",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("provider", sa.String(300), nullable=False),
    sa.Column("offer", sa.String(300), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("reason", sa.String(300), nullable=False),
)

FACTS = sa.Table(
    "fleet_facts",
    _metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(300), nullable=False),
)


class Tables:
    """The open database. Safe to use from several threads. `now` replaces the database's clock in tests."""

    def __init__(self, url: str, *, now: Callable[[], float] | None = None) -> None:
        sqlite = url.startswith("sqlite")
        self._injected_now = now
        try:
            self.engine = sa.create_engine(
                url, pool_pre_ping=not sqlite, connect_args={"timeout": 30} if sqlite else {}
            )
        except (sa.exc.ArgumentError, ValueError):  # its text may hold parts of the address, and so the password
            raise ValueError("database of the fleet: expected a SQLAlchemy URL, found what cannot be read") from None
        if sqlite:
            sa.event.listen(self.engine, "connect", _configure_sqlite)
            sa.event.listen(self.engine, "begin", _begin_sqlite)
        else:
            sa.event.listen(self.engine, "connect", _configure_postgres)
        with contextlib.suppress(sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.IntegrityError):
            _metadata.create_all(self.engine)  # another process may create the same tables at this moment
        _metadata.create_all(self.engine)
        if self._missing_columns():
            self._add_columns()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[tuple[sa.Connection, float]]:
        """The only writer, and the time at which it writes."""
        with self.engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("LOCK TABLE leases IN EXCLUSIVE MODE")
            yield connection, self._now(connection)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[tuple[sa.Connection, float]]:
        """A reader, and the time; it waits for no writer."""
        with self.engine.connect().execution_options(reading=True) as connection:
            yield connection, self._now(connection)

    def _now(self, connection: sa.Connection) -> float:
        if self._injected_now is not None:
            return self._injected_now()
        return float(connection.execute(sa.select(database_now())).scalar_one())

    def _missing_columns(self) -> list[sa.Column[Any]]:
        """Columns that a database of an earlier version lacks."""
        with self.engine.connect().execution_options(reading=True) as connection:
            return _missing(connection)

    def _add_columns(self) -> None:
        with self._transaction() as (connection, _):
            for column in _missing(connection):  # again: another process may have added them meanwhile
                words = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
                connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {words}")


def _missing(connection: sa.Connection) -> list[sa.Column[Any]]:
    inspector = sa.inspect(connection)
    missing: list[sa.Column[Any]] = []
    for table in _metadata.sorted_tables:
        there = {column["name"] for column in inspector.get_columns(table.name)}
        missing += [column for column in table.columns if column.name not in there]
    return missing


def _begin_sqlite(connection: sa.Connection) -> None:
    reading = connection.get_execution_options().get("reading")
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _configure_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # the BEGIN above is the only one
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout=30000")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _configure_postgres(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    # A worker that is stopped in the middle of a transaction would hold the fleet's lock for as long as it is stopped.
    cursor.execute("SET idle_in_transaction_session_timeout = '10s'")
    connection.commit()
    cursor.close()
