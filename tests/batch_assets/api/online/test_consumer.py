"""A consumer that is told to end, ends; what an engine answered is charged whatever becomes of the storing; only so
many results wait for the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.timing import PATIENCE

from batch_assets.api.interactive.event_stream import Usage
from batch_assets.api.online import consumer as consumers
from batch_assets.api.online.consumer import Consumer
from batch_assets.api.online.dispatcher import DispatchAnswer, DispatchFailed, Failure
from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.online.queues.queue_protocol import Claim, QueueAway
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind, TaskResult


class SwallowingQueue:
    """Takes a cancel for the end of its own wait, as a client library may."""

    def __init__(self) -> None:
        self.claims = 0
        self.asked = asyncio.Event()

    async def claim(self, consumer: str, most: int, wait: float) -> list[Any]:
        self.claims += 1
        self.asked.set()
        if self.claims > 1:
            await asyncio.Event().wait()  # it never comes back
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return []


async def settle(tenant: str, more: int) -> None: ...


def test_a_cancel_that_the_queue_swallows_ends_the_consumer() -> None:
    async def scenario() -> None:
        queue: Any = SwallowingQueue()
        requests: Any = None
        figures = OnlineFigures(CollectorRegistry())
        consumer = Consumer(
            queue, requests, figures, name="c", concurrency=2, clock=lambda: 0.0, uniform=lambda: 0.5, settle=settle
        )
        work = asyncio.create_task(consumer.run())
        await queue.asked.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(10):
                await asyncio.shield(work)
        assert queue.claims == 1

    asyncio.run(scenario())


class LosingQueue:
    """Has one task, stores its result, and goes away before it says so, as a queue whose reply is lost."""

    def __init__(self, said: list[str]) -> None:
        task = OnlineTask("task_1", "acme", "c", "m", TaskKind.CHAT, b"{}", 0.0, 60.0, False, 9, "")
        self._said, self._claims, self._stored = said, [Claim(task, "c", "1", 0, 0, 1, 60.0)], False
        self.ended = asyncio.Event()

    async def claim(self, consumer: str, most: int, wait: float) -> list[Claim]:
        if not self._claims:
            await asyncio.Event().wait()
        return [self._claims.pop()]

    async def acknowledge(self, claim: Claim, result: TaskResult) -> bool:
        self._said.append("stored")
        if not self._stored:
            self._stored = True
            raise QueueAway
        self.ended.set()
        return False  # another result is there: its own

    async def extend(self, claims: list[Claim]) -> None: ...

    async def reclaim(self, consumer: str, silent: float, most: int) -> list[Claim]:
        return []


class WaitingQueue(LosingQueue):
    """Notes how long a task that is given back is to wait."""

    def __init__(self) -> None:
        super().__init__([])
        self.waits: list[float] = []

    async def retry(self, claim: Claim, seconds: float, *, charged: bool) -> bool:
        self.waits.append(seconds)
        self.ended.set()
        return True


@pytest.mark.parametrize(("now", "wait"), [(10.0, 0.25), (59.9, 0.1), (60.0 - 1e-9, 0.0)])
def test_a_task_waits_for_no_try_after_its_time_to_live(now: float, wait: float) -> None:
    """Else it would be told that it expired when that try is due: seconds late."""

    async def scenario() -> None:
        queue: Any = WaitingQueue()

        class Requests:
            async def ask(self, *arguments: object, reusable: bool) -> tuple[DispatchAnswer, bool]:
                raise DispatchFailed(Failure.AWAY, "no_engine", "No engine.")

        figures, requests = OnlineFigures(CollectorRegistry()), Requests()
        consumer = Consumer(
            queue,
            requests,  # type: ignore[arg-type]
            figures,
            name="c",
            concurrency=2,
            clock=lambda: now,
            uniform=lambda: 1.0,
            settle=settle,
        )
        work = asyncio.create_task(consumer.run())
        async with asyncio.timeout(PATIENCE * 10):
            await queue.ended.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert queue.waits[0] == pytest.approx(wait, abs=1e-6)

    asyncio.run(scenario())


@pytest.mark.parametrize("cached", [False, True])
def test_an_answer_is_charged_before_it_is_stored(cached: bool) -> None:
    async def scenario() -> list[str]:
        said: list[str] = []
        queue: Any = LosingQueue(said)

        class Requests:
            async def ask(self, *arguments: object, reusable: bool) -> tuple[DispatchAnswer, bool]:
                message = b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],'
                return DispatchAnswer(message + b'"usage":{"prompt_tokens":3,"completion_tokens":4}}', None), cached

        def charge(task: OnlineTask, usage: Usage | None) -> None:
            assert usage is not None
            said.append(f"charged {task.task_id} {usage.total}")

        requests: Any = Requests()
        figures = OnlineFigures(CollectorRegistry())
        consumer = Consumer(
            queue,
            requests,
            figures,
            name="c",
            concurrency=1,
            clock=lambda: 0.0,
            uniform=lambda: 0.0,
            settle=settle,
            charge=charge,
        )
        work = asyncio.create_task(consumer.run())
        async with asyncio.timeout(30):
            await queue.ended.wait()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return said

    assert asyncio.run(scenario()) == ([] if cached else ["charged task_1 7"]) + ["stored", "stored"]


ANSWER = b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}'


class PartlyAwayQueue:
    """Has these tasks; takes no result of those whose id begins with `away` until it is `back`."""

    def __init__(self, *names: str) -> None:
        tasks = [OnlineTask(name, "acme", "c", "m", TaskKind.CHAT, b"{}", 0.0, 60.0, False, 9, "") for name in names]
        self._claims = [Claim(task, "c", "1", 0, 0, 1, 60.0) for task in tasks]
        self.back, self.stored = False, list[str]()
        self.refused, self.all_claimed = 0, asyncio.Event()

    async def claim(self, consumer: str, most: int, wait: float) -> list[Claim]:
        if not self._claims:
            self.all_claimed.set()
            await asyncio.Event().wait()
        return [self._claims.pop(0)]

    async def acknowledge(self, claim: Claim, result: TaskResult) -> bool:
        if claim.task.task_id.startswith("away") and not self.back:
            self.refused += 1
            raise QueueAway
        self.stored.append(claim.task.task_id)
        return True

    async def extend(self, claims: list[Claim]) -> None: ...

    async def reclaim(self, consumer: str, silent: float, most: int) -> list[Claim]:
        return []

    async def retry(self, claim: Claim, seconds: float, *, charged: bool) -> bool:
        return True


class Answers:
    async def ask(self, *arguments: object, reusable: bool) -> tuple[DispatchAnswer, bool]:
        return DispatchAnswer(ANSWER, None), False


@contextlib.asynccontextmanager
async def consuming(queue: Any) -> AsyncIterator[None]:
    """One task at a time."""
    requests: Any = Answers()
    figures = OnlineFigures(CollectorRegistry())
    consumer = Consumer(
        queue, requests, figures, name="c", concurrency=1, clock=lambda: 0.0, uniform=lambda: 0.0, settle=settle
    )
    work = asyncio.create_task(consumer.run())
    try:
        async with asyncio.timeout(30 * PATIENCE):
            yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def test_only_so_many_results_wait_for_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that gives tasks and takes no results does not fill the memory."""
    monkeypatch.setattr(consumers, "AGAIN_SECONDS", 0.01)

    async def scenario() -> None:
        queue = PartlyAwayQueue("away-1", "away-2", "there")
        async with consuming(queue):
            await until(lambda: queue.refused >= 20)
            assert not queue.stored and not queue.all_claimed.is_set()
            queue.back = True
            await until(lambda: len(queue.stored) == 3)

    asyncio.run(scenario())
