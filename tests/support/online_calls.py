"""Online requests for tests: the service in this process, over a queue of its own or a Redis, and calls of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.online import online_settings
from batch_assets.api.settings import ApiSettings
from support.front_doors import front_door_alone
from support.timing import PATIENCE


@dataclass
class OnlineCalls:
    """Calls of one service."""

    door: FrontDoor
    client: httpx.AsyncClient

    async def submit(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        """`POST /v1/inference`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post("/v1/inference", json={"client_id": "test", **body}, headers=named)

    async def accepted(self, body: dict[str, Any], **headers: str) -> str:
        """The id of a request that is accepted."""
        answer = await self.submit(body, **headers)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["task_id"])

    async def result(self, task_id: str, wait: float = 20.0, **headers: str) -> Any:
        """What became of a request."""
        answer = await self.client.get(f"/v1/result/{task_id}", params={"wait": wait}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ended(self, task_id: str) -> Any:
        """Its result, however long it takes."""
        async with asyncio.timeout(40 * PATIENCE):
            while (found := await self.result(task_id))["status"] == "PENDING":
                pass
        return found

    def figure(self, name: str, **labels: str) -> float:
        """One of its metrics; 0 where there is none yet."""
        return self.door.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def online_calls(
    home: Path,
    engines: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    redis: str | None = None,
    headers: dict[str, str] | None = None,
    **environment: str,
) -> AsyncIterator[OnlineCalls]:
    """The service with engines of the model `tiny`. `environment`: CONCURRENCY, MOST_WAITING, CACHE_GROUPS."""
    door = _door(home, monkeypatch, redis, environment)
    for url in engines:
        door.inner.state.proxy.directory.announce(EngineTarget(url, "tiny"))
    transport = httpx.ASGITransport(door.app, raise_app_exceptions=False)
    base = "http://127.0.0.1:8080"
    async with (
        door.inner.router.lifespan_context(door.inner),
        httpx.AsyncClient(transport=transport, base_url=base, headers=headers, timeout=60) as client,
    ):
        yield OnlineCalls(door, client)


def _door(home: Path, monkeypatch: pytest.MonkeyPatch, redis: str | None, environment: dict[str, str]) -> FrontDoor:
    home.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(getattr(online_settings, name), value)
        if redis is not None:
            patch.setenv(online_settings.REDIS, redis)
        return front_door_alone(ApiSettings(home, "", f"sqlite:///{home / 'api.db'}"))
