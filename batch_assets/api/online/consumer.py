"""Takes tasks out of the queue, has them answered, and stores what came of it.

A task is acknowledged when its result is stored. While the queue is away, an answer that is there already is kept until
it can be stored: it was paid for. Who ends in order gives back what it holds; of who is killed others take it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from batch_assets.api.interactive.event_stream import Usage
from batch_assets.api.online.answers.collapse import CollapsedRequests
from batch_assets.api.online.cancellation import raise_if_cancelled
from batch_assets.api.online.dispatcher import DispatchFailed, DispatchRequest, Failure
from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.online.queues.queue_protocol import Claim, QueueAway, TaskQueue
from batch_assets.api.online.queues.tasks import OnlineTask, TaskResult, TaskStatus, failed
from batch_assets.api.online.request import read_answer
from gpu_runner.inference.failures.retry import RetryPolicy, backoff

log = logging.getLogger(__name__)

CLAIM_SECONDS = 1.0
TOGETHER_SECONDS = 0.005  # between two claims while requests are in hand: what comes meanwhile is claimed at once
EXTEND_SECONDS = 1.0
SILENT_SECONDS = 5.0  # after which a consumer is held to be dead
AGAIN_SECONDS = 0.25  # between looks at a queue that is away
END_SECONDS = 2.0
RETRY = RetryPolicy(max_tries=3, backoff_min=0.125, backoff_max=5.0, jitter=0.9)  # 0.25 s, 0.5 s, 1 s and so on at most
MOST_DELIVERIES = 20  # times that a task may be claimed because consumers died, before it is held to be why

Charge = Callable[[OnlineTask, Usage | None], None]  # what an engine's answer used; the same task counts once
Settle = Callable[[str, int], Awaitable[None]]  # tenant, tokens used beyond what was expected


@dataclass(slots=True)
class _Serving:
    """A task in hand. The claim is replaced when it is claimed anew by its own consumer."""

    claim: Claim
    since: float
    work: asyncio.Task[None] | None = None


class Consumer:
    """`clock`: Unix seconds. `uniform`: 0 to 1. `name`: unlike any other consumer's. Lives on one event loop."""

    def __init__(
        self,
        queue: TaskQueue,
        requests: CollapsedRequests,
        figures: OnlineFigures,
        *,
        name: str,
        concurrency: int,
        clock: Callable[[], float],
        uniform: Callable[[], float],
        settle: Settle,
        policy: RetryPolicy = RETRY,
        charge: Charge = lambda task, usage: None,
    ) -> None:
        self._queue, self._requests, self._figures, self._charge = queue, requests, figures, charge
        self._name, self._concurrency, self._policy = name, concurrency, policy
        self._clock, self._uniform, self._settle = clock, uniform, settle
        self._serving: dict[str, _Serving] = {}
        self._freed = asyncio.Event()
        self._trust_after = 0.0
        self.ended = 0  # tasks that got a result here

    async def run(self) -> None:
        """Serve until cancelled; then give back what is in hand."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claim())
                group.create_task(self._look_after())
        finally:
            await self._give_back()

    @property
    def _free(self) -> int:
        """How many more may be begun."""
        return self._concurrency - len(self._serving)

    async def _claim(self) -> None:
        while True:
            raise_if_cancelled()
            while self._free <= 0:
                self._freed.clear()
                await self._freed.wait()
            try:
                free = self._free
                claims = await self._queue.claim(self._name, max(1, free), CLAIM_SECONDS)
                self._begin(claims)
                if 0 < len(claims) < min(free, len(self._serving)):
                    await asyncio.sleep(TOGETHER_SECONDS)
            except QueueAway:
                await self._away()
            except Exception as error:  # a defect must not end all that comes after it
                log.error("online queue: %s", type(error).__name__, exc_info=error)
                await self._away()

    async def _look_after(self) -> None:
        """Say that this consumer lives, and take over from those that do not say it."""
        while True:
            raise_if_cancelled()
            await asyncio.sleep(EXTEND_SECONDS)
            try:
                old = time.monotonic() - EXTEND_SECONDS
                await self._queue.extend([one.claim for one in self._serving.values() if one.since < old])
                free = self._free
                if free > 0 and time.monotonic() >= self._trust_after:
                    taken = await self._queue.reclaim(self._name, SILENT_SECONDS, free)
                    self._figures.reclaimed.inc(len(taken))
                    self._begin(taken)
            except QueueAway:
                await self._away()
            except Exception as error:
                log.error("online queue: %s", type(error).__name__, exc_info=error)
                await self._away()

    async def _away(self) -> None:
        """Nobody could say that he lives in this time: the silent ones are not dead."""
        self._trust_after = time.monotonic() + 2 * SILENT_SECONDS
        await asyncio.sleep(AGAIN_SECONDS)

    def _begin(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            task_id = claim.task.task_id
            if (known := self._serving.get(task_id)) is not None:
                known.claim = claim
                continue
            serving = self._serving[task_id] = _Serving(claim, time.monotonic())
            serving.work = asyncio.create_task(self._serve(task_id, serving))

    async def _serve(self, task_id: str, serving: _Serving) -> None:
        try:
            await self._answer(serving)
        except Exception as error:  # a defect of ours: the task is reclaimed, and buried at last
            log.error("online task: %s", type(error).__name__, exc_info=error)
            await asyncio.sleep(AGAIN_SECONDS)
        del self._serving[task_id]
        self._freed.set()

    async def _answer(self, serving: _Serving) -> None:
        claim = serving.claim
        left = claim.expires_at - self._clock()
        if left <= 0:
            await self._store(serving, failed("expired", _EXPIRED, self._clock(), claim.failures))
            return
        if claim.deliveries > MOST_DELIVERIES:
            said = f"Given up: {claim.deliveries - 1} consumers were lost with this request."
            await self._bury(serving, failed("consumers_lost", said, self._clock(), claim.failures))
            return
        task = claim.task
        request = DispatchRequest(
            task.kind,
            task.model,
            task.body,
            task.expected_tokens,
            claim.expires_at,
            task.traceparent,
            claim.failures,
            task.tenant,
        )
        began, outcome = time.monotonic(), "cancelled"
        try:
            async with asyncio.timeout(left):
                answer, cached = await self._requests.ask(task.tenant, request, reusable=task.reusable)
            outcome = "cached" if cached else "answered"
        except TimeoutError:
            outcome = "expired"
            await self._store(serving, failed("expired", _EXPIRED, self._clock(), claim.failures))
            return
        except DispatchFailed as error:
            outcome = error.failure.value
            await self._failed(serving, error)
            return
        finally:
            if outcome != "cached":
                self._figures.engine(task.model, outcome, time.monotonic() - began)
        read = answer.read or read_answer(task.kind, answer.body)
        assert read is not None, "an answer that was not read is none"
        if not cached:  # before it is stored: a kill in between, or a reply of the queue that is lost, loses no charge
            self._charge(task, read.usage)
        result = TaskResult(
            TaskStatus.SUCCESS, self._clock(), read.output, read.choices, read.usage, None, claim.failures, cached
        )
        used = 0 if cached or read.usage is None else read.usage.total
        await self._store(serving, result, used)

    async def _failed(self, serving: _Serving, error: DispatchFailed) -> None:
        claim = serving.claim
        if error.failure is Failure.REFUSED:
            await self._store(serving, failed(error.code, error.message, self._clock(), claim.failures))
            return
        charged = error.failure is Failure.BROKEN
        failures = claim.failures + charged
        if failures >= self._policy.max_tries:
            await self._bury(serving, failed(error.code, error.message, self._clock(), failures))
            return
        self._figures.retried(error.failure.value)
        wait = backoff(self._policy, failures if charged else claim.returned + 1, None, self._uniform)
        wait = min(wait, max(0.0, claim.expires_at - self._clock()))  # then it is claimed to be told that it expired
        await self._surely(lambda: self._queue.retry(serving.claim, wait, charged=charged))

    async def _store(self, serving: _Serving, result: TaskResult, used: int = 0) -> None:
        stored = await self._surely(lambda: self._queue.acknowledge(serving.claim, result))
        await self._after(serving.claim, result, used, stored=stored)

    async def _bury(self, serving: _Serving, result: TaskResult) -> None:
        stored = await self._surely(lambda: self._queue.bury(serving.claim, result))
        await self._after(serving.claim, result, 0, stored=stored)

    async def _after(self, claim: Claim, result: TaskResult, used: int, *, stored: bool) -> None:
        if not stored:
            self._figures.duplicates.inc()
            return
        self.ended += 1
        self._figures.ended("ok" if result.error is None else result.error.code)
        self._figures.seconds.observe(max(0.0, result.finished_at - claim.task.created_at))
        await self._settle(claim.task.tenant, used - claim.task.expected_tokens)

    async def _surely(self, call: Callable[[], Awaitable[bool]]) -> bool:
        """Until the queue has taken it."""
        with contextlib.suppress(QueueAway):
            return await call()
        while True:
            raise_if_cancelled()
            await asyncio.sleep(AGAIN_SECONDS * (1 + self._uniform()))
            with contextlib.suppress(QueueAway):
                return await call()

    async def _give_back(self) -> None:
        """Cancel what is under way; the next consumer begins it anew, at once."""
        held = list(self._serving.values())
        for one in held:
            if one.work is not None:
                one.work.cancel()
        await asyncio.gather(*(one.work for one in held if one.work is not None), return_exceptions=True)
        with contextlib.suppress(QueueAway, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                again = (self._queue.retry(one.claim, 0.0, charged=False) for one in held)
                await asyncio.gather(*again, return_exceptions=True)


_EXPIRED = "Nobody could answer the request within its time to live."
