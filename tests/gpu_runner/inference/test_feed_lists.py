"""The feed on an engine that takes several rows in one request: full lists, each row its own outcome."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from support.examples import property_test
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.client.protocol import EngineLost, RequestDenied, RowRejected, Transient
from gpu_runner.cost_meter import CostMeter
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.micro_batches.list_limits import ListLimits
from gpu_runner.rows import Generation

EMBEDDING = Generation("embedding", "m")
POISON = RowRejected("rejected_400", "bad input")


def embedder(rules: dict[str, object] | None = None, **changes: Any) -> FakeEngine:
    return FakeEngine(rules, generation=EMBEDDING, **{"slots": 1000, **changes})


def make_feed(rows: int, sink: Sink, **changes: Any) -> Feed:
    policy = FeedPolicy(**changes)
    return Feed(
        iter(batches(rows, size=200)), on_row=sink.on_row, on_batch=sink.on_batch, policy=policy, rng=random.Random(0)
    )


def serve(rows: int, engine: FakeEngine, slots: int = 64, **changes: Any) -> tuple[Sink, Feed]:
    """All rows through the engine, in virtual time."""
    sink = Sink()
    feed = make_feed(rows, sink, **changes)

    async def main() -> None:
        await feed.serve(engine, ORIGIN, slots)

    run(main)
    assert feed.finished
    return sink, feed


def sizes(engine: FakeEngine) -> Counter[int]:
    return Counter(len(each) for each in engine.lists)


def test_rows_go_in_full_lists_and_each_has_its_outcome() -> None:
    engine = embedder()
    sink, feed = serve(1000, engine)
    found = sink.outcomes()
    assert {name: outcome.output for name, outcome in found.items()} == {f"r{i}": f"re: r{i}" for i in range(1000)}
    assert sizes(engine)[64] == 15
    assert len(sink.rows) == 1000 and set(engine.asked.values()) == {1}
    assert {outcome.tries for outcome in found.values()} == {1}
    assert feed.counts.prompt_tokens == 3000


def test_a_list_is_bounded_in_bytes_and_by_the_window() -> None:
    engine = embedder()
    serve(200, engine, lists=ListLimits(bytes=60))
    assert max(len("".join(each)) + 2 * len(each) for each in engine.lists) <= 60
    narrow = embedder()
    serve(100, narrow, slots=2)
    assert narrow.most_open <= 8 and max(sizes(narrow)) == 8


@pytest.mark.slow
def test_small_lists_do_not_go_on_as_small_lists() -> None:
    """Rows that end one by one free one place each; a place is not refilled before a list's worth is free."""
    engine = embedder({f"r{i}": POISON for i in range(0, 640, 64)})
    serve(6400, engine)
    small = sum(count for size, count in sizes(engine).items() if size < 32)
    assert sizes(engine)[64] > 0.8 * 6400 / 64
    assert small <= 10 * 10


@pytest.mark.parametrize("place", [0, 31, 63])
def test_a_poisoned_row_is_found_in_log2_steps_and_the_others_are_answered(place: int) -> None:
    engine = embedder({f"r{place}": POISON})
    sink, feed = serve(64, engine)
    assert sink.dead() == {f"r{place}": "rejected_400"}
    dead = sink.outcomes()[f"r{place}"]
    assert (dead.error_message, dead.tries) == ("bad input", 1)
    assert engine.asked[f"r{place}"] == 7  # 64, 32, 16, 8, 4, 2 and alone
    assert sizes(engine) == {64: 1, 32: 2, 16: 2, 8: 2, 4: 2, 2: 2}
    assert feed.counts.failures == 0 and feed.counts.charged == 0


def test_a_denied_row_is_found_as_well_and_its_list_is_not_denied_with_it() -> None:
    engine = embedder({"r5": RequestDenied("rejected_403", "check the engine's key", "moderated")})
    sink, _ = serve(640, engine)
    assert sink.dead() == {"r5": "rejected_403"}
    assert len(sink.rows) == 640


def test_a_transient_error_is_not_bisected_and_charges_each_row_once() -> None:
    engine = embedder({"r3": [Transient("http_500")]})
    sink, feed = serve(64, engine)
    assert sink.dead() == {}
    assert {outcome.tries for outcome in sink.outcomes().values()} == {2}
    assert feed.counts.charged == 64
    assert sizes(engine)[64] == 1 and max(size for size in sizes(engine) if size < 64) <= 8


