"""What every queue promises: on the file of one process, and on a real Redis."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.redis_server import RedisServer, needs_redis, redis_server
from support.timing import PATIENCE

from batch_assets.api.online.queues import task_table
from batch_assets.api.online.queues.embedded import EmbeddedQueue
from batch_assets.api.online.queues.queue_protocol import (
    RESULT_SECONDS,
    SHARDS,
    Claim,
    KeyReused,
    TaskQueue,
    new_task_id,
    once_key,
    shard_of,
)
from batch_assets.api.online.queues.redis_commands import client
from batch_assets.api.online.queues.redis_streams import RedisQueue
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind, TaskResult, TaskStatus, failed

Opened = Callable[[], Any]  # an async context manager of a queue over the same data


class Clock:
    """Unix seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("a")) as found:
        yield found


@pytest.fixture
def clock() -> Clock:
    return Clock()


_DATABASES = itertools.cycle(range(1, 16))


@pytest.fixture(params=["embedded", pytest.param("redis", marks=needs_redis)])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Opened:
    url = ""
    if request.param == "redis":
        url = request.getfixturevalue("server").url.replace("/0", f"/{next(_DATABASES)}")

    @asynccontextmanager
    async def queue() -> AsyncIterator[TaskQueue]:
        found: Any
        if url:
            found = RedisQueue(url, clock)
        else:
            found = EmbeddedQueue(tmp_path, clock)
            await found.open()
        try:
            yield found
        finally:
            await found.close()

    async def empty() -> None:
        async with client(url) as redis:
            await redis.flushdb()

    if url:
        asyncio.run(empty())
    return queue


def task(name: str, tenant: str = "acme", now: float | None = None) -> OnlineTask:
    body = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": name}]})
    at = time.time() if now is None else now
    return OnlineTask(
        new_task_id(tenant, None), tenant, "client", "tiny", TaskKind.CHAT, body, at, 60.0, False, 10, "00-x"
    )


def answered(text: str) -> TaskResult:
    return TaskResult(TaskStatus.SUCCESS, time.time(), output=orjson.dumps(text))


