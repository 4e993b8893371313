"""What the queue in Redis does with a server that is full or was emptied, with keys, and with silent consumers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.redis_server import RedisServer, needs_redis, redis_server
from support.timing import PATIENCE

from batch_assets.api.online.queues import redis_commands, redis_streams
from batch_assets.api.online.queues.queue_protocol import Claim, OnceKey, QueueAway, new_task_id, once_key, shard_of
from batch_assets.api.online.queues.redis_commands import RedisCommands, Script
from batch_assets.api.online.queues.redis_scripts import GROUP, LOOK, MOST_TOLD
from batch_assets.api.online.queues.redis_streams import RedisQueue, key
from batch_assets.api.online.queues.redis_wakeups import CHANNELS
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind, TaskResult, TaskStatus, failed

pytestmark = needs_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


def run(server: RedisServer, scenario: Callable[[RedisQueue, Any], Coroutine[Any, Any, None]]) -> None:
    """`scenario` gets the queue over an empty server, and a client."""

    async def opened() -> None:
        queue = RedisQueue(server.url, time.time)
        try:
            await queue.commands.client.flushall()
            await scenario(queue, queue.commands.client)
        finally:
            await queue.commands.client.config_set("maxmemory", "0")
            await queue.close()

    asyncio.run(opened())


def task(once: OnceKey | None = None) -> OnlineTask:
    task_id = new_task_id("acme", once)
    return OnlineTask(task_id, "acme", "client", "tiny", TaskKind.CHAT, b"{}", time.time(), 60.0, False, 10, "00-x")


async def claimed(queue: RedisQueue) -> Claim:
    (claim,) = await queue.claim("one", 1, 1.0)
    return claim


async def until(ask: Callable[[], Any], enough: Callable[[Any], bool]) -> None:
    """Ask again and again until this is so."""
    async with asyncio.timeout(30 * PATIENCE):
        for pause in itertools.chain([0.0], itertools.repeat(0.01)):
            await asyncio.sleep(pause)
            if enough(await ask()):
                return


def stream(claim: Claim) -> str:
    return key(shard_of(claim.task.task_id) or 0, "stream")


@pytest.mark.parametrize("end", ["answered", "buried", "delayed", "reclaimed"])
def test_a_server_that_is_full_takes_nothing_more_and_drains(server: RedisServer, end: str) -> None:
    async def scenario(queue: RedisQueue, client: Any) -> None:
        once = once_key("acme", "client", "key", b"body")
        first = task(once)
        await queue.append(first, once)
        await client.config_set("maxmemory", "1")
        with pytest.raises(QueueAway):
            await queue.append(task())
        claim = await claimed(queue)
        await queue.extend([claim])
        if end == "delayed":
            assert await queue.retry(claim, 0.0, charged=True)
            await queue.sweep()
            claim = await claimed(queue)
            assert claim.failures == 1
        elif end == "reclaimed":
            (claim,) = await queue.reclaim("two", 0.0, 1)
        if end == "buried":
            assert await queue.bury(claim, failed("engine_error", "no", time.time(), 3))
            assert [letter.task_id for letter in await queue.dead_letters(10)] == [first.task_id]
        else:
            assert await queue.acknowledge(claim, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
        found = await queue.look(first.task_id, 0.1)
        assert found is not None and found.result is not None
        assert (await queue.depth()).unanswered == 0

    run(server, scenario)


def test_a_server_that_was_emptied_is_used_again_by_who_only_accepts(server: RedisServer) -> None:
    async def scenario(queue: RedisQueue, client: Any) -> None:
        assert (await queue.depth()).unanswered == 0
        await client.flushall()
        with pytest.raises(QueueAway):
            await queue.depth()
        await queue.append(task())
        assert (await queue.depth()).waiting == 1

    run(server, scenario)


def test_a_key_is_kept_as_long_as_its_task_that_is_driven_again(server: RedisServer) -> None:
    async def scenario(queue: RedisQueue, client: Any) -> None:
        once = once_key("acme", "client", "key", b"body")
        first = task(once)
        await queue.append(first, once)
        kept = key(shard_of(first.task_id) or 0, f"once:{once.name}")
        assert await client.ttl(kept) == -1, "for ever, while it is not answered"
        assert await queue.bury(await claimed(queue), failed("engine_error", "no", time.time(), 3))
        assert 0 < await client.ttl(kept) <= 600
        assert await queue.redrive([first.task_id]) == 1
        assert await client.ttl(kept) == -1
        assert await queue.append(replace(first, task_id=new_task_id("acme", once)), once) == await queue.append(
            first, once
        )

    run(server, scenario)


@pytest.mark.parametrize("extended", [True, False])
def test_only_who_says_nothing_for_long_loses_a_task(server: RedisServer, extended: bool) -> None:
    async def scenario(queue: RedisQueue, client: Any) -> None:
        await queue.append(task())
        claim = await claimed(queue)
        await client.xclaim(stream(claim), GROUP, "one", 0, [claim.receipt], idle=100_000, justid=True)
        if extended:
            await queue.extend([claim])
        assert len(await queue.reclaim("two", 50.0, 16)) == (0 if extended else 1)

    run(server, scenario)


def test_consumers_of_ended_processes_are_forgotten_and_those_with_claims_are_not(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_streams, "GONE_SECONDS", 0.0)

    async def scenario(queue: RedisQueue, client: Any) -> None:
        asked = task()
        place = key(shard_of(asked.task_id) or 0, "stream")

        async def names() -> set[bytes]:
            return {found["name"] for found in await client.xinfo_consumers(place, GROUP)}

        await queue.append(asked)
        claim = await claimed(queue)
        await queue.append(other := task())
        while shard_of(other.task_id) != shard_of(asked.task_id):  # a consumer with nothing left in the same shard
            await queue.append(other := task())
        for claimed_by_two in await queue.claim("two", 1000, 1.0):
            assert await queue.acknowledge(claimed_by_two, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
        assert await names() == {b"one", b"two"}
        await queue.sweep()
        assert await names() == {b"one"}
        monkeypatch.setattr(redis_streams, "FORGET_EVERY", 0.0)
        assert await queue.acknowledge(claim, TaskResult(TaskStatus.SUCCESS, time.time(), b"1"))
        await queue.sweep()
        assert await names() == set()
        await queue.append(last := task())
        assert [found.task.task_id for found in await queue.claim("one", 1, 1.0)] == [last.task_id]

    run(server, scenario)


def test_a_consumer_that_was_forgotten_and_comes_back_takes_nothing_from_who_has_its_task_now(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped for longer than consumers are remembered."""
    monkeypatch.setattr(redis_streams, "GONE_SECONDS", 0.0)
    ended = TaskResult(TaskStatus.SUCCESS, time.time(), b"1")

    async def scenario(queue: RedisQueue, client: Any) -> None:
        await queue.append(task())
        claim = await claimed(queue)
        (taken,) = await queue.reclaim("two", 0.0, 16)
        await queue.sweep()
        assert [found["name"] for found in await client.xinfo_consumers(stream(claim), GROUP)] == [b"two"]
        await queue.extend([claim])
        entry = (shard_of(claim.task.task_id) or 0, claim.receipt, claim.task.task_id)
        assert await queue._deliver("one", [entry]) == [], "its claim, whose answer it reads only now, is another's"
        assert not await queue.retry(claim, 0.0, charged=True)
        assert not await queue.bury(claim, failed("engine_error", "no", time.time(), 3))
        assert taken.deliveries == 2 and await queue.acknowledge(taken, ended)
        assert not await queue.acknowledge(claim, ended)
        await queue.append(last := task())
        assert [found.task.task_id for found in await queue.claim("one", 1, 1.0)] == [last.task_id]

    run(server, scenario)


