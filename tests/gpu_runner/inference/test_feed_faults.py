"""The feed on engines that fail: who is charged, who is a dead letter, and when an engine is given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from support.examples import property_test
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.client.protocol import Completion, EngineLost, RowRejected, Transient
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.reachability import Reachability
from gpu_runner.rows import Batch, Outcome

POLICY = FeedPolicy()
RESET = Transient("connection_lost")
BUSY = Transient("http_429", retry_after=1.0, taken=False)


def make_feed(source: Iterable[Batch], sink: Sink, policy: FeedPolicy = POLICY, **changes: Any) -> Feed:
    return Feed(
        iter(source),
        on_row=sink.on_row,
        on_batch=sink.on_batch,
        policy=replace(policy, **changes),
        rng=random.Random(0),
    )


def test_a_rejected_row_is_a_dead_letter_at_once() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r3": RowRejected("context_length_exceeded", "too long")})
        await make_feed(batches(50), sink).serve(engine, ORIGIN, 8)
        dead = sink.outcomes()["r3"]
        assert (dead.error, dead.error_message, dead.tries) == ("context_length_exceeded", "too long", 1)
        assert sink.dead().keys() == {"r3"} and engine.asked["r3"] == 1

    run(main)


def test_a_failure_that_passes_costs_one_try() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r3": [Transient("http_500"), Transient("timeout")]})
        await make_feed(batches(500), sink).serve(engine, ORIGIN, 8)
        assert sink.dead() == {}
        assert sink.outcomes()["r3"].tries == 3

    run(main)


@pytest.mark.parametrize("error", [Transient("http_500", "boom"), Transient("http_503"), BUSY, RESET])
def test_a_row_that_always_fails_is_a_dead_letter_after_three_tries(error: Transient) -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r3": error})
        await make_feed(batches(500), sink).serve(engine, ORIGIN, 8)
        dead = sink.outcomes()["r3"]
        assert (dead.error, dead.error_message, dead.tries) == (error.code, error.message, 3)
        assert sink.dead().keys() == {"r3"} and engine.asked["r3"] == 3

    run(main)


def test_the_last_row_of_all_may_be_the_bad_one() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r0": RESET})
        await make_feed(batches(1), sink).serve(engine, ORIGIN, 8)
        assert sink.outcomes()["r0"].tries == 3
        assert engine.canaries >= 3  # nobody else could prove that the engine lives

    run(main)


def test_rows_wait_between_tries_and_hold_no_slot_meanwhile() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r3": [RESET]}, slots=4)
        feed = make_feed(batches(300), sink)
        started = asyncio.get_running_loop().time()
        await feed.serve(engine, ORIGIN, 1)
        assert asyncio.get_running_loop().time() - started >= 2
        assert len(sink.outcomes()) == 300

    run(main)


@pytest.mark.slow
def test_one_percent_of_every_kind_of_bad_row_dies_alone() -> None:
    kinds = {
        "http_500": Transient("http_500"),
        "http_429": BUSY,
        "connection_lost": RESET,
        "garbage_body": Transient("garbage_body"),
        "rejected_400": RowRejected("rejected_400"),
    }

    async def main() -> None:
        sink = Sink()
        places = iter(random.Random(3).sample(range(2000), 20 * len(kinds)))
        wanted = {f"r{next(places)}": code for code in kinds for _ in range(20)}
        feed = make_feed(batches(2000), sink)
        await feed.serve(FakeEngine({row_id: kinds[code] for row_id, code in wanted.items()}), ORIGIN, 64)
        assert sink.dead() == wanted
        assert {outcome.tries for outcome in sink.outcomes().values() if outcome.ok} == {1}

    run(main)


def test_a_dying_engine_charges_nobody() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(seconds=1)
        feed = make_feed(batches(200), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 16))
        await asyncio.sleep(3.5)
        engine.die()
        with pytest.raises(EngineLost, match="unreachable"):
            await serving
        finished = set(engine.answered)
        assert finished and feed.counts.charged == feed.counts.voided == 0
        second = FakeEngine()
        await feed.serve(second, ORIGIN, 16)
        assert sink.dead() == {}
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}
        assert not finished & set(second.asked)

    run(main)


def test_an_engine_that_says_500_before_it_dies_charges_nobody() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(seconds=1)
        feed = make_feed(batches(200), sink)
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 16))
        await asyncio.sleep(2)
        engine.outage = Transient("http_500", "EngineCore encountered an issue")
        await asyncio.sleep(10)  # /health still answers
        engine.die()
        with pytest.raises(EngineLost):
            await serving
        assert feed.counts.requests <= 200 and feed.counts.failures <= 64 + feed.counts.canaries
        await feed.serve(FakeEngine(), ORIGIN, 16)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_an_engine_that_was_restarted_in_place_charges_nobody() -> None:
    async def main() -> None:
        for gone in (0.1, 1.0, 1.5):
            sink, engine = Sink(), FakeEngine(seconds=1)
            feed = make_feed(batches(200), sink)
            loop = asyncio.get_running_loop()
            loop.call_later(2.5, engine.die)
            loop.call_later(2.5 + gone, engine.revive)
            with pytest.raises(EngineLost, match="restarted"):
                await feed.serve(engine, ORIGIN, 16)
            await feed.serve(engine, ORIGIN, 16)
            assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_a_restart_is_known_by_when_the_process_began() -> None:
    class Quick(FakeEngine):
        """Its pages are slow, and the next engine has caught up with the first one before they are read again."""

        async def load(self) -> EngineLoad | None:
            await asyncio.sleep(0.5)
            return await super().load()

        async def healthy(self) -> bool:
            await asyncio.sleep(0.5)
            return await super().healthy()

        def revive(self) -> None:
            super().revive()
            self.started_at, self.tokens = 2.0, 10_000

    async def main() -> None:
        sink, engine = Sink(), Quick(slots=16)
        engine.started_at = 1.0
        feed = make_feed(batches(1000), sink)
        loop = asyncio.get_running_loop()
        loop.call_later(2.5, engine.die)
        loop.call_later(2.6, engine.revive)
        with pytest.raises(EngineLost, match="restarted"):
            await feed.serve(engine, ORIGIN, 16)
        await feed.serve(engine, ORIGIN, 16)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_an_engine_that_is_back_when_the_canary_comes_charges_nobody() -> None:
    class Back(FakeEngine):
        """Is started anew in the moment between a look at its pages and the canary that follows."""

        async def canary(self, prompt: bytes | None = None) -> None:
            if not self.alive:
                self.revive()
            self.tokens += 1

    async def main() -> None:
        sink, engine = Sink(), Back(seconds=1)
        feed = make_feed(batches(200), sink, dead_seconds=10)
        asyncio.get_running_loop().call_later(2.5, engine.die)
        with pytest.raises(EngineLost, match="restarted"):
            await feed.serve(engine, ORIGIN, 16)
        assert feed.counts.canaries == 1 and feed.counts.charged == 0
        await feed.serve(engine, ORIGIN, 16)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


@pytest.mark.parametrize("page", ["in time", "slow", "gone for a moment"])
def test_another_engine_s_answer_is_no_proof_that_the_first_one_lives(page: str) -> None:
    class Replaced(FakeEngine):
        """The canary that follows the failures is answered by the next process."""

        async def canary(self, prompt: bytes | None = None) -> None:
            if self.outage is not None:
                self.outage, self.started_at, self.tokens = None, 2.0, 10_000
                self.replaced_at = asyncio.get_running_loop().time()

        async def load(self) -> EngineLoad | None:
            since = asyncio.get_running_loop().time() - self.replaced_at
            if page == "slow" and since >= 0:
                await asyncio.sleep(9)
            return None if page == "gone for a moment" and 0 <= since < 2 else await super().load()

    async def main() -> None:
        sink, engine = Sink(), Replaced(seconds=1)
        engine.started_at, engine.replaced_at = 1.0, float("inf")
        feed = make_feed(batches(200), sink, dead_seconds=10)

        def fail() -> None:  # while the pages of the dying engine still answer
            engine.outage = Transient("http_500")

        asyncio.get_running_loop().call_later(2.5, fail)
        with pytest.raises(EngineLost, match="restarted"):
            await feed.serve(engine, ORIGIN, 16)
        assert feed.counts.charged == 0
        await feed.serve(engine, ORIGIN, 16)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


@pytest.mark.parametrize("page", ["none", "lost"])
def test_failures_are_judged_where_no_page_tells_who_answers(page: str) -> None:
    class Pageless(FakeEngine):
        async def load(self) -> EngineLoad | None:
            if page == "lost" and asyncio.get_running_loop().time() > 1:
                raise Transient("http_500")
            return await super().load()

    async def main() -> None:
        sink, engine = Sink(), Pageless({"r0": Transient("http_500")}, metrics=page != "none")
        feed = make_feed(batches(100), sink)
        await feed.serve(engine, ORIGIN, 16)
        assert sink.dead() == {"r0": "http_500"} and feed.counts.engine_deaths == 0
        assert asyncio.get_running_loop().time() < 60

    run(main)


def test_embeddings_may_come_from_several_servers_behind_one_address() -> None:
    class Two(FakeEngine):
        """Counters of tokens stand still; each look is at the other server's page."""

        async def load(self) -> EngineLoad | None:
            self.tokens, self.started_at = 0, 1.0 if self.started_at == 2.0 else 2.0
            return await super().load()

    async def main() -> None:
        sink, engine = Sink(), Two(seconds=3)
        feed = make_feed(batches(100), sink)
        await feed.serve(engine, ORIGIN, 16)
        assert sink.dead() == {} and feed.counts.engine_deaths == 0

    run(main)


