"""A webhook on loopback for tests: it answers as it is told, and keeps what was posted."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
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

    def serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(65536)
            head, _, body = request.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += connection.recv(65536)
            self.posted.append(json.loads(body))
            self.heads.append(head.decode())
            answer = ANSWERS[self.mode]
            if answer is None:
                self.stop.wait(20)
                return
            connection.sendall(answer)
            while self.mode == "drip" and not self.stop.wait(0.05):
                connection.sendall(b"x")


@contextlib.contextmanager
def serving() -> Iterator[Webhook]:
    """A webhook that is there while the body runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Webhook(url=f"http://127.0.0.1:{listener.getsockname()[1]}/services/{SECRET}")
        threading.Thread(target=found.serve, args=(listener,), daemon=True).start()
        yield found
        found.stop.set()
