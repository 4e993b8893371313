"""Requests that pass as they are: what an answer says of the row, and what of the engine."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from support.http_server import ANSWER, http_server
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from gpu_runner.client.protocol import Completion, EngineRefused, RowRejected, Transient
from gpu_runner.client.verbatim_client import (
    KEPT_ERROR_BYTES,
    VerbatimClient,
    error_json,
    read_each,
    read_whole,
    refusal,
)
from gpu_runner.rows import Generation


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)


def refused(status: int, body: bytes = b'{"error": {"message": "no"}}') -> Exception:
    return refusal(cast(aiohttp.ClientResponse, Answer(status)), body)


@pytest.mark.parametrize("status", [400, 403, 405, 413, 422])
def test_a_refused_request_is_its_writers_affair(status: int) -> None:
    error = refused(status)
    assert isinstance(error, RowRejected) and error.code == f"rejected_{status}"
    assert json.loads(error.message) == {"error": {"message": "no"}}


def test_a_refused_key_or_model_says_something_of_the_engine() -> None:
    assert isinstance(refused(401), EngineRefused) and isinstance(refused(307), EngineRefused)
    assert isinstance(refused(429, b'{"error": {"type": "insufficient_quota"}}'), EngineRefused)
    assert isinstance(refused(404, b'{"message": "The model `x` does not exist."}'), EngineRefused)
    assert isinstance(refused(404, b'{"message": "no such page"}'), RowRejected)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_trouble_of_the_server_passes(status: int) -> None:
    error = refused(status)
    assert isinstance(error, Transient) and error.code == f"http_{status}"


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"\xff\xfe", b'"x' + b"y" * 2 * KEPT_ERROR_BYTES + b'"', b"[" * 9999]
)
def test_any_error_body_becomes_json_within_bounds(body: bytes) -> None:
    text = error_json(body)
    assert len(text) <= KEPT_ERROR_BYTES and "\n" not in text
    assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


def answer(**more: Any) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    return json.dumps({"choices": [{"finish_reason": "stop"}], "usage": usage, **more}, indent=2).encode()


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 9}, {"max_tokens": 1}),
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        ({"max_tokens": 9, "max_completion_tokens": None}, {"max_tokens": 1}),
    ],
)
def test_a_canary_limits_its_answer_by_the_field_of_the_row(limits: dict[str, Any], sent: dict[str, int]) -> None:
    bodies: list[dict[str, Any]] = []

    async def note(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response(ANSWER)

    async def main() -> None:
        routes, generation = {"/v1/chat/completions": note}, Generation("chat", "m")
        async with http_server(routes) as url, VerbatimClient(url, generation) as engine:
            await engine.canary(json.dumps({"model": "m", "messages": [], **limits}).encode())

    asyncio.run(main())
    assert bodies == [{"model": "m", "messages": [], **sent}]


def test_an_answer_is_kept_whole_on_one_line() -> None:
    found = read_whole(answer(anything=[1, None]))
    assert (found.finish_reason, found.prompt_tokens, found.completion_tokens) == ("stop", 3, 4)
    assert (
        isinstance(found.output, str) and "\n" not in found.output and json.loads(found.output)["anything"] == [1, None]
    )


def test_an_embedding_in_base64_is_an_answer() -> None:
    body = b'{"object":"list","data":[{"embedding":"AAAA"}],"usage":{"prompt_tokens":1}}'
    assert read_whole(body).prompt_tokens == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", answer(choices=[{"finish_reason": None}]), answer(choices=[{"finish_reason": "abort"}]), b'"x"'],
)
def test_what_is_no_whole_answer_is_asked_again(body: bytes) -> None:
    with pytest.raises(Transient):
        read_whole(body)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        ({"message": "no credit", "code": 402}, EngineRefused, None),
        ({"message": "no quota", "code": "insufficient_quota"}, EngineRefused, None),
        ({"message": "flagged", "code": 403}, RowRejected, "rejected_403"),
        ({"message": "slow down", "code": "429"}, Transient, "http_429"),
        ({"message": "boom", "code": "oops"}, Transient, "http_502"),
        ("boom", Transient, "http_502"),
    ],
)
def test_an_error_of_status_200_is_no_answer_and_keeps_the_server_s_words(error: Any, kind: Any, code: Any) -> None:
    with pytest.raises(kind) as raised:
        read_whole(json.dumps({"error": error}).encode())
    if code is not None:
        assert raised.value.code == code and json.loads(raised.value.message)["error"] == error


@pytest.mark.parametrize("body", [answer(choices=[]), b'{"id": "x"}', b'{"object": "list", "data": []}'])
def test_an_answer_without_choices_and_vectors_is_none(body: bytes) -> None:
    with pytest.raises(Transient, match="garbage_body"):
        read_whole(body)


def embedding(text: Any, **more: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": text, **more}).encode()


def asked(log: Path) -> int:
    return log.read_text().count('"event":"received"')


def test_texts_that_agree_in_all_else_are_one_request_and_each_answer_is_as_if_alone(tmp_path: Path) -> None:
    bodies = [embedding("a"), embedding("c c c"), embedding("f")]

    async def ask() -> tuple[list[Completion], list[Completion]]:
        async with VerbatimClient(engine.url, Generation("embedding", "tiny")) as client:
            assert client.takes_lists
            assert len({client.list_kind(body) for body in bodies}) == 1
            assert client.list_kind(embedding("b", user="u")) not in (None, client.list_kind(bodies[0]))
            assert client.list_kind(embedding(["d", "e"])) is None
            for other in (embedding("b", user="u"), embedding(["d", "e"])):
                with pytest.raises(ValueError, match="agree in all else"):
                    await client.generate_list([bodies[0], other])
            return await client.generate_list(bodies), [await client.generate(body) for body in bodies]

    log = tmp_path / "log"
    with simulated_engine("--speed", "50", "--request-log", str(log)) as engine:
        together, alone = asyncio.run(ask())
        deadline = time.monotonic() + 10 * PATIENCE
        while asked(log) < 1 + len(bodies) and time.monotonic() < deadline:  # it is written five times a second
            time.sleep(0.02)
    assert asked(log) == 1 + len(bodies)
    assert [json.loads(str(one.output))["data"] for one in together] == [
        json.loads(str(one.output))["data"] for one in alone
    ]
    tokens = [sum(one.prompt_tokens for one in answers) for answers in (together, alone)]
    assert tokens[0] == tokens[1] > 0
    assert {one.finish_reason for one in together} == {"stop"}


def test_one_refused_text_refuses_the_list() -> None:
    refusal = json.dumps([{"kind": "too_long", "match": {"contains": "oops"}}])

    async def ask() -> None:
        async with VerbatimClient(engine.url, Generation("embedding", "tiny")) as client:
            with pytest.raises(RowRejected):
                await client.generate_list([embedding("oops"), embedding("a")])

    with simulated_engine("--speed", "50", "--faults", refusal) as engine:
        asyncio.run(ask())


def test_an_answer_to_several_texts_that_is_none_is_asked_for_once_more() -> None:
    for body in (b"", b"[]", b'{"data": []}', b'{"data": [{"index": 0}, {"index": 0}]}'):
        with pytest.raises(Transient, match="garbage_body"):
            read_each(body, [1, 1])