def test_a_way_that_is_made_anew_is_no_dead_engine_and_charges_nobody() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine(slots=16)
        feed = make_feed(batches(1000), sink)
        loop = asyncio.get_running_loop()
        loop.call_later(2.5, engine.cut)
        loop.call_later(2.5 + 9, engine.heal)
        await feed.serve(engine, ORIGIN, 16)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}
        assert feed.counts.engine_deaths == 0
        assert engine.asked.total() <= 1000 + 64

    run(main)


def test_an_engine_that_refuses_through_a_way_that_stands_is_lost_after_two_seconds() -> None:
    async def main() -> None:
        engine = FakeEngine(slots=16)
        feed = make_feed(batches(1000), Sink())
        asyncio.get_running_loop().call_later(2.5, engine.die)
        with pytest.raises(EngineLost, match="unreachable"):
            await feed.serve(engine, ORIGIN, 16)
        assert 4 < asyncio.get_running_loop().time() < 7

    run(main)


def test_a_host_that_is_gone_is_left_at_the_next_look() -> None:
    async def main() -> None:
        engine = FakeEngine(slots=16)
        feed = make_feed(batches(1000), Sink())
        loop = asyncio.get_running_loop()
        loop.call_later(2.5, engine.cut)
        loop.call_later(2.5 + 3, engine.cut, Reachability.LOST)
        with pytest.raises(EngineLost, match="its host does not answer"):
            await feed.serve(engine, ORIGIN, 16)
        assert 5.4 < loop.time() < 7

    run(main)


