"""Interactive requests on engines of the fleet: leased when somebody asks, kept in reserve, several of one model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_service import CHAT, jsonl, line, no_instance, settings_of
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api import service
from batch_assets.api.front_door import FrontDoor, build_front_door
from batch_assets.api.settings import ModelSettings
from batch_assets.settings import fleet_database
from gpu_runner.fleet_database.database import FleetDatabase

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


TWO = [{"name": f"sim{n}", "kind": "simulated", "models": ["tiny"], "speed": 20} for n in (1, 2)]


@contextlib.asynccontextmanager
async def running(
    home: Path, models: ModelSettings, engines: Sequence[Mapping[str, object]] = TWO
) -> AsyncIterator[tuple[FrontDoor, httpx.AsyncClient]]:
    (home / "fleet.yaml").write_text(json.dumps({"engines": engines}))
    door = build_front_door(replace(settings_of(home, None), models=models))
    before, service._open_instance = service._open_instance, no_instance
    try:
        async with door.inner.router.lifespan_context(door.inner):
            transport = httpx.ASGITransport(door.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
                yield door, client
    finally:
        service._open_instance = before


def leased() -> set[str]:
    with contextlib.closing(FleetDatabase(fleet_database())) as fleet_db:
        return {name for name in ("sim1", "sim2") if fleet_db.holder(name)}


async def until(true: Any) -> None:
    async with asyncio.timeout(60 * PATIENCE):
        while True:
            if await true():
                return
            await asyncio.sleep(0.1)


def test_a_model_without_an_engine_gets_one_when_somebody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))

    async def steps() -> None:
        async with running(tmp_path, ModelSettings()) as (_, client):
            assert leased() == set()
            assert (await client.post(CHAT, json=ASK)).status_code == 200  # it waits for the boot
            assert len(leased()) == 1
            assert (await client.post(CHAT, json={**ASK, "model": "nobody"})).status_code == 404

    asyncio.run(steps())
    assert leased() == set(), "nothing is held by a service that has ended"


def test_a_reserve_of_two_is_held_without_work_and_shares_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))

    async def steps() -> None:
        async with running(tmp_path, ModelSettings(reserve={"tiny": 2})) as (door, client):
            directory = door.inner.state.proxy.directory

            async def both() -> bool:
                return len(await directory.engines("tiny")) == 2

            await until(both)
            assert leased() == {"sim1", "sim2"}
            answers = await asyncio.gather(*(client.post(CHAT, json=ASK) for _ in range(20)))
            assert {one.status_code for one in answers} == {200}
            lines = jsonl([line(str(number)) for number in range(600)])
            file = await client.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"})
            asked = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch = (await client.post("/v1/batches", json=asked)).json()

            async def ended() -> bool:
                found = (await client.get(f"/v1/batches/{batch['id']}")).json()
                return found["status"] == "completed" and found["request_counts"]["completed"] == 600

            await until(ended)

    asyncio.run(steps())
    assert leased() == set()


def test_a_batch_of_one_replica_gets_the_engine_that_another_one_holds_for_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is only one, and the chats do not end: they are answered by it all the time."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))

    async def steps(engine: Mapping[str, object]) -> None:
        models, engines = ModelSettings(), [engine]
        async with running(tmp_path, models, engines) as (_, one), running(tmp_path, models, engines) as (_, two):

            async def answered() -> bool:
                return (await one.post(CHAT, json=ASK)).status_code == 200

            await until(answered)
            lines = jsonl([line(str(number)) for number in range(20)])
            file = await two.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"})
            asked = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch = (await two.post("/v1/batches", json=asked)).json()

            async def completed() -> bool:
                assert await answered()
                return bool((await two.get(f"/v1/batches/{batch['id']}")).json()["status"] == "completed")

            await until(completed)

    with simulated_engine("--speed", "20") as engine:
        asyncio.run(steps({"name": "lab", "kind": "endpoint", "url": engine.url, "models": ["tiny"]}))
