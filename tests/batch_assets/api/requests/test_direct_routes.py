"""Direct routes: what they answer is what FastAPI's route of the same path answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from sqlalchemy.exc import OperationalError
from support.http_server import http_server
from support.online_calls import OnlineCalls, online_calls

from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.interactive import routes as interactive
from batch_assets.api.interactive.proxy import Proxy
from batch_assets.api.online.online_service import OnlineService
from batch_assets.api.online.routes import DIRECT_ROUTES
from batch_assets.api.requests.api_error import ApiError
from batch_assets.api.requests.callers import Scope
from batch_assets.api.requests.direct_routes import DirectRoute

SUBMIT, RESULT = "/v1/inference", "/v1/result"
BODY = {"input": "hello", "client_id": "test", "model": "tiny"}
ABSENT = f"{RESULT}/task_{'0' * 32}"
KEY = "Idempotency-Key"
Call = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]

CALLS: dict[str, Call] = {
    "accepted": lambda client: client.post(SUBMIT, json=BODY),
    "with a key": lambda client: client.post(SUBMIT, json=BODY, headers={KEY: "a"}),
    "an empty key": lambda client: client.post(SUBMIT, json=BODY, headers={KEY: ""}),
    "a long key": lambda client: client.post(SUBMIT, json=BODY, headers={KEY: "a" * 257}),
    "two keys": lambda client: client.post(SUBMIT, json=BODY, headers=[(KEY, "a"), (KEY, "b")]),
    "no body": lambda client: client.post(SUBMIT),
    "no JSON": lambda client: client.post(SUBMIT, content=b"{", headers={"content-type": "application/json"}),
    "another type": lambda client: client.post(SUBMIT, content=b"{}", headers={"content-type": "text/plain"}),
    "an unknown field": lambda client: client.post(SUBMIT, json={**BODY, "more": 1}),
    "an unknown model": lambda client: client.post(SUBMIT, json={**BODY, "model": "none"}),
    "another method": lambda client: client.get(SUBMIT),
    "a longer path": lambda client: client.post(f"{SUBMIT}/", json=BODY),
    "too large": lambda client: client.post(SUBMIT, json={**BODY, "input": "x" * (5 << 20)}),
    "no such task": lambda client: client.get(ABSENT),
    "no id": lambda client: client.get(f"{RESULT}/"),
    "a path in a path": lambda client: client.get(f"{ABSENT}/more"),
    "a wait": lambda client: client.get(f"{ABSENT}?wait=0.5"),
    "a wait in another form": lambda client: client.get(f"{ABSENT}?wait=1e1"),
    "a wait that is too long": lambda client: client.get(f"{ABSENT}?wait=60.5"),
    "a wait that is none": lambda client: client.get(f"{ABSENT}?wait=soon"),
    "two waits": lambda client: client.get(f"{ABSENT}?wait=1&wait=2"),
    "another parameter": lambda client: client.get(f"{ABSENT}?more=1"),
    "a result that is deleted": lambda client: client.delete(ABSENT),
}
DIRECT = {"accepted", "with a key", "no body", "no JSON", "another type", "an unknown field", "an unknown model"} | {
    "too large", "no such task", "a wait"
}  # fmt: skip

CHAT = "/v1/chat/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ENGINE_SAYS = {"id": "1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}
JSON = {"content-type": "application/json"}

INTERACTIVE: dict[str, Call] = {
    "a chat": lambda client: client.post(CHAT, json=ASK),
    "a stream": lambda client: client.post(CHAT, json={**ASK, "stream": True}),
    "a completion": lambda client: client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}),
    "an embedding": lambda client: client.post("/v1/embeddings", json={"model": "tiny", "input": "hi"}),
    "a response": lambda client: client.post("/v1/responses", json={"model": "tiny", "input": "hi"}),
    "a query": lambda client: client.post(f"{CHAT}?a=1", json=ASK),
    "refused by the engine": lambda client: client.post(CHAT, json={**ASK, "max_tokens": -1}),
    "no body": lambda client: client.post(CHAT),
    "no JSON": lambda client: client.post(CHAT, content=b"{", headers=JSON),
    "a list": lambda client: client.post(CHAT, content=b"[]", headers=JSON),
    "no model": lambda client: client.post(CHAT, json={}),
    "an unknown model": lambda client: client.post(CHAT, json={**ASK, "model": "none"}),
    "a bad target": lambda client: client.post(CHAT, json=ASK, headers={"x-target-ttft-seconds": "soon"}),
    "a target": lambda client: client.post(CHAT, json=ASK, headers={"x-target-ttft-seconds": "10"}),
    "too large": lambda client: client.post(CHAT, content=b"x" * (2 << 20)),
    "too large, in chunks": lambda client: client.post(CHAT, content=chunks(2 << 20)),
    "another method": lambda client: client.get(CHAT),
    "a longer path": lambda client: client.post(f"{CHAT}/", json=ASK),
}
INTERACTIVE_DIRECT = INTERACTIVE.keys() - {"another method", "a longer path"}


async def chunks(size: int) -> AsyncIterator[bytes]:
    """A body of so many bytes, whose length nobody says."""
    for _ in range(size >> 16):
        yield b"x" * (1 << 16)


async def engine(request: web.Request) -> web.StreamResponse:
    """Answers every request alike."""
    asked = await request.json()
    if asked.get("max_tokens") == -1:
        return web.json_response({"error": {"message": "max_tokens must be at least 1"}}, status=400)
    if not asked.get("stream"):
        return web.json_response(ENGINE_SAYS)
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n')
    return answer


def seen(answer: httpx.Response) -> tuple[int, Any, list[str], str | None]:
    """Of an answer what does not change from one request to the next."""
    names = sorted(name for name in answer.headers if not name.startswith("x-ratelimit-reset"))
    text = re.sub(r"task_[0-9a-f]{32}", "task", answer.text)
    return answer.status_code, text, names, answer.headers.get("content-type")


async def both(site: OnlineCalls, monkeypatch: pytest.MonkeyPatch, call: Call) -> tuple[Any, Any, bool]:
    """The answer as it is and that of FastAPI alone, and whether the first one came directly."""
    taken: list[bool] = []
    takes = DirectRoute.takes

    def noted(route: DirectRoute, scope: Any) -> bool:
        taken.append(takes(route, scope))
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(DirectRoute, "takes", noted)
        first = await call(site.client)
        patch.setattr(DirectRoute, "takes", lambda route, scope: False)
        return seen(first), seen(await call(site.client)), any(taken)


def test_both_ways_give_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with online_calls(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            for name, call in CALLS.items():
                direct, framework, directly = await both(site, monkeypatch, call)
                assert direct == framework, name
                assert directly == (name in DIRECT), name

    asyncio.run(scenario())


def test_both_ways_give_the_same_interactive_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with http_server({"/v1/{task:.*}": engine}) as url, online_calls(tmp_path, [url], monkeypatch) as site:
            for name, call in INTERACTIVE.items():
                direct, framework, directly = await both(site, monkeypatch, call)
                assert direct == framework, name
                assert directly == (name in INTERACTIVE_DIRECT), name
            answers = [await INTERACTIVE[name](site.client) for name in ("a chat", "a stream", "too large")]
            assert [answer.status_code for answer in answers] == [200, 200, 413]
            assert answers[0].json() == ENGINE_SAYS and answers[1].text.endswith("data: [DONE]\n\n")

    asyncio.run(scenario())


@pytest.mark.parametrize("scopes", [{Scope.INFERENCE}, {Scope.FILES_READ}])
def test_callers_are_asked_for_their_key_and_counted_on_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scopes: set[Scope]
) -> None:
    with contextlib.closing(KeyStore(f"sqlite:///{tmp_path}/api.db", time.time)) as keys:
        secret = keys.create("acme", frozenset(scopes))[1]

    async def scenario() -> None:
        async with online_calls(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            for key in ("", "Bearer wrong", f"Bearer {secret}"):
                headers = {"Authorization": key} if key else {}
                for call in (
                    lambda client, headers=headers: client.post(SUBMIT, json=BODY, headers=headers),
                    lambda client, headers=headers: client.get(ABSENT, headers=headers),
                    lambda client, headers=headers: client.post(CHAT, json=ASK, headers=headers),
                ):
                    direct, framework, directly = await both(site, monkeypatch, call)
                    assert direct == framework and directly
                    allowed = key.endswith(secret) and Scope.INFERENCE in scopes
                    assert (direct[0] in (202, 404, 503)) == allowed
                    assert ("x-ratelimit-limit-requests" in direct[2]) == key.endswith(secret)

    asyncio.run(scenario())


def test_a_defect_is_answered_as_one_and_reaches_the_log_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: OnlineService, *arguments: Any) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with online_calls(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            monkeypatch.setattr(OnlineService, "submit", broken)
            direct, framework, directly = await both(site, monkeypatch, CALLS["accepted"])
            assert directly and direct == framework and direct[0] == 500
            raising = httpx.ASGITransport(site.door.app)
            async with httpx.AsyncClient(transport=raising, base_url="http://127.0.0.1:8080") as client:
                with pytest.raises(ZeroDivisionError):
                    await client.post(SUBMIT, json=BODY)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ZeroDivisionError(), 500),
        (OperationalError("", {}, OSError("server closed the connection unexpectedly")), 503),
        (ApiError(429, "Slow down.", code="slow"), 429),
    ],
)
def test_an_error_while_the_engine_is_asked_is_answered_on_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    """The engine is asked while the answer is sent."""

    def broken(*arguments: Any) -> None:
        raise error

    async def scenario() -> None:
        async with online_calls(tmp_path, ["http://127.0.0.1:9"], monkeypatch) as site:
            monkeypatch.setattr(site.door.inner.state.proxy.choice, "sent", broken)
            direct, framework, directly = await both(site, monkeypatch, INTERACTIVE["a chat"])
            assert directly and direct == framework and direct[0] == status
            assert "x-request-id" in direct[2]
            count = "batch_assets_http_requests_total"
            assert site.figure(count, method="POST", route=CHAT, status=str(status)) == 2

    asyncio.run(scenario())


def test_an_error_after_the_beginning_of_an_answer_breaks_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Proxy, *arguments: Any) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with http_server({CHAT: engine}) as url, online_calls(tmp_path, [url], monkeypatch) as site:
            monkeypatch.setattr(Proxy, "relay", broken)
            raising = httpx.ASGITransport(site.door.app)
            async with httpx.AsyncClient(transport=raising, base_url="http://127.0.0.1:8080") as client:
                with pytest.raises(ZeroDivisionError):
                    await INTERACTIVE["a stream"](client)
            assert site.figure("batch_assets_http_requests_total", method="POST", route=CHAT, status="200") == 1

    asyncio.run(scenario())


def test_metrics_name_the_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with online_calls(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            await CALLS["accepted"](site.client)
            await CALLS["no such task"](site.client)
            count = "batch_assets_http_requests_total"
            assert site.figure(count, method="POST", route=SUBMIT, status="202") == 1
            assert site.figure(count, method="GET", route=f"{RESULT}/{{task_id}}", status="404") == 1

    asyncio.run(scenario())


def test_each_direct_route_is_one_of_fastapi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with online_calls(tmp_path, [], monkeypatch, CONCURRENCY="0") as site:
            paths = site.door.inner.openapi()["paths"]
            direct = (*interactive.DIRECT_ROUTES, *DIRECT_ROUTES)
            assert all(route.method.lower() in paths[route.path] for route in direct)

    asyncio.run(scenario())
