"""Several Redis servers: one that is away takes its shards with it and nothing else; no claim is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import RedisServer, needs_redis, redis_server
from support.timing import PATIENCE

from batch_assets.api.online.queues import redis_streams
from batch_assets.api.online.queues.protocol import Claim, QueueAway, new_task_id, shard_of
from batch_assets.api.online.queues.redis_commands import client
from batch_assets.api.online.queues.redis_sharded import ShardedRedisQueue
from batch_assets.api.online.queues.redis_streams import RedisQueue, key
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind, TaskResult, TaskStatus

pytestmark = needs_redis

Scenario = Callable[[ShardedRedisQueue], Coroutine[Any, Any, None]]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisServer]]:
    with redis_server(tmp_path / "a") as one, redis_server(tmp_path / "b") as two:
        yield [one, two]


@contextlib.asynccontextmanager
async def opened(servers: Sequence[RedisServer]) -> AsyncIterator[ShardedRedisQueue]:
    queue = ShardedRedisQueue([server.url for server in servers], time.time)
    try:
        yield queue
    finally:
        await queue.close()


def run(servers: Sequence[RedisServer], scenario: Scenario) -> None:
    async def play() -> None:
        async with opened(servers) as queue:
            await scenario(queue)

    asyncio.run(play())


def task(server: int) -> OnlineTask:
    """A task whose shard is on this server of two."""
    while (shard_of(task_id := new_task_id("acme", None)) or 0) % 2 != server:
        pass
    return OnlineTask(task_id, "acme", "client", "tiny", TaskKind.CHAT, b"{}", time.time(), 60.0, False, 10, "00-x")


async def claimed(queue: ShardedRedisQueue, count: int) -> list[Claim]:
    claims: list[Claim] = []
    async with asyncio.timeout(20 * PATIENCE):
        while len(claims) < count:
            with contextlib.suppress(QueueAway):
                claims += await queue.claim("one", 64, 0.2)
    return claims


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until this is so."""
    async with asyncio.timeout(20 * PATIENCE):
        for pause in itertools.chain([0.0], itertools.repeat(0.01)):
            await asyncio.sleep(pause)
            if await true():
                return


async def until_all_are_there(queue: ShardedRedisQueue) -> None:
    async def there() -> bool:
        return (await queue.depth()).away == 0.0

    await until(there)


def answered() -> TaskResult:
    return TaskResult(TaskStatus.SUCCESS, time.time(), b"1")


def ids(claims: Sequence[Claim]) -> set[str]:
    return {claim.task.task_id for claim in claims}


def test_each_shard_is_on_one_server(servers: list[RedisServer]) -> None:
    async def scenario(queue: ShardedRedisQueue) -> None:
        tasks = [task(number % 2) for number in range(8)]
        for asked in tasks:
            await queue.append(asked)
        for number, server in enumerate(servers):
            async with client(server.url) as redis:
                for asked in tasks:
                    shard = shard_of(asked.task_id) or 0
                    there = await redis.exists(key(shard, f"task:{asked.task_id}"))
                    assert there == (shard % 2 == number)

    run(servers, scenario)


def test_a_server_that_is_killed_takes_its_shards_with_it_and_nothing_else(servers: list[RedisServer]) -> None:
    async def scenario(queue: ShardedRedisQueue) -> None:
        lost, kept, held = task(1), task(0), task(1)
        await queue.append(held)
        (claim,) = await claimed(queue, 1)
        await queue.append(lost)
        assert (await queue.depth()).away == 0.0
        servers[1].kill()
        for _ in range(3):
            with pytest.raises(QueueAway):
                await queue.append(task(1))
            with pytest.raises(QueueAway):
                await queue.look(lost.task_id, 5.0)
            with pytest.raises(QueueAway):
                await queue.acknowledge(claim, answered())
        await queue.sweep()
        await queue.append(kept)
        (other,) = await claimed(queue, 1)
        assert other.task == kept
        await queue.extend([claim, other])
        assert ids(await queue.reclaim("two", 0.0, 16)) == {kept.task_id}
        depth = await queue.depth()
        assert (depth.waiting + depth.claimed, depth.away) == (3, 0.5), "of the one that is away, what was known last"
        assert depth.tenants == {"acme": 3}
        assert await queue.acknowledge(other, answered())
        found = await queue.look(kept.task_id, 5.0)
        assert found is not None and found.result is not None
        assert await queue.dead_letters(10) == []
        servers[1].start()
        (again,) = await claimed(queue, 1)
        assert again.task == lost
        await until_all_are_there(queue)
        assert await queue.acknowledge(claim, answered())

    run(servers, scenario)


