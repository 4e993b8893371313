"""Answers by the digest of what was asked, and the cache of one process.

What is kept has a checksum over key and answer: garbage is no answer. A cache that fails or is slow counts as empty.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

KEPT_SECONDS = 300.0
MOST_BYTES = 64 << 20  # of one process
MOST_ANSWER = 1 << 20  # larger answers are not kept
_SUM = 32


class CacheAway(Exception):
    """The cache cannot be asked now."""


class AnswerCache(Protocol):
    """Bytes by key, for a time. Raises CacheAway. `begin`: True for whoever may ask the engine for this key now."""

    async def get(self, key: str) -> bytes | None: ...
    async def put(self, key: str, value: bytes) -> None: ...
    async def drop(self, key: str) -> None: ...
    async def begin(self, key: str, seconds: float) -> bool: ...
    async def end(self, key: str) -> None: ...
    async def close(self) -> None: ...


def answer_key(group: str, identity: str, path: str, body: bytes) -> str:
    """The key of a request: who may share the answer, which model, and the canonical request."""
    digest = hashlib.sha256()
    for part in (group.encode(), identity.encode(), path.encode(), body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def sealed(key: str, answer: bytes) -> bytes:
    """An answer with its checksum."""
    return hashlib.sha256(key.encode() + answer).digest() + answer


def unsealed(key: str, value: bytes) -> bytes | None:
    """The answer; None where it is not what was kept under this key."""
    found, answer = value[:_SUM], value[_SUM:]
    return answer if found == hashlib.sha256(key.encode() + answer).digest() else None


class LocalCache:
    """The cache of one process; the answer that was used longest ago goes first. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], most_bytes: int = MOST_BYTES) -> None:
        self._clock, self._most = clock, most_bytes
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    async def get(self, key: str) -> bytes | None:
        """What is kept."""
        found = self._kept.get(key)
        if found is None:
            return None
        if found[0] <= self._clock():
            await self.drop(key)
            return None
        self._kept.move_to_end(key)
        return found[1]

    async def put(self, key: str, value: bytes) -> None:
        """Keep it."""
        await self.drop(key)
        self._kept[key] = (self._clock() + KEPT_SECONDS, value)
        self._bytes += len(value)
        while self._bytes > self._most:
            _, (_, old) = self._kept.popitem(last=False)
            self._bytes -= len(old)

    async def drop(self, key: str) -> None:
        """Forget it."""
        if (found := self._kept.pop(key, None)) is not None:
            self._bytes -= len(found[1])

    async def begin(self, key: str, seconds: float) -> bool:
        """Nobody else asks: this process collapses its own requests."""
        return True

    async def end(self, key: str) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""
