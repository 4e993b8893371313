"""A completed batch: its object, its lines, its files."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from support.batch_api import BatchApi, jsonl
from support.timing import PATIENCE

pytestmark = pytest.mark.slow


def test_a_completed_batch(api: BatchApi, done: dict[str, Any]) -> None:
    assert done["status"] == "completed" and done["model"] == api.model and done["metadata"] == {"a": "b"}
    assert done["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
    times = [done[name] for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at")]
    assert times == sorted(times) and all(isinstance(one, int) for one in times)
    for name in ("error_file_id", "errors", "failed_at", "expired_at", "cancelling_at", "cancelled_at"):
        assert done[name] is None, name
    assert api.get(done["id"]) == done


def test_usage_is_that_of_all_lines(api: BatchApi, done: dict[str, Any]) -> None:
    usage = done["usage"]
    assert set(usage) == {
        "input_tokens",
        "input_tokens_details",
        "output_tokens",
        "output_tokens_details",
        "total_tokens",
    }
    assert set(usage["input_tokens_details"]) == {"cached_tokens"}
    assert set(usage["output_tokens_details"]) == {"reasoning_tokens"}
    told = [one["response"]["body"]["usage"] for one in api.lines(done["output_file_id"])]
    assert usage["input_tokens"] == sum(one["prompt_tokens"] for one in told) > 0
    assert usage["output_tokens"] == sum(one["completion_tokens"] for one in told) > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_lines_of_the_output(api: BatchApi, done: dict[str, Any]) -> None:
    output = api.lines(done["output_file_id"])
    assert sorted(one["custom_id"] for one in output) == sorted(f"r-{number}" for number in range(10))
    assert len({one["id"] for one in output}) == len({one["response"]["request_id"] for one in output}) == 10
    for one in output:
        assert set(one) == {"id", "custom_id", "response", "error"} and one["error"] is None
        assert one["id"].startswith("batch_req_")
        assert set(one["response"]) == {"status_code", "request_id", "body"} and one["response"]["status_code"] == 200
        body = one["response"]["body"]
        assert body["object"] == "chat.completion" and body["id"] and isinstance(body["created"], int)
        assert body["model"] and body["choices"][0]["message"]["role"] == "assistant"
        assert body["choices"][0]["finish_reason"] in ("stop", "length")


def test_every_line_of_a_file_ends(api: BatchApi, done: dict[str, Any]) -> None:
    content = api.content(done["output_file_id"])
    assert content.endswith(b"\n") and content.count(b"\n") == 10 and b"\r" not in content


def test_completions(api: BatchApi) -> None:
    body = {"model": api.model, "prompt": "once", "max_tokens": 4}
    url = "/v1/completions"
    lines = [{"custom_id": f"c{n}", "method": "POST", "url": url, "body": body} for n in range(3)]
    output, errors = api.results(api.ended(jsonl(*lines), endpoint=url))
    assert len(output) == 3 and not errors
    for one in output:
        answer = one["response"]["body"]
        assert answer["object"] == "text_completion" and isinstance(answer["choices"][0]["text"], str)


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("inputs", ["one", ["one", "two"]])
def test_embeddings(api: BatchApi, encoding: str, inputs: Any) -> None:
    body = {"model": api.model, "input": inputs, "encoding_format": encoding}
    line = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}
    batch = api.ended(jsonl(line), endpoint="/v1/embeddings")
    (one,), errors = api.results(batch)
    answer = one["response"]["body"]
    assert answer["object"] == "list" and not errors and batch["usage"]["output_tokens"] == 0
    assert [entry["index"] for entry in answer["data"]] == list(range(1 if inputs == "one" else 2))
    for entry in answer["data"]:
        vector = entry["embedding"]
        assert entry["object"] == "embedding"
        assert isinstance(vector, list) == (encoding == "float") and len(vector) > 0
        assert encoding == "float" or len(base64.b64decode(vector, validate=True)) % 4 == 0


def test_a_small_batch_is_done_in_seconds(api: BatchApi) -> None:
    began = time.monotonic()
    assert api.ended(api.chats(10))["status"] == "completed"
    assert time.monotonic() - began < 10 * PATIENCE


def test_six_hundred_lines(api: BatchApi) -> None:
    batch = api.ended(api.chats(600))
    assert batch["request_counts"] == {"total": 600, "completed": 600, "failed": 0}
    assert len({one["custom_id"] for one in api.lines(batch["output_file_id"])}) == 600


def test_each_line_has_parameters_of_its_own(api: BatchApi) -> None:
    short = api.chat("a", max_tokens=2, ignore_eos=True)
    long = api.chat("b", max_tokens=20, ignore_eos=True, temperature=0.3)
    many = api.chat("c", n=2)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    tools = api.chat("d", tools=[tool])
    batch = api.ended(jsonl(short, long, many, tools))
    found = {one["custom_id"]: one["response"]["body"] for one in api.lines(batch["output_file_id"])}
    assert (found["a"]["usage"]["completion_tokens"], found["b"]["usage"]["completion_tokens"]) == (2, 20)
    assert len(found["c"]["choices"]) == 2 and found["d"]["choices"]


def test_conversations_of_several_turns(api: BatchApi) -> None:
    line = api.chat("m")
    line["body"]["messages"] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    assert api.ended(jsonl(line))["request_counts"]["completed"] == 1


def test_ids_of_any_text(api: BatchApi) -> None:
    names = [
        "ü",
        "日本",
        "a b",
        'q"uote',
        "x" * 500,
        "emoji😀",
        "\\back",
        "\u0000nul",
        "\u2028",
        " lead",
        "line\nbreak",
    ]
    batch = api.ended(jsonl(*(api.chat(name) for name in names)))
    assert sorted(one["custom_id"] for one in api.lines(batch["output_file_id"])) == sorted(names)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n\n", "\n \n"])
def test_line_ends(api: BatchApi, end: str) -> None:
    content = "\r\n".join(json.dumps(api.chat(number)) for number in range(3)) + end
    batch = api.ended(content.encode())
    assert batch["status"] == "completed" and batch["request_counts"]["total"] == 3


def test_fields_that_are_not_documented_do_no_harm(api: BatchApi) -> None:
    batch = api.ended(jsonl({**api.chat("a"), "note": {"x": 1}}))
    assert batch["status"] == "completed"


def test_lines_that_the_engine_refuses_are_in_the_error_file(api: BatchApi) -> None:
    batch = api.ended(jsonl(api.chat(1), api.chat("bad", temperature=-3)))
    assert batch["status"] == "completed" and batch["errors"] is None
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    output, (wrong,) = api.results(batch)
    assert [one["custom_id"] for one in output] == ["r-1"]
    assert set(wrong) == {"id", "custom_id", "response", "error"} and wrong["custom_id"] == "bad"
    assert wrong["error"] is None and wrong["response"]["status_code"] == 400 and wrong["response"]["request_id"]
    assert wrong["response"]["body"]["error"]["message"] and wrong["id"].startswith("batch_req_")
    file = api.client.get(f"/v1/files/{batch['error_file_id']}").json()
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_error.jsonl")


@pytest.mark.parametrize("body", [{"max_tokens": 0}, {"max_tokens": -1}, {"n": 0}, {"top_p": 5}, {"messages": ["x"]}])
def test_a_refused_line_has_the_documented_error(api: BatchApi, body: dict[str, Any]) -> None:
    batch = api.ended(jsonl(api.chat(1), api.chat("bad", **body)))
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (wrong,) = api.lines(batch["error_file_id"])
    error = wrong["response"]["body"]["error"]
    assert set(wrong["response"]["body"]) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))


def test_a_batch_of_refused_lines_is_completed_without_an_output_file(api: BatchApi) -> None:
    batch = api.ended(api.chats(9, temperature=-3))
    assert batch["status"] == "completed" and batch["output_file_id"] is None
    assert batch["request_counts"] == {"total": 9, "completed": 0, "failed": 9}
    assert len(api.lines(batch["error_file_id"])) == 9


def test_a_prompt_beyond_the_context_is_a_line_of_the_error_file_or_refused(api: BatchApi) -> None:
    long = api.chat("long")
    long["body"]["messages"][0]["content"] = "word " * 200_000
    batch = api.ended(jsonl(api.chat(1), long))
    assert batch["status"] in ("completed", "failed")
    if batch["status"] == "completed":
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert [one["custom_id"] for one in api.lines(batch["error_file_id"])] == ["long"]
    else:
        assert [one["line"] for one in batch["errors"]["data"]] == [2]


def test_the_input_may_be_deleted_while_its_batch_runs(api: BatchApi) -> None:
    file = api.file(api.chats(500))["id"]
    batch = api.create(file).json()
    api.client.delete(f"/v1/files/{file}")
    assert api.until(batch["id"])["request_counts"] == {"total": 500, "completed": 500, "failed": 0}


def test_many_small_batches(api: BatchApi) -> None:
    file = api.file(api.chats(20))["id"]
    for name in [api.create(file).json()["id"] for _ in range(40)]:
        assert api.until(name)["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