def test_no_row_dies_of_another_rows_failure() -> None:
    """A row at which the server fails each time takes tries from its neighbours, but their last one they have alone."""
    engine = embedder({"r3": Transient("http_500", "cannot")})
    sink, _ = serve(64, engine)
    assert sink.dead() == {"r3": "http_500"}
    assert sink.outcomes()["r3"].tries == 3
    assert max(outcome.tries for outcome in sink.outcomes().values()) == 3


def test_a_server_that_takes_shorter_lists_is_sent_shorter_lists() -> None:
    engine = embedder()
    engine.most_inputs = 20
    sink, _ = serve(2000, engine)
    assert sink.dead() == {}
    longest = [len(each) for each in engine.lists]
    assert set(longest[len(longest) // 2 :]) <= {16, 8}
    assert sum(size > 20 for size in longest) < 30


def test_rows_of_an_engine_that_dies_go_to_the_next_one() -> None:
    async def main() -> None:
        sink, engine, after = Sink(), embedder(seconds=1.0), embedder()
        feed = make_feed(300, sink)
        asyncio.get_running_loop().call_later(0.5, engine.die)
        with pytest.raises(EngineLost):
            await feed.serve(engine, ORIGIN, 64)
        await feed.serve(after, ORIGIN, 64)
        assert len(sink.outcomes()) == 300 and sink.dead() == {}

    run(main)


def test_a_row_that_kills_engines_is_found_and_its_list_survives() -> None:
    async def main() -> None:
        sink = Sink()
        feed, deaths = make_feed(256, sink), 0
        while not feed.finished:
            try:
                await feed.serve(embedder({"r77": "kill"}), ORIGIN, 64)
            except EngineLost:
                deaths += 1
        assert sink.dead() == {"r77": "engine_killed"}
        assert len(sink.outcomes()) == 256 and deaths < 12

    run(main)


def test_a_hanging_list_is_aborted_and_only_the_row_at_fault_dies() -> None:
    engine = embedder({"r9": "hang"})
    sink, _ = serve(64, engine, stall_seconds=20.0)
    assert sink.dead() == {"r9": "timeout"}


def test_cancelling_leaves_no_request_behind() -> None:
    async def main() -> None:
        sink, engine = Sink(), embedder({"r1": POISON}, seconds=5.0)
        serving = asyncio.create_task(make_feed(500, sink).serve(engine, ORIGIN, 64))
        await asyncio.sleep(7.0)  # in the midst of a bisection
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert engine.open == 0

    run(main)


def test_answers_of_a_list_wait_for_room_of_the_oldest_batch() -> None:
    rules: dict[str, object] = {f"r{i}": "x" * 4000 for i in range(400)}
    engine = embedder(rules)
    sink, _ = serve(400, engine, open_bytes=200_000, batch_bytes=200_000)
    assert len(sink.outcomes()) == 400 and sink.dead() == {}


def test_rows_of_one_list_pay_the_same() -> None:
    async def main() -> None:
        sink, engine = Sink(), embedder(seconds=2.0)
        feed = make_feed(64, sink)
        await feed.serve(engine, ORIGIN, 64, spending=CostMeter(1.0))
        paid = [outcome.usd or 0.0 for outcome in sink.outcomes().values()]
        assert sum(paid) == pytest.approx(2.0) and max(paid) == pytest.approx(min(paid))

    run(main)


FAULTS = st.sampled_from([POISON, Transient("http_500"), "hang", RequestDenied("rejected_403", "check", "no")])


@pytest.mark.slow
@property_test(
    10,
    25,
    faults=st.dictionaries(st.integers(0, 149), FAULTS, max_size=6),
    inputs=st.integers(1, 70),
    most_inputs=st.integers(0, 40),
)
def test_whatever_fails_each_row_ends_by_itself(faults: dict[int, object], inputs: int, most_inputs: int) -> None:
    engine = embedder({f"r{i}": fault for i, fault in faults.items()})
    engine.most_inputs = most_inputs
    sink, _ = serve(150, engine, slots=32, lists=ListLimits(inputs=inputs), stall_seconds=20.0)
    assert sink.dead().keys() == {f"r{i}" for i in faults}
    assert len(sink.outcomes()) == len(sink.rows) == 150
