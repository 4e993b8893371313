"""How long the rows of a dataset are taken to be before any is measured."""

from __future__ import annotations

import pytest
from support.specs import spec

from batch_assets.capacity_planning.workload_estimate import PromptLengths, work_of


@pytest.mark.parametrize(
    ("sampling", "most", "said"),
    [
        ({}, 1024, "completions: 50% of max_tokens (1,024)"),
        ({"extra": {"max_completion_tokens": 300}}, 300, "completions: 50% of max_tokens (300)"),
        ({"max_tokens": None}, 1024, "completions: 50% of 1,024 tokens, as sampling has no limit"),
    ],
)
def test_answers_have_a_length_to_plan_with_however_they_are_limited(
    sampling: dict[str, object], most: int, said: str
) -> None:
    work = work_of(spec(sampling=sampling).generation(), 10, 10, PromptLengths(20.0, 40.0), ())
    assert (work.mix.output_tokens, work.longest) == (most / 2, 40 + most)
    assert said in [one.text for one in work.assumptions]
