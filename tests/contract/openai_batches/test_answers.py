"""What all answers have: headers, methods, errors of what is not there; and the models."""

from __future__ import annotations

import pytest
from support.batch_api import BatchApi, is_error

pytestmark = pytest.mark.slow

METHODS = {
    "/v1/files": {"GET", "POST"},
    "/v1/files/file-x": {"GET", "DELETE"},
    "/v1/files/file-x/content": {"GET"},
    "/v1/batches": {"GET", "POST"},
    "/v1/batches/batch_x": {"GET"},
    "/v1/batches/batch_x/cancel": {"POST"},
    "/v1/models": {"GET"},
    "/v1/models/a/b": {"GET"},
}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files", "/v1/batches", "/v1/batches/batch_x", "/v1/nope", "/x"])
def test_every_answer_has_an_id_and_its_time(api: BatchApi, path: str) -> None:
    first, second = api.client.get(path), api.client.get(path)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.headers["openai-processing-ms"].isdecimal()
    assert first.headers["openai-version"] == "2020-10-01"
    assert first.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("path", ["/v1/nope", "/v1", "/v2/files", "/v1/files/", "/v1/batches/", "/v1/batches/a/b/c"])
def test_an_unknown_path(api: BatchApi, path: str) -> None:
    error = is_error(api.client.get(path), 404)
    assert path in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/batches"),
        ("DELETE", "/v1/batches"),
        ("DELETE", "/v1/batches/batch_x"),
        ("PATCH", "/v1/batches/batch_x"),
        ("GET", "/v1/batches/batch_x/cancel"),
        ("POST", "/v1/files/file-x"),
        ("PUT", "/v1/files/file-x/content"),
        ("POST", "/v1/models"),
        ("OPTIONS", "/v1/files"),
        ("TRACE", "/v1/models/a/b"),
    ],
)
def test_a_method_that_a_path_does_not_have(api: BatchApi, method: str, path: str) -> None:
    answer = api.client.request(method, path)
    is_error(answer, 405)
    assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == METHODS[path]


@pytest.mark.parametrize("path", [*METHODS, "/v1/nope"])
def test_an_answer_to_head_has_no_body(api: BatchApi, path: str) -> None:
    answer = api.client.head(path)
    assert answer.status_code in (200, 404, 405) and answer.content == b""


def test_models(api: BatchApi) -> None:
    page = api.client.get("/v1/models").json()
    assert page["object"] == "list"
    (model,) = [one for one in page["data"] if one["id"] == api.model]
    assert model["object"] == "model" and isinstance(model["created"], int) and isinstance(model["owned_by"], str)
    assert api.client.get(f"/v1/models/{api.model}").json() == model


def test_an_unknown_model(api: BatchApi) -> None:
    is_error(api.client.get("/v1/models/nope"), 404, "model", "model_not_found")


def test_an_unread_header_does_no_harm(api: BatchApi) -> None:
    headers = {"OpenAI-Organization": "o", "OpenAI-Project": "p", "OpenAI-Beta": "x", "User-Agent": "ü".encode()}
    assert api.client.get("/v1/files", params={"limit": 1}, headers=headers).status_code == 200