def test_a_dead_letter_comes_back_with_the_time_at_which_it_was_created(server: RedisServer) -> None:
    """Also when Redis has forgotten its result, after ten minutes."""

    async def scenario(queue: RedisQueue, client: Any) -> None:
        asked = replace(task(), created_at=time.time() - 1234.567891)
        await queue.append(asked)
        assert await queue.bury(await claimed(queue), failed("engine_error", "no", time.time(), 3))
        assert await client.delete(key(shard_of(asked.task_id) or 0, f"task:{asked.task_id}")) == 1
        assert await queue.redrive([asked.task_id]) == 1
        found = await queue.look(asked.task_id)
        assert found is not None and (found.created_at, found.result) == (asked.created_at, None)

    run(server, scenario)


def test_a_full_server_is_said_once_a_minute(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(queue: RedisQueue, client: Any) -> None:
        await queue.depth()
        await client.config_set("maxmemory", "1")
        for _ in range(20):
            with pytest.raises(QueueAway):
                await queue.append(task())
            await queue.depth()

    with caplog.at_level("WARNING"):
        run(server, scenario)
    assert [record.getMessage() for record in caplog.records] == ["Redis refused a command: OOM"]


@pytest.mark.parametrize("length", [100, MOST_TOLD])
def test_who_waits_asks_once_and_is_told_the_result_unless_it_is_large(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    async def scenario(queue: RedisQueue, client: Any) -> None:
        looks: list[Script] = []
        ran = queue.commands.run

        async def noted(script: Script, *arguments: Any, **named: Any) -> Any:
            looks.extend([script] if script is LOOK else [])
            return await ran(script, *arguments, **named)

        monkeypatch.setattr(queue.commands, "run", noted)
        monkeypatch.setattr(redis_streams, "AGAIN_SECONDS", 60.0 * PATIENCE)
        asked = task()
        await queue.append(asked)
        channel = CHANNELS + queue._wakeups.name
        with queue._wakeups.waiting("nothing"):  # begins to listen
            await until(lambda: client.pubsub_numsub(channel), lambda found: found[0][1] == 1)
        waits = asyncio.create_task(queue.look(asked.task_id, 60.0 * PATIENCE))
        name = key(shard_of(asked.task_id) or 0, f"task:{asked.task_id}")
        await until(lambda: client.hget(name, "waiters"), bool)
        result = TaskResult(TaskStatus.SUCCESS, time.time(), output=b'"' + b"x" * length + b'"')
        assert await queue.acknowledge(await claimed(queue), result)
        found = await waits
        assert found is not None and found.result == result.packed() and found.tenant == "acme"
        assert len(looks) == (1 if length < MOST_TOLD else 2)

    run(server, scenario)


def test_calls_that_come_one_by_one_are_sent_at_once_and_several_together(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(queue: RedisQueue, client: Any) -> None:
        trips: list[int] = []
        trip = RedisCommands._round_trip

        async def noted(self: RedisCommands, calls: Any) -> list[Any]:
            trips.append(len(calls))
            return await trip(self, calls)

        monkeypatch.setattr(RedisCommands, "_round_trip", noted)
        monkeypatch.setattr(redis_commands, "GATHER_SECONDS", 0.05)
        for _ in range(3):
            await queue.append(task())
        assert trips == [1, 1, 1]

        async def later(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await queue.append(task())

        await asyncio.gather(later(0), later(0))
        trips.clear()
        await asyncio.gather(*(later(turns) for turns in range(20)))
        assert trips == [20], "they wait for each other"

    run(server, scenario)
