"""Requests that pass as they are: what an answer says of the row, and what of the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import pytest

from gpu_runner.client.protocol import EngineRefused, RowRejected, Transient
from gpu_runner.client.verbatim_client import KEPT_ERROR_BYTES, error_json, read_whole, refusal


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
