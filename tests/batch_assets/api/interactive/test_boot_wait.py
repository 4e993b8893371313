"""A chat for a model without an engine waits for the boot, as long as its caller does and an engine is on its way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.api_service import settings_of
from support.front_doors import front_door_alone
from support.http_server import http_server, status
from support.timing import PATIENCE

from batch_assets.api.execution.engines.engine_supply import Awaited
from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive import boot_wait
from batch_assets.api.interactive.boot_wait import BootWait, boot_wait_seconds, patience
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.requests.api_error import ApiError
from batch_assets.settings import SettingError

MODEL = "not-running"
CHAT = "/v1/chat/completions"
ANSWER = {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_wait, "LOOK_SECONDS", 0.005)


@contextlib.asynccontextmanager
async def door(folder: Path) -> AsyncIterator[tuple[FrontDoor, BootWait, httpx.AsyncClient]]:
    """The front door of a fleet whose engines come when the test announces them."""
    service = front_door_alone(settings_of(folder, None))
    transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
    async with (
        service.inner.router.lifespan_context(service.inner),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080", timeout=60 * PATIENCE) as client,
    ):
        yield service, service.inner.state.proxy.boots, client


async def until_waiting(boots: BootWait, number: int) -> None:
    async with asyncio.timeout(30 * PATIENCE):
        while boots.waiting != number:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def chat(client: httpx.AsyncClient, **headers: str) -> asyncio.Task[httpx.Response]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return asyncio.create_task(client.post(CHAT, json=body, headers=headers))


def test_the_first_chat_waits_until_the_engine_has_booted(tmp_path: Path) -> None:
    async def steps() -> None:
        answer = status(200, json.dumps(ANSWER))
        async with http_server({CHAT: answer, "/": answer}) as url, door(tmp_path) as (service, boots, client):
            asked = [chat(client), chat(client)]
            await until_waiting(boots, 2)
            assert b"batch_assets_requests_waiting_for_engine 2.0" in service.metrics.page()
            service.inner.state.proxy.directory.announce(EngineTarget(url, MODEL))
            assert [(await one).status_code for one in asked] == [200, 200]
            assert boots.waiting == 0

    asyncio.run(steps())


def test_who_leaves_while_it_waits_frees_its_place(tmp_path: Path) -> None:
    async def steps() -> None:
        async with door(tmp_path) as (_, boots, client):
            asked = chat(client)
            await until_waiting(boots, 1)
            asked.cancel()
            await until_waiting(boots, 0)

    asyncio.run(steps())


def test_a_chat_waits_no_longer_than_its_caller(tmp_path: Path) -> None:
    async def steps() -> None:
        async with door(tmp_path) as (_, boots, client):
            boots.awaited = lambda model, path: Awaited.BOOT
            answer = await chat(client, **{"x-stainless-read-timeout": "0.05"})
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
            assert answer.json()["error"]["message"].endswith("It waits for an engine that is being started.")

    asyncio.run(steps())


def test_nobody_waits_for_an_engine_that_is_not_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_wait, "SETTLE_SECONDS", 0.02)

    async def steps() -> None:
        async with door(tmp_path) as (_, boots, client):
            boots.awaited = lambda model, path: Awaited.OFFER
            answer = await chat(client)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "30"
            assert "nothing that is offered now" in answer.json()["error"]["message"]
            boots.never_served = lambda model, path: "It needs 900 GiB."
            answer = await chat(client)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_unavailable"
            assert answer.headers["x-should-retry"] == "false"

    asyncio.run(steps())


def test_places_are_bounded_and_a_tenant_leaves_as_many_as_it_has() -> None:
    async def never() -> bool:
        return False

    async def steps() -> None:
        boots = BootWait(60.0, places=8)
        waiting = [asyncio.create_task(boots.wait("m", CHAT, tenant, 60.0, never)) for tenant in "aaaabb"]
        await until_waiting(boots, 6)
        for tenant in "ab":
            with pytest.raises(ApiError):
                await boots.wait("m", CHAT, tenant, 60.0, never)
        waiting.append(asyncio.create_task(boots.wait("m", CHAT, "c", 60.0, never)))
        await until_waiting(boots, 7)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert boots.waiting == 0

    asyncio.run(steps())


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({}, 540.0), ({"x-stainless-read-timeout": "100"}, 90.0), ({"x-stainless-timeout": "nan"}, 540.0)],
)
def test_the_patience_of_a_caller_is_what_it_says(headers: dict[str, str], seconds: float) -> None:
    assert patience(headers) == pytest.approx(seconds)


def test_the_limit_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert boot_wait_seconds() == 540.0
    monkeypatch.setenv("BATCH_ASSETS_BOOT_WAIT_SECONDS", "0")
    assert boot_wait_seconds() == 0.0
    monkeypatch.setenv("BATCH_ASSETS_BOOT_WAIT_SECONDS", "soon")
    with pytest.raises(SettingError, match="expected seconds"):
        boot_wait_seconds()
