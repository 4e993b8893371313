"""A webhook on loopback for tests: it answers as it is told, and keeps what was posted."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SECRET = "T0KEN-of-the-webhook"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
ANSWERS: dict[str, bytes | None] = {
    "ok": OK,
    "error": b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
    "garbage": b"\x00\xff this is no HTTP at all \r\n\r\n",
    "half": b"HTTP/1.1 200 O",
    "nothing": b"",
    "hang": None,
    "drip": b"HTTP/1.1 200 OK\r\nX-Slow: ",
}


@dataclass
class Webhook:
    """A server on loopback that answers each request as `mode` says, and keeps what was posted."""

    mode: str = "ok"
    posted: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, target: Callable[[socket.socket], None], end: socket.socket) -> None:
        self.threads.append(threading.Thread(target=target, args=(end,), daemon=True))
        self.threads[-1].start()

    def serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # shut down: the test is over
            while True:
                connection, _ = listener.accept()
                self.start(self.answer, connection)

    def answer(self, connection: socket.socket) -> None:
        connection.settimeout(30)
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += received(connection)
            head, _, body = request.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += received(connection)
            self.posted.append(json.loads(body))
            self.heads.append(head.decode())
            answer = ANSWERS[self.mode]
            if answer is None:
                self.stop.wait()
                return
            connection.sendall(answer)
            while self.mode == "drip" and not self.stop.wait(0.05):
                connection.sendall(b"x")


def received(connection: socket.socket) -> bytes:
    """What comes next. ConnectionResetError: nothing does."""
    if found := connection.recv(65536):
        return found
    raise ConnectionResetError


@contextlib.contextmanager
def serving() -> Iterator[Webhook]:
    """A webhook that is there while the body runs, and no thread of it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Webhook(url=f"http://127.0.0.1:{listener.getsockname()[1]}/services/{SECRET}")
        found.start(found.serve, listener)
        try:
            yield found
        finally:
            found.stop.set()
            # Without it the thread would wait in `accept` for ever, and take connections of whoever is given the
            # descriptor's number next.
            listener.shutdown(socket.SHUT_RDWR)
            for thread in found.threads:
                thread.join()
