"""JSON bodies: read when the caller is known, of the documented type, refused by the name of what is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from batch_assets.api.app import create_app
from batch_assets.api.batches.create import CreateBatch
from batch_assets.api.online import routes as online
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller, Scope
from batch_assets.api.requests.json_body import parse_body
from batch_assets.api.settings import ApiSettings

GOOD = b'{"input_file_id": "file-x", "endpoint": "/v1/embeddings", "completion_window": "24h"}'
UNREADABLE = [b"{", b"", b"[]", b"null", b"\xff", b"[" * 100_000]


def refused(body: bytes, content_type: str = "application/json") -> ApiError:
    with pytest.raises(ApiError) as found:
        parse_body(CreateBatch, content_type, body)
    assert found.value.status == 400
    return found.value


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
def test_json_is_taken_under_its_names(kind: str) -> None:
    assert parse_body(CreateBatch, kind, GOOD).input_file_id == "file-x"


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "+json"]
)
def test_another_type_is_said_to_be_one(kind: str) -> None:
    error = refused(GOOD, kind)
    assert error.code == "unsupported_content_type" and "application/json" in error.message


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"metadata": {"query": 5}}, "metadata.query"),
        ({"metadata": {"body": None}}, "metadata.body"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": "3600"}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10**30}}, "output_expires_after.seconds"),
        ({"completion_window": 24}, "completion_window"),
        ({"path": 1}, "path"),
    ],
)
def test_the_parameter_is_named_whole(more: dict[str, Any], param: str) -> None:
    assert refused(json.dumps({**json.loads(GOOD), **more}).encode()).param == param


@pytest.mark.parametrize("window", [" 24h", "24h ", "\t24h"])
def test_a_window_has_no_space_around_it(window: str) -> None:
    body = CreateBatch(input_file_id="file-x", endpoint="/v1/embeddings", completion_window=window)
    with pytest.raises(ApiError) as found:
        body.check()
    assert found.value.param == "completion_window"


def ask_as(tmp_path: Path, caller: Caller | None, bodies: list[bytes]) -> list[httpx.Response]:
    """Answers of every call that takes JSON; None: a caller that nobody knows."""

    async def authenticate(request: object) -> Caller:
        if caller is None:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return caller

    async def asked() -> list[httpx.Response]:
        app = create_app(ApiSettings(tmp_path, str(tmp_path / "store"), "sqlite://"), authenticate)
        app.include_router(online.router)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers = {"Content-Type": "application/json"}
            paths = ("/v1/batches", "/v1/inference", "/v1/dead_letters/redrive")
            return [await client.post(path, content=body, headers=headers) for path in paths for body in bodies]

    return asyncio.run(asked())


def test_who_is_not_known_is_told_so_whatever_was_sent(tmp_path: Path) -> None:
    assert {answer.status_code for answer in ask_as(tmp_path, None, UNREADABLE)} == {401}


def test_who_may_not_is_told_so_whatever_was_sent(tmp_path: Path) -> None:
    reader = Caller("a", "key_1", frozenset({Scope.FILES_READ}))
    assert {answer.status_code for answer in ask_as(tmp_path, reader, UNREADABLE)} == {403}


def test_who_may_is_told_what_is_wrong_with_the_body(tmp_path: Path) -> None:
    writer = Caller("a", "key_1", frozenset(Scope))
    assert {answer.status_code for answer in ask_as(tmp_path, writer, UNREADABLE)} == {400}
