"""Rows with one beginning are sent one after the other where that pays, and all others as they were read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import ORIGIN, FakeEngine, Sink
from support.virtual_time import run

from gpu_runner.client.protocol import EngineLost
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.inference.prefix_order import AS_READ, PrefixOrder, PrefixPolicy
from gpu_runner.rows import Batch, Row

DOCUMENTS, QUESTIONS, SIZE = 100, 6, 50
ORDERED = PrefixPolicy(rows=DOCUMENTS * QUESTIONS)


def document(number: int) -> str:
    return f"document {number:04d} " + "x" * 3000


def scattered(count: int = DOCUMENTS * QUESTIONS) -> list[str]:
    prompts = [f"{document(number % DOCUMENTS)} question {number}" for number in range(count)]
    random.Random(1).shuffle(prompts)
    return prompts


def batches_of(prompts: Sequence[str]) -> list[Batch]:
    rows = [Row(f"b{n // SIZE}", f"r{n}", f"key-{n}", orjson.dumps(prompt)) for n, prompt in enumerate(prompts)]
    return [Batch(f"b{n // SIZE}", tuple(rows[n : n + SIZE])) for n in range(0, len(rows), SIZE)]


def sent_by(prompts: Sequence[str], prefixes: PrefixPolicy, engine: FakeEngine | None = None) -> tuple[list[int], Sink]:
    """The numbers of the rows as they were answered by an engine with one slot, and all that was handed on."""
    sink = Sink()

    async def main() -> None:
        feed = Feed(
            iter(batches_of(prompts)),
            on_row=sink.on_row,
            on_batch=sink.on_batch,
            policy=FeedPolicy(prefixes=prefixes),
            rng=random.Random(0),
        )
        while not feed.finished:
            try:
                await feed.serve(engine or FakeEngine(slots=1), ORIGIN, 1)
            except EngineLost:
                assert engine is not None
                engine.revive()
                engine.rules.clear()

    run(main)
    return [int(outcome.row_id[1:]) for _, outcome in sink.rows], sink


def visits(prompts: Sequence[str], order: Sequence[int]) -> int:
    """How often an engine begins with another document."""
    return len(list(groupby(prompts[number][:13] for number in order)))


def test_rows_of_a_document_that_are_scattered_are_sent_one_after_the_other() -> None:
    prompts = scattered()
    order, sink = sent_by(prompts, ORDERED)
    assert visits(prompts, range(len(prompts))) > 5 * DOCUMENTS
    first = SIZE + 1  # the first batch begins before more is read
    assert visits(prompts, order) <= DOCUMENTS + 2 * first
    assert sorted(order) == list(range(len(prompts)))
    handed_on = [o.row_id for key in sorted(sink.batches, key=lambda k: int(k[1:])) for o in sink.batches[key]]
    assert handed_on == [f"r{n}" for n in range(len(prompts))], "the table's order is the source's"


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompts",
    [
        [f"{number} of its own " + "x" * 3000 for number in range(300)],
        ["one for all " + "x" * 3000 + f" {number * 7919 % 300:03d}" for number in range(300)],
        [f"one of eight: {number * 5 % 8} " + "x" * 3000 + f" {number * 7919 % 300:03d}" for number in range(300)],
        [f"short {number % 30} {number}" for number in range(300)],
        [document(number // QUESTIONS) + f" {number * 7919 % 300:03d}" for number in range(300)],
        [f"{number}" for number in range(300)],
    ],
    ids=["nothing shared", "one system prompt", "eight system prompts", "short", "together already", "tiny"],
)
def test_where_it_does_not_pay_rows_are_sent_as_they_were_read(prompts: list[str]) -> None:
    assert sent_by(prompts, ORDERED)[0] == list(range(len(prompts)))


def test_where_nobody_asks_for_it_rows_are_sent_as_they_were_read() -> None:
    assert sent_by(scattered(), PrefixPolicy())[0] == list(range(DOCUMENTS * QUESTIONS))


def test_no_row_waits_for_rows_of_a_later_window() -> None:
    prompts, window = scattered(), 4 * SIZE
    order, _ = sent_by(prompts, replace(ORDERED, rows=window))
    assert [number // window for number in order] == [n // window for n in range(len(prompts))]
    assert order != list(range(len(prompts)))


def test_a_window_is_bounded_by_the_bytes_of_its_prompts() -> None:
    places = PrefixOrder(replace(ORDERED, prompt_bytes=2 * SIZE * 3000))
    windows = [
        {place[0] for place in places.places([row.prompt for row in one.rows])} for one in batches_of(scattered())
    ]
    assert windows == [{1 + number // 2} for number in range(len(windows))]


def test_the_feed_reads_a_window_ahead_only_where_it_pays() -> None:
    places = PrefixOrder(ORDERED)
    assert places.ahead == 0
    places.places([document(number).encode() for number in range(DOCUMENTS)])
    assert not places.pays and places.ahead == 0
    places.places([document(number).encode() for number in range(DOCUMENTS)])
    assert places.pays and places.ahead == ORDERED.rows


def test_it_stops_where_later_rows_share_nothing() -> None:
    places = PrefixOrder(replace(ORDERED, rows=200))
    places.places([row.prompt for batch in batches_of(scattered(200)) for row in batch.rows])
    assert places.pays
    alone = [f"{number} of its own ".encode() + b"x" * 3000 for number in range(200)]
    places.places(alone)
    assert places.places(alone[:1])[0][1] == b"" and not places.pays


def test_no_row_is_lost_or_answered_twice_when_the_engine_dies_in_the_middle() -> None:
    prompts = scattered()
    engine = FakeEngine({prompts[200]: "kill"}, slots=1)
    order, sink = sent_by(prompts, ORDERED, engine)
    assert sorted(order) == list(range(len(prompts)))
    assert sink.dead() == {} and len(sink.outcomes()) == len(prompts)
    assert engine.asked.total() <= len(prompts) + engine.most_open, "what was in flight"


@given(st.lists(st.lists(st.binary(max_size=6), max_size=8), max_size=8), st.integers(1, 20))
@settings(max_examples=50)
def test_places_keep_the_windows_in_order(batches: list[list[bytes]], rows: int) -> None:
    places = PrefixOrder(PrefixPolicy(rows=rows, least_share=0.0, least_rows=0))
    found: list[Any] = [places.places(batch) for batch in batches]
    windows = [place[0] for batch in found for place in batch]
    assert windows == sorted(windows)
    assert [place[1] for batch in found for place in batch] == [prompt for batch in batches for prompt in batch]
    assert all(place > AS_READ for batch in found for place in batch)