async def claim_all(queue: TaskQueue, count: int, consumer: str = "one") -> list[Claim]:
    """So many claims; a queue may hand them out in parts."""
    claims: list[Claim] = []
    async with asyncio.timeout(10 * PATIENCE):
        while len(claims) < count:
            claims += await queue.claim(consumer, 64, 1.0)
    return claims


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_a_task_is_appended_claimed_and_answered(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            asked = task("one")
            assert (await queue.append(asked)).task_id == asked.task_id
            pending = await queue.look(asked.task_id)
            assert pending is not None and pending.result is None
            assert (pending.tenant, pending.created_at) == ("acme", asked.created_at)
            (claim,) = await claim_all(queue, 1)
            assert claim.task == asked
            assert (claim.failures, claim.returned, claim.deliveries) == (0, 0, 1)
            assert claim.expires_at == asked.created_at + 60
            assert await queue.acknowledge(claim, answered("yes")) is True
            found = await queue.look(asked.task_id)
            assert found is not None and orjson.loads(found.result)["output"] == "yes"
            assert not await queue.claim("one", 10, 0.0)
            depth = await queue.depth()
            assert (depth.waiting, depth.claimed, depth.unanswered, depth.tenants) == (0, 0, 0, {})

    run(scenario)


def test_what_was_appended_is_there_for_the_next_process(opened: Opened) -> None:
    async def scenario() -> None:
        tasks = [task(f"{number}") for number in range(40)]
        async with opened() as queue:
            await asyncio.gather(*(queue.append(one) for one in tasks))
            claims = await claim_all(queue, 40)
            await queue.acknowledge(claims[0], answered("kept"))
        async with opened() as queue:
            found = await queue.look(claims[0].task.task_id)
            assert found is not None and found.result is not None
            again = list(await queue.reclaim("two", 0.0, 10_000))
            again += await claim_all(queue, 39 - len(again), "two")
            assert {one.task.task_id for one in again} == {one.task.task_id for one in claims[1:]}
            assert all(one.deliveries == 2 for one in again)

    run(scenario)


def test_the_first_result_stays(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            await queue.append(task("one"))
            (claim,) = await claim_all(queue, 1)
            (other,) = await queue.reclaim("two", 0.0, 10)
            assert other.consumer == "two" and other.deliveries == 2
            assert await queue.acknowledge(claim, answered("first"))
            assert not await queue.acknowledge(other, answered("second"))
            assert not await queue.bury(other, failed("engine_failed", "no", time.time(), 3))
            found = await queue.look(claim.task.task_id)
            assert orjson.loads(found.result)["output"] == "first"
            assert (await queue.depth()).unanswered == 0

    run(scenario)


def test_who_lost_a_task_cannot_give_it_back_or_bury_it(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            await queue.append(task("one"))
            (claim,) = await claim_all(queue, 1)
            (other,) = await queue.reclaim("two", 0.0, 10)
            assert not await queue.retry(claim, 0.0, charged=True)
            assert not await queue.bury(claim, failed("engine_failed", "no", time.time(), 3))
            assert (await queue.depth()).claimed == 1
            assert await queue.retry(other, 0.0, charged=True)

    run(scenario)


def test_a_task_that_is_extended_is_not_reclaimed(opened: Opened, clock: Clock) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            await queue.append(task("one"))
            (claim,) = await claim_all(queue, 1)
            clock.now += 100
            await queue.extend([claim])
            assert not await queue.reclaim("two", 50.0, 10)
            assert (await queue.depth()).claimed == 1

    run(scenario)


def test_a_retry_waits_its_time_and_counts_its_failures(opened: Opened, clock: Clock) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            await queue.append(task("one"))
            (claim,) = await claim_all(queue, 1)
            assert await queue.retry(claim, 30.0, charged=True)
            await queue.sweep()
            assert not await queue.claim("one", 10, 0.0)
            assert (await queue.depth()).delayed == 1
            clock.now += 31
            await queue.sweep()
            (again,) = await claim_all(queue, 1)
            assert (again.failures, again.returned, again.deliveries) == (1, 0, 1)
            assert await queue.retry(again, 0.0, charged=False)
            await queue.sweep()
            (third,) = await claim_all(queue, 1)
            assert (third.failures, third.returned, third.deliveries) == (1, 1, 1)

    run(scenario)


def test_a_dead_letter_is_answered_shown_and_driven_again(opened: Opened, clock: Clock) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            asked = task("one")
            await queue.append(asked)
            (claim,) = await claim_all(queue, 1)
            assert await queue.bury(claim, failed("engine_failed", "no", clock(), 3))
            result = orjson.loads((await queue.look(asked.task_id)).result)
            assert (result["status"], result["error"]["code"], result["tries"]) == ("FAILED", "engine_failed", 3)
            (letter,) = await queue.dead_letters(10)
            assert (letter.task_id, letter.tenant, letter.code, letter.failures) == (
                asked.task_id,
                "acme",
                "engine_failed",
                3,
            )
            depth = await queue.depth()
            assert (depth.dead, depth.unanswered) == (1, 0)
            clock.now += 3600
            assert await queue.redrive([asked.task_id, asked.task_id, "task_" + "0" * 32, "x"]) == 1
            assert (await queue.look(asked.task_id)).result is None
            (again,) = await claim_all(queue, 1)
            assert (again.failures, again.deliveries, again.task) == (0, 1, asked)
            assert again.expires_at == pytest.approx(clock.now + 60)
            assert await queue.acknowledge(again, answered("at last"))
            assert (await queue.depth()).dead == 0 and not await queue.dead_letters(10)

    run(scenario)


def test_a_repeated_key_is_one_task(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            once = once_key("acme", "client", "key-1", b"body")
            asked = [replace(task("one"), task_id=new_task_id("acme", once)) for _ in range(8)]
            found = await asyncio.gather(*(queue.append(one, once) for one in asked))
            assert len({one.task_id for one in found}) == 1
            assert sorted(one.repeated for one in found) == [False] + [True] * 7
            assert (await queue.depth()).waiting == 1
            assert await queue.known("acme", once) == found[0].task_id
            for call in (lambda key: queue.append(asked[0], key), lambda key: queue.known("acme", key)):
                with pytest.raises(KeyReused):
                    await call(once_key("acme", "client", "key-1", b"another"))
            assert await queue.known("acme", once_key("acme", "client", "key-2", b"body")) is None
            other = once_key("acme", "other", "key-1", b"another")
            assert not (await queue.append(replace(asked[0], task_id=new_task_id("acme", other)), other)).repeated
            (claim, _) = await claim_all(queue, 2)
            await queue.acknowledge(claim, answered("yes"))
            assert (await queue.append(asked[3], once)).repeated

    run(scenario)


def test_who_waits_for_a_result_gets_it_when_it_is_there(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            asked = task("one")
            await queue.append(asked)
            waits = [asyncio.create_task(queue.look(asked.task_id, 30.0 * PATIENCE)) for _ in range(3)]
            (claim,) = await claim_all(queue, 1)
            assert not any(one.done() for one in waits)
            await queue.acknowledge(claim, answered("yes"))
            for one in await asyncio.gather(*waits):
                assert orjson.loads(one.result)["output"] == "yes"

    run(scenario)


def test_a_wait_ends_without_a_result(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            asked = task("one")
            await queue.append(asked)
            found = await queue.look(asked.task_id, 0.05)
            assert found is not None and found.result is None
            assert await queue.look(new_task_id("acme", None), 0.05) is None

    run(scenario)


def test_nobody_waits_for_a_task_of_another_tenant(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            asked = task("one")
            await queue.append(asked)
            async with asyncio.timeout(10 * PATIENCE):
                assert await queue.look(asked.task_id, 60.0 * PATIENCE, "other") is None
            found = await queue.look(asked.task_id, 0.0, "acme")
            assert found is not None and found.tenant == "acme"

    run(scenario)


@pytest.mark.parametrize("name", ["", "task_", "task_zz", "task_ff" + "0" * 30, "task_" + "0" * 33, "x" * 500, "é"])
def test_an_id_that_is_none_is_not_there(opened: Opened, name: str) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            assert await queue.look(name) is None

    run(scenario)


def test_a_tenant_with_few_tasks_does_not_wait_for_one_with_many(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            await asyncio.gather(*(queue.append(task(f"{number}", "big")) for number in range(300)))
            shards = {shard_of(new_task_id("big", None)) for _ in range(200)}
            assert len(shards) <= 4
            mine = {shard_of(new_task_id("small", None)) for _ in range(200)}
            assert mine - shards, "expected tenants that do not share all of their shards"
            few = [task(f"few-{number}", "small") for number in range(8)]
            apart = [one for one in few if shard_of(one.task_id) not in shards]
            await asyncio.gather(*(queue.append(one) for one in few))
            assert (await queue.depth()).tenants == {"big": 300, "small": 8}
            taken: set[str] = set()
            async with asyncio.timeout(10 * PATIENCE):
                while not {one.task_id for one in apart[:3]} <= taken:
                    taken |= {claim.task.task_id for claim in await queue.claim("one", 16, 1.0)}
            assert len(taken) < 100

    run(scenario)


def test_two_consumers_never_get_the_same_task(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as queue:
            tasks = [task(f"{number}") for number in range(200)]
            await asyncio.gather(*(queue.append(one) for one in tasks))
            ids: list[str] = []
            async with asyncio.timeout(10 * PATIENCE):
                while len(ids) < 200:
                    found = await asyncio.gather(*(queue.claim(f"c{number}", 16, 0.1) for number in range(4)))
                    ids += [claim.task.task_id for claims in found for claim in claims]
            assert sorted(ids) == sorted(one.task_id for one in tasks)

    run(scenario)


def test_shards_are_of_ids_and_few_per_tenant() -> None:
    for tenant in ("a", "b", "c"):
        ids = [new_task_id(tenant, None) for _ in range(100)]
        assert {shard_of(one) for one in ids} <= set(range(SHARDS))
        assert 1 <= len({shard_of(one) for one in ids}) <= 4
    once = once_key("a", "c", "k", b"")
    assert len({shard_of(new_task_id("a", once)) for _ in range(20)}) == 1


def test_what_is_to_be_forgotten_is_forgotten_however_much_it_is(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_table, "MOST_FORGOTTEN", 2)

    async def scenario() -> None:
        queue = EmbeddedQueue(tmp_path, clock)
        await queue.open()
        await asyncio.gather(*(queue.append(task(f"{number}", now=clock.now)) for number in range(5)))
        for claim in await claim_all(queue, 5):
            await queue.acknowledge(claim, replace(answered("yes"), finished_at=clock.now))
        clock.now += RESULT_SECONDS + 1
        left = []
        for _ in range(4):
            await queue.sweep()
            left.append(await queue._run(lambda db: db.execute("SELECT count(*) FROM tasks").fetchone()[0]))
        assert left == [3, 1, 0, 0]
        await queue.close()

    run(scenario)


def test_a_row_that_is_no_task_holds_up_nobody(tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        queue = EmbeddedQueue(tmp_path, clock)
        await queue.open()
        spoiled, whole = task("one"), task("two")
        await queue.append(spoiled)
        await queue.append(whole)
        spoil = "UPDATE tasks SET packed = ? WHERE id = ?"
        await queue._run(lambda db: db.execute(spoil, (b'{"tenant": 5}\n', spoiled.task_id)).rowcount)
        assert [claim.task for claim in await queue.claim("one", 10, 1.0)] == [whole]
        await queue.close()

    run(scenario)


def test_a_result_is_forgotten_after_ten_minutes(tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        queue = EmbeddedQueue(tmp_path, clock)
        await queue.open()
        once = once_key("acme", "client", "key", b"")
        await queue.append(task("one", now=clock.now), once)
        (claim,) = await claim_all(queue, 1)
        await queue.acknowledge(claim, replace(answered("yes"), finished_at=clock.now))
        clock.now += RESULT_SECONDS - 1
        await queue.sweep()
        assert await queue.look(claim.task.task_id) is not None
        clock.now += 2
        assert await queue.look(claim.task.task_id) is None
        assert not (await queue.append(task("one", now=clock.now), once)).repeated
        await queue.sweep()
        await queue.close()

    run(scenario)
