"""Rows that engines had when they ended: none is lost, and those that end engines are found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import suppress

import pytest
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.client.protocol import EngineLost, Transient
from gpu_runner.inference.feed import Feed, FeedPolicy

POLICY = FeedPolicy()


def make_feed(rows: int, sink: Sink, policy: FeedPolicy = POLICY) -> Feed:
    return Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, policy=policy, rng=random.Random(0))


async def serve_all(feed: Feed, rules: Mapping[str, object], slots: int = 64, seqs: int = 16) -> int:
    """Serves engine after engine until the feed is finished; returns how many were lost."""
    lost = 0
    while not feed.finished:
        try:
            await feed.serve(FakeEngine(rules, slots=slots), ORIGIN, seqs)
        except EngineLost:
            lost += 1
            assert lost < 200
    return lost


@pytest.mark.slow
def test_one_row_that_kills_engines_is_found_with_few_deaths() -> None:
    async def main() -> None:
        for position in (0, 77, 249):
            sink = Sink()
            lost = await serve_all(make_feed(250, sink), {f"r{position}": "kill"}, slots=256, seqs=64)
            assert lost <= 9
            assert sink.dead() == {f"r{position}": "engine_killed"}
            assert len(sink.outcomes()) == 250
            assert sink.outcomes()[f"r{position}"].tries == 2
            assert {outcome.tries for outcome in sink.outcomes().values() if outcome.ok} == {1}

    run(main)


def test_several_rows_that_kill_engines_are_all_found() -> None:
    async def main() -> None:
        sink = Sink()
        poison = {f"r{i}": "kill" for i in (3, 40, 41, 700, 999)}
        lost = await serve_all(make_feed(1000, sink), poison, slots=64, seqs=64)
        assert sink.dead() == dict.fromkeys(poison, "engine_killed")
        assert len(sink.outcomes()) == 1000
        assert {outcome.tries for outcome in sink.outcomes().values() if outcome.ok} == {1}
        assert lost <= 9 * len(poison)

    run(main)


def test_suspects_are_tried_with_nothing_else_in_flight() -> None:
    async def main() -> None:
        sink, together = Sink(), []
        feed = make_feed(2000, sink)
        while not feed.finished:
            engine = FakeEngine({"r77": "kill"}, slots=64)
            try:
                await feed.serve(engine, ORIGIN, 64)
            except EngineLost:
                together.append(len(engine.together[0]))
        assert together[0] > 64 and together[-2:] == [1, 1]
        assert together[1:] == sorted(together[1:], reverse=True)

    run(main)


def test_finished_rows_are_never_asked_again_whatever_dies() -> None:
    async def main() -> None:
        sink, answered = Sink(), dict[str, int]()
        feed = make_feed(500, sink)
        while not feed.finished:
            engine = FakeEngine({"r77": "kill", "r300": "kill"})
            with suppress(EngineLost):
                await feed.serve(engine, ORIGIN, 32)
            for row_id, count in engine.answered.items():
                answered[row_id] = answered.get(row_id, 0) + count
        assert sum(answered.values()) == 498

    run(main)


def test_an_unlucky_row_is_not_taken_for_one_that_kills() -> None:
    async def main() -> None:
        sink = Sink()
        feed = make_feed(3, sink)
        for _ in range(2):  # in flight at two deaths: a suspect
            engine = FakeEngine(seconds=1e6)
            serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8))
            await asyncio.sleep(1)
            engine.die()
            with pytest.raises(EngineLost):
                await serving
        await feed.serve(FakeEngine(), ORIGIN, 8)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_while_one_engine_tries_suspects_the_other_goes_on() -> None:
    async def main() -> None:
        sink, engines = Sink(), list[FakeEngine]()
        feed = make_feed(600, sink)

        async def lane() -> None:
            while not feed.finished:
                engines.append(FakeEngine({"r5": "kill"}, slots=8))
                with suppress(EngineLost):
                    await feed.serve(engines[-1], ORIGIN, 8)

        await asyncio.gather(lane(), lane())
        assert sink.dead() == {"r5": "engine_killed"}
        deaths = [engine.together[0] for engine in engines if engine.together]
        assert deaths.count({"r5"}) == 2
        assert set().union(*deaths) == {f"r{i}" for i in range(32)}  # never beside a row that is no suspect
        assert any(engine.answered.total() > 100 for engine in engines)
        assert {outcome.tries for outcome in sink.outcomes().values() if outcome.ok} == {1}

    run(main)


def test_an_engine_finishes_its_rows_before_it_tries_suspects() -> None:
    async def main() -> None:
        sink, dying, slow = Sink(), FakeEngine({"r5": "kill"}), FakeEngine({"r5": "kill"}, seconds=50)
        feed = make_feed(40, sink, FeedPolicy(suspect_deaths=1))
        both = [asyncio.create_task(feed.serve(*pair)) for pair in ((dying, ORIGIN, 4), (slow, ORIGIN, 64))]
        with pytest.raises(EngineLost):
            await both[0]
        await asyncio.sleep(10)
        assert len(slow.asked) == 24  # though there is room for more
        with pytest.raises(EngineLost):
            await both[1]
        assert slow.together == [{f"r{i}" for i in range(16)}]
        assert slow.answered.total() == 24

    run(main)


def test_a_trial_that_is_cancelled_is_taken_up_again() -> None:
    async def main() -> None:
        sink, rounds = Sink(), 0
        feed = make_feed(250, sink)
        dice = random.Random(1)
        while not feed.finished:
            rounds += 1
            serving = asyncio.create_task(feed.serve(FakeEngine({"r77": "kill"}), ORIGIN, 64))
            await asyncio.sleep(dice.uniform(0, 8))
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert rounds < 300
        assert sink.dead() == {"r77": "engine_killed"}
        assert len(sink.outcomes()) == 250

    run(main)


def test_engines_that_fail_every_request_from_the_first_on_make_no_row_a_suspect() -> None:
    async def main() -> None:
        sink = Sink()
        feed = make_feed(20, sink)
        for _ in range(6):
            engine = FakeEngine()
            engine.outage = Transient("http_500", "out of order")
            with pytest.raises(EngineLost, match="no_progress: every request failed"):
                await feed.serve(engine, ORIGIN, 64)
        assert sink.outcomes() == {}
        await serve_all(feed, {}, slots=64, seqs=64)
        assert sink.dead() == {}
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}
        assert len(sink.outcomes()) == 20

    run(main)
