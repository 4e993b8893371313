"""The service over two Redis servers, one of which is killed while requests come; answers are kept by key."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from aiohttp import web
from support.http_server import http_server
from support.online_site import OnlineSite, online_site
from support.redis_server import RedisServer, needs_redis, redis_server
from support.timing import PATIENCE

from batch_assets.api.online.answers import redis_cache
from batch_assets.api.online.answers.cache import CacheAway
from batch_assets.api.online.answers.redis_cache import ShardedRedisCache
from batch_assets.api.online.queues.protocol import shard_of

pytestmark = needs_redis

CHAT = "/v1/chat/completions"
ANSWER = (
    b'{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
ASK = {"input": "hello", "model": "tiny"}


def server_of(task_id: str) -> int:
    return (shard_of(task_id) or 0) % 2


async def submitted(site: OnlineSite, statuses: list[int]) -> str:
    """The id of a request, repeated until it is accepted."""
    async with asyncio.timeout(60 * PATIENCE):
        while (answer := await site.submit(ASK)).status_code != 202:
            assert answer.json()["error"]["code"] == "queue_unavailable" and answer.headers["retry-after"] == "1"
            statuses.append(answer.status_code)
    return str(answer.json()["task_id"])


async def until_away(site: OnlineSite, share: float) -> None:
    deadline = time.monotonic() + 20 * PATIENCE
    while site.figure("batch_assets_online_queue_away") != share:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_server_that_is_killed_while_requests_come_loses_none_and_stops_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(one: RedisServer, two: RedisServer) -> None:
        gate = asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            await gate.wait()
            return web.Response(body=ANSWER, content_type="application/json")

        urls = f"{one.url} {two.url}"
        async with (
            http_server({CHAT: answer}) as url,
            online_site(tmp_path / "home", [url], monkeypatch, redis=urls, CONCURRENCY="8") as site,
        ):
            statuses: list[int] = []
            ids: list[str] = []
            while {server_of(task_id) for task_id in ids[:-20]} != {0, 1}:  # some are claimed, the others wait
                ids.append(await submitted(site, statuses))
                assert len(ids) < 500, "expected a tenant with shards on both servers"
            assert not statuses
            await asyncio.to_thread(two.kill)
            while statuses.count(503) < 5:
                ids.append(await submitted(site, statuses))
                assert server_of(ids[-1]) == 0, "a repeated request draws its shard anew"
            await until_away(site, 0.5)
            gate.set()
            for task_id in ids:
                if server_of(task_id) == 0:
                    assert (await site.ended(task_id))["status"] == "SUCCESS"
            found = await site.client.get(f"/v1/result/{next(one for one in ids if server_of(one) == 1)}?wait=30")
            assert found.status_code == 503 and found.json()["error"]["code"] == "queue_unavailable"
            await asyncio.to_thread(two.start)
            await until_away(site, 0.0)
            for task_id in ids:
                assert (await site.ended(task_id))["status"] == "SUCCESS"
            while server_of(await submitted(site, statuses)) == 0:
                pass

    with redis_server(tmp_path / "a") as one, redis_server(tmp_path / "b") as two:
        asyncio.run(scenario(one, two))


def test_answers_are_on_the_server_that_their_key_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_cache, "LOOK_SECONDS", 10.0)

    async def scenario(one: RedisServer, two: RedisServer) -> None:
        keys = [f"{number:064x}" for number in (0, 1 << 224)]
        cache = ShardedRedisCache([one.url, two.url], time.monotonic)
        other = ShardedRedisCache([one.url, two.url], time.monotonic)
        for key in keys:
            assert await cache.begin(key, 60.0) and not await other.begin(key, 60.0)
            await cache.put(key, key.encode())
            await cache.end(key)
            assert await other.get(key) == key.encode() and await other.begin(key, 60.0)
        await cache.drop(keys[0])
        assert await other.get(keys[0]) is None
        two.kill()
        with pytest.raises(CacheAway):
            await cache.get(keys[1])
        await cache.put(keys[0], b"kept")
        assert await cache.get(keys[0]) == b"kept"
        await cache.close()
        await other.close()

    with redis_server(tmp_path / "a") as one, redis_server(tmp_path / "b") as two:
        asyncio.run(scenario(one, two))
