"""The shape of every error, and the bounds of what is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI
from pydantic import BaseModel

from batch_assets.api.access.authentication import AccessSettingsError
from batch_assets.api.app import create_app
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Caller, Scope, caller_with
from batch_assets.api.requests.json_body import json_body
from batch_assets.api.server import serve
from batch_assets.api.settings import ApiLimits, ApiSettings


class Order(BaseModel):
    """What the test's route takes."""

    model_config = {"extra": "forbid"}
    amount: int


def app_of(tmp_path: Path, limits: ApiLimits | None = None) -> FastAPI:
    settings = ApiSettings(tmp_path, str(tmp_path / "store"), "sqlite://", limits=limits or ApiLimits())
    app = create_app(settings)

    @app.post("/test/order")
    async def order(order: Annotated[Order, Depends(json_body(Order))]) -> int:
        return order.amount

    @app.get("/test/defect")
    async def defect() -> None:
        raise RuntimeError("what is inside")

    @app.get("/test/scoped")
    async def scoped(caller: Caller = Depends(caller_with(Scope.FILES_READ))) -> str:  # noqa: B008
        return caller.tenant

    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


async def call(app: FastAPI, method: str, path: str, **options: object) -> httpx.Response:
    async with client_of(app) as client:
        return await client.request(method, path, **options)  # type: ignore[arg-type]


def error_of(answer: httpx.Response) -> dict[str, object]:
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def run(coroutine: object) -> httpx.Response:
    import asyncio

    return asyncio.run(coroutine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/nothing", 404, "invalid_request_error"),
        ("GET", "/test/order", 405, "invalid_request_error"),
        ("GET", "/test/defect", 500, "server_error"),
    ],
)
def test_every_error_has_the_documented_shape(tmp_path: Path, method: str, path: str, status: int, kind: str) -> None:
    answer = run(call(app_of(tmp_path), method, path))
    assert answer.status_code == status
    assert error_of(answer)["type"] == kind
    assert "inside" not in answer.text


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b'{"amount": "many"}', "amount", "invalid_value"),
        (b"{}", "amount", "missing_required_parameter"),
        (b'{"amount": 1, "colour": 2}', "colour", "unknown_parameter"),
        (b"{", None, None),
        (b"[1]", None, None),
        (b"", None, "missing_required_parameter"),
        (b"[" * 100_000, None, None),
        (b"null", None, None),
        (b'{"amount": NaN}', None, None),
        (b'{"amount": ' + b"9" * 5_000 + b"}", None, None),
        (b"\xff", None, None),
    ],
)
def test_an_invalid_body_is_status_400_and_names_the_parameter(
    tmp_path: Path, body: bytes, param: str | None, code: str | None
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = run(call(app_of(tmp_path), "POST", "/test/order", content=body, headers=headers))
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_a_body_above_the_limit_is_refused_with_and_without_content_length(tmp_path: Path) -> None:
    app = app_of(tmp_path, ApiLimits(json_bytes=100))

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 50

    for content in (b" " * 101, parts()):
        answer = run(call(app, "POST", "/test/order", content=content, headers={"Content-Type": "application/json"}))
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"


def test_a_body_that_does_not_come_is_status_408(tmp_path: Path) -> None:
    app = app_of(tmp_path, ApiLimits(silent_seconds=0.01))

    async def parts() -> AsyncIterator[bytes]:
        import asyncio

        yield b"{"
        await asyncio.Event().wait()

    headers = {"Content-Type": "application/json"}
    answer = run(call(app, "POST", "/test/order", content=parts(), headers=headers))
    assert answer.status_code == 408


def test_the_embedded_default_is_one_tenant_and_a_missing_scope_is_status_403(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    assert run(call(app, "GET", "/test/scoped")).json() == "default"

    async def reader(request: object) -> Caller:
        return Caller("a", "key_1", frozenset({Scope.MODELS_READ}))

    app.state.authenticate = reader
    answer = run(call(app, "GET", "/test/scoped"))
    assert answer.status_code == 403
    assert error_of(answer)["type"] == "permission_error"


def test_an_error_can_carry_headers(tmp_path: Path) -> None:
    app = app_of(tmp_path)

    async def limited(request: object) -> Caller:
        raise ApiError(429, "Rate limit reached.", code="rate_limit_exceeded", headers={"Retry-After": "7"})

    app.state.authenticate = limited
    answer = run(call(app, "GET", "/test/scoped"))
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert error_of(answer)["type"] == "rate_limit_error"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_without_keys_the_service_listens_on_loopback_only(tmp_path: Path, host: str) -> None:
    with pytest.raises(AccessSettingsError):
        serve(ApiSettings(tmp_path, str(tmp_path), "sqlite://", host=host))


def test_the_description_names_every_call_and_the_page_of_docs_is_served(tmp_path: Path) -> None:
    described = run(call(create_app(ApiSettings(tmp_path, str(tmp_path), "sqlite://")), "GET", "/openapi.json")).json()
    expected = {
        "/v1/files": {"get", "post"},
        "/v1/files/{file_id}": {"get", "delete"},
        "/v1/files/{file_id}/content": {"get"},
        "/v1/batches": {"get", "post"},
        "/v1/batches/{batch_id}": {"get"},
        "/v1/batches/{batch_id}/cancel": {"post"},
        "/v1/models": {"get"},
        "/v1/models/{model}": {"get"},
    }
    assert {path: set(described["paths"][path]) for path in expected} == expected
    assert run(call(create_app(ApiSettings(tmp_path, str(tmp_path), "sqlite://")), "GET", "/docs")).status_code == 200


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/files", "GET, POST"),
        ("/v1/files/file-x", "DELETE, GET"),
        ("/v1/files/file-x/content", "GET"),
        ("/v1/batches", "GET, POST"),
        ("/v1/batches/batch_x/cancel", "POST"),
        ("/v1/models/of/somebody", "GET"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
def test_a_method_that_is_not_there_is_answered_with_all_that_are(tmp_path: Path, path: str, methods: str) -> None:
    app = create_app(ApiSettings(tmp_path, str(tmp_path / "store"), "sqlite://"))
    answer = run(call(app, "PUT", path))
    assert (answer.status_code, answer.headers["Allow"]) == (405, methods)
    assert error_of(answer)["code"] == "method_not_supported"
