"""One line of an input file."""

from __future__ import annotations

import pytest
from support.api_service import CHAT, jsonl, line

from batch_assets.api.batches.lines import LineChecker

DEEP = b"[" * 300 + b"]" * 300  # orjson reads some 1,000 levels and writes 254


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (jsonl([line("a", x="HERE")]).replace(b'"HERE"', DEEP), "invalid_json_line"),
        (jsonl([line("a", model="ti\0ny")]), "invalid_value"),  # Postgres keeps no such text
    ],
    ids=["deep", "nul"],
)
def test_what_cannot_be_sent_or_kept_is_an_error_of_its_line(raw: bytes, code: str) -> None:
    found = LineChecker(CHAT, None).check(raw, 7)
    assert isinstance(found, list)
    assert [(error.code, error.line) for error in found] == [(code, 7)]


@pytest.mark.parametrize("name", ["kv_transfer_params", "priority", "request_id", "vllm_xargs"])
def test_no_line_says_who_comes_first_in_an_engine(name: str) -> None:
    (error,) = LineChecker(CHAT, None).check(jsonl([line("a", **{name: None})]), 3)  # type: ignore[misc]
    assert (error.code, error.param, error.line) == ("unsupported_parameter", f"body.{name}", 3)


@pytest.mark.parametrize(
    ("prompt", "more", "refused"),
    [
        ([1] * 9, {}, True),
        ([[1], [1] * 9], {}, True),
        ([1] * 8, {}, False),
        ([[1] * 8] * 9, {}, False),
        (["word"] * 9, {}, False),
        ("word " * 900, {}, False),
        ([1] * 9, {"truncate_prompt_tokens": 4}, False),
    ],
)
def test_token_ids_beyond_the_models_context_are_refused_and_nothing_that_an_engine_might_take(
    prompt: object, more: dict[str, object], refused: bool
) -> None:
    checker = LineChecker("/v1/completions", None, contexts={"tiny": 8})
    found = checker.check(jsonl([line("a", "/v1/completions", prompt=prompt, **more)]), 3)
    if not refused:
        assert not isinstance(found, list)
        return
    (error,) = found  # type: ignore[misc]
    assert (error.code, error.param, error.line) == ("context_length_exceeded", "body.prompt", 3)
