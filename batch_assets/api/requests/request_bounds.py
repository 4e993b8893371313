"""Bounds of what is read of a request: bytes and seconds. ASGI middleware, outside of everything that parses.

A body is counted as it comes, whatever Content-Length says. Who sends too much gets 413, who stops sending 408.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.error_answers import error_response


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """Most bytes of a body, longest wait for its next part, and longest time for all of it."""

    bytes: int
    silent_seconds: float
    seconds: float


BodyLimits = Callable[[str, str], BodyLimit]  # of (method, path)


class RequestLimits:
    """Counts what the application reads of each request."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limits(scope["method"], scope["path"])
        reader = _BoundedReader(receive, limit)
        answer = _Answer(reader, scope, receive, send)
        try:
            reader.check_length(dict(scope["headers"]).get(b"content-length"))
            await self._app(scope, reader.receive, answer.send)
        except ApiError as error:  # the application's own handlers stand inside: it was refused before it came there
            if answer.started:
                raise
            await error_response(error)(scope, receive, send)


class _Answer:
    """The `send` of one request. What was refused here is answered as such, whatever a parser made of it."""

    def __init__(self, reader: _BoundedReader, scope: Scope, receive: Receive, send: Send) -> None:
        self._reader, self._scope, self._receive, self._send = reader, scope, receive, send
        self.started = False
        self._replaced = False

    async def send(self, message: Message) -> None:
        """The next message of the application's answer."""
        if self._replaced:
            return
        if message["type"] == "http.response.start" and self._reader.refusal is not None:
            self._replaced = self.started = True
            await error_response(self._reader.refusal)(self._scope, self._receive, self._send)
            return
        self.started = self.started or message["type"] == "http.response.start"
        await self._send(message)


class _BoundedReader:
    """The `receive` of one request, counted."""

    def __init__(self, receive: Receive, limit: BodyLimit) -> None:
        self._receive, self._limit = receive, limit
        self._bytes = 0
        self._complete = False
        self.refusal: ApiError | None = None
        self._until = asyncio.get_running_loop().time() + limit.seconds

    def check_length(self, said: bytes | None) -> None:
        """Refuse by Content-Length, before anything is read. Raises ApiError 413."""
        if said is not None and said.isdigit() and (len(said) > 15 or int(said) > self._limit.bytes):
            raise self._too_large()

    async def receive(self) -> Message:
        """The next message. Raises ApiError 408, 413."""
        if self._complete:  # what comes now is the end of the connection, whenever that is
            return await self._receive()
        left = self._until - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, min(left, self._limit.silent_seconds))):
                message = await self._receive()
        except TimeoutError:
            self.refusal = ApiError(
                408, "The request's body did not come in time.", code="request_timeout", headers={"Connection": "close"}
            )
            raise self.refusal from None
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._bytes > self._limit.bytes:
                raise self._too_large()
        return message

    def _too_large(self) -> ApiError:
        self.refusal = ApiError(
            413,
            f"The request is too large: expected at most {self._limit.bytes:,} bytes.",
            code="request_too_large",
            headers={"Connection": "close"},
        )
        return self.refusal
