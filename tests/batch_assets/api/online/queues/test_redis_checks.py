"""Which server is used: one that a version before has as one of a list is not, until its key is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.redis_server import RedisServer, needs_redis, redis_server

from batch_assets.api.online.queues import redis_commands, redis_streams
from batch_assets.api.online.queues.queue_protocol import Claim, QueueAway, new_task_id
from batch_assets.api.online.queues.redis_checks import PLACE, shard_in
from batch_assets.api.online.queues.redis_commands import client
from batch_assets.api.online.queues.redis_streams import RedisQueue
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind, TaskResult, TaskStatus

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "a") as found:
        yield found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_commands, "AWAY_SECONDS", 0.0)


@contextlib.asynccontextmanager
async def opened(server: RedisServer) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(server.url, time.time)
    try:
        yield queue
    finally:
        await queue.close()


def task() -> OnlineTask:
    task_id = new_task_id("acme", None)
    return OnlineTask(task_id, "acme", "client", "tiny", TaskKind.CHAT, b"{}", time.time(), 60.0, False, 10, "00-x")


async def claimed(queue: RedisQueue) -> Claim:
    (claim,) = await queue.claim("one", 1, 5.0)
    return claim


async def place_of(server: RedisServer) -> bytes | None:
    async with client(server.url) as redis:
        found = await redis.get(PLACE)
    return found if isinstance(found, bytes) else None


async def set_place(server: RedisServer, place: str | None) -> None:
    async with client(server.url) as redis:
        await (redis.delete(PLACE) if place is None else redis.set(PLACE, place))


def test_shards_of_keys() -> None:
    assert shard_in(b"batch-assets:{online:0f}:task:task_x") == 15
    assert shard_in(PLACE.encode()) is shard_in(b"x") is shard_in(b"batch-assets:{online:zz}:stream") is None


def test_a_server_that_is_one_of_a_list_is_refused_said_once_and_used_without_its_key(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await set_place(server, "2 of 3")
        async with opened(server) as queue:
            for _ in range(3):
                with pytest.raises(QueueAway):
                    await queue.append(task())
                with pytest.raises(QueueAway):
                    await queue.depth()
        assert await place_of(server) == b"2 of 3"
        await set_place(server, None)
        async with opened(server) as queue:
            await queue.append(task())

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    (said,) = {record.getMessage() for record in caplog.records}
    assert "Redis: expected `1 of 1`, found `2 of 3`" in said and "delete the key on each of its servers" in said


def test_services_of_the_version_before_find_that_the_server_is_used_alone(server: RedisServer) -> None:
    """It is kept as all that is accepted is."""

    async def scenario() -> None:
        async with opened(server) as queue:
            await queue.append(task())
        server.kill()
        server.start()
        assert await place_of(server) == b"1 of 1"

    asyncio.run(scenario())


def test_a_place_that_changes_under_a_service_is_found_and_found_mended(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_streams, "FORGET_EVERY", 0.0)

    async def scenario() -> None:
        async with opened(server) as queue:
            await queue.sweep()
            await set_place(server, "2 of 3")
            with pytest.raises(QueueAway):
                await queue.sweep()
            with pytest.raises(QueueAway):
                await queue.append(task())
            await set_place(server, "1 of 1")
            await queue.append(task())

    asyncio.run(scenario())


def test_a_full_server_without_a_place_takes_it_and_drains(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(server) as queue:
            await queue.append(asked := task())
        await set_place(server, None)
        async with client(server.url) as redis:
            await redis.config_set("maxmemory", "1")
        async with opened(server) as queue:
            claim = await claimed(queue)
            assert claim.task == asked
            assert await queue.acknowledge(claim, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
        assert await place_of(server) == b"1 of 1"

    asyncio.run(scenario())


def test_what_waits_on_a_server_of_a_list_is_answered_by_a_service_that_has_it_alone(server: RedisServer) -> None:
    """The version before kept a part of the shards on each server, in the same keys."""

    async def scenario() -> None:
        async with opened(server) as queue:
            await queue.append(asked := task())
        await set_place(server, "3 of 3")  # as that version left it
        await set_place(server, None)  # as the page says
        async with opened(server) as queue:
            claim = await claimed(queue)
            assert claim.task == asked
            assert await queue.acknowledge(claim, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
            assert (await queue.depth()).unanswered == 0

    asyncio.run(scenario())
