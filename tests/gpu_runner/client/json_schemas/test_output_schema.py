"""Answers against a JSON schema."""

from __future__ import annotations

import pytest

from gpu_runner.client.json_schemas.output_schema import compile_check

SCHEMA = {
    "type": "object",
    "properties": {"topic": {"type": "string"}, "score": {"type": "integer", "minimum": 1}},
    "required": ["topic"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("text", ['{"topic": "a"}', ' {"score": 3, "topic": ""}\n'])
def test_an_answer_that_fits_has_no_problem(text: str) -> None:
    assert compile_check(SCHEMA)(text) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "not JSON"), ("Sure! {}", "not JSON"), ("{}", "topic"), ('{"topic": 3}', "topic"),
     ('{"topic": "a", "score": 0}', "score"), ('{"topic": "a", "x": 1}', "x")],
)  # fmt: skip
def test_an_answer_that_does_not_fit_names_the_problem(text: str, told: str) -> None:
    problem = compile_check(SCHEMA)(text)
    assert problem is not None
    assert told in problem
    assert len(problem) <= 400


def test_a_long_answer_makes_no_long_problem() -> None:
    problem = compile_check({"type": "integer"})('"' + "x" * 10_000 + '"')
    assert problem is not None
    assert len(problem) <= 400


@pytest.mark.parametrize("schema", [{"type": "objekt"}, {"$ref": "http://127.0.0.1:1/schema.json"}])
def test_a_wrong_schema_is_refused_at_once(schema: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="JSON schema"):
        compile_check(schema)
