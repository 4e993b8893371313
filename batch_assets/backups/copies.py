"""Copies of databases that others write meanwhile: nobody waits, and each copy is of one moment.

SQLite by its online backup (https://www.sqlite.org/backup.html): the whole file in one step of one reader, so that in
write-ahead mode no writer waits and none makes it begin anew. Postgres by COPY in one transaction that sees one moment
(repeatable read): it needs no `pg_dump`, which the image does not have and which refuses servers newer than itself.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from batch_assets.backups.databases import PostgresDatabase, TableGroup
from resources.backups.archive import BackupError

BUSY_SECONDS = 60.0  # for a file that is not in write-ahead mode
CONNECT_SECONDS = 10
STATEMENT_SECONDS = 900  # one table
_LIMITS = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 30_000}


def copy_sqlite(source: Path, target: Path) -> bool:
    """Copy one file of SQLite as it is at one moment. False: it is not there. Raises BackupError."""
    if not source.exists():
        return False
    address = f"file:{_quoted(source)}?mode=ro"
    try:
        with (
            contextlib.closing(sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS)) as one,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            copy.execute("PRAGMA synchronous=OFF")
            one.backup(copy, pages=-1)
    except sqlite3.Error as error:
        raise BackupError(f"{source}: expected a SQLite file that can be copied, found: {error}") from None
    return True


def _quoted(path: Path) -> str:
    """As a URI of SQLite has it."""
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


@contextlib.contextmanager
def postgres_connection(database: PostgresDatabase) -> Iterator[Any]:
    """A connection of psycopg2 whose calls end. Raises BackupError, without the address: it may hold a password."""
    engine = sa.create_engine(
        database.url, poolclass=sa.NullPool, connect_args={"connect_timeout": CONNECT_SECONDS, **_LIMITS}
    )
    try:
        connection = engine.raw_connection()
        try:
            driver: Any = connection.driver_connection
            driver.rollback()
            yield driver
        finally:
            connection.close()
    except (sa.exc.SQLAlchemyError, driver_error()) as error:
        raise BackupError(
            f"{named(database)}: expected a Postgres that answers, found {type(error).__name__}"
        ) from None
    finally:
        engine.dispose()


def driver_error() -> type[Exception]:
    """What psycopg2 raises; it is imported where there is a Postgres."""
    import psycopg2

    error: type[Exception] = psycopg2.Error
    return error


def named(database: PostgresDatabase) -> str:
    """Host and database, for people."""
    return f"{database.url.host}/{database.url.database}"


class Moment:
    """All tables of one Postgres database as they are at one moment. Use as a context manager."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._stack = contextlib.ExitStack()
        self._cursor: Any = None

    def __enter__(self) -> Moment:
        connection = self._stack.enter_context(postgres_connection(self._database))
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        self._cursor = self._stack.enter_context(connection.cursor())
        self._cursor.execute(f"SET statement_timeout = '{STATEMENT_SECONDS}s'")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def version(self, group: TableGroup) -> str:
        """Version of a group's tables; "" where they are not there."""
        if not self.columns(group.version_table):
            return ""
        self._cursor.execute(f'SELECT version_num FROM "{group.version_table}"')
        found = self._cursor.fetchone()
        return str(found[0]) if found else ""

    def columns(self, table: str) -> list[str]:
        """Names of the columns of a table, in order; none where it is not there."""
        return columns_of(self._cursor, table)

    def copy(self, table: str, columns: list[str], target: Path) -> None:
        """Write the lines of a table, in Postgres' own text form."""
        names = ", ".join(f'"{name}"' for name in columns)
        with target.open("wb") as file:
            self._cursor.copy_expert(f'COPY "{table}" ({names}) TO STDOUT', file)


def columns_of(cursor: Any, table: str) -> list[str]:
    """Names of the columns of a table that the search path finds, in order; none where it is not there."""
    query = (
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped "
        "ORDER BY attnum"
    )
    cursor.execute(query, (f'"{table}"',))
    return [str(line[0]) for line in cursor.fetchall()]