def test_a_bad_row_and_a_slow_health_page_are_no_restart() -> None:
    class Hiccup(FakeEngine):
        async def healthy(self) -> bool:
            return asyncio.get_running_loop().time() > 5

    async def main() -> None:
        sink, engine = Sink(), Hiccup({"r0": Transient("http_500")}, seconds=4)
        feed = make_feed(batches(20), sink, dead_seconds=10)
        await feed.serve(engine, ORIGIN, 8)
        assert feed.counts.engine_deaths == 0 and sink.dead() == {"r0": "http_500"}

    run(main)


@pytest.mark.parametrize("error", [Transient("http_500"), BUSY, Transient("http_503")])
def test_an_outage_that_passes_costs_one_window_of_requests_and_no_try(error: Transient) -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine()
        feed = make_feed(batches(1000), sink)
        engine.outage = error
        serving = asyncio.create_task(feed.serve(engine, ORIGIN, 16))
        await asyncio.sleep(50)
        assert engine.asked.total() <= 64
        assert engine.canaries <= 20
        engine.outage = None
        await serving
        assert sink.dead() == {}
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}
        assert feed.counts.requests <= 1.3 * 1000

    run(main)


@pytest.mark.slow
def test_connections_that_break_together_on_an_engine_that_lives_charge_nobody() -> None:
    class Starved(FakeEngine):
        """It loses every connection for 25 of 40 seconds, and answers a canary all the time."""

        async def generate(self, prompt: bytes, **more: Any) -> Completion:
            found = await super().generate(prompt, **more)
            if asyncio.get_running_loop().time() % 40 < 25:
                raise RESET
            return found

    async def main() -> None:
        sink, engine = Sink(), Starved({"r3": RESET}, seconds=1)
        await make_feed(batches(600), sink).serve(engine, ORIGIN, 64)
        assert sink.dead() == {"r3": "connection_lost"}

    run(main)


def test_an_engine_that_only_fails_is_given_up() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine()
        feed = make_feed(batches(100), sink)
        engine.outage = Transient("http_500")
        with pytest.raises(EngineLost, match="no_progress"):
            await feed.serve(engine, ORIGIN, 8)
        assert sink.rows == []
        await feed.serve(FakeEngine(), ORIGIN, 8)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


