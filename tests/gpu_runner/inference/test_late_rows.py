"""Rows that are late are asked for once more: the first answer counts, and each row has one outcome."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from support.examples import property_test
from support.fake_engine import GENERATION, ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.bounded_http.bounded_read import FREE_BYTES
from gpu_runner.client.protocol import EngineLost, RowRejected, Transient
from gpu_runner.cost_meter import TokenMeter
from gpu_runner.inference.answer_memory import ROW_BYTES, AnswerMemory
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.inference.late_rows import LateRequest
from gpu_runner.inference.row_state import Request
from gpu_runner.inference.second_requests import SecondRequests, _Second
from gpu_runner.rows import Batch
from gpu_runner.token_price import TokenPrice

LIST_GENERATION = replace(GENERATION, task="embedding")


def make_feed(source: Iterable[Batch], sink: Sink, **changes: Any) -> Feed:
    policy = replace(FeedPolicy(), **changes)
    return Feed(iter(source), on_row=sink.on_row, on_batch=sink.on_batch, policy=policy, rng=random.Random(0))


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("slots", [4, 64])
def test_one_answer_of_forty_that_never_comes_costs_a_minute_and_one_request(metrics: bool, slots: int) -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r7": ["hang"]}, metrics=metrics, slots=8)
        feed = make_feed(batches(40), sink)
        await feed.serve(engine, ORIGIN, slots)
        assert now() < 70 and engine.open == 0
        row = sink.outcomes()["r7"]
        assert (row.ok, row.tries, row.output) == (True, 1, "re: r7") and row.seconds < 2
        assert engine.asked["r7"] == 2 and engine.asked.total() == 41
        assert len(sink.rows) == 40 and engine.canaries == 0
        assert (feed.counts.hedges, feed.counts.requests, feed.counts.failures) == (1, 41, 0)

    run(main)


def test_what_a_run_says_names_the_late_rows() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r7": "hang", "r8": "hang"}, metrics=False)
        feed = make_feed(batches(40), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 2))
        await asyncio.sleep(50)
        assert feed.progress().late == 0
        await asyncio.sleep(20)
        assert (feed.progress().late, feed.progress().hedges) == (2, 1)  # one at once in a
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert feed.progress().late == 0

    run(main)


def test_a_late_row_is_asked_for_on_another_engine_where_there_is_one() -> None:
    async def main() -> None:
        sink, first, second = Sink(), FakeEngine({"r0": "hang"}, metrics=False), FakeEngine({}, metrics=False)
        feed = make_feed(batches(100), sink)
        serving = asyncio.create_task(feed.serve(first, replace(ORIGIN, engine="first"), 8))
        await asyncio.sleep(0.1)
        await feed.serve(second, replace(ORIGIN, engine="second"), 8)
        await serving
        assert first.asked["r0"] == second.asked["r0"] == 1 and first.open == 0 and now() < 70
        origin = sink.outcomes()["r0"].origin
        assert origin is not None and origin.engine == "second"

    run(main)


def test_a_first_answer_that_comes_at_last_counts_and_ends_the_second_request() -> None:
    class Slow(FakeEngine):
        """Takes 80 s for r3 at first, and 30 s after that."""

        async def _run(self, text: str, *rest: Any) -> Any:
            if text == "r3":
                await asyncio.sleep(80 if self.asked[text] == 1 else 30)
            return await super()._run(text, *rest)

    async def main() -> None:
        sink, engine = Sink(), Slow()
        feed = make_feed(batches(40), sink)
        await feed.serve(engine, ORIGIN, 8)
        row = sink.outcomes()["r3"]
        assert row.seconds == pytest.approx(80.2) and engine.asked["r3"] == 2 and engine.answered["r3"] == 1
        assert engine.open == 0 and feed.counts.hedges == 1 and len(sink.rows) == 40

    run(main)


@pytest.mark.parametrize("error", [Transient("http_500"), Transient("http_429"), RowRejected("rejected_400")])
def test_a_second_request_that_fails_is_repeated_later_and_charges_nobody(error: Exception) -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r7": ["hang", error]}, metrics=False)
        feed = make_feed(batches(40), sink)
        await feed.serve(engine, ORIGIN, 8)
        assert 120 <= now() < 130 and engine.asked["r7"] == 3 and feed.counts.hedges == 2
        assert sink.outcomes()["r7"].tries == 1 and feed.counts.charged == 0

    run(main)


def test_an_engine_on_which_everything_hangs_gets_few_second_requests() -> None:
    async def main() -> None:
        sink = Sink()
        engine = FakeEngine({f"r{number}": "hang" for number in range(100, 200)}, slots=1000, metrics=False)
        feed = make_feed(batches(200), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 16))
        await asyncio.sleep(250)
        assert len(sink.rows) == 100 and 1 <= feed.counts.hedges <= 64 // 8
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)


def test_a_list_whose_answer_is_lost_is_asked_for_once_more() -> None:
    async def main() -> None:
        sink = Sink()
        engine = FakeEngine({"r390": ["hang"]}, generation=LIST_GENERATION, metrics=False)
        feed = make_feed(batches(400), sink)
        await feed.serve(engine, ORIGIN, 4)
        assert len(sink.outcomes()) == len(sink.rows) == 400 and now() < 70 and engine.open == 0
        assert engine.asked["r390"] == 2

    run(main)


def test_a_large_second_answer_waits_for_room_and_gives_it_back() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r7": ["hang"]})
        feed = make_feed(batches(40), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8))
        await asyncio.sleep(30)
        engine.rules["r7"] = "x" * (2 * FREE_BYTES)
        await serving
        assert len(str(sink.outcomes()["r7"].output)) == 2 * FREE_BYTES
        assert feed._work.memory.reading == 0

    run(main)


def test_a_second_answer_of_a_list_waits_for_room_as_its_oldest_row_does() -> None:
    """Rows of a list lie by length: the first one's batch may have no room while the oldest batch always moves."""

    @dataclass(eq=False)
    class Row:
        order: int
        batch: Any

    class Worker:
        def __init__(self) -> None:
            self.in_flight: dict[Any, Any] = {}
            self.life = SimpleNamespace(serving=True)
            self.ended: BaseException | None = None
            self.paid: Sequence[Any] = ()

        async def ask_too(self, rows: Sequence[Any], admit: Any) -> Sequence[str]:
            await admit(1000)
            return [f"answer {row.order}" for row in rows]

        def pay_in_vain(self, completions: Sequence[Any]) -> None:
            self.paid = completions

        def end(self, error: BaseException) -> None:
            self.ended = error

    async def main() -> None:
        memory, worker = AnswerMemory(0, 0), Worker()
        first, second = memory.open(1), memory.open(1)
        memory.keep(first, ROW_BYTES)
        assert memory.full
        seconds = SecondRequests(SimpleNamespace(memory=memory), list)  # type: ignore[arg-type]
        rows = (Row(1, SimpleNamespace(bytes=second)), Row(0, SimpleNamespace(bytes=first)))
        async with asyncio.timeout(5):
            late = LateRequest(Request(rows), rows, True)  # type: ignore[arg-type]
            await seconds._serve(_Second(late, worker, worker))  # type: ignore[arg-type]
        assert len(worker.paid) == 2 and worker.ended is None and memory.reading == 0

    run(main)


