"""How far a request got: whether its connection is new, when that was begun, and when the first byte was sent.

Servers close a connection on which they hear nothing for some seconds, a new one too: llama.cpp's (cpp-httplib) after
5 s, before the first request as between two. A busy client opens many connections at once and writes to them later, so
there may be a limit to how many are open without a byte sent.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import aiohttp

# A new connection without a byte for this long may have been closed by a server that waited in vain.
SILENT_SECONDS = 4.0
# A close in idleness meets a request within a moment of sending; a later reset broke a request at work.
IDLE_CLOSE_SECONDS = 5.0


class RequestProgress:
    """One request. `limit`: of connections that are open, or being opened, without a byte sent; None: no limit.

    Times are seconds of the event loop. Use as a context manager around the request: leaving it gives the place back.
    """

    __slots__ = ("_held", "_limit", "opened_at", "sent_at")

    def __init__(self, limit: asyncio.Semaphore | None = None) -> None:
        self._limit, self._held = limit, False
        self.opened_at: float | None = None
        self.sent_at: float | None = None

    def __enter__(self) -> RequestProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    async def open(self) -> None:
        """A connection is about to be opened for it; waits while too many are open without a byte sent."""
        if self._limit is not None and not self._held:
            await self._limit.acquire()
            self._held = True
        self.opened_at = asyncio.get_running_loop().time()

    def send(self) -> None:
        """Its first bytes are written now."""
        self.sent_at = asyncio.get_running_loop().time()
        self._give_back()

    def closed_in_idleness(self, now: float) -> bool:
        """Whether a connection that is found closed at `now` was closed before the server had the request.

        True where it broke soon after the first byte, or before it, and was idle until then: kept alive from an
        earlier request, or new and silent for long.
        """
        if self.sent_at is None:
            return True
        idle = self.opened_at is None or self.sent_at - self.opened_at > SILENT_SECONDS
        return idle and now - self.sent_at <= IDLE_CLOSE_SECONDS

    def _give_back(self) -> None:
        if self._limit is not None and self._held:
            self._held = False
            self._limit.release()


def request_trace() -> aiohttp.TraceConfig:
    """Tells the RequestProgress that is a request's `trace_request_ctx` how far it got."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(_open)
    trace.on_request_headers_sent.append(_headers)
    trace.on_request_chunk_sent.append(_chunk)
    return trace


async def _open(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionCreateStartParams
) -> None:
    await context.trace_request_ctx.open()


async def _headers(
    _: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestHeadersSentParams
) -> None:
    if params.method == "GET":  # of others, headers are written with the beginning of the body
        context.trace_request_ctx.send()


async def _chunk(_: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestChunkSentParams) -> None:
    if context.trace_request_ctx.sent_at is None:
        context.trace_request_ctx.send()
