"""An HTTP/1.1 client that costs little CPU: what a load generator needs, so that it measures the server and not itself.

One request at a time on each connection, connections are kept; no redirects, no TLS, no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any

import httptools

CONNECT_SECONDS = 2.0


class NoAnswer(Exception):
    """The connection was refused, broke, or nothing came in time."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """`retry_after`: seconds that the server asks for; 0 where it does not."""

    status: int
    body: bytes
    retry_after: float


class _Connection(asyncio.Protocol):
    """The callbacks of httptools' parser are named `on_…`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._body: list[bytes] = []
        self._retry_after = 0.0
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NoAnswer())

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = float(value)
        elif name.lower() == b"connection" and value.lower() == b"close":
            self.open = False

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        answer = HttpAnswer(self._parser.get_status_code(), body, self._retry_after)
        self._parser = httptools.HttpResponseParser(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def ask(self, request: bytes) -> asyncio.Future[HttpAnswer]:
        """Send a request."""
        self._body, self._retry_after = [], 0.0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """No further request."""
        self.open = False
        self._transport.close()


class LeanHttp:
    """Calls of one server on this machine. Lives on one event loop. `refused_at`: monotonic, of the last connection."""

    def __init__(self, port: int) -> None:
        self._port, self._idle = port, list[_Connection]()
        self.refused_at = -math.inf
        self._head = f"Host: 127.0.0.1:{port}\r\n".encode()

    async def call(
        self, method: str, path: str, seconds: float, body: bytes | None = None, headers: bytes = b""
    ) -> HttpAnswer:
        """The answer. `headers`: lines that end with CRLF. Raises NoAnswer, after `seconds` at the latest."""
        parts = [f"{method} {path} HTTP/1.1\r\n".encode(), self._head, headers]
        if body is not None:
            parts.append(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            parts.append(b"\r\n")
        connection = await self._connection()
        answer, loop = connection.ask(b"".join(parts)), asyncio.get_running_loop()
        timer = loop.call_later(seconds, connection.close)
        try:
            found = await answer
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            timer.cancel()
        if connection.open:
            self._idle.append(connection)
        return found

    async def _connection(self) -> _Connection:
        while self._idle:
            if (kept := self._idle.pop()).open:
                return kept
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                _, made = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        except (OSError, TimeoutError):
            self.refused_at = time.monotonic()
            raise NoAnswer from None
        return made

    def close(self) -> None:
        """Close all connections that are kept."""
        for connection in self._idle:
            with contextlib.suppress(OSError):
                connection.close()
