"""The guard in front of Dagster's webserver, which itself takes changes from whoever reaches its port.

Dagster's UI has no login, and every web page that a browser shows can send requests to 127.0.0.1. The guard lets
through what comes from the UI's own pages or from a program that shows the token, and of that nothing that changes
anything without token or cookie. Pure ASGI; what a request is and does is decided in requests.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from batch_assets.webserver.guarded_requests import (
    READS,
    Access,
    Refused,
    asked_operations,
    check_json,
    check_message,
    check_source,
    posted_operations,
    read_headers,
)

MOST_BODY_BYTES = 16 << 20  # a backfill may name each of a million partitions
MOST_MESSAGE_BYTES = 1 << 20
BODY_SECONDS = 60.0
LOG = logging.getLogger("batch_assets.webserver.server")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Connection = tuple[str, int] | None

# The UI shows notebooks in frames of its own pages.
SECURITY_HEADERS = (
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"content-security-policy", b"frame-ancestors 'self'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
)


class WebGuard:
    """Wraps the webserver's ASGI app. `own` says whether a connection (client, server) was made by our own user."""

    def __init__(self, app: App, access: Access, own: Callable[[Connection, Connection], bool]) -> None:
        self._app, self._access, self._own = app, access, own
        self._said: set[str] = set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                await self._http(scope, receive, send)
            elif scope["type"] == "websocket":
                await self._websocket(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refused as refused:
            self._say(str(refused))
            await _answer(scope["type"], refused, send)

    async def _http(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        headers = read_headers(scope["headers"])
        check_source(self._access, headers, method=method, path=path)
        if method in ("GET", "HEAD"):
            if path == "/server_info":  # a health check of whoever runs this machine
                return await self._app(scope, receive, _with_headers(send, None))
            self._check_user(scope, headers)
            if path.rstrip("/") == "/graphql" and not asked_operations(scope["query_string"]) <= READS:
                raise Refused(405, "a change: expected by POST")
            return await self._app(scope, receive, _with_headers(send, self._cookie(headers)))
        if method != "POST":
            raise Refused(405, "method: expected GET, HEAD or POST")
        self._check_user(scope, headers)
        graphql = path == "/graphql"
        check_json(headers, may_lack=not graphql)
        if not graphql:
            self._check_token(headers)
        body = await _body(headers, receive)
        if graphql and not posted_operations(body) <= READS:
            self._check_token(headers)
        await self._app(scope, _again(body, receive), _with_headers(send, None))

    async def _websocket(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = read_headers(scope["headers"])
        check_source(self._access, headers, method="CONNECT", path=scope["path"])
        self._check_user(scope, headers)
        self._check_token(headers)

        async def receive_checked() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive":
                try:
                    check_message(message, MOST_MESSAGE_BYTES)
                except Refused as refused:
                    self._say(str(refused))
                    await send({"type": "websocket.close", "code": 1008, "reason": str(refused)})
                    return {"type": "websocket.disconnect", "code": 1008}
            return message

        await self._app(scope, receive_checked, send)

    def _check_user(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        client, server = (tuple(found) if (found := scope.get(end)) else None for end in ("client", "server"))
        if not (self._access.has_token(headers) or self._own(client, server)):
            raise Refused(403, "another user of this machine: expected Authorization: Bearer with the owner's token")

    def _check_token(self, headers: Mapping[str, str]) -> None:
        if not (self._access.has_token(headers) or self._access.has_cookie(headers)):
            raise Refused(
                403, "a change: expected the cookie of the UI, or Authorization: Bearer with the token in DAGSTER_HOME"
            )

    def _cookie(self, headers: Mapping[str, str]) -> bytes | None:
        """The cookie to set with a page; None for who has it, or shows the token."""
        if self._access.has_cookie(headers) or self._access.has_token(headers):
            return None
        named = f"{self._access.cookie_name}={self._access.cookie}"
        return f"{named}; Path=/; HttpOnly; SameSite=Strict".encode()

    def _say(self, reason: str) -> None:
        """Each reason once: who asks a thousand times does not fill the disk."""
        if reason not in self._said:
            self._said.add(reason)
            LOG.warning("a request was refused: %s", reason)


def _with_headers(send: Send, cookie: bytes | None) -> Send:
    """Adds our headers to each answer, and the cookie to a page."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *SECURITY_HEADERS]
            kinds = [value for name, value in headers if name.lower() == b"content-type"]
            if cookie is not None and any(kind.startswith(b"text/html") for kind in kinds):
                headers.append((b"set-cookie", cookie))
            message = {**message, "headers": headers}
        await send(message)

    return sending


async def _body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """The whole body. Raises Refused when it is too large, or takes too long."""
    too_large = Refused(413, f"body: expected at most {MOST_BODY_BYTES >> 20} MiB")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > MOST_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise Refused(400, "body: the connection was closed in the middle of it")
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > MOST_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"body: expected within {BODY_SECONDS:.0f} s") from None
    return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """The same body once more, for the app."""
    left = [body]

    async def receiving() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return receiving


async def _answer(kind: str, refused: Refused, send: Send) -> None:
    if kind == "websocket":  # before it was accepted: the handshake is answered 403
        await send({"type": "websocket.close", "code": 1008})
        return
    text = f"refused: {refused}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(text)).encode())]
    more = [(b"connection", b"close"), *SECURITY_HEADERS]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers + more})
    await send({"type": "http.response.body", "body": text})
