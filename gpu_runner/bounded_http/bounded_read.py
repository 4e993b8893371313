"""Reads the body of an HTTP answer, no further than is good: bytes, time and encoding are bounded.

No compression is asked for and none is taken, so a byte on the wire is a byte in memory. Headers are bounded by aiohttp
(128 of at most 8,190 bytes).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

KIB, MIB = 1 << 10, 1 << 20

# What every body may have without asking for room: a usual answer has a few KiB.
FREE_BYTES = 16 * KIB
# aiohttp holds up to twice this per connection, and what one read of the socket brings, before we look at it.
BUFFER_BYTES = 64 * KIB
# A large body that may be read is read in larger parts.
READ_BYTES = 256 * KIB
# Beyond FREE_BYTES the server is writing an answer that it has: the rest is a matter of the network.
BODY_SECONDS = 60.0

# Pages: /v1/models of a gateway with thousands of models, /metrics of vLLM with eight engines (400 KiB).
PAGE_BYTES = 4 * MIB
# Of an error only the first words are used; vLLM's can repeat the prompt.
ERROR_BYTES = 256 * KIB

# Values in a JSON text take up to 72 bytes each in Python.
FREE_VALUES = 2_000_000

Admit = Callable[[int], Awaitable[None]]


class BodyTooLarge(Exception):
    """A body that goes on beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit:,} bytes")
        self.limit = limit


class UnaskedEncoding(Exception):
    """A body in a Content-Encoding, though none was asked for."""

    def __init__(self, encoding: str) -> None:
        super().__init__(encoding)
        self.encoding = encoding[:32] if encoding.isascii() and encoding.isprintable() else "an unknown one"


def check_values(body: bytes, limit: int) -> None:
    """Raises ValueError for a JSON text of far more values than an answer of that size has: `[[],[],…` grows 24 times.

    Only bodies that could hold so many are looked through.
    """
    most = max(FREE_VALUES, limit // 16)
    if len(body) > most and body.count(b",") + body.count(b"[") + body.count(b"{") > most:
        raise ValueError(f"expected at most {most:,} values")


async def read_body(answer: aiohttp.ClientResponse, limit: int, admit: Admit | None = None) -> bytes:
    """The whole body. Raises BodyTooLarge, UnaskedEncoding, TimeoutError; the connection is then closed.

    `admit(bytes)` is awaited before more than FREE_BYTES are read; that wait is not the server's time.
    """
    content = answer.content
    try:
        if encoding := encoding_of(answer):
            raise UnaskedEncoding(encoding)
        promised = answer.content_length if "Transfer-Encoding" not in answer.headers else None
        if promised is not None and promised > limit:
            raise BodyTooLarge(limit)
        first = await content.readany()
        if content.is_eof() and content.at_eof():
            if len(first) > limit:
                raise BodyTooLarge(limit)
            return first
        body = bytearray(first)
        while (len(body) if promised is None else promised) <= FREE_BYTES:
            chunk = await content.readany()
            if not chunk:
                return bytes(body)
            body += chunk
            if len(body) > limit:
                raise BodyTooLarge(limit)
        if admit is not None:
            await admit(promised or limit)
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in content.iter_chunked(READ_BYTES):
                body += chunk
                if len(body) > limit:
                    raise BodyTooLarge(limit)
        return bytes(body)
    except BaseException:
        answer.close()
        raise


async def read_beginning(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The first `limit` bytes of a body, of which the rest is left unread; none of one that is encoded."""
    body = bytearray()
    try:
        if encoding_of(answer):
            limit = 0
        while len(body) < limit and (chunk := await answer.content.readany()):
            body += chunk
    except BaseException:
        answer.close()
        raise
    if not answer.content.at_eof():
        answer.close()
    return bytes(body[:limit])


def encoding_of(answer: aiohttp.ClientResponse) -> str:
    """What the body is encoded in; empty when it is as it is."""
    found = answer.headers.get("Content-Encoding", "").strip().lower()
    return "" if found == "identity" else found
