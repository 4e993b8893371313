"""How long the rows of a dataset are taken to be before any is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.specs import spec

from batch_assets.capacity_planning.workload_estimate import PromptLengths, work_of, work_of_source
from gpu_runner.token_price import TokenPrice


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


def test_a_conversation_counts_the_prompts_of_all_its_turns(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"q": "12345678"}\n')
    sampling = {"max_tokens": 100, "extra": {"ignore_eos": True}}
    prompt = {"system": "1234", "turns": ["{{ q }}", "1234", "123456781234"]}
    work = work_of_source(spec(prompt=prompt, sampling=sampling), tmp_path)
    first = (1 + 4) + (2 + 4)  # a token for four bytes, and four for each message
    second = first + (100 + 4) + (1 + 4)
    third = second + (100 + 4) + (3 + 4)
    assert (work.mix.prompt_tokens, work.mix.output_tokens) == (first + second + third, 300)
    assert work.longest == third + 100 and work.longest_output == 100
    one = work_of_source(spec(prompt={"system": "1234", "turns": ["{{ q }}"]}, sampling=sampling), tmp_path)
    assert (one.mix.prompt_tokens, one.mix.output_tokens, one.longest) == (first, 100, first + 100)


def test_a_row_may_cost_as_much_as_the_longest_answer_that_it_is_asked_again_for() -> None:
    output = {"on_truncated": "retry_longer", "retry_max_tokens": 5000}
    work = work_of(spec(output=output).generation(), 10, 10, PromptLengths(20.0, 40.0), ())
    assert (work.longest, work.longest_output) == (5040, 5000)
    once = work_of(spec(sampling={"max_tokens": 5000}).generation(), 10, 10, PromptLengths(20.0, 40.0), ())
    price = TokenPrice(1.0, 10.0)
    assert work.row_usd(price) == once.row_usd(price) > 5000 * 10 / 1e6