@pytest.mark.slow
@property_test(
    12,
    200,
    hanging=st.sets(st.integers(0, 79), max_size=12),
    failing=st.sets(st.integers(0, 79), max_size=6),
    slow=st.dictionaries(st.integers(0, 79), st.floats(55, 110), max_size=6),
    deaths=st.lists(st.floats(1, 200), max_size=2),
    engines=st.integers(1, 2),
    seqs=st.integers(1, 8),
    lists=st.booleans(),
)
def test_each_row_has_exactly_one_outcome_whatever_answers_first(
    hanging: set[int],
    failing: set[int],
    slow: dict[int, float],
    deaths: list[float],
    engines: int,
    seqs: int,
    lists: bool,
) -> None:
    class Uneven(FakeEngine):
        async def _run(self, text: str, *rest: Any) -> Any:
            await asyncio.sleep(slow.get(int(text[1:]), 0) if self.asked[text] % 2 else 0)
            return await super()._run(text, *rest)

    async def main() -> None:
        sink = Sink()
        feed = make_feed(batches(80, size=10), sink)
        rules: dict[str, object] = {f"r{number}": [Transient("http_500")] for number in failing}
        rules |= {f"r{number}": ["hang"] for number in hanging}
        generation = LIST_GENERATION if lists else GENERATION
        fates = list(deaths)

        async def serve() -> None:
            while not feed.finished:
                engine = Uneven(rules, slots=8, generation=generation)
                if fates:
                    asyncio.get_running_loop().call_later(fates.pop(), engine.die)
                try:
                    await feed.serve(engine, ORIGIN, seqs)
                except EngineLost:
                    continue
                assert engine.open == 0

        await asyncio.gather(*(serve() for _ in range(engines)))
        assert len(sink.rows) == len(sink.outcomes()) == 80 and not sink.dead()
        assert feed._work.memory.reading == 0

    run(main)


@pytest.mark.parametrize("granted", [None, 40.0])
def test_second_requests_to_an_engine_that_is_paid_by_the_token_count_against_what_is_granted(
    granted: float | None,
) -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r7": ["hang"]}, metrics=False)
        meter = TokenMeter(TokenPrice(0.0, 200_000.0), 1.0)  # each answer of five tokens costs a dollar
        meter.hold()
        meter.grant(granted)
        feed = make_feed(batches(40), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8, spending=meter))
        await asyncio.sleep(100)
        assert (engine.asked["r7"], len(sink.rows)) == ((2, 40) if granted is None else (1, 39))
        assert meter.spent().useful_usd == len(sink.rows)
        assert meter.hold() == (granted or 41)  # the request that is waited for, or was broken off, may have to be paid
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)
