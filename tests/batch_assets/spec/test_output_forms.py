"""`output.choice`, `regex` and `grammar`: at most one form, and none that cannot be held."""

from __future__ import annotations

from typing import Any

import pytest
from support.specs import spec

from batch_assets.component import spec_version
from batch_assets.snapshot.ingest import RowKeys
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import load_spec
from batch_assets.spec.scaffold import first_attributes
from gpu_runner.rows import row_key

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("output", [{"choice": ["a", "b"]}, {"regex": "a+"}, {"grammar": 'root ::= "a"'}])
def test_each_form_is_a_part_of_the_request(output: dict[str, Any]) -> None:
    found = spec(output=output)
    assert found.generation().structured_outputs == output
    assert found.output.form == next(iter(output))
    assert RowKeys(found.generation()).digests([b'"q"'])[0].hex() == row_key(found.generation(), "q")
    assert spec_version(found) != spec_version(spec())


def test_without_a_form_all_is_as_before() -> None:
    assert spec().generation().stated() == {
        "task": "chat",
        "model": "m",
        "sampling": {"max_tokens": 1024},
        "json_schema": None,
        "repair_tries": 1,
    }
    assert spec_version(spec()) == "8813ad16d74b6f1d"


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        (
            {"output": {"choice": ["a"], "regex": "a"}},
            "one of json_schema, choice, regex, grammar, found choice and regex",
        ),
        ({"output": {"json_schema": {"type": "object"}, "grammar": "x"}}, "found json_schema and grammar"),
        ({"task": "embedding", "output": {"regex": "a"}}, "no regex for task embedding"),
        ({"output": {"choice": []}}, "output.choice"),
        ({"output": {"choice": "yes"}}, "output.choice"),
        ({"output": {"choice": [1, 2]}}, "output.choice.0"),
        ({"output": {"choice": ["a", "a"]}}, "each choice once"),
        ({"output": {"choice": ["a", " "]}}, "no blanks"),
        ({"output": {"choice": ["a"]}, "sampling": {"extra": {"tools": [TOOL]}}}, "no tools beside output.choice"),
        (
            {"output": {"regex": "a"}, "sampling": {"extra": {"guided_regex": "a"}}},
            "no guided_regex beside output.regex",
        ),
        ({"sampling": {"extra": {"structured_outputs": {"regex": "a"}}}}, "choice, regex or grammar instead"),
    ],
)
def test_forms_that_contradict_each_other_are_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as found:
        spec(**attributes)
    assert words in str(found.value)


def test_what_becomes_of_cut_answers_is_no_part_of_the_row_key_and_has_a_bound() -> None:
    plain = spec().generation()
    assert spec(output={"on_truncated": "keep", "max_tokens_may_grow": False}).generation() == plain
    longer = spec(output={"on_truncated": "retry_longer"}).generation()
    assert (longer.on_truncated, longer.retry_max_tokens, longer.longest_answer) == ("retry_longer", 4096, 4096)
    assert spec(output={"on_truncated": "retry_longer", "retry_max_tokens": 2000}).generation().retry_max_tokens == 2000
    assert row_key(longer, "q") == row_key(plain, "q")
    of_rows = spec(output={"on_truncated": "retry_longer", "retry_max_tokens": 100}, sampling={"max_tokens": "{{ q }}"})
    assert of_rows.generation().retry_max_tokens == 100
    of_rows = spec(output={"on_truncated": "retry_longer"}, sampling={"max_tokens": "{{ q }}"})
    assert of_rows.generation().with_fields(b'{"max_tokens":5000}').longest_answer == 20_000
    growing = spec(output={"max_tokens_may_grow": True}).generation()
    assert RowKeys(growing).digests([b'"q"'])[0].hex() == row_key(growing, "q") != row_key(plain, "q")


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"output": {"on_truncated": "longer"}}, "output.on_truncated"),
        ({"output": {"retry_max_tokens": 4096}}, "on_truncated: retry_longer beside it"),
        ({"output": {"on_truncated": "dead", "retry_max_tokens": 4096}}, "on_truncated: retry_longer beside it"),
        ({"output": {"on_truncated": "retry_longer", "retry_max_tokens": 1024}}, "more than max_tokens (1,024)"),
        ({"output": {"on_truncated": "retry_longer", "retry_max_tokens": 1 << 21}}, "output.retry_max_tokens"),
        ({"output": {"on_truncated": "retry_longer"}, "sampling": {"max_tokens": None}}, "a token limit beside it"),
        ({"output": {"max_tokens_may_grow": True}, "sampling": {"max_tokens": None}}, "a token limit beside it"),
        ({"output": {"on_truncated": "dead"}, "task": "embedding"}, "no such key for task embedding"),
        ({"output": {"max_tokens_may_grow": True}, "task": "embedding"}, "no such key for task embedding"),
    ],
)
def test_what_cannot_be_asked_of_cut_answers_is_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as found:
        spec(**attributes)
    assert words in str(found.value)


def test_thinking_is_split_off_by_a_rule_that_is_no_part_of_the_row_key() -> None:
    assert spec().generation().reasoning_tags is None
    found = spec(model="mistralai/Magistral-Small-2509", output={"reasoning_tags": "auto"}).generation()
    assert found.reasoning_tags == "mistral" and found.stated()["reasoning_tags"] == "mistral"
    assert spec(output={"reasoning_tags": "seed_oss"}).generation().reasoning_tags == "seed_oss"
    assert row_key(spec(output={"reasoning_tags": "auto"}).generation(), "q") == row_key(spec().generation(), "q")
    assert load_spec(first_attributes("d"), "defs.yaml").generation().reasoning_tags == "think"
    for refused in ({"output": {"reasoning_tags": "auto"}, "task": "embedding"}, {"output": {"reasoning_tags": "xml"}}):
        with pytest.raises(SpecError, match=r"output\.reasoning_tags"):
            spec(**refused)
