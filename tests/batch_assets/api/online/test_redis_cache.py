"""The cache of answers in Redis: as many calls at a time as come, and a cancel that its library swallows."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.redis_server import RedisServer, needs_redis, redis_server

from batch_assets.api.online.answers import redis_cache
from batch_assets.api.online.answers.redis_cache import RedisCache


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@needs_redis
def test_more_calls_at_a_time_than_connections_are_answered(
    monkeypatch: pytest.MonkeyPatch, server: RedisServer
) -> None:
    monkeypatch.setattr(redis_cache, "LOOK_SECONDS", 10.0)  # a machine that is busy is not away

    async def scenario() -> None:
        cache = RedisCache(server.url, time.monotonic)
        await cache.put("k", b"kept")
        assert await asyncio.gather(*(cache.get("k") for _ in range(256))) == [b"kept"] * 256
        await cache.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancel_that_the_library_swallows_ends_the_call(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(redis_cache, "LOOK_SECONDS", 10.0)

    async def scenario() -> None:
        asked = asyncio.Event()

        async def swallow(name: str) -> bytes:
            asked.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if fails:
                raise ConnectionError
            return b"kept"

        cache: Any = RedisCache("redis://127.0.0.1:1/0", time.monotonic)
        monkeypatch.setattr(cache._client, "get", swallow)
        call = asyncio.create_task(cache.get("k"))
        await asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await cache.close()

    asyncio.run(scenario())
