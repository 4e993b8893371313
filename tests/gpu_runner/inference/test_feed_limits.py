"""The feed on engines that take so many rows at once, or so many requests or tokens a minute."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.fake_engine import GENERATION, ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.client.protocol import Transient
from gpu_runner.inference.feed import Feed
from gpu_runner.request_limits import RequestLimits


class Counting(FakeEngine):
    """Notes when it is asked for something."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.times: list[float] = []

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        self.times.append(asyncio.get_running_loop().time())
        return await super().generate(*arguments, **options)

    async def generate_list(self, prompts: Any, **options: Any) -> Any:
        before = len(self.times)
        answers = await super().generate_list(prompts, **options)
        del self.times[before + 1 :]  # one request
        return answers

    async def canary(self, prompt: bytes | None = None) -> None:
        self.times.append(asyncio.get_running_loop().time())
        await super().canary(prompt)

    @property
    def most_in_a_minute(self) -> int:
        return max(sum(at <= other < at + 59.999 for other in self.times) for at in self.times)


async def served(engine: FakeEngine, rows: int, limits: RequestLimits) -> Sink:
    sink = Sink()
    feed = Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
    await feed.serve(engine, ORIGIN, 64, limits=limits)
    assert len(sink.rows) == len(sink.outcomes()) == rows
    return sink


@pytest.mark.parametrize("per_minute", [1, 7, 120])
@pytest.mark.parametrize("metrics", [False, True])
def test_rows_wait_for_the_next_minute_and_none_fails_or_is_late_for_that(per_minute: int, metrics: bool) -> None:
    async def main() -> None:
        engine = Counting(metrics=metrics)
        rows = 2 * per_minute + 3
        sink = await served(engine, rows, RequestLimits(requests_per_minute=per_minute))
        assert engine.most_in_a_minute <= per_minute and engine.canaries == 0
        assert asyncio.get_running_loop().time() <= (rows - 1) / per_minute * 60 + 1
        assert {(row.tries, row.seconds < 1) for row in sink.outcomes().values()} == {(1, True)}

    run(main)


def test_retries_and_second_requests_count_as_requests() -> None:
    async def main() -> None:
        rules = {"r3": [Transient("http_500")] * 2, "r7": ["hang"], "r20": [Transient("connection_lost")]}
        engine = Counting(rules, metrics=False)
        sink = await served(engine, 90, RequestLimits(requests_per_minute=60))
        assert engine.most_in_a_minute <= 60 + engine.canaries and not sink.dead()
        assert engine.asked.total() == 94

    run(main)


def test_lists_count_as_one_request_each() -> None:
    async def main() -> None:
        engine = Counting(generation=replace(GENERATION, task="embedding"))
        await served(engine, 400, RequestLimits(requests_per_minute=2, concurrency=100))
        assert len(engine.lists) >= 4 and engine.most_in_a_minute <= 2

    run(main)


def test_tokens_a_minute_hold_rows_back_before_they_are_sent() -> None:
    async def main() -> None:
        engine = Counting()  # each row: 3 tokens of the prompt, 5 of the answer
        await served(engine, 300, RequestLimits(tokens_per_minute=800))
        assert 90 < asyncio.get_running_loop().time() < 260
        assert engine.most_in_a_minute <= 120
        assert all(later - at < 60 for at, later in pairwise(engine.times))

    run(main)


def test_no_more_rows_are_in_flight_than_the_concurrency_also_while_one_is_late() -> None:
    async def main() -> None:
        engine = FakeEngine({"r7": ["hang"]}, metrics=False)
        await served(engine, 500, RequestLimits(concurrency=3))
        assert engine.most_open <= 3 and engine.asked["r7"] == 2
        assert asyncio.get_running_loop().time() < 120

    run(main)


def test_a_feed_that_waits_for_the_next_minute_ends_at_once_when_it_is_told_to() -> None:
    async def main() -> None:
        sink, stop = Sink(), asyncio.Event()
        feed = Feed(iter(batches(10)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
        serving = asyncio.create_task(
            feed.serve(FakeEngine(), ORIGIN, 8, stop=stop, limits=RequestLimits(requests_per_minute=1))
        )
        await asyncio.sleep(30)
        stop.set()
        await serving
        assert len(sink.rows) == 1 and asyncio.get_running_loop().time() <= 30.001

    run(main)
