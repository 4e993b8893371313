"""Lines of the output and error files, from what became of a row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batch_assets.api.execution.results import Usage, result_line
from gpu_runner.rows import Origin, Outcome

ORIGIN = Origin("m", "e", "p", "i", False, "r")


def outcome(output: str | None, error: str | None = None, message: str | None = None) -> Outcome:
    return Outcome("a", "k", output, "stop", 3, 4, 1, error, message, ORIGIN, 0.0, 1.0)


def shown(found: Outcome | None, rest: str = "batch_expired") -> Any:
    text = result_line("batch_1", "a", found, rest)
    assert text.endswith(b"\n") and text.count(b"\n") == 1
    return json.loads(text)


def test_an_answer_is_passed_as_it_is() -> None:
    line = shown(outcome('{"id":"x","choices":[1]}'))
    assert line["custom_id"] == "a" and line["error"] is None
    assert line["response"] == {
        "status_code": 200,
        "request_id": line["response"]["request_id"],
        "body": {"id": "x", "choices": [1]},
    }


@pytest.mark.parametrize(("code", "status"), [("rejected_400", 400), ("rejected_404", 404), ("http_500", 500)])
def test_an_http_error_is_a_response_and_no_error(code: str, status: int) -> None:
    line = shown(outcome(None, code, '{"error":{"message":"no"}}'))
    assert line["error"] is None and line["response"]["status_code"] == status
    kind = "server_error" if status == 500 else "invalid_request_error"
    assert line["response"]["body"] == {"error": {"message": "no", "type": kind, "param": None, "code": None}}


@pytest.mark.parametrize(
    ("said", "message", "param", "code"),
    [
        ({"error": {"message": "m", "type": "BadRequestError", "param": "n", "code": 400}}, "m", "n", None),
        ({"error": {"message": "m", "type": None, "param": None, "code": "c"}}, "m", None, "c"),
        ({"object": "error", "message": "m", "type": "BadRequestError", "param": None, "code": 400}, "m", None, None),
        ({"error": "m"}, "m", None, None),
        ({"detail": "m"}, '{"detail": "m"}', None, None),
        ({"error": {"message": 5}}, '{"error": {"message": 5}}', None, None),
        ([], "[]", None, None),
    ],
)
def test_an_engines_error_is_shown_as_the_documented_one(
    said: Any, message: str, param: str | None, code: str | None
) -> None:
    line = shown(outcome(None, "rejected_400", json.dumps(said)))
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert line["response"]["body"] == {"error": error}


@pytest.mark.parametrize("said", [None, ""])
def test_an_engines_error_without_a_word_has_a_message(said: str | None) -> None:
    body = shown(outcome(None, "rejected_400", said))["response"]["body"]
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]


@pytest.mark.parametrize(("code", "said"), [("timeout", "request_timeout"), ("engine_killed", "engine_killed")])
def test_what_is_no_http_error_is_an_error_and_no_response(code: str, said: str) -> None:
    line = shown(outcome(None, code, "secret"))
    assert line["response"] is None and line["error"]["code"] == said and "secret" not in line["error"]["message"]


@pytest.mark.parametrize("rest", ["batch_expired", "batch_cancelled"])
def test_a_line_without_an_outcome_says_why(rest: str) -> None:
    line = shown(None, rest)
    assert line["response"] is None and line["error"]["code"] == rest and line["error"]["message"]


def test_ids_are_the_same_when_the_file_is_written_again() -> None:
    assert shown(None)["id"] == shown(outcome("{}"))["id"]


def test_usage_adds_up_with_its_details() -> None:
    usage = Usage()
    details = {"prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 1}}
    usage.add(outcome(json.dumps({"usage": details})))
    usage.add(outcome(json.dumps({"usage": {"prompt_tokens_details": None}, "x": '"cached_tokens"'})))
    usage.add(outcome("{}"))
    assert json.loads(usage.to_json()) == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 21,
    }


@pytest.mark.parametrize("usage", [[1], {"prompt_tokens_details": [1], "completion_tokens_details": "x"}])
def test_details_of_another_shape_are_no_details(usage: Any) -> None:
    found = Usage()
    found.add(outcome(json.dumps({"usage": usage, "x": {"cached_tokens": 1}})))
    assert (found.input_tokens, found.cached_tokens, found.reasoning_tokens) == (3, 0, 0)
