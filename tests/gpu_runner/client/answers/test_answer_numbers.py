"""Numbers and words of a hostile server: one that cannot be costs one row, and never the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

import orjson
import pyarrow as pa
import pytest
from aiohttp import web
from support.fake_engine import ORIGIN, Sink, batches
from support.http_server import http_server, status

from gpu_runner.client.engine_client import EngineClient, EngineRefused
from gpu_runner.client.engine_load import MalformedMetrics, parse_metrics
from gpu_runner.client.protocol import (
    Completion,
    Transient,
    error_of,
    read_answer,
    retry_after,
)
from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.rows import Generation
from resources.store.outcome_tables import outcomes_table

ABSURD = [-1, 1 << 31, 1 << 63, 1 << 64, 1e30, 1.5, -0.5, True, False, "7", [7], {"a": 1}]
RUNNING = b"vllm:num_requests_running 1\n"


def text_body(usage: Any = None, content: Any = "t", reason: Any = "stop") -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "text": content, "finish_reason": reason}], "usage": usage})


def vector_body(vector: bytes, usage: bytes = b"{}") -> bytes:
    return b'{"data":[{"index":0,"embedding":' + vector + b'}],"usage":' + usage + b"}"


def refused(task: Any, body: bytes) -> bool:
    with pytest.raises(Transient) as raised:
        read_answer(task, 200, {}, body)
    return raised.value.code == "garbage_body"


@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("value", ABSURD, ids=repr)
def test_a_count_of_tokens_that_cannot_be_makes_the_answer_garbage(field: str, value: Any) -> None:
    body = text_body({"x": 0}).replace(b'"x":0', f'"{field}":{json.dumps(value)}'.encode())
    assert refused("completion", body)


@pytest.mark.parametrize(("value", "tokens"), [(None, 0), (0, 0), (7, 7), (7.0, 7), ((1 << 31) - 1, (1 << 31) - 1)])
def test_a_count_that_can_be_is_kept_and_a_missing_one_is_nothing(value: Any, tokens: int) -> None:
    assert read_answer("completion", 200, {}, text_body({"prompt_tokens": value})).prompt_tokens == tokens


@pytest.mark.parametrize("number", [b"1e39", b"-1e39", b"1e999", b"NaN", b"Infinity", b"null", b'"1"', b"[1]"])
def test_a_vector_of_what_float32_cannot_hold_is_garbage(number: bytes) -> None:
    assert refused("embedding", vector_body(b"[0.5," + number + b"]"))


@pytest.mark.parametrize("vector", [b"{}", b'"AAAA"', b"[" + b"0," * 65_536 + b"0]"], ids=["object", "text", "long"])
def test_what_is_no_vector_of_bounded_length_is_garbage(vector: bytes) -> None:
    assert refused("embedding", vector_body(vector))


@pytest.mark.parametrize("reason", ["x" * 65, 3, ["stop"], {"a": 1}, True], ids=str)
def test_a_finish_reason_that_is_no_short_word_is_garbage(reason: Any) -> None:
    assert refused("completion", text_body(reason=reason))


@pytest.mark.parametrize("content", [b'"\\ud800"', b'"\xff"', b'"\\udc00\\ud800"'], ids=repr)
def test_text_that_is_no_unicode_is_garbage(content: bytes) -> None:
    assert refused("completion", text_body(content="t").replace(b'"t"', content))


def test_nul_and_other_control_characters_are_text_and_kept_as_they_are() -> None:
    said = "a\x00b\x1b[31m\u202e\ufeff"
    assert read_answer("completion", 200, {}, text_body(content=said)) == Completion(said, "stop", 0, 0)


@pytest.mark.parametrize("depth", [300, 1000])
def test_an_error_of_nested_lists_is_an_error_like_any_other(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    for body in (nested, b'{"message":' + nested + b"}", b'{"error":{"code":' + nested + b"}}"):
        assert isinstance(error_of(500, {}, body), Transient)


@pytest.mark.parametrize("figure", ["nan", "NaN", "+Inf", "-Inf", "1e999", "--5", "-1", "", "1e16", "0x10", "1,5", "e"])
@pytest.mark.parametrize("name", ["num_requests_running", "kv_cache_usage_perc", "generation_tokens_total"])
def test_a_page_with_a_figure_that_cannot_be_says_nothing(name: str, figure: str) -> None:
    page = RUNNING + f'vllm:{name}{{engine="0"}} {figure}\n'.encode()
    if figure == "":
        parse_metrics(page)  # a line without a figure is none
    else:
        with pytest.raises(MalformedMetrics):
            parse_metrics(page)


@pytest.mark.parametrize("figure", ["nan", "+Inf", "1e999", "--5", "-3", "1e300"])
def test_a_start_time_that_cannot_be_is_not_told(figure: str) -> None:
    load = parse_metrics(RUNNING + f"process_start_time_seconds {figure}\n".encode())
    assert load is not None and load.started_at is None


@pytest.mark.parametrize(
    "page",
    [b"", b"\x00" * 1000, b"vllm:num_requests_running{", b'vllm:num_requests_running{a="}{}{"} 1\n', b"{}" * 10_000,
     b"vllm:num_requests_running{" + b"}" * 100_000 + b"\n", RUNNING[:-2] + b"\xff\n"],
    ids=range(7),
)  # fmt: skip
def test_no_page_ends_anything_else(page: bytes) -> None:
    with contextlib.suppress(MalformedMetrics):
        parse_metrics(page)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1e300", 3600.0), ("-1e300", 0.0), ("9" * 400, None), ("Fri, 31 Dec 9999 23:59:59 GMT", 3600.0), ("\x00", None)],
)
def test_nobody_is_waited_for_longer_than_an_hour(value: str, seconds: float | None) -> None:
    assert retry_after({"Retry-After": value, "Date": "Fri, 31 Dec 1999 23:59:49 GMT"}) == seconds


@pytest.mark.parametrize("length", [-5, 0, 1 << 40, 1e30, True, "4096", [1], None], ids=repr)
def test_a_context_that_cannot_be_is_not_told(length: Any) -> None:
    async def models(request: web.Request) -> web.Response:
        entry = {"id": "m", "max_model_len": length, "owned_by": {"a": [1]}}
        return web.json_response({"data": [7, None, {"id": 3}, {"id": "x" * 10_000}, entry]})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": ["\x00" * 5000]})

    async def main() -> None:
        async with (
            http_server({"/v1/models": models, "/version": version}) as url,
            EngineClient(url, Generation("chat", "m")) as engine,
        ):
            info = await engine.info()
            assert (info.max_model_len, info.version, info.simulated) == (None, "", False)

    asyncio.run(main())


@pytest.mark.parametrize("page", [b"[]", b'{"data":3}', b'{"data":{"a":1}}', b"[" * 2000, b"\xff", b'{"data":[]}'])
def test_a_list_of_models_that_is_none_refuses_the_engine(page: bytes) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.Response(body=page)

    async def main() -> None:
        async with http_server({"/v1/models": models}) as url, EngineClient(url, Generation("chat", "m")) as engine:
            with pytest.raises(EngineRefused):
                await engine.info()

    asyncio.run(main())


def test_a_server_of_absurd_numbers_costs_the_rows_that_met_them_and_all_others_can_be_stored() -> None:
    """Also with metrics that cannot be, all the time."""
    absurd = {f"r{i}": value for i, value in enumerate(ABSURD)}

    async def complete(request: web.Request) -> web.Response:
        prompt = (await request.json()).get("prompt")
        tokens = absurd.get(prompt, (1 << 31) - 1)
        return web.Response(body=text_body({"prompt_tokens": 5}).replace(b":5", b":" + json.dumps(tokens).encode()))

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running nan\nvllm:generation_tokens_total --5\n")

    async def main() -> None:
        sink, generation = Sink(), Generation("completion", "m")
        retry = RetryPolicy(backoff_min=0.01, backoff_max=0.02, proof_lag=0.05, proof_health=0.1)
        policy = FeedPolicy(retry=retry, poll_seconds=0.1)
        feed = Feed(iter(batches(60)), on_row=sink.on_row, on_batch=sink.on_batch, policy=policy, rng=random.Random(0))
        routes = {"/v1/completions": complete, "/metrics": metrics, "/health": status(200)}
        async with http_server(routes) as url, EngineClient(url, generation) as engine:
            await asyncio.wait_for(feed.serve(engine, ORIGIN, 8), 60)
        assert sink.dead() == dict.fromkeys(absurd, "garbage_body")
        outcomes = [outcome for _, outcome in sink.rows]
        table = outcomes_table(outcomes, "completion")
        assert pa.compute.sum(table.column("prompt_tokens")).as_py() == (60 - len(absurd)) * ((1 << 31) - 1)

    asyncio.run(main())
