"""The front door as a process: the stock clients, kills, an engine that goes away. Judged by files and engine's log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api_service import ENDED, api_service, jsonl, line
from support.served_door import ServedDoor
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE, SOAK

from batch_assets.api.batches.redrive import REDRIVE_OF
from batch_assets.api.execution.catalog import KEY, partition_of
from batch_assets.settings import fleet_database
from e2e.browser import browser, needs_chromium
from e2e.harness import eventually, platform
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.engine_process import free_port

pytestmark = pytest.mark.slow

LINES = 1000
IN_FLIGHT = 64  # 16 slots, and three times as many waiting
DRAINED = 8 if SOAK else IN_FLIGHT // 2  # a machine that does much else has not the time to end all of them in order


@dataclass
class Door(ServedDoor):
    """The service, and the stock client for it."""

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def wait(self, true: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + PATIENCE * seconds
        while True:
            with contextlib.suppress(openai.APIConnectionError):
                if true():
                    return
            self.check_lives(deadline)
            time.sleep(0.05)

    def create(self, lines: list[Any], **more: Any) -> Any:
        asked: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
        with self.client() as client:
            file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
            return client.batches.create(input_file_id=file.id, **asked)

    def retrieve(self, batch_id: str) -> Any:
        with self.client() as client:
            return client.batches.retrieve(batch_id)

    def ended(self, batch_id: str) -> Any:
        found: list[Any] = []

        def has_ended() -> bool:
            found[:] = [self.retrieve(batch_id)]
            return found[0].status in ENDED

        self.wait(has_ended, 90)
        return found[0]

    def done(self, batch_id: str) -> int:
        return int(self.retrieve(batch_id).request_counts.completed)

    def lines(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        with self.client() as client:
            return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    log = tmp_path / "requests"
    slots = ("--max-num-seqs", "16", "--output-tokens", "fixed:8", "--weights-ms", "20", "--request-log", str(log))
    with simulated_engine(*slots) as engine:
        served = Door(tmp_path, engine.url)
        served.start()
        try:
            yield served
        finally:
            served.close()


def requests(home: Path) -> int:
    """How many requests the engine has received, by its own log."""
    return (home / "requests").read_text().count('"event":"received"')


def check(door: Door, batch: Any, lines: int) -> None:
    output, errors = door.lines(batch.output_file_id), door.lines(batch.error_file_id)
    assert errors == [] and batch.status == "completed"
    assert sorted(one["custom_id"] for one in output) == sorted(f"r{number}" for number in range(lines))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (lines, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak("api"))])
def test_a_service_that_is_ended_in_the_middle_goes_on_where_it_was(door: Door, tmp_path: Path, number: int) -> None:
    batch = door.create([line(f"r{number}") for number in range(LINES)])
    door.wait(lambda: door.done(batch.id) > 300)
    before = door.done(batch.id)
    status = door.end(number)
    assert status == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    door.start()
    assert door.done(batch.id) >= before
    check(door, door.ended(batch.id), LINES)
    # What was finished in the moments before a kill is not in the journal yet; at SIGTERM, what is in flight may end.
    assert requests(tmp_path) - LINES <= (2 * IN_FLIGHT if number == signal.SIGKILL else DRAINED)


@pytest.mark.soak("api")
def test_a_short_window_overtakes_the_lines_that_are_not_sent_yet(door: Door) -> None:
    whole, some = 3000, 100
    long = door.create([line(f"r{number}") for number in range(whole)])
    door.wait(lambda: door.done(long.id) > 100)
    before = door.done(long.id)
    began = time.monotonic()
    short = door.create([line(f"r{number}") for number in range(some)], completion_window="10m")
    check(door, door.ended(short.id), some)
    took, waited_for = time.monotonic() - began, door.done(long.id) - before
    print(f"{some} lines took {took:.1f} s, while {waited_for} lines of the other batch were answered")
    # Before it: what was in flight, and what was answered while the short batch was checked and read.
    assert waited_for < 500
    assert door.retrieve(long.id).status == "in_progress"
    check(door, door.ended(long.id), whole)


def test_an_engine_that_is_away_fails_no_line(tmp_path: Path) -> None:
    port = str(free_port())
    slots = ("--port", port, "--max-num-seqs", "16", "--output-tokens", "fixed:8", "--weights-ms", "20")
    served = Door(tmp_path, f"http://127.0.0.1:{port}")
    try:
        with simulated_engine(*slots):
            served.start()
            batch = served.create([line(f"r{number}") for number in range(600)])
            served.wait(lambda: served.done(batch.id) > 100)
        time.sleep(3.0)  # longer than anything that decides whether an engine lives
        assert served.retrieve(batch.id).status == "in_progress"
        with simulated_engine(*slots):
            check(served, served.ended(batch.id), 600)
    finally:
        served.close()


def test_a_store_that_is_away_fails_no_line(tmp_path: Path) -> None:
    async def steps(url: str) -> None:
        async with api_service(tmp_path / "home", url) as site:
            batch = await site.create([line(f"r{number}") for number in range(400)])
            while (await site.get(batch["id"]))["request_counts"]["completed"] < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            store = tmp_path / "home" / "store"
            store.rename(tmp_path / "away")
            await asyncio.sleep(3.0)
            now = await site.get(batch["id"])
            assert now["status"] == "in_progress" and now["request_counts"]["completed"] < 400
            (tmp_path / "away").rename(store)
            assert (await site.until(batch["id"]))["request_counts"] == {"total": 400, "completed": 400, "failed": 0}

    with simulated_engine("--max-num-seqs", "8", "--output-tokens", "fixed:8", "--weights-ms", "15") as engine:
        asyncio.run(steps(engine.url))


def test_batches_run_on_engines_that_are_leased_from_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"name": "sim", "kind": "simulated", "models": ["tiny"], "speed": 20}
    (tmp_path / "fleet.yaml").write_text(json.dumps({"engines": [engine]}))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))

    async def steps() -> None:
        async with api_service(tmp_path, None) as site:
            assert "tiny" in [model["id"] for model in (await site.client.get("/v1/models")).json()["data"]]
            batch = await site.until((await site.create([line(str(number)) for number in range(20)]))["id"])
            assert batch["status"] == "completed" and batch["request_counts"]["completed"] == 20
            with contextlib.closing(FleetDatabase(fleet_database())) as fleet_db:
                assert [run.dataset for run in fleet_db.runs()] == ["api/tiny"]

    asyncio.run(steps())
    with contextlib.closing(FleetDatabase(fleet_database())) as fleet_db:
        assert fleet_db.runs() == []


@pytest.mark.soak("dagster")
@needs_chromium
def test_a_batch_and_its_lineage_in_dagsters_ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "other", "source": {"grid": {"word": ["sun"]}}, "prompt": {"user": "{{ word }}"}}
    simulator = ["--speed", "20", "--output-tokens", "fixed:8"]
    with platform(tmp_path, monkeypatch, spec, simulator=simulator) as site:
        served = Door(tmp_path, site.simulator.url)
        with contextlib.closing(served), browser(site.stack.url, KEY.path[0], tmp_path) as ui:
            served.start()
            asked = [line(f"r{number}", model="test-model") for number in range(600)]
            batch = served.ended(served.create(asked).id)
            keys = [partition_of(batch.id, f"{number:05}") for number in range(3)]
            eventually(lambda: site.instance.get_materialized_partitions(KEY) == set(keys), 60, "the catalog's entries")
            ui.open_asset("batches", "partitions", partition=keys[2])
            shown = eventually(lambda: (found := ui.metadata()).get("rows") and found, 30, "the partition's metadata")
            assert (shown["rows"], shown["ok"], shown["model"]) == ("100", "100", "test-model")
            ui.shot("api-batches")
            assert "Materialized (3)" in ui.text()
            ui.open_lineage()
            arrow = (KEY.path[1], "billing")
            eventually(lambda: arrow in ui.edges(), 30, "the lineage from batches to the bill")
            ui.shot("api-lineage")


@pytest.mark.soak("api")
def test_a_backfill_in_the_ui_asks_for_the_lines_of_a_batch_without_an_answer_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_once = json.dumps([{"kind": "too_long", "match": {"contains": "oops"}, "times": 1}])
    simulator = ["--speed", "20", "--output-tokens", "fixed:8", "--faults", refused_once]
    spec = {"name": "other", "source": {"grid": {"word": ["sun"]}}, "prompt": {"user": "{{ word }}"}}
    with platform(tmp_path, monkeypatch, spec, simulator=simulator) as site:
        served = Door(tmp_path, site.simulator.url)
        with contextlib.closing(served):
            served.start()
            names = ["oops" if number in (7, 599) else "r" for number in range(600)]
            asked = [line(f"{name}{number}", model="test-model") for number, name in enumerate(names)]
            batch = served.ended(served.create(asked, metadata={"who": "me"}).id)
            assert (batch.request_counts.completed, batch.request_counts.failed) == (598, 2)
            keys = [partition_of(batch.id, f"{number:05}") for number in range(3)]
            eventually(lambda: site.instance.get_materialized_partitions(KEY) == set(keys), 60, "the catalog's entries")
            backfill = site.launch_backfill(keys[0], keys[-1], asset=KEY.path)
            assert site.finish_backfill(backfill)["status"] == "COMPLETED_SUCCESS"
            with served.client() as client:
                newest = client.batches.list(limit=1).data[0]
            assert newest.metadata == {"who": "me", REDRIVE_OF: batch.id}
            again = served.ended(newest.id)
            assert {one["custom_id"] for one in served.lines(again.output_file_id)} == {"oops7", "oops599"}
            assert again.error_file_id is None and served.retrieve(batch.id) == batch
            redriven = site.instance.get_latest_data_version_record(KEY, partition_key=keys[0])
            assert redriven is not None and redriven.asset_materialization is not None
            assert redriven.asset_materialization.metadata["redriven_as"].value == again.id
