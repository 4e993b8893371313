"""An engine on bare sockets whose bodies do not end, for tests of what the client bears. 127.0.0.1 only.

`sent` counts the bytes that clients took; no body goes beyond `most` bytes, so that a client without limits ends too.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from types import TracebackType

import orjson

MOST = 600 << 20
BLOCK = b" " * (1 << 16)
Body = Iterator[bytes]
Answer = tuple[bytes, Body]
Route = Callable[[int], Answer]


def text(content: str = "hi", tokens: int = 1) -> bytes:
    """An answer to a completion request."""
    choice = {"index": 0, "text": content, "finish_reason": "stop"}
    return orjson.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})


def whole(body: bytes, *, status: str = "200 OK", head: bytes = b"") -> Route:
    """A body as it should be."""
    return lambda most: (b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s" % (status.encode(), len(body), head), iter([body]))


def endless(block: bytes = BLOCK, head: bytes = b"", begin: bytes = b"") -> Route:
    """A body without a length."""
    return lambda most: (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + head,
        chain([begin], repeat(block, most // len(block))),
    )


def bomb(megabytes: int = MOST >> 20) -> Route:
    """600 MB of spaces in gzip: 600 KB on the wire. One flushed block again and again, so the checksum is wrong."""
    packer = zlib.compressobj(1, wbits=31)
    head = packer.compress(b'{"choices":[') + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return whole(head + block * megabytes + packer.flush(), head=b"Content-Encoding: gzip\r\n")


class HostileServer:
    """Answers by path; anything else is 404."""

    def __init__(self, routes: dict[str, Route], most: int = MOST) -> None:
        self.routes, self.most = routes, most
        self.sent = 0
        self.asked: list[str] = []
        self._guard = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._connections: set[socket.socket] = set()

    def __enter__(self) -> HostileServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._guard:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the client has left
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with self._guard:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while request := lines.readline():
                    self._answer(connection, lines, request.split()[1].decode())
            except (OSError, ValueError):
                pass
            finally:
                with self._guard:
                    self._connections.discard(connection)

    def _answer(self, connection: socket.socket, lines: object, path: str) -> None:
        length = 0
        while (line := lines.readline()) not in (b"\r\n", b""):  # type: ignore[attr-defined]
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        lines.read(length)  # type: ignore[attr-defined]
        self.asked.append(path)
        head, body = self.routes.get(path, whole(b"{}", status="404 Not Found"))(self.most)
        connection.sendall(head + b"\r\n")
        for block in body:
            connection.sendall(block)
            with self._guard:
                self.sent += len(block)
        if b"Connection: close" in head:
            raise ValueError("closed")