def test_no_call_waits_for_a_server_that_is_away(servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(queue: ShardedRedisQueue) -> None:
        await queue.sweep()
        servers[1].kill()
        await queue.sweep()
        looked = asyncio.Event()

        async def silent(*asked: Any) -> Any:
            looked.set()
            await asyncio.Event().wait()

        for call in ("depth", "sweep", "claim", "reclaim", "extend", "dead_letters"):
            monkeypatch.setattr(queue._servers[1].queue, call, silent)
        await looked.wait()
        await queue.append(kept := task(0))
        async with asyncio.timeout(20 * PATIENCE):
            (claim,) = await claimed(queue, 1)
            assert claim.task == kept
            await queue.extend([claim])
            await queue.sweep()
            await queue.dead_letters(1)
            assert len(await queue.reclaim("two", 0.0, 16)) == 1
            assert (await queue.depth()).claimed == 1

    run(servers, scenario)


def test_all_servers_away_is_said_as_of_one_and_does_not_spin(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(queue: ShardedRedisQueue) -> None:
        await queue.append(kept := task(0))
        (claim,) = await claimed(queue, 1)
        for server in servers:
            server.kill()
        calls = (
            queue.sweep,
            queue.depth,
            lambda: queue.claim("one", 1, 20.0 * PATIENCE),
            lambda: queue.extend([claim]),
            lambda: queue.reclaim("one", 0.0, 1),
            lambda: queue.dead_letters(1),
            lambda: queue.redrive([kept.task_id]),
        )
        for call in calls:
            with pytest.raises(QueueAway):
                await call()
        asked: list[RedisQueue] = []
        claims, depths = RedisQueue.claim, RedisQueue.depth

        async def counted_claim(self: RedisQueue, *words: Any) -> Any:
            asked.append(self)
            return await claims(self, *words)

        async def counted_depth(self: RedisQueue) -> Any:
            asked.append(self)
            return await depths(self)

        monkeypatch.setattr(RedisQueue, "claim", counted_claim)
        monkeypatch.setattr(RedisQueue, "depth", counted_depth)
        began = asyncio.get_running_loop().time()
        for _ in range(50):
            with pytest.raises(QueueAway):
                await queue.claim("one", 1, 1.0)
            await asyncio.sleep(0.01)
        passed = asyncio.get_running_loop().time() - began
        assert 1 <= len(asked) <= 2 * (1 + passed / 0.25), "four looks a second at each"

    run(servers, scenario)


def test_a_claim_that_comes_after_the_wait_is_returned_by_the_next_call(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(queue: ShardedRedisQueue) -> None:
        gate, claims = asyncio.Event(), RedisQueue.claim

        async def late(self: RedisQueue, consumer: str, most: int, wait: float) -> Sequence[Claim]:
            found = await claims(self, consumer, most, wait)
            await gate.wait()
            return found

        await queue.append(asked := task(1))
        monkeypatch.setattr(queue._servers[1].queue, "claim", late.__get__(queue._servers[1].queue))
        assert not await queue.claim("one", 8, 0.01)

        async def is_claimed() -> bool:
            return (await queue.depth()).claimed == 1

        await until(is_claimed)
        waiting = asyncio.create_task(queue.claim("one", 8, 60.0 * PATIENCE))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        (claim,) = await queue.claim("one", 8, 60.0 * PATIENCE)
        assert (claim.task, claim.deliveries) == (asked, 1)
        assert not await queue.claim("one", 8, 0.0)
        await queue.append(after := task(1))
        assert ids(await claimed(queue, 1)) == {after.task_id}

    run(servers, scenario)


def test_what_is_claimed_for_the_next_call_is_kept_alive_and_given_back_at_the_end(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with opened(servers) as queue:
            await queue.append(first := task(0))
            gate, claims = asyncio.Event(), RedisQueue.claim

            async def gated(*words: Any) -> Any:
                await gate.wait()
                return await claims(queue._servers[1].queue, *words)

            monkeypatch.setattr(queue._servers[1].queue, "claim", gated)
            (claim,) = await queue.claim("one", 8, 20.0 * PATIENCE)
            assert claim.task == first
            await queue.append(asked := task(1))
            gate.set()

            async def is_there() -> bool:
                return bool(queue._not_returned())

            await until(is_there)
            extended: list[Claim] = []

            async def noted(found: Sequence[Claim]) -> None:
                extended.extend(found)

            for server in queue._servers:
                monkeypatch.setattr(server.queue, "extend", noted)
            await queue.extend([claim])
            assert ids(extended) == {first.task_id, asked.task_id}
        async with opened(servers) as other:
            await other.sweep()
            (again,) = await claimed(other, 1)
            assert (again.task, again.returned, again.failures) == (asked, 1, 0)

    asyncio.run(play())


def test_close_in_the_middle_leaves_no_task_and_no_connection(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_streams, "AGAIN_SECONDS", 0.3)

    async def play() -> None:
        async with opened(servers) as queue:
            asked = task(0)
            await queue.append(asked)
            await claimed(queue, 1)
            servers[1].kill()
            await queue.sweep()
            servers[1].start()
            calls = [
                asyncio.create_task(queue.claim("one", 8, 600.0)),
                asyncio.create_task(queue.look(asked.task_id, 600.0)),
            ]
            await asyncio.sleep(0.1)  # they wait for their servers
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [QueueAway, QueueAway]
        with pytest.raises(QueueAway):
            await queue.claim("one", 8, 1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        for server in servers:
            async with client(server.url) as redis:
                assert len(await redis.client_list()) == 1

    asyncio.run(play())


def test_nobody_is_held_to_be_dead_for_the_time_in_which_the_server_was_away(servers: list[RedisServer]) -> None:
    async def scenario(queue: ShardedRedisQueue) -> None:
        await queue.append(first := task(0))
        await queue.append(second := task(1))
        await claimed(queue, 2)
        servers[1].kill()
        await queue.sweep()
        servers[1].start()
        await until_all_are_there(queue)
        back_at = queue._servers[1].back_at
        queue._servers[1].back_at = asyncio.get_running_loop().time() - 0.001
        assert ids(await queue.reclaim("two", 0.001, 16)) <= {first.task_id}, "within twice the time"
        queue._servers[1].back_at = back_at - 600
        found = await queue.reclaim("three", 0.0, 16)
        assert ids(found) == {first.task_id, second.task_id}

    run(servers, scenario)
