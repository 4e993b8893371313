"""Opens the service's database: SQLite in write-ahead mode, or Postgres. Its tables are brought to today's version."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from batch_assets.api.database.migrations import HEAD, upgrade, version_of
from batch_assets.api.database.tables import IDENTITY
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.sqlite_files import sqlite_engine
from gpu_runner.table_versions import ONE_UPGRADE

BUSY_SECONDS = 10
POOL_SECONDS = 5.0  # how long a caller waits for one of the connections, when all are taken
PSYCOPG2 = "psycopg2"


Check = Callable[[sa.Connection], None]  # within a transaction; what it raises ends it, and nothing is written


def unchecked(connection: sa.Connection) -> None:
    """No check."""


class RecordsError(UserFacingError):
    """The records cannot be opened."""

    exit_status = ExitStatus.WRONG_REQUEST


def is_records_trouble(error: BaseException) -> bool:
    """The database is away, hangs or is locked: the same may succeed later. Not: what was asked of it is wrong."""
    if isinstance(error, DBAPIError):
        return isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated
    return isinstance(error, sa.exc.TimeoutError)  # no connection was free


class Records:
    """The records' database. `url`: SQLAlchemy's; it may hold a password and is never shown.

    Every call ends: in Postgres as `gpu_runner.bounded_postgres` says, in SQLite when another has written for
    BUSY_SECONDS.
    """

    def __init__(self, url: str) -> None:
        try:
            self.engine = _bounded_engine(url)
            with ONE_UPGRADE:
                self._bring_to_head(url)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise RecordsError(
                "BATCH_ASSETS_API_DB: expected a database that can be opened (sqlite:////path/api.db or "
                f"postgresql+psycopg2://host/name), found one that cannot: {type(error).__name__}"
            ) from None

    def _bring_to_head(self, url: str) -> None:
        with self.reading() as connection:
            found = version_of(connection)
        if found == HEAD:
            return
        if self.engine.dialect.name == "sqlite":
            with self.writing() as connection:
                upgrade(connection)
            return
        engine = sa.create_engine(url, poolclass=sa.NullPool)  # a change of large tables takes its time
        with engine.begin() as connection:
            upgrade(connection)

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that may write."""
        with self.engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that only reads."""
        with self.engine.connect().execution_options(reading=True) as connection:
            yield connection

    @functools.cached_property
    def identity(self) -> str:
        """16 hexadecimal digits that only these records have, and copies of them. All processes find the same."""
        query = sa.select(IDENTITY.c.identity).where(IDENTITY.c.number == 1)
        with self.reading() as connection:
            found = connection.scalar(query)
        if found is None:
            dialect = postgresql if self.engine.dialect.name == "postgresql" else sqlite
            insert = dialect.insert(IDENTITY).values(number=1, identity=secrets.token_hex(8))
            with self.writing() as connection:
                connection.execute(insert.on_conflict_do_nothing())
            with self.reading() as connection:
                found = connection.execute(query).scalar_one()
        return str(found)

    @property
    def address(self) -> str:
        """Where they are, for people: without user, password and options."""
        url = self.engine.url
        return sa.URL.create(url.drivername, host=url.host, port=url.port, database=url.database).render_as_string()

    def answers(self) -> bool:
        """Whether the database can be asked now."""
        try:
            with self.reading() as connection:
                connection.execute(sa.select(1))
        except SQLAlchemyError:
            return False
        return True

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _bounded_engine(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return sqlite_engine(parsed, BUSY_SECONDS)
    if parsed.get_dialect().driver != PSYCOPG2:
        return sa.create_engine(parsed, pool_pre_ping=True, pool_timeout=POOL_SECONDS)
    from gpu_runner.bounded_postgres import bounded_engine

    return bounded_engine(parsed, pool_pre_ping=True, pool_timeout=POOL_SECONDS)
