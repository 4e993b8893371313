"""What we rely on in an engine, asked of the simulator, llama.cpp and real vLLM by the same tests.

pytest tests/contract                                   the simulator and llama.cpp
VLLM_PYTHON=… pytest tests/contract -m vllm             real vLLM
"""

from __future__ import annotations

import base64
import json
import math
import re
import socket
import struct
import time
import urllib.parse
from typing import Any

import jsonschema_rs
import pytest
from support.contract_engines import API_KEY, CONTEXT, DIMENSIONS, EMBEDDING_CONTEXT, IDLE_SECONDS, Answer, Served

# Who it is


def test_health_and_ping_answer_without_a_body(engine: Served) -> None:
    for path in ("/health", "/ping"):
        answer = engine.call(path)
        assert (answer.status, answer.body) == (200, b"")


def test_the_model_card_names_model_and_context(engine: Served) -> None:
    listing = engine.call("/v1/models").json
    (card,) = listing["data"]
    assert (listing["object"], card["object"], card["id"]) == ("list", "model", engine.model)
    assert card["max_model_len"] == CONTEXT
    assert isinstance(card["created"], int) and isinstance(card["owned_by"], str)
    assert {"root", "parent", "permission"} <= card.keys()
    assert isinstance(engine.call("/version").json["version"], str)


def test_the_simulator_and_only_the_simulator_says_that_it_simulates(engine: Served) -> None:
    version, card = engine.call("/version").json["version"], engine.call("/v1/models").json["data"][0]
    says = [version.startswith("simulated-"), card["owned_by"] == "simulated", card.get("simulated") is True]
    assert says == [engine.kind == "simulator"] * 3


# Answers


def check_usage(usage: dict[str, Any]) -> None:
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_chat_answer_has_the_fields_that_clients_read(engine: Served) -> None:
    answer = engine.chat(max_tokens=5, ignore_eos=True)
    body = answer.json
    assert answer.status == 200 and answer.headers["content-type"].startswith("application/json")
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == engine.model
    assert abs(body["created"] - time.time()) < 60
    (choice,) = body["choices"]
    assert choice["index"] == 0 and choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert body["usage"]["completion_tokens"] == 5
    check_usage(body["usage"])


def test_a_text_answer_has_the_fields_that_clients_read(engine: Served) -> None:
    body = engine.complete(max_tokens=5, ignore_eos=True).json
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == engine.model
    (choice,) = body["choices"]
    assert choice["index"] == 0 and isinstance(choice["text"], str)
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert body["usage"]["completion_tokens"] == 5
    check_usage(body["usage"])


def test_a_request_id_of_the_client_becomes_part_of_the_answers_id(engine: Served) -> None:
    answer = engine.call(
        "/v1/completions", {"model": engine.model, "prompt": "x", "max_tokens": 1}, {"X-Request-Id": "row-7"}
    )
    assert answer.json["id"] == "cmpl-row-7"


