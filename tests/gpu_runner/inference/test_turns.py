"""Conversations of several turns in a feed: each turn is asked once, after the answer before it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from support.fake_engine import ORIGIN, FakeEngine, Sink
from support.virtual_time import run

from gpu_runner.client.protocol import Completion, EngineLost, RowRejected, Transient
from gpu_runner.cost_meter import CostMeter, TokenMeter
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.rows import Batch, Generation, Outcome, Row, Turn
from gpu_runner.token_price import TokenPrice

CHAT = Generation("chat", "m", {"max_tokens": 15})
SCHEMA = {"type": "object", "required": ["a"]}


class ChatEngine(FakeEngine):
    """Prompts are messages; rules are by their texts, as "s|u1|re: …"."""

    def __init__(self, rules: Any = None, *, generation: Generation = CHAT, **more: Any) -> None:
        super().__init__(rules, generation=generation, **more)
        self.free: Counter[bool] = Counter()

    async def generate(self, prompt: bytes, **more: Any) -> Completion:
        self.free[more.pop("free", False)] += 1
        said = "|".join(message["content"] for message in orjson.loads(prompt))
        found = await super().generate(orjson.dumps(said), **more)
        answer = str(found.output)
        return replace(found, output=f"a{said.count('|') // 2 + 1}" if answer.startswith("re: ") else answer)


def conversation(batch: str, name: str, turns: int) -> Row:
    said = tuple(f"{name}.{turn}" for turn in range(1, turns + 1))
    return Row(batch, name, f"key-{name}", orjson.dumps([{"content": said[0], "role": "user"}]), turns=said)


def conversations(rows: int, turns: Callable[[int], int] = lambda row: 3, size: int = 25) -> list[Batch]:
    made = [conversation(f"b{i // size}", f"r{i}", turns(i)) for i in range(rows)]
    return [Batch(f"b{n}", tuple(made[at : at + size])) for n, at in enumerate(range(0, rows, size))]


def make_feed(batches: Sequence[Batch], sink: Sink, policy: FeedPolicy | None = None) -> Feed:
    made = Feed(iter(batches), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0), policy=policy)
    return made


def outcomes(engine: FakeEngine, batches: Sequence[Batch]) -> dict[str, Outcome]:
    sink = Sink()

    async def main() -> None:
        await make_feed(batches, sink).serve(engine, ORIGIN, 4)

    run(main)
    return sink.outcomes()


def test_each_turn_is_asked_once_behind_the_answers_before_it() -> None:
    engine = ChatEngine()
    found = outcomes(engine, conversations(60, lambda row: 1 + row % 4))
    asked = {"r3.1", "r3.1|a1|r3.2", "r3.1|a1|r3.2|a2|r3.3", "r3.1|a1|r3.2|a2|r3.3|a3|r3.4"}
    assert {said for said in engine.asked if said.split("|")[0] == "r3.1"} == asked
    assert set(engine.asked.values()) == {1} and len(engine.asked) == 15 * (1 + 2 + 3 + 4)
    one = found["r3"]
    assert (one.output, one.finish_reason, one.error, one.tries) == ("a4", "stop", None, 4)
    assert (one.prompt_tokens, one.completion_tokens) == (12, 20)
    assert [(turn.user, turn.output, turn.tries, turn.prompt_tokens) for turn in one.turns] == [
        (f"r3.{n}", f"a{n}", 1, 3) for n in range(1, 5)
    ]
    assert one.seconds == pytest.approx(0.8) and sum(turn.seconds for turn in one.turns) == pytest.approx(0.8)
    assert len(found["r0"].turns) == 1 and engine.asked["r0.1"] == 1


def test_turns_that_were_answered_are_told_and_are_not_asked_again() -> None:
    sink, again = Sink(), Sink()
    engine, second = ChatEngine(), ChatEngine()
    batches = conversations(3)

    async def main() -> None:
        await make_feed(batches, sink).serve(engine, ORIGIN, 4)
        begun = {outcome.row_id: outcome.turns for _, outcome in sink.rows if outcome.begun}
        assert [len(turns) for turns in begun.values()] == [2, 2, 2]
        begun["r1"] = begun["r1"][:1]
        del begun["r2"]
        await make_feed([replace(batches[0], begun=begun)], again).serve(second, ORIGIN, 4)

    run(main)
    told = [outcome for _, outcome in sink.rows if outcome.row_id == "r0"]
    assert [(one.begun, one.output, len(one.turns), one.tries) for one in told] == [
        (True, None, 1, 1),
        (True, None, 2, 2),
        (False, "a3", 3, 3),
    ]
    assert sorted(said.split("|")[-1] for said in second.asked) == ["r0.3", "r1.2", "r1.3", "r2.1", "r2.2", "r2.3"]
    texts = [[turn.output for turn in one.turns] for one in again.outcomes().values()]
    assert texts == [["a1", "a2", "a3"]] * 3
    assert {one.completion_tokens for one in again.outcomes().values()} == {15}


def test_a_turn_that_dies_keeps_those_before_it_and_tries_count_for_each_turn() -> None:
    refused = RowRejected("rejected_400", "no")
    flaky = [Transient("http_500"), "b"]
    engine = ChatEngine({"r0.1|a1|r0.2": refused, "r1.1": list(flaky), "r1.1|b|r1.2": list(flaky), "r2.1": refused})
    found = outcomes(engine, conversations(3))
    dead = found["r0"]
    assert (dead.error, dead.output, dead.tries, dead.completion_tokens) == ("rejected_400", None, 2, 5)
    assert [turn.output for turn in dead.turns] == ["a1"]
    assert [(turn.output, turn.tries) for turn in found["r1"].turns] == [("b", 2), ("b", 2), ("a3", 1)]
    assert found["r1"].tries == 5
    assert (found["r2"].error, found["r2"].turns) == ("rejected_400", ())


def test_only_the_last_answer_is_held_to_the_schema_and_asked_in_its_form() -> None:
    last = "r0.1|a1|r0.2|a2|r0.3"
    engine = ChatEngine({last: ["{}", '{"a": 1}']}, generation=replace(CHAT, json_schema=SCHEMA))
    found = outcomes(engine, conversations(1))["r0"]
    assert (found.output, found.tries, [turn.tries for turn in found.turns]) == ('{"a": 1}', 4, [1, 1, 2])
    assert engine.free == {True: 2, False: 2}


class CuttingEngine(ChatEngine):
    """Cuts what is shorter than thirty tokens."""

    async def generate(self, prompt: bytes, **more: Any) -> Completion:
        found = await super().generate(prompt, **more)
        return (
            found
            if (more.get("max_tokens") or 15) >= 30
            else replace(found, finish_reason="length", completion_tokens=15)
        )


def test_a_cut_answer_is_asked_for_again_in_its_own_turn_or_is_the_end() -> None:
    longer = replace(CHAT, on_truncated="retry_longer", retry_max_tokens=60)
    found = outcomes(CuttingEngine(generation=longer), conversations(1))["r0"]
    assert [(turn.finish_reason, turn.tries) for turn in found.turns] == [("stop", 2)] * 3 and found.tries == 6
    kept = outcomes(CuttingEngine(), conversations(1))["r0"]
    assert [turn.finish_reason for turn in kept.turns] == ["length"] * 3 and kept.finish_reason == "length"
    dead = outcomes(CuttingEngine(generation=replace(CHAT, on_truncated="dead")), conversations(1))["r0"]
    assert (dead.error, dead.turns) == ("truncated", ())


def test_an_engine_stays_as_full_with_turns_as_with_single_requests() -> None:
    took: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await make_feed(conversations(200), Sink()).serve(ChatEngine(slots=20), ORIGIN, 20)
        took.append(loop.time() - began)

    run(main)
    assert took[0] < 1.03 * 200 * 3 * 0.2 / 20


def test_a_feed_that_is_stopped_between_turns_goes_on_with_the_next_turn() -> None:
    sink, engine = Sink(), ChatEngine()

    async def main() -> None:
        feed, stop = make_feed(conversations(4), sink), asyncio.Event()
        asyncio.get_running_loop().call_later(0.25, stop.set)
        await feed.serve(engine, ORIGIN, 4, stop=stop)
        assert not sink.batches and sum(engine.asked.values()) == 8 and not feed.progress().last_rows
        await feed.serve(engine, ORIGIN, 4)
        assert feed.progress().last_rows

    run(main)
    assert set(engine.asked.values()) == {1} and len(engine.asked) == 12
    assert {len(one.turns) for one in sink.outcomes().values()} == {3}


def test_the_last_rows_are_not_in_flight_while_turns_are_to_come() -> None:
    seen: dict[int, bool] = {}

    async def main() -> None:
        feed = make_feed(conversations(2), Sink())

        def look(turn: int) -> None:
            seen[turn] = feed.progress().last_rows

        for turn in (1, 2, 3):
            asyncio.get_running_loop().call_later(0.2 * turn - 0.1, look, turn)
        await feed.serve(ChatEngine(), ORIGIN, 4)

    run(main)
    assert seen == {1: False, 2: False, 3: True}


def test_where_a_feed_stands_may_be_asked_while_its_thread_changes_what_is_in_flight() -> None:
    feed = make_feed([], Sink())
    feed._work.exhausted = True
    in_flight: dict[object, object] = {}

    class Ending:
        @property
        def goes_on(self) -> bool:
            in_flight.pop(self)  # as the feed's thread does when the answer comes
            in_flight[object()] = None
            return False

    in_flight |= {Ending(): None, Ending(): None}
    worker = SimpleNamespace(in_flight=in_flight, late_rows=0, window=SimpleNamespace(size=2))
    feed._workers.append(cast(Any, worker))
    assert feed.progress().last_rows


def test_a_lost_engine_costs_the_turns_in_flight_and_no_other() -> None:
    sink, first, second = Sink(), ChatEngine(), ChatEngine()

    async def main() -> None:
        feed = make_feed(conversations(4), sink)
        asyncio.get_running_loop().call_later(0.3, first.die)
        with pytest.raises(EngineLost):
            await feed.serve(first, ORIGIN, 4)
        await feed.serve(second, ORIGIN, 4)

    run(main)
    assert sorted({said.split("|")[-1][-1] for said in second.asked}) == ["2", "3"]
    assert all(one.ok and len(one.turns) == 3 for one in sink.outcomes().values())


def test_a_conversation_that_ends_engines_with_its_second_turn_is_found_and_the_others_go_on() -> None:
    sink, asked = Sink(), Counter[str]()
    poison = "r3.1|a1|r3.2"

    async def main() -> None:
        feed = make_feed(conversations(8), sink)
        for _ in range(12):
            engine = ChatEngine({poison: "kill"})
            try:
                await feed.serve(engine, ORIGIN, 8)
            except EngineLost:
                continue
            finally:
                asked.update(engine.answered)
            break

    run(main)
    found = sink.outcomes()
    assert found["r3"].error == "engine_killed" and [turn.output for turn in found["r3"].turns] == ["a1"]
    assert all(one.ok and len(one.turns) == 3 for name, one in found.items() if name != "r3")
    assert set(asked.values()) == {1}


def test_dollars_add_up_over_turns_and_a_conversation_is_one_row_of_the_bill() -> None:
    sink, meter = Sink(), CostMeter(0.5)

    async def main() -> None:
        await make_feed(conversations(10), sink).serve(ChatEngine(), ORIGIN, 4, spending=meter)

    run(main)
    found = sink.outcomes().values()
    for one in found:
        assert one.usd == pytest.approx(sum(turn.usd or 0 for turn in one.turns))
    used = meter.spent()
    assert sum(one.usd or 0 for one in found) == pytest.approx(0.5 * used.useful_seconds)
    assert (used.rows, used.completion_tokens) == (10, 150)


def test_what_conversations_hold_is_let_go_when_their_batch_is_committed() -> None:
    kept: list[int] = []

    async def main() -> None:
        refused = RowRejected("rejected_400", "no")
        feed = make_feed(conversations(30), Sink())
        await feed.serve(ChatEngine({"r7.1|a1|r7.2": refused}), ORIGIN, 4)
        kept.append(feed._work.memory.held)

    run(main)
    assert kept == [0]


def test_turns_of_one_conversation_count_against_the_bytes_of_its_batch() -> None:
    engine = ChatEngine({"r0.1": "x" * 1000, f"r0.1|{'x' * 1000}|r0.2": "y" * 100_000})
    policy = FeedPolicy(batch_bytes=70_000)
    sink = Sink()

    async def main() -> None:
        await make_feed(conversations(1), sink, policy).serve(engine, ORIGIN, 4)

    run(main)
    (dead,) = sink.outcomes().values()
    assert dead.error == "answer_too_large" and [len(turn.output) for turn in dead.turns] == [1000]


def test_more_turns_than_a_row_has_are_not_believed() -> None:
    turn = Turn("u", "a", "stop", None, 1, 1, 1, 0.1, None)
    (batch,) = conversations(1, lambda row: 2)
    engine = ChatEngine()
    found = outcomes(engine, [replace(batch, begun={"r0": (turn,) * 5})])["r0"]
    assert len(found.turns) == 2 and list(engine.asked) == ["r0.1|a|r0.2"]


def test_a_budget_that_is_spent_between_turns_lets_the_next_turn_wait() -> None:
    sink, engine = Sink(), ChatEngine()
    meter = TokenMeter(TokenPrice(0.0, 1e6), row_usd=5.0)  # a dollar for a token of an answer, five for a turn
    asked: list[int] = []

    async def main() -> None:
        feed = make_feed(conversations(2), sink)
        meter.grant(15.0)
        loop = asyncio.get_running_loop()
        loop.call_later(5, lambda: asked.append(sum(engine.asked.values())))
        loop.call_later(6, lambda: meter.grant(30.0))
        await feed.serve(engine, ORIGIN, 4, spending=meter)
        assert feed.progress().turns == 4

    run(main)
    assert asked == [3] and set(engine.asked.values()) == {1} and len(engine.asked) == 6
    assert [one.usd for one in sink.outcomes().values()] == [15.0, 15.0]
