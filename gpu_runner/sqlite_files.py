"""SQLite files that several threads and processes open at once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

PAUSE_SECONDS = 0.02


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
