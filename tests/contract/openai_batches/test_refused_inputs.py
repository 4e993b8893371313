"""Inputs that make a batch `failed`: every fault with its code and line, in one pass, before anything is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.batch_api import BatchApi, is_error, jsonl

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n\n", b" \n", b"\r\n"])
def test_an_input_without_lines(api: BatchApi, content: bytes) -> None:
    assert [error["code"] for error in api.refused(content)][:1] in (["empty_file"], ["invalid_json_line"])


def test_an_empty_input(api: BatchApi) -> None:
    (error,) = api.refused(b"")
    assert (error["code"], error["line"]) == ("empty_file", None)


@pytest.mark.parametrize(
    "wrong",
    [
        b"{nope",
        b"[1]",
        b"null",
        b"5",
        b'"text"',
        b"{} {}",
        b'{"custom_id": "\xff"}',
        b'{"custom_id": NaN}',
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b"\xef\xbb\xbf{}",
        b'{"custom_id": "x",}',
        b"{'custom_id': 'x'}",
    ],
)
def test_a_line_that_is_no_json_object(api: BatchApi, wrong: bytes) -> None:
    errors = api.refused(jsonl(api.chat(1), wrong, api.chat(2)))
    assert [(error["code"], error["line"]) for error in errors] == [("invalid_json_line", 2)]


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
@pytest.mark.parametrize("value", ["missing", None])
def test_a_line_without_a_field(api: BatchApi, name: str, value: Any) -> None:
    line = {**api.chat(1), name: value}
    if value == "missing":
        del line[name]
    (error,) = api.refused(jsonl(api.chat(2), line))
    assert (error["code"], error["param"], error["line"]) == ("missing_required_parameter", name, 2)


@pytest.mark.parametrize("custom_id", [5, "", "x" * 513, ["a"], {}, True])
def test_a_custom_id_that_is_no_name(api: BatchApi, custom_id: Any) -> None:
    (error,) = api.refused(jsonl({**api.chat(1), "custom_id": custom_id}))
    assert (error["param"], error["line"]) == ("custom_id", 1)


def test_the_same_custom_id_twice(api: BatchApi) -> None:
    errors = api.refused(jsonl(api.chat("a"), api.chat("b"), api.chat("a"), api.chat("a")))
    assert [(one["code"], one["line"], one["param"]) for one in errors] == [
        ("duplicate_custom_id", 3, "custom_id"),
        ("duplicate_custom_id", 4, "custom_id"),
    ]


def test_the_same_custom_id_escaped(api: BatchApi) -> None:
    other = json.dumps(api.chat("b")).replace('"b"', '"\\u0061"')
    assert [one["code"] for one in api.refused(jsonl(api.chat("a"), other))] == ["duplicate_custom_id"]


@pytest.mark.parametrize("url", ["/v1/completions", "https://api.openai.com/v1/chat/completions", "", "/", 5])
def test_another_url(api: BatchApi, url: Any) -> None:
    (error,) = api.refused(jsonl(api.chat(1), {**api.chat(2), "url": url}))
    assert (error["code"], error["line"], error["param"]) == ("url_mismatch", 2, "url")


@pytest.mark.parametrize("method", ["GET", "post", "", 5])
def test_another_method(api: BatchApi, method: Any) -> None:
    (error,) = api.refused(jsonl({**api.chat(1), "method": method}))
    assert (error["param"], error["line"]) == ("method", 1)


@pytest.mark.parametrize("body", [[1], "x", 5, True])
def test_a_body_that_is_no_object(api: BatchApi, body: Any) -> None:
    (error,) = api.refused(jsonl({**api.chat(1), "body": body}))
    assert error["param"].startswith("body") and error["line"] == 1


def test_a_body_without_a_model(api: BatchApi) -> None:
    line = api.chat(1)
    del line["body"]["model"]
    assert [one["param"] for one in api.refused(jsonl(line))] == ["body.model"]


@pytest.mark.parametrize("model", [5, "", None, "x" * 400, ["tiny"]])
def test_a_model_that_is_no_name(api: BatchApi, model: Any) -> None:
    assert [one["param"] for one in api.refused(jsonl(api.chat(1, model=model)))] == ["body.model"]


def test_two_models(api: BatchApi) -> None:
    (error,) = api.refused(jsonl(api.chat(1), api.chat(2, model="other")))
    assert (error["code"], error["line"]) == ("model_mismatch", 2)


def test_an_unknown_model(api: BatchApi) -> None:
    assert api.refused(jsonl(api.chat(1, model="nope-9")))[0]["code"] == "model_not_found"


@pytest.mark.parametrize("messages", ["missing", None, [], "text", {}])
def test_a_chat_without_messages(api: BatchApi, messages: Any) -> None:
    line = api.chat(1, messages=messages)
    if messages == "missing":
        del line["body"]["messages"]
    assert [one["param"] for one in api.refused(jsonl(line))] == ["body.messages"]


def test_streams(api: BatchApi) -> None:
    (error,) = api.refused(jsonl(api.chat(1, stream=True)))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "body.stream")


def test_no_stream_is_no_fault(api: BatchApi) -> None:
    assert api.ended(jsonl(api.chat(1, stream=False), api.chat(2, stream=None)))["status"] == "completed"


def test_numbers_that_json_does_not_have(api: BatchApi) -> None:
    wrong = json.dumps(api.chat(1)).replace('"max_tokens": 8', '"temperature": NaN')
    assert [one["line"] for one in api.refused(jsonl(wrong))] == [1]


def test_an_id_that_is_no_text(api: BatchApi) -> None:
    batch = api.ended(jsonl(json.dumps(api.chat("x")).replace('"x"', '"\\ud800"')))
    assert batch["status"] in ("failed", "completed")


def test_all_faults_are_told_in_one_pass_in_order(api: BatchApi) -> None:
    lines = ("{", api.chat(1), api.chat(1), {**api.chat(2), "url": "/v1/x"}, {**api.chat(3), "method": "PUT"})
    assert [one["line"] for one in api.refused(jsonl(*lines))] == [1, 3, 4, 5]


def test_all_faults_of_one_line_are_told(api: BatchApi) -> None:
    found = api.refused(jsonl({"body": {"stream": True}}))
    assert {one["param"] for one in found} >= {"custom_id", "method", "url", "body.model", "body.messages"}
    assert {one["line"] for one in found} == {1}


def test_lines_are_counted_with_their_ends(api: BatchApi) -> None:
    content = b"\r\n".join(json.dumps(api.chat(number)).encode() for number in range(3)) + b"\r\n{\r\n"
    assert [one["line"] for one in api.refused(content)] == [4]


def test_errors_are_limited(api: BatchApi) -> None:
    assert 1 <= len(api.refused(jsonl(*["{"] * 5_000))) <= 1_000


def test_too_many_lines(api: BatchApi) -> None:
    assert [one["code"] for one in api.refused(api.chats(20_001))] == ["too_many_tasks"]


def test_too_many_inputs_of_embeddings(api: BatchApi) -> None:
    url = "/v1/embeddings"
    body = {"model": api.model, "input": ["x"] * 10_001}
    lines = [{"custom_id": f"e{n}", "method": "POST", "url": url, "body": body} for n in range(2)]
    assert [one["code"] for one in api.refused(jsonl(*lines), url)] == ["too_many_tasks"]


def test_a_refused_batch_is_final_and_has_cost_nothing(api: BatchApi) -> None:
    batch = api.ended(b"{\n")
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["usage"] is None or batch["usage"]["total_tokens"] == 0
    assert batch["in_progress_at"] is None and batch["failed_at"] >= batch["created_at"]
    error = is_error(api.cancel(batch["id"]), 400)
    assert "failed" in error["message"]
