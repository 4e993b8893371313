"""Which servers are used: a server knows which part of the queue it has, and others than its list do not use it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import RedisServer, needs_redis, redis_server

from batch_assets.api.online.queues import redis_checks, redis_commands, redis_streams
from batch_assets.api.online.queues.protocol import SHARDS, Claim, QueueAway, new_task_id, once_key, shard_of
from batch_assets.api.online.queues.redis_checks import PLACE, Place, shard_in
from batch_assets.api.online.queues.redis_commands import client
from batch_assets.api.online.queues.redis_sharded import AGAIN_SECONDS, ShardedRedisQueue
from batch_assets.api.online.queues.redis_streams import RedisQueue
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind, TaskResult, TaskStatus, failed

pytestmark = needs_redis


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisServer]]:
    with redis_server(tmp_path / "a") as one, redis_server(tmp_path / "b") as two:
        yield [one, two]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_commands, "AWAY_SECONDS", 0.0)


@contextlib.asynccontextmanager
async def opened(*servers: RedisServer) -> AsyncIterator[Any]:
    urls = [server.url for server in servers]
    queue: Any = ShardedRedisQueue(urls, time.time) if len(urls) > 1 else RedisQueue(urls[0], time.time)
    try:
        yield queue
    finally:
        await queue.close()


def task(server: int) -> OnlineTask:
    """A task whose shard is on this server of two."""
    while (shard_of(task_id := new_task_id("acme", None)) or 0) % 2 != server:
        pass
    return OnlineTask(task_id, "acme", "client", "tiny", TaskKind.CHAT, b"{}", time.time(), 60.0, False, 10, "00-x")


async def claimed(queue: Any) -> Claim:
    (claim,) = await queue.claim("one", 1, 5.0)
    return claim


async def place_of(server: RedisServer) -> bytes | None:
    async with client(server.url) as redis:
        found = await redis.get(PLACE)
    return found if isinstance(found, bytes) else None


async def forget_place(server: RedisServer) -> None:
    async with client(server.url) as redis:
        assert await redis.delete(PLACE) == 1


async def refused(*servers: RedisServer) -> bool:
    """Whether a service with this list accepts nothing, whatever the shard, and says it of its queue."""
    async with opened(*servers) as queue:
        with contextlib.suppress(QueueAway):
            await queue.sweep()
        failures = 0
        for number in range(4):
            try:
                await queue.append(task(number % 2))
            except QueueAway:
                failures += 1
        assert failures in (0, 4)
        if failures:
            with pytest.raises(QueueAway):
                await queue.known("acme", once_key("acme", "client", "key", b""))
            with pytest.raises(QueueAway):
                await queue.depth()
        return failures > 0


@pytest.mark.parametrize("servers", range(1, 17))
def test_each_shard_has_one_server_of_the_list(servers: int) -> None:
    places = [Place(number, servers) for number in range(1, servers + 1)]
    assert sorted(shard for place in places for shard in place.shards) == list(range(SHARDS))
    assert all(shard % servers == place.number - 1 for place in places for shard in place.shards)


def test_shards_of_keys() -> None:
    assert shard_in(b"batch-assets:{online:0f}:task:task_x") == 15
    assert shard_in(PLACE.encode()) is shard_in(b"x") is shard_in(b"batch-assets:{online:zz}:stream") is None


def test_a_list_that_differs_is_refused_and_said_once(
    servers: list[RedisServer], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        one, two = servers
        assert not await refused(one, two)
        for server in servers:  # it is kept as all that is accepted is
            server.kill()
            server.start()
        assert [await place_of(server) for server in servers] == [b"1 of 2", b"2 of 2"]
        assert await refused(one) and await refused(two)
        assert not await refused(one, two)
        assert [await place_of(server) for server in servers] == [b"1 of 2", b"2 of 2"]
        caplog.clear()
        assert await refused(two, one)

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("expected the place" in line and "delete the key" in line for line in said)
    assert any("server 1 of 2: expected the place `1 of 2`, found `2 of 2`" in line for line in said)
    assert any("server 2 of 2: expected the place `2 of 2`, found `1 of 2`" in line for line in said)


def test_the_number_of_servers_is_changed_while_the_queue_is_empty(servers: list[RedisServer]) -> None:
    async def scenario() -> None:
        one, two = servers
        async with opened(one) as queue:
            assert (await queue.depth()).unanswered == 0
        assert await place_of(one) == b"1 of 1"
        assert await refused(one, two), "a service with the old list may be running"
        await forget_place(one)
        assert not await refused(one, two)
        assert [await place_of(server) for server in servers] == [b"1 of 2", b"2 of 2"]

    asyncio.run(scenario())


@pytest.mark.parametrize("left", ["waiting", "claimed", "delayed", "answered", "dead"])
def test_a_server_that_was_used_alone_is_refused_as_long_as_it_has_anything_of_other_shards(
    servers: list[RedisServer], caplog: pytest.LogCaptureFixture, left: str
) -> None:
    async def scenario() -> None:
        one, two = servers
        async with opened(one) as queue:
            await queue.append(stays := task(0))
            claim = await claimed(queue)
            await queue.retry(claim, 0.0, charged=False)
            await queue.append(asked := task(1))
            if left != "waiting":
                claim = await claimed(queue)
                assert claim.task == asked
            if left == "delayed":
                await queue.retry(claim, 600.0, charged=False)
            if left == "answered":
                await queue.acknowledge(claim, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
            if left == "dead":
                await queue.bury(claim, failed("engine_error", "no", time.time(), 3))
                async with client(one.url) as redis:  # its result is forgotten, the letter is not
                    await redis.delete(redis_streams.key(shard_of(asked.task_id) or 0, f"task:{asked.task_id}"))
        await forget_place(one)
        assert await refused(one, two) and await place_of(one) is None
        async with opened(one) as queue:  # the old list finds it all
            if left == "dead":
                await queue.redrive([asked.task_id])
            if left == "delayed":
                async with client(one.url) as redis:
                    await redis.zadd(redis_streams.key(shard_of(asked.task_id) or 0, "delayed"), {asked.task_id: 0})
            if left == "claimed":
                (claim,) = await queue.reclaim("two", 0.0, 16)
            elif left != "answered":
                await queue.sweep()
                claim = next(one for one in await queue.claim("one", 16, 5.0) if one.task == asked)
            await queue.acknowledge(claim, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
        async with client(one.url) as redis:  # ten minutes later
            await redis.delete(redis_streams.key(shard_of(asked.task_id) or 0, f"task:{asked.task_id}"))
        await forget_place(one)
        assert not await refused(one, two), "streams without entries are left of the other shards"
        async with opened(one, two) as queue:
            assert await queue.look(stays.task_id) is not None

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    (said,) = {record.getMessage() for record in caplog.records}
    assert "Redis server 1 of 2: expected its own shards only, found keys of shard " in said


def test_a_place_that_changes_under_a_service_is_found_and_found_mended(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_streams, "FORGET_EVERY", 0.0)

    async def scenario() -> None:
        async with opened(*servers) as queue:
            await queue.sweep()
            async with client(servers[1].url) as redis:
                await redis.set(PLACE, "2 of 3")
                await queue.sweep()
                for number in range(2):
                    with pytest.raises(QueueAway):
                        await queue.append(task(number))
                await redis.config_set("maxmemory-policy", "allkeys-lru")  # another reason, and it hides the first
                await asyncio.sleep(2 * AGAIN_SECONDS)
                with pytest.raises(QueueAway):
                    await queue.append(task(0))
                await redis.config_set("maxmemory-policy", "noeviction")
                await redis.set(PLACE, "2 of 2")
            async with asyncio.timeout(60):
                while queue._servers[1].looks is not None:
                    await asyncio.wait([queue._servers[1].looks])
            for number in range(2):
                await queue.append(task(number))

    asyncio.run(scenario())


def test_a_full_server_without_a_place_takes_it_and_drains(servers: list[RedisServer]) -> None:
    async def scenario() -> None:
        one, _ = servers
        async with opened(one) as queue:
            await queue.append(asked := task(0))
        await forget_place(one)
        async with client(one.url) as redis:
            await redis.config_set("maxmemory", "1")
        async with opened(one) as queue:
            claim = await claimed(queue)
            assert claim.task == asked
            assert await queue.acknowledge(claim, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
        assert await place_of(one) == b"1 of 1"

    asyncio.run(scenario())


def test_names_of_keys_are_not_read_for_long(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_checks, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(redis_checks, "SCANNED", 1)

    async def scenario() -> None:
        async with client(servers[0].url) as redis, opened(*servers) as queue:
            await redis.mset({f"{number}": "x" for number in range(1000)})
            with pytest.raises(QueueAway):
                await queue.append(task(0))
            await redis.set(PLACE, "1 of 2")
            await queue.append(task(0))

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    assert "set that key to `1 of 2`" in caplog.text
