"""A thread that owns a SQLite file: all calls that came meanwhile are one transaction, and so one fsync.

`synchronous=FULL` in write-ahead mode: a commit returns when the log is on the disk (https://sqlite.org/pragma.html).
A call's future is set after the commit, so nobody is told of what may be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from batch_assets.api.online.queues.queue_protocol import QueueAway
from gpu_runner.sqlite_files import use_write_ahead_log

log = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[sqlite3.Connection], Any]
MOST_CALLS = 512  # of one transaction
BUSY_SECONDS = 5.0

CALL_SECONDS = 10.0  # a disk that takes longer is away

After = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class _Entry:
    call: Call
    after: After | None
    future: asyncio.Future[Any]


class GroupCommit:
    """Opens the file in its thread; `close` waits for what is under way. Raises sqlite3.Error from `open`."""

    def __init__(self, path: Path, schema: str) -> None:
        self._path, self._schema = path, schema
        self._calls: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="online-queue", daemon=True)
        self._closed = False
        self.commits = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def run(self, call: Callable[[sqlite3.Connection], T], after: After | None = None) -> T:
        """What `call` returns, once it is durable. Raises QueueAway when the disk refuses or hangs.

        `after` gets what `call` returned, or the error, on the event loop: also when nobody waits for it any more.
        """
        if self._closed:
            raise QueueAway
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_Entry(call, after, future))
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await future
        except TimeoutError:
            raise QueueAway from None

    def close(self) -> None:
        """End the thread after the calls that it has."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self._thread.join()

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        ended = False
        while not ended:
            entries, ended = self._next()
            try:
                connection = connection or self._open()
                results = _commit(connection, [entry.call for entry in entries])
                self.commits += 1
            except Exception as error:  # whoever waits is told, whatever it is
                log.error("queue of online requests: %s", type(error).__name__)
                results = [QueueAway()] * len(entries)
            _settle(entries, results)
        if connection is not None:
            connection.close()

    def _next(self) -> tuple[list[_Entry], bool]:
        """All calls that wait, at least one; whether there will be more."""
        entries: list[_Entry] = []
        entry = self._calls.get()
        while entry is not None:
            entries.append(entry)
            if len(entries) >= MOST_CALLS:
                return entries, False
            try:
                entry = self._calls.get_nowait()
            except queue.Empty:
                return entries, False
        return entries, True

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_SECONDS)
        use_write_ahead_log(connection.execute, BUSY_SECONDS)
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(self._schema)
        return connection


def _commit(connection: sqlite3.Connection, calls: list[Call]) -> list[Any]:
    """What each call returns or raises. Raises sqlite3.Error when the transaction as a whole came to nothing."""
    if not calls:
        return []
    connection.execute("BEGIN IMMEDIATE")
    try:
        results: list[Any] = []
        for call in calls:
            try:
                results.append(call(connection))
            except sqlite3.Error:
                raise
            except Exception as error:  # the call's own answer: it has changed nothing
                results.append(error)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return results


def _settle(entries: list[_Entry], results: list[Any]) -> None:
    """Tell all at once: one wake-up of the event loop for a transaction."""
    if not entries:
        return

    def settle() -> None:
        for entry, result in zip(entries, results, strict=True):
            if entry.after is not None:
                entry.after(result)
            if entry.future.done():
                continue
            if isinstance(result, BaseException):
                entry.future.set_exception(result)
            else:
                entry.future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        entries[0].future.get_loop().call_soon_threadsafe(settle)
