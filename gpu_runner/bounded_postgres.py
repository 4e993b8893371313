"""Connections to Postgres whose calls all end, whatever the server or the way to it does: of the fleet's database and
of the service's records.

`connect_timeout` of libpq bounds the connection, `statement_timeout` of the server each statement, also one that waits
for a lock. Neither ends a call whose server is stopped, or whose network takes packets without an answer: there
psycopg2 waits in the kernel, for ever. So a thread closes the socket (`shutdown`) of a call that has had CALL_SECONDS,
and the call raises OperationalError, as for a connection that was lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg2.extensions
import sqlalchemy as sa

CONNECT_SECONDS = 5
STATEMENT_SECONDS = 15
CALL_SECONDS = 20.0  # longer: the server's own words come first where it has any


class CallDeadlines:
    """Ends calls that take too long, by one thread for all of them, which lives while there are calls.

    `seconds` of a call; it is seen within a quarter of that.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """There is no call and no thread: in a child after a fork, where those of its parent are not."""
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[float, int]] = {}  # when it is to end by the monotonic clock; its socket
        self._watching = False

    @contextlib.contextmanager
    def call(self, descriptor: int) -> Iterator[None]:
        """The body makes one call on this socket, which stays open that long."""
        number = next(self._numbers)
        with self._lock:
            self._calls[number] = (time.monotonic() + self._seconds, descriptor)
            if not self._watching:
                threading.Thread(target=self._watch, name="postgres-deadlines", daemon=True).start()
                self._watching = True
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _watch(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(self._seconds / 4)
            with self._lock:
                now = time.monotonic()
                for number in [number for number, (until, _) in self._calls.items() if until <= now]:
                    _shut_down(self._calls.pop(number)[1])
                idle_since = now if self._calls else idle_since
                if now - idle_since > self._seconds:
                    self._watching = False
                    return


def _shut_down(descriptor: int) -> None:
    """End both directions of a socket, which stays its owner's to close. Takes no descriptor: there may be none left.

    Raises nothing: a call whose connection is gone already ends by itself, and the others are watched on.
    """
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or not connected any more
        found = socket.socket(fileno=descriptor)
        try:
            found.shutdown(socket.SHUT_RDWR)
        finally:
            found.detach()


DEADLINES = CallDeadlines(CALL_SECONDS)
os.register_at_fork(after_in_child=DEADLINES.forget)


class BoundedConnection(psycopg2.extensions.connection):  # type: ignore[misc]  # it has no types
    """A connection whose statements, commits and rollbacks end within CALL_SECONDS."""

    deadlines = DEADLINES

    def __init__(self, dsn: str, **options: Any) -> None:
        super().__init__(dsn, **options)
        self.cursor_factory = BoundedCursor

    def bounded(self) -> contextlib.AbstractContextManager[None]:
        """What the body asks of the server ends in time."""
        return contextlib.nullcontext() if self.closed else self.deadlines.call(self.fileno())

    def commit(self) -> None:
        """As of psycopg2."""
        with self.bounded():
            super().commit()

    def rollback(self) -> None:
        """As of psycopg2."""
        with self.bounded():
            super().rollback()


class BoundedCursor(psycopg2.extensions.cursor):  # type: ignore[misc]
    """A cursor of a BoundedConnection."""

    connection: BoundedConnection

    def execute(self, query: Any, vars: Any = None) -> None:
        """As of psycopg2."""
        with self.connection.bounded():
            super().execute(query, vars)

    def executemany(self, query: Any, vars_list: Any) -> None:
        """As of psycopg2."""
        with self.connection.bounded():
            super().executemany(query, vars_list)


def bounded_engine(url: sa.URL, **options: Any) -> sa.Engine:
    """SQLAlchemy's engine for a URL with the driver psycopg2, each of whose calls ends. `options`: of `create_engine`.

    What the URL says itself of CONNECT_SECONDS (`?connect_timeout=`) stays. Not for a change of tables, which may take
    its time.
    """
    arguments: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "connection_factory": BoundedConnection}
    arguments = {name: value for name, value in arguments.items() if name not in url.query}
    engine = sa.create_engine(url, connect_args=arguments, **options)
    sa.event.listen(engine, "connect", _limit_statements)
    return engine


def _limit_statements(connection: Any, record: Any) -> None:
    """A new connection, as SQLAlchemy announces it: the server is to end statements that take too long.

    In words of SQL, because poolers before Postgres refuse most options of a connection.
    """
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(f"SET statement_timeout = '{STATEMENT_SECONDS}s'")
    connection.commit()
