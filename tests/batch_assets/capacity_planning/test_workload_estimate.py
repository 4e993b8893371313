"""How long the rows of a dataset are taken to be before any is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.specs import spec

from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.capacity_planning.workload_estimate import PromptLengths, work_of, work_of_source
from batch_assets.snapshot.source.errors import SourceError
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


@pytest.mark.parametrize("name", ["q.csv", "q.jsonl"])
@pytest.mark.parametrize("wrong", [{"id": "nope"}, {"keep_columns": ["nope"]}])
def test_a_plan_refuses_a_source_without_a_column_that_a_run_would_need(
    tmp_path: Path, name: str, wrong: dict[str, object]
) -> None:
    (tmp_path / "q.csv").write_text("q,number\ntea,1\n")
    (tmp_path / "q.jsonl").write_text('{"q": "tea", "number": 1}\n')
    declared = spec(source={"path": name}, **wrong)
    with pytest.raises(SourceError) as planned:
        work_of_source(declared, tmp_path)
    with pytest.raises(SourceError) as previewed:
        first_rows(declared, tmp_path, 1)
    assert str(planned.value) == str(previewed.value)
    assert str(planned.value).startswith(f"{name}: expected column 'nope', found")


def test_a_plan_of_a_source_with_all_its_columns_counts_its_rows(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("q,number,kept\ntea,1,\nrice,2,x\n")
    declared = spec(source={"path": "q.csv"}, id="number", keep_columns=["kept"])
    assert work_of_source(declared, tmp_path).rows == 2
    (tmp_path / "q.jsonl").write_text('{"q": "tea", "id": 1}\n{"q": "rice", "id": 2, "kept": "x"}\n')
    assert work_of_source(spec(id="id", keep_columns=["kept"]), tmp_path).rows == 2


def test_a_file_that_the_filter_needs_is_missed_before_a_row_is_asked(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"q": "tea"}\n')
    declared = spec(filter={"leaked": {"overlap": {"column": "output", "files": "tests.jsonl", "text": "text"}}})
    for look in (lambda: work_of_source(declared, tmp_path), lambda: first_rows(declared, tmp_path, 1)):
        with pytest.raises(SourceError, match=r"^filter\.leaked\.overlap: tests\.jsonl: no such file below "):
            look()
    (tmp_path / "tests.jsonl").write_text('{"question": "What is tea?"}\n')
    for look in (lambda: work_of_source(declared, tmp_path), lambda: first_rows(declared, tmp_path, 1)):
        with pytest.raises(
            SourceError, match=r"^filter\.leaked\.overlap: tests\.jsonl: .*column 'text', found 'question'"
        ):
            look()
    (tmp_path / "tests.jsonl").write_text('{"text": "What is tea made of, and where?"}\n')
    assert work_of_source(declared, tmp_path).rows == len(first_rows(declared, tmp_path, 1)) == 1
