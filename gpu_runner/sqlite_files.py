"""SQLite files that several threads and processes open at once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlalchemy as sa

PAUSE_SECONDS = 0.02
SYNCHRONOUS = "NORMAL"  # of `sqlite_engine`: no commit waits for the disk in write-ahead mode, and none is torn


def use_write_ahead_log(
    execute: Callable[[str], Any],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Switch the file to write-ahead mode, or find it there. `execute`: of a connection or a cursor of `sqlite3`.

    While another connection writes or makes the same switch, SQLite refuses it at once, whatever `busy_timeout` is. So
    it is tried again for `seconds`. Raises sqlite3.OperationalError afterwards, and at once for any other reason.
    """
    deadline = clock() + seconds
    while True:
        try:
            execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or clock() >= deadline:
                raise
            sleep(PAUSE_SECONDS)


def sqlite_engine(url: sa.URL, busy_seconds: int) -> sa.Engine:
    """An engine whose transactions that write exclude each other, and wait `busy_seconds` for another writer. One that
    only reads says so by the execution option `reading`.
    """
    import sqlalchemy  # slow to import, and not wanted by those who use `sqlite3` alone

    def begin(connection: sa.Connection) -> None:
        reading = connection.get_execution_options().get("reading")
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    def configure(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the BEGIN above is the only one
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={1000 * busy_seconds}")
        use_write_ahead_log(cursor.execute, busy_seconds)
        cursor.execute(f"PRAGMA synchronous={SYNCHRONOUS}")
        cursor.close()

    engine = sqlalchemy.create_engine(url, connect_args={"timeout": busy_seconds})
    sqlalchemy.event.listen(engine, "connect", configure)
    sqlalchemy.event.listen(engine, "begin", begin)
    return engine
