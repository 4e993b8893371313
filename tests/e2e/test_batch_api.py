"""A dataset that another home's `batch-assets serve` writes as a hosted Batch API would: whole, and after `kill -9`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.batch_api import BatchApi
from support.served_door import ServedDoor
from support.simulated_engine import simulated_engine

from e2e.command_line import NAME, ROWS, SPEC, CommandProject
from e2e.command_line import site as new_site
from e2e.harness import eventually
from gpu_runner.fleet_database.database import FleetDatabase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PRICE = {"input": 1.0, "output": 10.0}


@contextlib.contextmanager
def hosted(folder: Path, speed: str) -> Iterator[tuple[CommandProject, BatchApi, Any]]:
    """A project whose one engine is a Batch API; the API; and the engine that this one asks."""
    (folder / "hosted" / "home").mkdir(parents=True)
    with simulated_engine("--speed", speed, model="test-model") as engine:
        door = ServedDoor(folder / "hosted", engine.url, slots=64)
        try:
            door.start()
            with new_site(folder) as project:
                offered = {
                    "name": "hosted",
                    "kind": "batch_api",
                    "url": f"{door.url}/v1",
                    "models": ["test-model"],
                    "usd_per_million_tokens": PRICE,
                    "batch": {"completion_window": "24h", "gather_seconds": 1, "poll_seconds": 1},
                }
                project.declare(SPEC | {"sampling": {"max_tokens": 4096}})
                (folder / "fleet.yaml").write_text(yaml.safe_dump({"engines": [offered]}))
                api = BatchApi(door.url)
                with api.client:
                    yield project, api, engine
        finally:
            door.close()


def check(project: CommandProject, api: BatchApi, engine: Any, result: dict[str, Any]) -> None:
    """All rows are there, each was asked once, and paid for as the price list says."""
    assert (result["complete"], result["rows"], result["ok"]) == (True, ROWS, ROWS)
    assert engine.get("/simulator/stats")["requests"] == ROWS, "no line was sent twice"
    batches = api.client.get("/v1/batches").json()["data"]
    assert {batch["status"] for batch in batches} == {"completed"}
    assert sum(batch["request_counts"]["completed"] for batch in batches) == ROWS
    assert api.client.get("/v1/files").json()["data"] == [], "files are deleted when their rows are in the store"
    usd = result["request"]["usd_total"]
    tokens = PRICE["input"] * result["prompt_tokens"] + PRICE["output"] * result["completion_tokens"]
    assert usd == pytest.approx(tokens / 1e6)
    assert project.ask("verify", NAME)[0] == 0


@pytest.mark.soak("dagster")
def test_a_batch_api_writes_a_dataset(tmp_path: Path) -> None:
    with hosted(tmp_path, "50") as (project, api, engine):
        status, plan = project.ask("plan", NAME)
        assert status == 0 and "batch API: hosted is taken" in plan, plan
        command = project.start("run", NAME, "--json")
        status, output = command.end(200)
        assert status == 0, command.said()
        check(project, api, engine, json.loads(output))


def test_a_killed_worker_costs_no_line(tmp_path: Path) -> None:
    with hosted(tmp_path, "4") as (project, api, engine):
        command = project.start("run", NAME, "--json")
        eventually(lambda: api.client.get("/v1/batches").json()["data"], 60, "a batch")
        with contextlib.closing(FleetDatabase(f"sqlite:///{project.home}/fleet.db")) as fleet_db:
            (pid,) = {beat.pid for beat in fleet_db.runs() if beat.first_key}
        assert engine.get("/simulator/stats")["requests"] < ROWS, "it was to be killed before the batch has ended"
        os.kill(pid, signal.SIGKILL)
        status, output = command.end(300)
        assert status == 0, command.said()
        check(project, api, engine, json.loads(output))