def test_a_server_that_admits_few_rows_at_once_is_served_at_its_pace() -> None:
    class Narrow(FakeEngine):
        """Takes at most 25 rows at once."""

        async def generate(self, prompt: bytes, **options: Any) -> Any:
            if self.open >= 25:
                self.asked["refused"] += 1
                raise BUSY
            return await super().generate(prompt, **options)

    async def main() -> None:
        sink, engine = Sink(), Narrow(seconds=5)
        feed = make_feed(batches(1000), sink)
        await feed.serve(engine, ORIGIN, 16)
        assert sink.dead() == {}
        assert {outcome.tries for outcome in sink.outcomes().values()} == {1}
        assert engine.asked["refused"] <= 300

    run(main)


def test_a_stalled_engine_is_given_up_though_its_health_is_fine() -> None:
    class Frozen(FakeEngine):
        async def canary(self, prompt: bytes | None = None) -> None:
            await asyncio.sleep(1e6)

    async def main() -> None:
        sink, engine = Sink(), Frozen(seconds=1e6)
        feed = make_feed(batches(50), sink)
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineLost, match="stalled"):
            await feed.serve(engine, ORIGIN, 8)
        assert 120 <= asyncio.get_running_loop().time() - started < 130
        await feed.serve(FakeEngine(), ORIGIN, 8)
        assert {(outcome.ok, outcome.tries) for outcome in sink.outcomes().values()} == {(True, 1)}

    run(main)


@pytest.mark.parametrize("seconds", [500, 2000])
def test_without_metrics_silence_is_borne_while_a_canary_answers(seconds: float) -> None:
    async def main() -> None:
        engine = FakeEngine(seconds=seconds, metrics=False)
        engine.canary = FakeEngine().canary
        feed = make_feed(batches(8), Sink())
        await feed.serve(engine, ORIGIN, 8)
        assert feed.finished and feed.counts.failures == 0

    run(main)


def test_without_metrics_a_silent_engine_is_given_up_in_the_end() -> None:
    class Frozen(FakeEngine):
        async def canary(self, prompt: bytes | None = None) -> None:
            await asyncio.sleep(1e6)

    async def main() -> None:
        feed = make_feed(batches(8), Sink())
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineLost, match=r"no_progress|stalled"):
            await feed.serve(Frozen(seconds=1e6, metrics=False), ORIGIN, 8)
        assert 120 < asyncio.get_running_loop().time() - started <= 610

    run(main)


def test_health_that_comes_and_goes_is_no_death() -> None:
    class Flapping(FakeEngine):
        checks = 0

        async def healthy(self) -> bool:
            self.checks += 1
            return self.checks % 3 == 0

    async def main() -> None:
        engine = Flapping(seconds=100)
        feed = make_feed(batches(8), Sink())
        await feed.serve(engine, ORIGIN, 8)
        assert engine.checks > 50 and feed.counts.engine_deaths == 0

    run(main)


def test_a_row_that_is_tried_again_goes_before_the_rest() -> None:
    async def main() -> None:
        sink = Sink()
        await make_feed(batches(400), sink).serve(FakeEngine({"r3": [RESET]}, slots=4), ORIGIN, 1)
        assert 20 < [outcome.row_id for _, outcome in sink.rows].index("r3") < 200

    run(main)


def test_rows_of_a_lost_engine_go_first_and_in_order() -> None:
    async def main() -> None:
        sink, first, second = Sink(), FakeEngine(seconds=1e6), FakeEngine()
        feed = make_feed(batches(200), sink)
        serving = asyncio.create_task(feed.serve(first, ORIGIN, 4))
        await asyncio.sleep(1)
        first.die()
        with pytest.raises(EngineLost):
            await serving
        await feed.serve(second, ORIGIN, 4)
        assert list(second.asked) == [f"r{i}" for i in range(200)]

    run(main)


def test_an_engine_that_dies_after_the_last_row_is_not_missed() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine()

        async def slowly(job: str, key: str, outcomes: list[Outcome]) -> None:
            await asyncio.sleep(50)
            await sink.on_batch(job, key, outcomes)

        feed = Feed(iter(batches(25)), on_row=sink.on_row, on_batch=slowly)
        asyncio.get_running_loop().call_later(10, engine.die)
        await feed.serve(engine, ORIGIN, 8)
        assert feed.finished and len(sink.outcomes()) == 25

    run(main)


