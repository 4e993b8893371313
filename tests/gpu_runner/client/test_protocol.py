"""Request bodies, and what answers of OpenAI-compatible servers mean."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
import pytest

from gpu_runner.client.engine_load import EngineLoad, parse_metrics
from gpu_runner.client.input_lists import read_outputs
from gpu_runner.client.protocol import (
    Completion,
    EngineRefused,
    Repair,
    RequestDenied,
    Requests,
    RowRejected,
    Transient,
    error_of,
    read_answer,
    retry_after,
)
from gpu_runner.rows import Generation

SCHEMA = {"type": "object", "required": ["a"]}
MESSAGES = [{"role": "user", "content": 'Grüße \u2028 "x"'}]


def chat_answer(content: Any = "hi", finish_reason: Any = "stop", **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return orjson.dumps({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}} | more)


def test_a_chat_body_holds_model_sampling_and_messages() -> None:
    body = Requests(Generation("chat", "m", {"temperature": 0.5})).body(orjson.dumps(MESSAGES))
    assert orjson.loads(body) == {"model": "m", "temperature": 0.5, "messages": MESSAGES}


@pytest.mark.parametrize(("task", "field"), [("completion", "prompt"), ("embedding", "input")])
def test_a_text_task_sends_the_prompt_in_its_own_field(task: Any, field: str) -> None:
    body = Requests(Generation(task, "m")).body(orjson.dumps("text"))
    assert orjson.loads(body) == {"model": "m", field: "text"}


@pytest.mark.parametrize(
    ("schema", "strict"),
    [(SCHEMA, False), (SCHEMA | {"properties": {"a": {"type": "string"}}, "additionalProperties": False}, True)],
)
def test_a_schema_is_sent_as_structured_output_and_as_strict_where_openai_takes_it(
    schema: dict[str, Any], strict: bool
) -> None:
    body = orjson.loads(Requests(Generation("chat", "m", json_schema=schema)).body(orjson.dumps(MESSAGES)))
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema, "strict": strict},
    }


@pytest.mark.parametrize("field", ["model", "messages", "stream", "n"])
def test_sampling_may_not_overrule_the_client(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Requests(Generation("chat", "m", {field: 1}))


def test_a_chat_repair_shows_the_answer_and_its_fault() -> None:
    requests = Requests(Generation("chat", "m", {"seed": 1}, SCHEMA))
    body = orjson.loads(requests.body(orjson.dumps(MESSAGES), Repair("{}", '"a" is missing', 1)))
    assert body["messages"][:1] == MESSAGES
    assert body["messages"][1] == {"role": "assistant", "content": "{}"}
    assert '"a" is missing' in body["messages"][2]["content"]


def test_a_completion_repair_takes_another_seed() -> None:
    requests = Requests(Generation("completion", "m", {"seed": 5}, SCHEMA))
    assert orjson.loads(requests.body(b'"p"', Repair("", "", 2)))["seed"] == 7
    assert orjson.loads(requests.body(b'"p"'))["seed"] == 5


def test_a_chat_answer_becomes_text_and_tokens() -> None:
    assert read_answer("chat", 200, {}, chat_answer()) == Completion("hi", "stop", 7, 2)


@pytest.mark.parametrize(
    ("named", "model"),
    [("gpt-4o-2024-08-06", "gpt-4o-2024-08-06"), *((odd, None) for odd in (None, "", " ", 7, {}, "x" * 513, "a\nb"))],
)
def test_an_answer_says_which_model_wrote_it(named: Any, model: str | None) -> None:
    assert read_answer("chat", 200, {}, chat_answer(model=named)).model == model
    body = orjson.dumps({"choices": [{"index": 0, "text": "t", "finish_reason": "stop"}], "model": named})
    assert read_answer("completion", 200, {}, body).model == model
    body = orjson.dumps({"data": [{"index": 0, "embedding": [1, 0.5]}], "model": named})
    assert read_answer("embedding", 200, {}, body).model == model
    assert [one.model for one in read_outputs("embedding", 200, {}, body, [1])] == [model]


@pytest.mark.parametrize("reason", ["length", "tool_calls", "repetition"])
def test_every_end_that_the_model_reached_is_an_outcome(reason: str) -> None:
    assert read_answer("chat", 200, {}, chat_answer(None, reason)) == Completion("", reason, 7, 2)


def test_a_completion_answer_becomes_text() -> None:
    body = orjson.dumps({"choices": [{"index": 0, "text": "t", "finish_reason": "length"}], "usage": None})
    assert read_answer("completion", 200, {}, body) == Completion("t", "length", 0, 0)


def test_an_embedding_becomes_a_vector() -> None:
    body = orjson.dumps({"data": [{"index": 0, "embedding": [1, 0.5]}], "usage": {"prompt_tokens": 3}})
    assert read_answer("embedding", 200, {}, body) == Completion((1.0, 0.5), "stop", 3, 0)


@pytest.mark.parametrize("reason", [None, "abort", "error"])
def test_a_row_without_a_proper_end_is_not_done(reason: Any) -> None:
    with pytest.raises(Transient) as raised:
        read_answer("chat", 200, {}, chat_answer("half", reason))
    assert raised.value.code == "unfinished"


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b"{}", b'{"choices":[]}',
     b'{"choices":[{"index":0,"finish_reason":"stop"}]}', b'"x"',
     chat_answer(3), chat_answer("a", 1), chat_answer(usage=[1]), chat_answer()[:-5], b"\xff\xfe"],
)  # fmt: skip
def test_garbage_is_transient(body: bytes) -> None:
    with pytest.raises(Transient) as raised:
        read_answer("chat", 200, {}, body)
    assert raised.value.code == "garbage_body"


@pytest.mark.parametrize(
    ("error", "kind", "code", "message"),
    [
        ({"message": "no credit", "code": 402}, RequestDenied, "rejected_402", "no credit"),
        ({"message": "slow down", "code": "429"}, Transient, "http_429", "slow down"),
        ({"message": "maximum context length is 10", "code": 400}, RowRejected, "context_length_exceeded", None),
        ({"message": "no quota", "code": "insufficient_quota"}, RequestDenied, "rejected_429", "no quota"),
        ({"message": "boom", "code": "oops"}, Transient, "error_answer", "boom"),
        ("boom", Transient, "error_answer", "boom"),
    ],
)
@pytest.mark.parametrize("task", ["chat", "completion", "embedding"])
def test_an_error_of_status_200_keeps_the_server_s_message(
    error: Any, kind: Any, code: str, message: str | None, task: Any
) -> None:
    for read in (partial(read_answer, task), lambda *args: read_outputs(task, *args, [1, 1])):
        with pytest.raises(kind) as raised:
            read(200, {}, orjson.dumps({"error": error}))
        assert raised.value.code == code and (message is None or raised.value.message == message)


@pytest.mark.parametrize(
    ("task", "body", "named"),
    [
        ("chat", b"<!DOCTYPE html>", "15 bytes of a web page (HTML), no JSON"),
        ("chat", b"", "0 bytes of nothing"),
        ("chat", b"{", "1 bytes of what is no JSON"),
        ("chat", b'{"choices": [], "x": NaN}', "25 bytes of JSON with NaN or Infinity, which JSON has not"),
        ("chat", b"[]", "JSON that is no object"),
        ("chat", b'{"choices":[]}', "an answer whose `choices` are empty"),
        ("chat", b'{"id": 1}', "an answer without `choices`"),
        ("chat", chat_answer([{"type": "text"}] * 2), "content in 2 parts, expected one text"),
        ("chat", chat_answer(usage={"prompt_tokens": "3"}), "`usage.prompt_tokens` written as text, expected a number"),
        ("embedding", b'{"data":[]}', "an answer whose `data` are empty"),
        (
            "embedding",
            b'{"data":[{"index":0,"embedding":"AAAA"}]}',
            "a vector written as text (base64), expected a list of numbers",
        ),
    ],
)
def test_what_is_no_answer_is_named_as_what_it_is(task: Any, body: bytes, named: str) -> None:
    with pytest.raises(Transient) as raised:
        read_answer(task, 200, {}, body)
    assert (raised.value.code, raised.value.message) == ("garbage_body", named)


@pytest.mark.parametrize("vector", [[], ["x"], None, 3])
def test_a_broken_vector_is_transient(vector: Any) -> None:
    with pytest.raises(Transient):
        read_answer("embedding", 200, {}, orjson.dumps({"data": [{"index": 0, "embedding": vector}]}))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
def test_busy_and_broken_servers_are_transient(status: int) -> None:
    error = error_of(status, {"Retry-After": "3"}, b"busy")
    assert isinstance(error, Transient)
    assert (error.code, error.retry_after, error.message) == (f"http_{status}", 3.0, "busy")
    assert error.taken == (status != 429)
    assert error.overload == (status in (429, 503))


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500])
@pytest.mark.parametrize(
    ("error", "named"),
    [
        ({"type": "insufficient_quota", "code": "insufficient_quota"}, "insufficient_quota"),
        ({"type": "insufficient_quota", "code": "project_spend_limit_exceeded"}, "project_spend_limit_exceeded"),
        ({"type": "insufficient_quota", "code": None}, "insufficient_quota"),
        ({"type": "exceeded_current_quota_error"}, "exceeded_current_quota_error"),
        ({"type": "invalid_request_error", "code": "billing_hard_limit_reached"}, "billing_hard_limit_reached"),
    ],
)
def test_an_account_that_cannot_pay_is_known_by_its_code_whatever_the_status(
    status: int, error: dict[str, Any], named: str
) -> None:
    denied = error_of(status, {"Retry-After": "1"}, orjson.dumps({"error": {"message": "add credit", **error}}))
    assert isinstance(denied, RequestDenied) and denied.of_account
    assert (denied.code, denied.message) == (f"rejected_{status}", "add credit")
    assert f"found status {status} ({named}): look at its credit" in str(denied)


@pytest.mark.parametrize(
    "code", ["rate_limit_exceeded", "tokens", "RESOURCE_EXHAUSTED", 429, None, ["insufficient_quota"]]
)
def test_a_limit_that_passes_is_none_of_the_account_whatever_its_words(code: Any) -> None:
    words = "You exceeded your current quota, please check your plan and billing details: insufficient_quota"
    assert isinstance(error_of(429, {}, orjson.dumps({"error": {"message": words, "code": code}})), Transient)


@pytest.mark.parametrize("status", [301, 307, 401, 403, 404])
def test_a_wrong_address_or_key_refuses_the_engine(status: int) -> None:
    assert isinstance(error_of(status, {"Location": "http://elsewhere"}, b"no"), EngineRefused)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 1024 tokens. However, you requested 2000 tokens",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "Input is too long for requested model",
    ],
)
def test_a_prompt_beyond_the_context_has_its_own_code(message: str) -> None:
    error = error_of(400, {}, orjson.dumps({"error": {"message": message, "code": 400}}))
    assert isinstance(error, RowRejected)
    assert error.code == "context_length_exceeded"
    assert error.message == message


@pytest.mark.parametrize("status", [400, 402, 409, 413, 418, 422, 451])
def test_other_refusals_name_their_status(status: int) -> None:
    error = error_of(status, {}, b'{"detail":"bad"}')
    assert isinstance(error, RequestDenied)
    assert (error.code, error.message) == (f"rejected_{status}", "bad")


def test_openai_s_code_says_too_long_without_the_words() -> None:
    error = error_of(400, {}, b'{"error":{"message":"no","code":"context_length_exceeded"}}')
    assert isinstance(error, RowRejected)
    assert error.code == "context_length_exceeded"


def test_what_a_server_says_is_cut_and_stays_out_of_the_exception_s_text() -> None:
    error = error_of(400, {}, orjson.dumps({"error": {"message": "prompt: " + "secret " * 500}}))
    assert isinstance(error, RequestDenied)
    assert len(error.message) == 500
    assert "secret" not in f"{error} {error!r}"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ((400, "max_tokens 5000 is above 4,096"), (400, "max_tokens 16 is above 4096"), True),
        ((400, "invalid text 'ab'"), (400, "invalid text 'c d'"), True),
        ((400, "invalid text"), (400, "unsupported parameter: temperature"), False),
        ((400, "no"), (422, "no"), False),
        ((402, "no credit"), (401, "no credit"), False),
        ((401, "wrong key"), (403, "key is blocked"), True),
        ((403, "flagged"), (400, "flagged"), False),
    ],
)
def test_which_refusals_are_alike(one: tuple[int, str], other: tuple[int, str], alike: bool) -> None:
    first, second = (error_of(status, {}, words.encode()) for status, words in (one, other))
    assert isinstance(first, RequestDenied) and isinstance(second, RequestDenied)
    assert first.like(second) is second.like(first) is alike
    assert first.like(EngineRefused("no certificate"))


def test_a_probe_has_the_settings_and_roles_of_a_row_and_none_of_its_text() -> None:
    requests = Requests(Generation("chat", "m", {"temperature": 9}, SCHEMA))
    prompt = orjson.dumps([{"role": "system", "content": "secret"}, {"role": "user", "content": [{"text": "secret"}]}])
    probe = orjson.loads(requests.probe(prompt, content=False))
    ping = [{"role": "system", "content": "ping"}, {"role": "user", "content": "ping"}]
    assert probe == orjson.loads(requests.body(prompt)) | {"messages": ping}
    assert requests.probe(prompt, content=True) == requests.body(prompt)
    texts = Requests(Generation("completion", "m", {"max_tokens": 7}))
    assert orjson.loads(texts.probe(b'"secret"', content=False)) == {"model": "m", "max_tokens": 7, "prompt": "ping"}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2", 2.0), ("0.5", 0.5), ("-1", 0.0), ("x", None), ("Fri, 31 Dec 1999 23:59:59 GMT", 10.0), ("nan", None),
     ("inf", None)],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(value: str, seconds: float | None) -> None:
    headers = {"Retry-After": value, "Date": "Fri, 31 Dec 1999 23:59:49 GMT"}
    assert retry_after(headers) == seconds


def test_metrics_are_summed_over_engines() -> None:
    page = b"""# HELP vllm:num_requests_running Number
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 50.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total{engine="0"} 1.5e+06
vllm:num_preemptions_total{engine="0"} 2.0
"""
    assert parse_metrics(page) == EngineLoad(7, 5, 0.5, 1_500_000, 2, is_vllm=True)
    page += b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.79532198174e+09\n"
    assert parse_metrics(page) == EngineLoad(7, 5, 0.5, 1_500_000, 2, 1_795_321_981.74, is_vllm=True)


def test_a_page_without_vllm_s_metrics_is_no_load() -> None:
    assert parse_metrics(b"process_cpu_seconds_total 3\n") is None


def test_an_answer_that_a_content_filter_ended_says_so() -> None:
    body = orjson.dumps({"choices": [{"message": {"content": "half a"}, "finish_reason": "content_filter"}]})
    assert read_answer("chat", 200, {}, body).filtered
    assert not read_answer("chat", 200, {}, body.replace(b"content_filter", b"length")).filtered
