"""The cache of answers that all processes share, in Redis. Bounded: slow counts as away, and away as empty."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from redis.exceptions import RedisError

from batch_assets.api.online.answers.answer_cache import KEPT_SECONDS, CacheAway
from batch_assets.api.online.cancellation import raise_if_cancelled
from batch_assets.api.online.queues.redis_commands import MOST_CONNECTIONS, client

LOOK_SECONDS = 0.05
REST_SECONDS = 1.0  # after a call that failed or was slow


class RedisCache:
    """`clock`: monotonic seconds. Lives on one event loop."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self._look_seconds = LOOK_SECONDS
        self._client = client(url, answer_seconds=2 * self._look_seconds)
        self._clock, self._away_until = clock, 0.0
        self._connections = asyncio.Semaphore(MOST_CONNECTIONS)  # the client refuses a call beyond them

    async def get(self, key: str) -> bytes | None:
        """What is kept."""
        async with self._bounded():
            found = await self._client.get(_name(key))
        return found if isinstance(found, bytes) else None

    async def put(self, key: str, value: bytes) -> None:
        """Keep it."""
        async with self._bounded():
            await self._client.set(_name(key), value, px=int(1000 * KEPT_SECONDS))

    async def drop(self, key: str) -> None:
        """Forget it."""
        async with self._bounded():
            await self._client.delete(_name(key))

    async def begin(self, key: str, seconds: float) -> bool:
        """Whether no other process asks for this key."""
        async with self._bounded():
            return bool(await self._client.set(_asked(key), b"1", px=max(1, int(1000 * seconds)), nx=True))

    async def end(self, key: str) -> None:
        """This process does not ask any more."""
        async with self._bounded():
            await self._client.delete(_asked(key))

    async def close(self) -> None:
        """Close its connections."""
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        if self._clock() < self._away_until:
            raise CacheAway
        try:
            async with asyncio.timeout(self._look_seconds), self._connections:
                yield
        except (RedisError, OSError, TimeoutError):
            self._away_until = self._clock() + REST_SECONDS
            raise CacheAway from None
        finally:
            raise_if_cancelled()  # or a request to an engine would follow


def _name(key: str) -> str:
    return f"batch-assets:{{answer:{key}}}"


def _asked(key: str) -> str:
    return f"{_name(key)}:asked"