def test_several_prompts_and_token_ids_are_answered_in_order(engine: Served) -> None:
    both = engine.complete(["Hello there", "Hello you"], max_tokens=6, ignore_eos=True).json
    alone = [engine.complete(p, max_tokens=6, ignore_eos=True).json for p in ("Hello there", "Hello you")]
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert [c["text"] for c in both["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert both["usage"]["completion_tokens"] == 12
    ids = engine.complete([9, 10, 11], max_tokens=2, ignore_eos=True).json
    assert ids["usage"]["prompt_tokens"] == 3


def test_n_choices_of_one_prompt(engine: Served) -> None:
    body = engine.chat(max_tokens=8, ignore_eos=True, n=3, temperature=1, seed=5).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) > 1
    assert body["usage"]["completion_tokens"] == 24


def test_a_content_of_text_parts_is_taken(any_engine: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert any_engine.call("/v1/chat/completions", {"messages": messages, "max_tokens": 2}).status == 200


def test_the_model_may_be_left_out(any_engine: Served) -> None:
    body = any_engine.call("/v1/completions", {"prompt": "x", "max_tokens": 2}).json
    assert body["model"] == any_engine.model


# Where an answer ends


def test_the_end_token_counts_when_an_answer_stops_by_itself(engine: Served) -> None:
    choice_of = {"structured_outputs": {"choice": ["yes"]}}
    body = engine.chat(max_tokens=20, **choice_of).json
    assert body["choices"][0]["message"]["content"] == "yes"
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", None)
    assert 2 <= body["usage"]["completion_tokens"] <= 4


def test_max_tokens_ends_an_answer_with_length(any_engine: Served) -> None:
    for limit in (1, 7, 33):
        for name in ("max_tokens", "max_completion_tokens"):
            body = any_engine.chat(ignore_eos=True, **{name: limit}).json
            assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", limit)


def test_a_stop_string_ends_an_answer_and_is_left_out(engine: Served) -> None:
    choice = engine.chat(max_tokens=40, structured_outputs={"regex": "abcdefgh"}, stop=["ef"]).json["choices"][0]
    assert choice["message"]["content"] == "abcd"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ef")


def test_a_text_completion_without_max_tokens_has_sixteen(engine: Served) -> None:
    assert engine.complete(ignore_eos=True).json["usage"]["completion_tokens"] == 16


def test_a_chat_without_max_tokens_may_fill_the_context(any_engine: Served) -> None:
    body = any_engine.chat(ignore_eos=True).json
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == CONTEXT


def test_max_tokens_beyond_what_the_context_leaves_are_cut_in_silence(any_engine: Served) -> None:
    body = any_engine.complete([9] * (CONTEXT - 4), max_tokens=CONTEXT, ignore_eos=True).json
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 4)


def test_the_same_seed_gives_the_same_text_and_another_another(any_engine: Served) -> None:
    def text(seed: int) -> str:
        fields = {"max_tokens": 30, "ignore_eos": True, "temperature": 1}
        content: str = any_engine.chat(seed=seed, **fields).json["choices"][0]["message"]["content"]
        return content

    assert text(1) == text(1) != text(2)


# Streams


def test_a_chat_stream_ends_with_a_finish_reason_usage_and_done(engine: Served) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True}
    whole = engine.chat(**fields).json
    answer = engine.chat(stream=True, stream_options={"include_usage": True}, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = answer.events
    chunks = [json.loads(event) for event in events]
    assert last == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert chunks[-1]["choices"] == []
    assert {k: v for k, v in chunks[-1]["usage"].items() if v is not None} == {
        k: v for k, v in whole["usage"].items() if v is not None
    }


def test_a_text_stream_without_usage_ends_with_its_finish_reason(engine: Served) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True}
    *events, last = engine.complete(stream=True, **fields).events
    chunks = [json.loads(event) for event in events]
    assert last == "[DONE]" and {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(c["choices"][0]["text"] for c in chunks) == engine.complete(**fields).json["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk.get("usage") is None for chunk in chunks)


def test_a_refused_stream_is_an_ordinary_error(engine: Served) -> None:
    answer = engine.complete([9] * (CONTEXT + 1), stream=True)
    assert answer.status == 400 and "maximum context length" in answer.json["error"]["message"]


# Structured outputs

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "sure": {"type": "boolean"},
        "nothing": {"type": "null"},
        "score": {"type": "integer", "minimum": 1, "maximum": 9},
        "code": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$"},
        # Not maxLength: xgrammar then lets control characters through, which makes the answer invalid JSON.
        "word": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2},
        "either": {"anyOf": [{"const": 1}, {"type": "null"}]},
    },
    "required": ["color", "sure", "nothing", "score", "code", "word", "list", "either"],
    "additionalProperties": False,
    "$defs": {"item": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}


@pytest.mark.parametrize("form", ["response_format", "structured_outputs"])
def test_structured_output_fits_its_schema(engine: Served, form: str) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    fields = {"response_format": named} if form == "response_format" else {"structured_outputs": {"json": SCHEMA}}
    for seed in range(5):
        body = engine.chat(f"Question {seed}", max_tokens=600, temperature=1, seed=seed, **fields).json
        assert body["choices"][0]["finish_reason"] == "stop"
        found = json.loads(body["choices"][0]["message"]["content"])
        assert not list(jsonschema_rs.validator_for(SCHEMA).iter_errors(found)), found