def test_a_row_that_was_refused_has_no_part_in_a_death() -> None:
    async def main() -> None:
        sink = Sink()
        feed = make_feed(batches(2), sink)
        for _ in range(2):
            engine = FakeEngine({"r0": BUSY, "r1": "hang"})
            serving = asyncio.create_task(feed.serve(engine, ORIGIN, 8))
            await asyncio.sleep(0.5)
            engine.die()
            with pytest.raises(EngineLost):
                await serving
        engine = FakeEngine({"r1": "kill"})
        with pytest.raises(EngineLost):
            await feed.serve(engine, ORIGIN, 8)
        assert sink.rows == []
        assert engine.together == [{"r1"}]  # the suspect alone

    run(main)


def test_long_rows_are_no_stall_while_tokens_come() -> None:
    class Slow(FakeEngine):
        async def load(self) -> Any:
            self.tokens += 1
            return await super().load()

    async def main() -> None:
        feed = make_feed(batches(8), Sink())
        await feed.serve(Slow(seconds=500), ORIGIN, 8)
        assert feed.finished and feed.counts.failures == 0

    run(main)


def test_a_row_that_hangs_alone_is_a_dead_letter_and_the_engine_is_kept() -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r7": "hang", "r60": "hang"})
        feed = make_feed(batches(100), sink)
        await feed.serve(engine, ORIGIN, 8)
        assert sink.dead() == {"r7": "timeout", "r60": "timeout"}
        assert sink.outcomes()["r7"].tries == 3
        assert {outcome.tries for outcome in sink.outcomes().values() if outcome.ok} == {1}
        assert engine.open == 0

    run(main)


KINDS = ["kill", "hang", "rejected", "once", "always"]


@pytest.mark.slow
@property_test(
    20,
    80,
    bad=st.dictionaries(st.integers(0, 119), st.sampled_from(KINDS), max_size=8),
    deaths=st.lists(st.floats(0.0, 3.0), max_size=3),
    outage=st.none() | st.floats(0.0, 1.0),
    seqs=st.sampled_from([1, 4, 32]),
    seed=st.integers(0, 9),
)
def test_whatever_fails_every_row_has_one_outcome_and_no_innocent_is_charged(
    bad: dict[int, str], deaths: list[float], outage: float | None, seqs: int, seed: int
) -> None:
    rules: dict[str, object] = {}
    for number, kind in bad.items():
        rules[f"r{number}"] = {
            "kill": "kill",
            "hang": "hang",
            "rejected": RowRejected("rejected_400"),
            "once": [Transient("http_500")],
            "always": Transient("http_502"),
        }[kind]

    async def main() -> None:
        sink = Sink()
        feed = Feed(
            iter(batches(120, size=10)),
            on_row=sink.on_row,
            on_batch=sink.on_batch,
            policy=FeedPolicy(stall_seconds=30),
            rng=random.Random(seed),
        )
        fates = list(deaths)
        engines = 0
        while not feed.finished:
            engines += 1
            assert engines < 150
            engine = FakeEngine(rules, slots=8)
            loop = asyncio.get_running_loop()
            if fates:
                loop.call_later(fates.pop(), engine.die)
            elif outage is not None and engines % 3 == 0:
                loop.call_later(outage, setattr, engine, "outage", Transient("http_500"))
                loop.call_later(outage + 5, setattr, engine, "outage", None)
            try:
                await feed.serve(engine, ORIGIN, seqs)
            except EngineLost:
                continue
        outcomes = sink.outcomes()
        assert set(outcomes) == {f"r{i}" for i in range(120)}
        assert len(sink.rows) == 120
        wanted = {"kill": "engine_killed", "hang": "timeout", "rejected": "rejected_400", "always": "http_502"}
        expected = {f"r{number}": wanted[kind] for number, kind in bad.items() if kind in wanted}
        dead = sink.dead()
        for number, kind in bad.items():
            # A row that hangs may be alone in flight when engines die by chance.
            if kind == "hang" and dead.get(f"r{number}") == "engine_killed":
                expected[f"r{number}"] = "engine_killed"
            # One that always fails may meet the outage at last.
            if kind == "always" and dead.get(f"r{number}") == "http_500":
                expected[f"r{number}"] = "http_500"
        assert dead == expected
        for row_id, outcome in outcomes.items():
            if outcome.ok and bad.get(int(row_id[1:])) != "once":
                assert outcome.tries == 1

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [False, True])
def test_a_lost_answer_costs_few_canaries_an_hour(metrics: bool) -> None:
    async def main() -> None:
        sink, engine = Sink(), FakeEngine({"r7": "hang"}, metrics=metrics)
        serving = asyncio.create_task(make_feed(batches(40), sink).serve(engine, ORIGIN, 8))
        await asyncio.sleep(3600)
        assert engine.answered.total() == 39
        assert 1 <= engine.canaries <= 15
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run(main)
