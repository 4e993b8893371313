"""Rows on the page of a batch: which, how many bytes, of which batches, and nothing of a text read as Markdown."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import orjson
import pytest

from batch_assets.asset_metadata.batch_rows import (
    ALL_BATCHES,
    MOST_BYTES,
    ShownBatches,
    batch_rows_markdown,
    shown_prompts,
)
from gpu_runner.rows import Origin, Outcome, Row, Turn

HOSTILE = "<img src=x onerror=alert(1)> | [a](http://evil.example) `x` www.evil.example\n# head **b**"


def row(number: int, asked: str) -> Row:
    prompt = orjson.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}])
    return Row("00000", f"id-{number}", f"key-{number}", prompt)


def outcome(number: int, output: str | None, error: str | None = None) -> Outcome:
    origin = Origin("m", "e", "p", "i", False, "r")
    return Outcome(
        f"id-{number}", f"key-{number}", output, "stop" if output else None, 1, 1, 1, error, "secret", origin, 0.0, 1.0
    )


def test_the_first_five_rows_are_shown_each_output_below_its_prompt() -> None:
    rows = [row(number, f"What is {number}?") for number in range(20)]
    shown = batch_rows_markdown(shown_prompts(rows), [outcome(number, f"It is {number}") for number in range(20)])
    lines = shown.splitlines()
    assert lines[:4] == ["| prompt → output |", "| --- |", "| What is 0? |", "| → It is 0 |"]
    assert len(lines) == 12


def test_rows_without_an_answer_are_among_them() -> None:
    rows = [row(number, f"What is {number}?") for number in range(20)]
    outcomes = [outcome(n, None, "timeout") if n in (1, 15, 17, 18) else outcome(n, "fine") for n in range(20)]
    shown = batch_rows_markdown(shown_prompts(rows), outcomes)
    assert shown.splitlines()[4:6] == ["| What is 1? |", r"| → no completion\: timeout |"]
    assert shown.splitlines()[-4:-2] == [r"| id\-15 |", r"| → no completion\: timeout |"]
    assert len(shown.splitlines()) == 12 and "secret" not in shown


@pytest.mark.parametrize("text", [HOSTILE * 50, "*" * 5000, "語" * 5000, "\U0001f600" * 5000, "www.www.www." * 900])
def test_no_text_makes_it_long_or_is_read_as_markdown(text: str) -> None:
    rows = [row(number, text) for number in range(9)]
    shown = batch_rows_markdown(shown_prompts(rows), [outcome(number, text) for number in range(9)])
    assert len(shown.splitlines()) == 12 and len(shown) < 1000
    assert len(json.dumps(shown)) <= MOST_BYTES
    plain = re.sub(r"\\.", "", "\n".join(shown.splitlines()[2:]))
    assert plain.count("|") == 20 and not set("<>[]*_`#") & set(plain)
    assert not re.search(r"(?i)https?:/|www\.\w", re.sub(r"\\(.)", r"\1", shown))


def test_parts_of_a_message_are_named_and_vectors_are_short() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "What is this?"}, image]
    asked = replace(row(0, ""), prompt=orjson.dumps([{"role": "user", "content": content}]))
    vector = replace(outcome(0, "x"), output=(0.25,) * 1024)
    shown = batch_rows_markdown(shown_prompts([asked]), [vector])
    assert shown.splitlines()[2] == r"| What is this? \[image\_url\] |"
    assert shown.splitlines()[3] == r"| → \[0\.25, 0\.25, 0\.25, … 1,024 numbers\] |"


def test_of_a_conversation_the_last_turn_is_shown() -> None:
    turn = Turn("And then?", "Then tea.", "stop", None, 1, 1, 1, 1.0, None)
    shown = batch_rows_markdown(shown_prompts([row(0, "Hello")]), [replace(outcome(0, "Then tea."), turns=(turn,))])
    assert shown.splitlines()[2:] == ["| And then? |", r"| → Then tea\. |"]


def test_of_very_many_batches_some_show_rows_and_more_of_those_that_failed() -> None:
    few, many = ShownBatches(ALL_BATCHES), ShownBatches(80_000)
    keys = [f"{number:05d}" for number in range(80_000)]
    assert all(few.shows(key, failed=False) for key in keys[:ALL_BATCHES])
    plain = {key for key in keys if many.shows(key, failed=False)}
    failed = {key for key in keys if many.shows(key, failed=True)}
    assert len(plain) == ALL_BATCHES and plain < failed
    # twice, as SQLite keeps an event of a run in two files
    assert 2 * len(failed) * MOST_BYTES < 100e6
