"""Failed requests of one engine: they keep their slots until it is known whether the engine lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_engine import Sink, batches
from support.virtual_time import run

from gpu_runner.client.protocol import EngineRefused, RequestDenied, Transient
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.inference.answer_memory import AnswerMemory
from gpu_runner.inference.engine_liveness import EngineLiveness
from gpu_runner.inference.failed_requests import FailedRequests
from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.prefix_order import PrefixPolicy
from gpu_runner.inference.row_queue import Work
from gpu_runner.inference.row_state import Item, RowState
from gpu_runner.inference.windows.concurrency_window import Window
from gpu_runner.inference.worker_state import WorkerLife

POLICY = FeedPolicy(retry=RetryPolicy(max_tries=2))


class Worker:
    """An engine worker that sends nothing by itself: it does what FailedRequests decides."""

    def __init__(self, rows: int = 8) -> None:
        sink = Sink()
        self.work = Work(sink.on_row, AnswerMemory(1 << 20, 1 << 20), VectorLength(), PrefixPolicy())
        for batch in batches(rows):
            self.work.open(batch)
        self.life = WorkerLife()
        self.life.start()
        window, rng = Window(POLICY.window, 8), random.Random(0)
        self.liveness = EngineLiveness(asyncio.get_running_loop().time())
        self.woken = 0
        self.failures = FailedRequests(self.liveness, self.work, POLICY, rng, window, self.wake)
        self.dead: list[tuple[str, str, int]] = []

    def wake(self) -> None:
        self.woken += 1

    def send(self) -> Item:
        item = self.work.take()
        assert item is not None
        item.send(asyncio.get_running_loop().time())
        return item

    async def fail(self, error: Transient) -> Item:
        item = self.send()
        await asyncio.sleep(0.1)
        self.failures.failed((item,), error, asyncio.get_running_loop().time(), 0)
        return item

    def deny(self, item: Item, error: RequestDenied, at: float) -> None:
        self.failures.denied(item, error, at, 0)
        self.judge()

    def judge(self) -> None:
        if self.life.over:
            return
        verdicts = self.failures.judge(0)
        if verdicts.refused is not None:
            self.life.end(verdicts.refused)
        self.dead += [(one.item.row.row_id, one.code, one.item.tries + one.last) for one in verdicts.dead]

    async def live(self) -> None:
        """A request that is sent now is answered, and the engine is known to be the one of before."""
        await asyncio.sleep(0.1)
        now = asyncio.get_running_loop().time()
        self.liveness.succeeded(now, now)
        self.liveness.proof.add(self.liveness.claims)
        self.judge()


def in_loop(scenario: Callable[[Worker], Any], rows: int = 8) -> None:
    async def main() -> None:
        await scenario(Worker(rows))

    run(main)


def test_a_failure_keeps_its_slot_until_the_engine_is_known_to_live() -> None:
    async def scenario(worker: Worker) -> None:
        item, failures = await worker.fail(Transient("http_500")), worker.failures
        worker.judge()
        assert (failures.slots_kept, item.state, bool(failures)) == (1, RowState.UNDECIDED, True)
        assert failures.oldest == pytest.approx(asyncio.get_running_loop().time())
        await worker.live()
        await asyncio.sleep(0)
        assert (failures.slots_kept, item.state, item.tries, worker.woken) == (0, RowState.BACKING_OFF, 1, 1)
        assert worker.work.next_due is not None and not failures

    in_loop(scenario)


def test_the_last_charged_try_is_a_dead_letter_and_is_counted_once() -> None:
    async def scenario(worker: Worker) -> None:
        item = await worker.fail(Transient("http_500"))
        await worker.live()
        worker.work.promote(float("inf"))
        assert await worker.fail(Transient("http_502", "bad gateway")) is item
        await worker.live()
        assert worker.dead == [(item.row.row_id, "http_502", 2)]

    in_loop(scenario)


def test_failures_of_an_engine_that_has_ended_are_nobodys_and_are_given_up() -> None:
    async def scenario(worker: Worker) -> None:
        broken = await worker.fail(Transient("connection_lost"))
        refused = await worker.fail(Transient("connect_failed", taken=False))
        denied = worker.send()
        worker.deny(denied, RequestDenied("rejected_403", "check the key"), 1.0)
        assert worker.failures.oldest_break == worker.failures.oldest
        worker.life.end()
        await worker.live()
        assert worker.dead == [] and worker.work.counts.charged == 0
        assert worker.failures.give_up() == ([broken, refused, denied], [broken])
        assert not worker.failures and worker.failures.slots_kept == 0

    in_loop(scenario)


def test_a_denial_of_all_ends_the_worker_and_one_beside_answered_rows_is_the_rows_own() -> None:
    async def all_denied(worker: Worker) -> None:
        worker.deny(worker.send(), RequestDenied("rejected_401", "check the key"), 1.0)
        assert worker.failures.evidence_wanted(2.0, 0) == "canary"
        worker.failures.denials.canary_denied(EngineRefused("check the key"))
        worker.judge()
        assert isinstance(worker.life.error, EngineRefused) and worker.dead == []

    async def one_denied(worker: Worker) -> None:
        denied, answered = worker.send(), worker.send()
        now = asyncio.get_running_loop().time()
        worker.deny(denied, RequestDenied("rejected_403", "check the key"), now - 0.1)
        assert worker.failures.answered(answered, now)
        worker.judge()
        assert worker.dead == [(denied.row.row_id, "rejected_403", 1)] and worker.life.serving

    in_loop(all_denied)
    in_loop(one_denied)


def test_a_server_that_names_a_time_is_left_alone_until_then_at_most_as_long_as_the_policy_says() -> None:
    async def scenario(worker: Worker) -> None:
        for _ in range(6):  # so many that the window gives way
            await worker.fail(Transient("http_429", retry_after=3600.0, taken=False))
        now = asyncio.get_running_loop().time()
        assert worker.liveness.resting_until == pytest.approx(now + POLICY.retry.retry_after_max)
        await asyncio.sleep(POLICY.retry.retry_after_max + 0.1)
        assert worker.woken >= 1

    in_loop(scenario)
