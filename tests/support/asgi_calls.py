"""One request to an ASGI application, message by message: what httpx's transport cannot do (streams, leaving early)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson


class AsgiCall:
    """A POST of a JSON body. `leave` ends the connection; `on_message` sees every message of the answer."""

    def __init__(self, app: Any, path: str, body: object, headers: Mapping[str, str] | None = None) -> None:
        self._app, self._body = app, body if isinstance(body, bytes) else orjson.dumps(body)
        named = {"host": "127.0.0.1:8080", "content-type": "application/json", **(headers or {})}
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8080),
        }
        self._left = asyncio.Event()
        self._sent_body = False
        self.messages: list[dict[str, Any]] = []
        self.on_message: Callable[[dict[str, Any]], None] = lambda message: None

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def run(self) -> AsgiCall:
        """Have the application answer; returns when it has ended."""
        await self._app(self.scope, self._receive, self._send)
        return self

    @property
    def status(self) -> int:
        """Of the answer."""
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        """Of the answer, as far as it came."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    async def _receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.on_message(message)
