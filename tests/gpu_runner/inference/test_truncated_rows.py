"""What becomes of an answer that ends at the token limit: kept, asked for again with a higher one, or a dead letter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.virtual_time import run

from gpu_runner.bounded_http.bounded_read import Admit
from gpu_runner.client.answers.answer_limit import answer_limit
from gpu_runner.client.protocol import Completion, Repair, Requests, RowRejected, Transient
from gpu_runner.inference.feed import Feed
from gpu_runner.rows import Batch, Generation, Outcome, row_key


class CountingEngine(FakeEngine):
    """Writes an answer of so many tokens as its prompt says ("r7" is 7 times 10), cut at what it is asked for.

    `context`: tokens that it has; a request for more than that is `refused`, or the answer is cut there.
    """

    def __init__(self, generation: Generation, *, context: int = 10_000, refuses: bool = False, **more: Any) -> None:
        super().__init__(generation=generation, **more)
        self.context, self.refuses = context, refuses
        self.limits: dict[str, list[int]] = {}

    async def generate(
        self,
        prompt: bytes,
        *,
        repair: Repair | None = None,
        admit: Admit | None = None,
        fields: Any = None,
        max_tokens: int | None = None,
        free: bool = False,
        user: bool = False,
    ) -> Completion:
        text = orjson.loads(prompt)
        limit = max_tokens or self.generation.with_fields(fields or b"").most_tokens or 1_000_000
        self.limits.setdefault(text, []).append(limit)
        if limit > self.context and self.refuses:
            raise RowRejected("context_length_exceeded", "maximum context length")
        await super().generate(prompt, repair=repair, admit=admit)
        wanted, room = 10 * int(text[1:]), min(limit, self.context)
        tokens = min(wanted, room)
        return Completion("x" * tokens, "length" if wanted > room else "stop", 3, tokens)


def outcomes(engine: FakeEngine, rows: int) -> dict[str, Outcome]:
    sink = Sink()

    async def main() -> None:
        feed = Feed(iter(batches(rows)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
        await feed.serve(engine, ORIGIN, 4)

    run(main)
    return sink.outcomes()


KEEP = Generation("completion", "m", {"max_tokens": 15})
LONGER = replace(KEEP, on_truncated="retry_longer", retry_max_tokens=60)
DEAD = replace(KEEP, on_truncated="dead")


def test_a_cut_answer_is_kept_where_nothing_is_said() -> None:
    found = outcomes(CountingEngine(KEEP), 4)
    assert [(one.finish_reason, one.tries) for one in found.values()] == [("stop", 1)] * 2 + [("length", 1)] * 2


def test_a_cut_answer_is_asked_for_again_with_twice_the_limit_until_the_bound() -> None:
    engine = CountingEngine(LONGER)
    found = outcomes(engine, 10)
    assert engine.limits["r1"] == [15] and engine.limits["r2"] == [15, 30] and engine.limits["r5"] == [15, 30, 60]
    assert (found["r5"].finish_reason, len(found["r5"].output or ""), found["r5"].tries) == ("stop", 50, 3)
    assert (found["r5"].prompt_tokens, found["r5"].completion_tokens) == (9, 15 + 30 + 50)
    assert engine.limits["r9"] == [15, 30, 60]
    assert (found["r9"].finish_reason, len(found["r9"].output or ""), found["r9"].tries) == ("length", 60, 3)


def test_a_cut_answer_is_a_dead_letter_of_its_own_kind_where_that_is_wanted() -> None:
    found = outcomes(CountingEngine(DEAD), 3)
    assert found["r1"].ok
    assert (found["r2"].error, found["r2"].output, found["r2"].tries) == ("truncated", None, 1)
    assert found["r2"].error_message == "the answer was cut at the token limit after 15 tokens"
    assert found["r2"].completion_tokens == 15


@pytest.mark.parametrize("refuses", [True, False])
def test_where_the_context_ends_the_cut_answer_is_kept(refuses: bool) -> None:
    engine = CountingEngine(LONGER, context=32, refuses=refuses)
    found = outcomes(engine, 10)
    assert engine.limits["r9"] == [15, 30, 60]
    assert (found["r9"].error, found["r9"].finish_reason) == (None, "length")
    assert len(found["r9"].output or "") == (30 if refuses else 32)
    assert found["r2"].finish_reason == "stop"


def test_an_answer_that_the_context_cut_at_once_is_not_asked_for_again() -> None:
    engine = CountingEngine(LONGER, context=12)
    assert outcomes(engine, 10)["r9"].finish_reason == "length" and engine.limits["r9"] == [15]


SCHEMA = {"type": "object", "required": ["a"]}


class JsonEngine(CountingEngine):
    """Its answers are whole JSON from 60 tokens on, of the wrong form in the first such request."""

    repaired = False

    async def generate(self, prompt: bytes, **more: Any) -> Completion:
        found = await super().generate(prompt, **more)
        if found.finish_reason == "length":
            return replace(found, output='{"a": [1, 2')
        return replace(found, output='{"a": 1}' if more.get("repair") is not None else "{}")


def test_a_cut_json_is_asked_for_again_before_it_is_held_against_the_schema_and_a_repair_keeps_the_limit() -> None:
    engine = JsonEngine(replace(LONGER, json_schema=SCHEMA))
    found = outcomes(engine, 6)["r5"]
    assert (found.output, found.tries) == ('{"a": 1}', 4)
    assert engine.limits["r5"] == [15, 30, 60, 60]


def test_a_cut_json_that_there_is_no_room_for_misses_the_schema() -> None:
    engine = JsonEngine(replace(LONGER, json_schema=SCHEMA), context=20, refuses=True)
    found = outcomes(engine, 6)["r5"]
    assert found.error == "schema_invalid" and "cut at the token limit" in (found.error_message or "")


class ChoiceEngine(CountingEngine):
    """Its first answer is none of the choices; the repaired one is, and is cut there."""

    async def generate(self, prompt: bytes, **more: Any) -> Completion:
        found = await super().generate(prompt, **more)
        return replace(found, output="yes") if more.get("repair") is not None else replace(found, finish_reason="stop")


def test_a_repaired_answer_that_was_cut_and_has_no_room_to_go_on_is_kept() -> None:
    engine = ChoiceEngine(replace(LONGER, structured_outputs={"choice": ["yes"]}), context=20, refuses=True)
    found = outcomes(engine, 6)["r5"]
    assert (found.output, found.finish_reason, found.tries) == ("yes", "length", 3)
    assert engine.limits["r5"] == [15, 15, 30]


def test_a_row_with_a_limit_of_its_own_is_asked_for_four_times_that_where_nothing_is_said() -> None:
    engine, sink = CountingEngine(replace(LONGER, retry_max_tokens=None)), Sink()
    last = zip(batches(10)[0].rows[8:], (5, 40), strict=True)
    rows = [replace(one, fields=b'{"max_tokens":%d}' % most) for one, most in last]

    async def main() -> None:
        feed = Feed(iter([Batch("b0", tuple(rows))]), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
        await feed.serve(engine, ORIGIN, 4)

    run(main)
    assert engine.limits == {"r8": [5, 10, 20], "r9": [40, 80, 160]}
    assert {name: one.finish_reason for name, one in sink.outcomes().items()} == {"r8": "length", "r9": "stop"}


class FlakyEngine(CountingEngine):
    """Each request for more than the first limit fails once."""

    async def generate(self, prompt: bytes, **more: Any) -> Completion:
        key = (prompt, more.get("max_tokens"))
        if more.get("max_tokens") and key not in self.failed:
            self.failed.add(key)
            raise Transient("http_500")
        return await super().generate(prompt, **more)

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.failed: set[Any] = set()


def test_a_request_for_more_that_fails_is_tried_again_with_the_same_limit() -> None:
    engine = FlakyEngine(LONGER)
    found = outcomes(engine, 6)["r5"]
    assert engine.limits["r5"] == [15, 30, 60] and found.finish_reason == "stop" and found.tries == 5


@pytest.mark.slow
@given(first=st.integers(1, 40), bound=st.integers(2, 300), tokens=st.integers(0, 30))
def test_no_request_asks_for_more_than_the_bound_and_all_end(first: int, bound: int, tokens: int) -> None:
    generation = Generation(
        "completion", "m", {"max_tokens": first}, on_truncated="retry_longer", retry_max_tokens=max(bound, first)
    )
    engine = CountingEngine(generation, seconds=0.001)
    found = outcomes(engine, tokens + 1)[f"r{tokens}"]
    limits = engine.limits[f"r{tokens}"]
    assert limits[0] == first and limits == sorted(set(limits)) and limits[-1] <= max(bound, first)
    assert found.tries == len(limits) <= 10
    assert found.finish_reason == ("stop" if 10 * tokens <= max(bound, first) else "length")


def test_the_request_has_the_higher_limit_by_its_own_name_and_room_for_its_answer() -> None:
    chat = Generation("chat", "m", {"max_completion_tokens": 8}, on_truncated="retry_longer", retry_max_tokens=64)
    prompt = b'[{"content":"q","role":"user"}]'
    assert orjson.loads(Requests(chat).body(prompt, max_tokens=16))["max_completion_tokens"] == 16
    assert orjson.loads(Requests(chat).body(prompt, fields=b'{"seed":4}', max_tokens=16))["seed"] == 4
    assert answer_limit(chat) == answer_limit(Generation("chat", "m", {"max_tokens": 64}))


def test_a_row_key_has_the_limit_unless_it_may_grow() -> None:
    small, large = (Generation("chat", "m", {"max_tokens": most}) for most in (8, 64))
    assert row_key(small, "q") != row_key(large, "q")
    growing = [replace(one, max_tokens_may_grow=True) for one in (small, large)]
    assert row_key(growing[0], "q") == row_key(growing[1], "q")
    assert len({row_key(one, "q") for one in (small, growing[0], Generation("chat", "m"))}) == 3
    assert row_key(replace(small, on_truncated="dead"), "q") == row_key(small, "q")
