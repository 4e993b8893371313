"""What a line is charged for: the counts of its answer, cached tokens among them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batch_assets.api.billing.answer_usage import AnswerUsage, answer_usage, tokens_of
from batch_assets.api.billing.usage import Tokens
from gpu_runner.rows import Origin, Outcome

ORIGIN = Origin("tiny", "e", "p", "i", False, "r")


def answered(usage: Any, error: str | None = None) -> Outcome:
    body = json.dumps({"choices": [], "usage": usage})
    return Outcome("a", "k", body if error is None else None, "stop", 10, 4, 1, error, None, ORIGIN, 0.0, 1.0)


@pytest.mark.parametrize(
    ("usage", "cached", "reasoning"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 7}, "completion_tokens_details": {"reasoning_tokens": 3}}, 7, 3),
        ({"prompt_tokens_details": {"cached_tokens": 11}}, 10, 0),
        ({"prompt_tokens_details": {"cached_tokens": None}}, 0, 0),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, 0, 0),
        ({"prompt_tokens_details": {"cached_tokens": True}}, 0, 0),
        ({"prompt_tokens_details": None, "note": "cached_tokens"}, 0, 0),
        (None, 0, 0),
    ],
)
def test_cached_tokens_are_among_those_of_the_prompt(usage: Any, cached: int, reasoning: int) -> None:
    assert answer_usage(answered(usage)) == AnswerUsage(Tokens(10, cached, 4), reasoning)


def test_lines_without_an_answer_are_charged_nothing() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 7}}
    found = [answered(details), answered(details, "timeout"), answered({})]
    assert tokens_of(found) == Tokens(20, 7, 8)