def test_a_regex_and_a_choice_are_obeyed(engine: Served) -> None:
    regex = engine.chat(max_tokens=50, structured_outputs={"regex": r"[a-c]{3}-\d{2}"}).json
    assert re.fullmatch(r"[a-c]{3}-\d{2}", regex["choices"][0]["message"]["content"])
    choice = engine.chat(max_tokens=50, structured_outputs={"choice": ["red", "green"]}).json
    assert choice["choices"][0]["message"]["content"] in ("red", "green")


def test_json_cut_off_by_max_tokens_says_length(engine: Served) -> None:
    body = engine.chat(max_tokens=3, structured_outputs={"json": SCHEMA}).json
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_schema_that_no_grammar_can_express_is_refused(engine: Served) -> None:
    answer = engine.chat(structured_outputs={"json": {"type": "nonsense"}})
    check_error(answer, 400, "BadRequestError", None, "nonsense")
    answer = engine.chat(response_format={"type": "json_schema"})
    check_error(answer, 400, "BadRequestError", "response_format", "'json_schema' field must be provided")


# Refusals


def check_error(answer: Answer, status: int, kind: str | None, param: str | None, words: str) -> None:
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert kind is None or error["type"] == kind
    assert error["param"] == param
    assert words in error["message"]


def test_an_unknown_model_is_404(engine: Served) -> None:
    answer = engine.chat(model="another")
    check_error(answer, 404, "NotFoundError", "model", "The model `another` does not exist.")
    check_error(engine.complete(model="another"), 404, "NotFoundError", "model", "`another`")


def test_a_prompt_beyond_the_context_is_refused_with_the_limit(engine: Served) -> None:
    words = f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains at least"
    check_error(engine.chat("x" * 10 * CONTEXT), 400, "BadRequestError", "input_tokens", words)
    check_error(engine.complete([9] * (CONTEXT + 1)), 400, "BadRequestError", "input_tokens", words)


def test_a_text_that_is_too_long_for_its_tokens_to_be_counted_is_refused_alike(engine: Served) -> None:
    answer = engine.chat("x" * 1000 * CONTEXT)
    assert answer.status == 400
    assert f"maximum context length is {CONTEXT} tokens. However, your prompt" in answer.json["error"]["message"]


def test_the_edge_of_the_context_is_exact(engine: Served) -> None:
    for free in (2, 1):
        body = engine.complete([9] * (CONTEXT - free), max_tokens=5, ignore_eos=True).json
        assert body["usage"]["completion_tokens"] == free
    full = engine.complete([9] * CONTEXT, max_tokens=5)
    check_error(full, 400, "BadRequestError", "max_tokens", "max_tokens must be at least 1, got 0")


