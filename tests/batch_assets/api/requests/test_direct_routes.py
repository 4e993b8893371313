"""Direct routes: what they answer is what FastAPI's route of the same path answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.online_site import OnlineSite, online_site

from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.online.routes import DIRECT_ROUTES
from batch_assets.api.online.service import OnlineService
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


def seen(answer: httpx.Response) -> tuple[int, Any, list[str], str | None]:
    """Of an answer what does not change from one request to the next."""
    names = sorted(name for name in answer.headers if not name.startswith("x-ratelimit-reset"))
    text = re.sub(r"task_[0-9a-f]{32}", "task", answer.text)
    return answer.status_code, text, names, answer.headers.get("content-type")


async def both(site: OnlineSite, monkeypatch: pytest.MonkeyPatch, call: Call) -> tuple[Any, Any, bool]:
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
        async with online_site(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            for name, call in CALLS.items():
                direct, framework, directly = await both(site, monkeypatch, call)
                assert direct == framework, name
                assert directly == (name in DIRECT), name

    asyncio.run(scenario())


@pytest.mark.parametrize("scopes", [{Scope.INFERENCE}, {Scope.FILES_READ}])
def test_callers_are_asked_for_their_key_and_counted_on_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scopes: set[Scope]
) -> None:
    with contextlib.closing(KeyStore(f"sqlite:///{tmp_path}/api.db", time.time)) as keys:
        secret = keys.create("acme", frozenset(scopes))[1]

    async def scenario() -> None:
        async with online_site(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            for key in ("", "Bearer wrong", f"Bearer {secret}"):
                headers = {"Authorization": key} if key else {}
                for call in (
                    lambda client, headers=headers: client.post(SUBMIT, json=BODY, headers=headers),
                    lambda client, headers=headers: client.get(ABSENT, headers=headers),
                ):
                    direct, framework, directly = await both(site, monkeypatch, call)
                    assert direct == framework and directly
                    allowed = key.endswith(secret) and Scope.INFERENCE in scopes
                    assert (direct[0] in (202, 404)) == allowed
                    assert ("x-ratelimit-limit-requests" in direct[2]) == key.endswith(secret)

    asyncio.run(scenario())


def test_a_defect_is_answered_as_one_and_reaches_the_log_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: OnlineService, *arguments: Any) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with online_site(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            monkeypatch.setattr(OnlineService, "submit", broken)
            direct, framework, directly = await both(site, monkeypatch, CALLS["accepted"])
            assert directly and direct == framework and direct[0] == 500
            raising = httpx.ASGITransport(site.door.app)
            async with httpx.AsyncClient(transport=raising, base_url="http://127.0.0.1:8080") as client:
                with pytest.raises(ZeroDivisionError):
                    await client.post(SUBMIT, json=BODY)

    asyncio.run(scenario())


def test_metrics_name_the_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with online_site(tmp_path, ["http://127.0.0.1:9"], monkeypatch, CONCURRENCY="0") as site:
            await CALLS["accepted"](site.client)
            await CALLS["no such task"](site.client)
            count = "batch_assets_http_requests_total"
            assert site.figure(count, method="POST", route=SUBMIT, status="202") == 1
            assert site.figure(count, method="GET", route=f"{RESULT}/{{task_id}}", status="404") == 1

    asyncio.run(scenario())


def test_each_direct_route_is_one_of_fastapi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with online_site(tmp_path, [], monkeypatch, CONCURRENCY="0") as site:
            paths = site.door.inner.openapi()["paths"]
            assert all(route.method.lower() in paths[route.path] for route in DIRECT_ROUTES)

    asyncio.run(scenario())