def test_max_tokens_beyond_the_context_are_refused(engine: Served) -> None:
    words = f"max_tokens={CONTEXT + 1} cannot be greater than max_model_len={CONTEXT}"
    check_error(engine.chat(max_tokens=CONTEXT + 1), 400, "BadRequestError", "max_tokens", words)
    assert engine.chat(max_tokens=CONTEXT).status == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -3}, "max_tokens", "max_tokens must be at least 1, got -3"),
        ({"max_tokens": "x"}, "body.max_tokens", "Input should be a valid integer"),
        ({"temperature": -1}, "temperature", "temperature must be non-negative, got -1.0"),
        ({"temperature": 3}, "temperature", "temperature must be in [0, 2], got 3.0"),
        ({"temperature": "hot"}, "body.temperature", "Input should be a valid number"),
        ({"top_p": 2}, "top_p", "top_p must be in (0, 1], got 2.0"),
        ({"n": 2}, None, "n must be 1 when using greedy sampling, got 2"),
        ({"stop": ["1", "2", "3", "4", "5"]}, "body.stop", "at most 4"),
        ({"messages": "hi"}, "body.messages", "Input should be a valid list"),
        ({"messages": []}, None, "empty conversation"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(
    engine: Served, fields: dict[str, Any], param: str | None, words: str
) -> None:
    check_error(engine.chat(**fields), 400, None, param, words)


def test_a_body_that_cannot_be_read_is_refused(engine: Served) -> None:
    path = "/v1/chat/completions"
    check_error(engine.call(path, b"{bad"), 400, "Bad Request", "body.1", "JSON decode error")
    check_error(engine.call(path, b""), 400, "Bad Request", "body", "Field required")
    check_error(engine.call(path, {}), 400, "Bad Request", "body.messages", "Field required")
    check_error(engine.call("/v1/completions", {}), 400, "BadRequestError", "prompt", "Either prompt")


def test_unknown_paths_and_methods_are_told_apart(engine: Served) -> None:
    for path, body in (("/nothing", None), ("/v1/nothing", {})):
        answer = engine.call(path, body)
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
    answer = engine.call("/v1/chat/completions")
    assert (answer.status, answer.json) == (405, {"detail": "Method Not Allowed"})


def test_unknown_fields_and_priority_are_taken_in_silence(any_engine: Served) -> None:
    plain = any_engine.chat(max_tokens=10, ignore_eos=True).json["choices"]
    fields = {"frobnicate": 1, "guided_json": SCHEMA, "priority": 5}
    assert any_engine.chat(max_tokens=10, ignore_eos=True, **fields).json["choices"] == plain


# Access


@pytest.mark.parametrize("given", [None, "Bearer wrong", API_KEY, "Basic " + API_KEY])
def test_the_api_key_guards_v1(engine: Served, given: str | None) -> None:
    stranger = Served(engine.kind, engine.url, engine.model, engine.pid)
    headers = {} if given is None else {"Authorization": given}
    body = {"model": engine.model, "prompt": "x", "max_tokens": 1}
    for path, sent in (("/v1/models", None), ("/v1/completions", body), ("/v1/nothing", {})):
        answer = stranger.call(path, sent, headers)
        assert (answer.status, answer.json) == (401, {"error": "Unauthorized"})
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert stranger.call(path, None, headers).status == 200


def test_an_idle_connection_is_closed_after_the_keep_alive_time(any_engine: Served) -> None:
    address = urllib.parse.urlsplit(any_engine.url)
    assert address.hostname and address.port
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.settimeout(IDLE_SECONDS + 10)
        for _ in range(2):  # it is kept while it is in use
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: any_engine\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            answered = time.monotonic()
            time.sleep(IDLE_SECONDS / 2)
        assert connection.recv(4096) == b""
        assert 0.9 * IDLE_SECONDS < time.monotonic() - answered < IDLE_SECONDS + 5


def test_a_client_that_hangs_up_frees_its_slots(any_engine: Served) -> None:
    address = urllib.parse.urlsplit(any_engine.url)
    assert address.hostname and address.port
    before = any_engine.load().progress
    body = json.dumps({"prompt": [9] * 5, "max_tokens": CONTEXT - 10, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: any_engine\r\nAuthorization: Bearer {API_KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    count = 24 if any_engine.kind == "llama_cpp" else 40  # more than it has slots, or fewer
    connections = [socket.create_connection((address.hostname, address.port)) for _ in range(count)]
    for connection in connections:
        connection.sendall(head.encode() + body)
    wait_until(lambda: any_engine.load().running > 0)
    for connection in connections:
        connection.close()
    wait_until(lambda: any_engine.load().running + any_engine.load().waiting == 0)
    assert any_engine.load().progress - before < count * (CONTEXT - 10)


def wait_until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


# Metrics

GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
COUNTERS = ["prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
]


def test_metrics_have_vllms_names_and_its_label(engine: Served) -> None:
    engine.chat(max_tokens=3)
    names = {name for name in engine.metrics() if name.startswith("vllm:")}
    labels = {match for name in names for match in re.findall(r'model_name="([^"]*)"', name)}
    assert labels == {engine.model}
    bare = {name.split("{")[0].removeprefix("vllm:") for name in names}
    expected = {*GAUGES, "num_requests_waiting_by_reason", "cache_config_info", "request_success_total"}
    expected |= {f"{name}_total" for name in COUNTERS}
    expected |= {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")}
    assert expected <= bare
    reasons = {m for name in names for m in re.findall(r'finished_reason="([^"]*)"', name)}
    assert {"stop", "length", "abort", "error"} <= reasons


def test_metrics_tell_when_the_process_began(engine: Served) -> None:
    began = engine.metrics()["process_start_time_seconds"]
    assert time.time() - 3600 < began < time.time()
    assert engine.metrics()["process_start_time_seconds"] == began


def test_bucket_borders_are_vllms_own(engine: Served) -> None:
    borders = {
        name: [float(le) for series in engine.metrics() if series.startswith(f"vllm:{name}_bucket")
               for le in re.findall(r'le="([^"]*)"', series)]
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds")
    }  # fmt: skip
    assert borders["time_to_first_token_seconds"][:3] == [0.001, 0.005, 0.01]
    assert borders["e2e_request_latency_seconds"][-2:] == [7680.0, math.inf]
    assert borders["inter_token_latency_seconds"][:2] == [0.01, 0.025]
    assert [len(found) for found in borders.values()] == [23, 22, 20]


def test_counters_grow_by_what_the_answers_say(engine: Served) -> None:
    before = {name: engine.total(f"{name}_total") for name in (*COUNTERS, "request_success")}
    answers = [engine.chat(f"Question {n}", max_tokens=9, ignore_eos=True).json["usage"] for n in range(5)]
    grown = {name: engine.total(f"{name}_total") - value for name, value in before.items()}
    assert grown["generation_tokens"] == sum(usage["completion_tokens"] for usage in answers) == 45
    assert grown["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in answers)
    assert grown["request_success"] == 5
    assert engine.total("num_requests_running") == 0


# Embeddings


def test_an_embedding_answer_has_unit_vectors_in_the_order_of_the_inputs(embedder: Served) -> None:
    body = embedder.embed(["one apple", "two apples", "one apple"]).json
    assert body["id"].startswith("embd-") and body["object"] == "list" and body["model"] == embedder.model
    assert [(item["index"], item["object"]) for item in body["data"]] == [(n, "embedding") for n in range(3)]
    one, two, again = (item["embedding"] for item in body["data"])
    assert len(one) == len(two) == DIMENSIONS
    assert math.hypot(*one) == pytest.approx(1, abs=1e-3)
    assert math.dist(one, again) < 0.05 and one != two
    assert body["usage"]["completion_tokens"] == 0
    check_usage(body["usage"])


def test_an_embedding_comes_as_base64_of_float32_when_asked_for(any_embedder: Served) -> None:
    plain = any_embedder.embed("one apple").json["data"][0]["embedding"]
    packed = any_embedder.embed("one apple", encoding_format="base64").json["data"][0]["embedding"]
    assert list(struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(packed))) == pytest.approx(plain, abs=0.02)


def test_an_embedding_of_token_ids_and_of_nothing_works(any_embedder: Served) -> None:
    assert any_embedder.embed([5, 6, 7]).json["usage"]["prompt_tokens"] == 3
    assert len(any_embedder.embed("").json["data"][0]["embedding"]) == DIMENSIONS


def test_a_list_of_inputs_counts_as_its_inputs_one_by_one(embedder: Served) -> None:
    texts = ["one apple", "", "two apples and a pear"]
    alone = [embedder.embed(text).json for text in texts]
    together = embedder.embed(texts).json
    assert together["usage"]["prompt_tokens"] == sum(body["usage"]["prompt_tokens"] for body in alone)
    for item, body in zip(together["data"], alone, strict=True):
        assert math.dist(item["embedding"], body["data"][0]["embedding"]) < 0.05
    assert [item["index"] for item in embedder.embed(["x"] * 65).json["data"]] == list(range(65))


def test_one_input_that_is_too_long_refuses_the_whole_list(embedder: Served) -> None:
    words = f"This model's maximum context length is {EMBEDDING_CONTEXT} tokens."
    answer = embedder.embed(["one apple", "one " * 2 * EMBEDDING_CONTEXT, "two apples"])
    check_error(answer, 400, "BadRequestError", "input_tokens", words)
    check_error(embedder.embed([]), 400, "BadRequestError", None, "You must pass at least one prompt")
    assert embedder.embed(["one apple", None]).status == 400


def test_embeddings_refuse_what_they_cannot_do(embedder: Served) -> None:
    check_error(embedder.embed(model="another"), 404, "NotFoundError", None, "`another`")
    words = f"This model's maximum context length is {EMBEDDING_CONTEXT} tokens."
    check_error(embedder.embed("one " * 2 * EMBEDDING_CONTEXT), 400, "BadRequestError", "input_tokens", words)
    answer = embedder.embed("x", dimensions=DIMENSIONS // 2)
    check_error(answer, 400, "BadRequestError", None, "does not support Matryoshka embeddings")
    assert embedder.call("/v1/embeddings", {"model": embedder.model}).status == 400
