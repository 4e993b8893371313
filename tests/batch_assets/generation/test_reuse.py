"""Rows that another dataset has paid for: no engine is asked, the table says whose answers they are, all agrees."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from support import range_worker
from support.dataset_project import dataset_project
from support.range_runs import leased
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.snapshots import MODEL, commit, questions, write_snapshot
from support.timing import PATIENCE

from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.publishing.publish import publish
from batch_assets.publishing.verify import LedgerEntry, verify
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.reuse import find_reusable
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import BatchFooter, DatasetStore, SnapshotManifest
from resources.store.reusable_answers import ReusableAnswers

KILLS = 2


def prepared(
    objects: Objects, workdir: Path, *, rows: int = 40, paid: int = 25
) -> tuple[DatasetStore, SnapshotManifest]:
    """A dataset of `rows` rows, the first `paid` of which another one has answered."""
    other = DatasetStore(objects, "other")
    commit(other, write_snapshot(other, questions(paid), batch_rows=7))
    store = DatasetStore(objects, "d")
    manifest = write_snapshot(store, questions(rows))
    assert find_reusable(store, manifest, True, workdir=workdir / "reuse").rows == paid
    return store, manifest


def generate(
    store: DatasetStore,
    manifest: SnapshotManifest,
    engine: SimulatedEngine,
    run_id: str = "run-2",
    *,
    regenerate: bool = False,
    reuse: bool = True,
    batches: int | None = None,
) -> tuple[list[BatchFooter], int]:
    """The footers of all batches, or the first ones, and how many requests the engine got."""
    entries = store.entries(manifest.snapshot)[:batches]
    intent = Intent(run_id, regenerate)
    identity = RunIdentity(run_id, intent, (entries[0].key, entries[-1].key))
    before = int(engine.get("/simulator/stats")["requests"])
    run = RangeRun(store, manifest, plan_range(store, entries, intent), identity, journal_seconds=0.1, reuse=reuse)

    async def go() -> None:
        async with asyncio.timeout(60):
            if await run.prepare():
                await run.serve(leased(engine.url))

    with contextlib.closing(run):
        asyncio.run(go())
    assert run.missing() == []
    current = store.current_objects(entries)
    asked = int(engine.get("/simulator/stats")["requests"]) - before
    return [store.read_batch(current[entry.key])[1] for entry in entries], asked


def test_what_another_dataset_paid_for_is_not_asked_and_the_table_says_whose_it_is(
    tmp_path: Path, local_objects: Objects
) -> None:
    store, manifest = prepared(local_objects, tmp_path)
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        footers, asked = generate(store, manifest, engine)
    assert asked == 15
    assert [(footer.rows, footer.reused, footer.reused_from) for footer in footers] == [
        (10, 10, {"other": 10}),
        (10, 10, {"other": 10}),
        (10, 5, {"other": 5}),
        (10, 0, {}),
    ]
    assert [footer.usd for footer in footers[:2]] == [0.0, 0.0]
    card = Card()
    dead_letters(store, manifest)
    table = publish(store, manifest, card=card, now=1.0, workdir=tmp_path)
    assert (table.rows, table.ok, table.reused) == (40, 40, {"other": 25})
    rows = pl.read_parquet(table.glob(store.objects)).select("row_id", "reused_from", "usd", "output", "run_id")
    assert rows["reused_from"].to_list() == ["other"] * 25 + [None] * 15
    assert set(rows["usd"].to_list()[:25]) == {0.0}
    assert rows["output"][3] == "answer 3 to id-000003"
    assert rows["run_id"].to_list() == ["run-1"] * 25 + ["run-2"] * 15
    text = local_objects.get(f"{table.path}/README.md").decode()
    assert "25 of other; they cost nothing here" in text
    entries = {footer.key: LedgerEntry(footer.data_version, None, footer.rows, footer.ok) for footer in footers}
    assert verify(store, entries).differences == ()


def test_a_refresh_keeps_what_was_reused_and_says_so(tmp_path: Path, local_objects: Objects) -> None:
    store, manifest = prepared(local_objects, tmp_path, rows=10, paid=4)
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        generate(store, manifest, engine)
        again = write_snapshot(store, questions(9) + questions(1, start=100))
        (footer,), asked = generate(store, again, engine, "run-3")
    assert (asked, footer.reused, footer.reused_from) == (1, 9, {"other": 4})


@pytest.mark.slow
def test_a_regenerate_asks_for_all_and_who_does_not_ask_to_reuse_pays(tmp_path: Path, local_objects: Objects) -> None:
    store, manifest = prepared(local_objects, tmp_path)
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        assert generate(store, manifest, engine, regenerate=True)[1] == 40
        other = DatasetStore(local_objects, "e")
        copied = write_snapshot(other, questions(40))
        find_reusable(other, copied, True, workdir=tmp_path / "again")
        assert generate(other, copied, engine, reuse=False)[1] == 40


def test_vectors_that_are_generated_must_be_as_long_as_those_that_other_batches_take(
    tmp_path: Path, local_objects: Objects
) -> None:
    other = DatasetStore(local_objects, "other")
    commit(other, write_snapshot(other, questions(5), task="embedding"))
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(10, start=100) + questions(5), task="embedding")
    assert find_reusable(store, manifest, True, workdir=tmp_path / "reuse").rows == 5
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        (footer,), _ = generate(store, manifest, engine, batches=1)
    assert (footer.ok, footer.dead) == (0, 10)


def test_answers_that_are_damaged_or_gone_are_generated(tmp_path: Path, local_objects: Objects) -> None:
    store, manifest = prepared(local_objects, tmp_path)
    batches = ReusableAnswers(local_objects, "d", True).of_snapshot(manifest.snapshot)
    flipped = bytearray(local_objects.get(batches["00000"].path))
    flipped[len(flipped) // 3] ^= 1
    local_objects.put(batches["00000"].path, bytes(flipped))
    local_objects.put(batches["00002"].path, b"")
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        footers, asked = generate(store, manifest, engine)
    assert asked == 30
    assert [footer.reused for footer in footers] == [0, 10, 0, 0]


@pytest.mark.slow
def test_a_dataset_that_is_all_reused_needs_no_engine_through_the_real_assets(tmp_path: Path) -> None:
    asked = [f"What is {i} plus {i}?" for i in range(25)]
    with dataset_project(tmp_path, reuse=True) as site:
        site.source(asked)
        spec, folder = site.specs["d"]
        paying = spec.model_copy(update={"name": "paying", "reuse": False})
        other = DatasetStore(site.store.objects, "paying")
        work = tmp_path / "work"
        work.mkdir()
        commit(other, build_snapshot(paying, other, now=0.0, workdir=work, base=folder))
        made = site.materialize("prompts")
        assert made.success
        (event,) = made.asset_materializations_for_node("d__prompts")
        said = {name: value.value for name, value in event.metadata.items()}
        assert (said["rows_reusable"], said["reusable_from"]) == (25, {"paying": 25})
        assert said["plan"] == "nothing is missing"
        assert WorkloadEstimator(spec, site.store, folder).look().rows == 0
        assert site.run_rows("00000", "00002", None).success, site.reason()
        events = sorted(site.events(), key=lambda event: event[0])  # batches are committed side by side
        assert [(m["reused"], m["reused_from"]) for _, _, m in events] == [
            (10, {"paying": 10}),
            (10, {"paying": 10}),
            (5, {"paying": 5}),
        ]
        made = site.materialize("dataset")
        assert made.success, site.reason()
        (event,) = made.asset_materializations_for_node("d__dataset")
        assert (event.metadata["rows_reused"].value, event.metadata["usd"].value) == (25, 0.0)
        assert list(site.store.objects.list("d/reusable/")) == []


@pytest.mark.soak("losses")
def test_kills_of_two_runs_ask_for_no_reused_row(tmp_path: Path) -> None:
    root, database = str(tmp_path / "store"), f"sqlite:///{tmp_path}/fleet.db"
    objects = open_objects(root)
    store, manifest = prepared(objects, tmp_path, rows=200, paid=104)
    numbers, rng = itertools.count(), random.Random(1)
    workers: dict[str, subprocess.Popen[bytes]] = {}
    with (
        simulated_engine("--speed", "3", model=MODEL) as engine,
        contextlib.closing(FleetDatabase(database)) as fleet_db,
    ):

        def start() -> None:
            run_id = f"run-{next(numbers)}"
            workers[run_id] = subprocess.Popen(
                [sys.executable, range_worker.__file__, root, database, engine.url, run_id]
            )

        def asking() -> list[str]:
            if int(engine.get("/simulator/stats")["in_flight"]) == 0:
                return []
            return [beat.run_id for beat in fleet_db.runs() if beat.run_id in workers and beat.rows_done]

        try:
            start()
            start()
            for _ in range(KILLS):
                _eventually(lambda: bool(asking()))
                victim = workers.pop(rng.choice([*(asking() or list(workers))]))
                victim.kill()
                victim.wait()
                start()
            for worker in workers.values():
                assert worker.wait(PATIENCE * 90) == 0
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
    outcomes = [
        o for batch in store.current_objects(store.entries(manifest.snapshot)).values() for o in store.outcomes(batch)
    ]
    assert len(outcomes) == 200
    reused = {outcome.row_id for outcome in outcomes if outcome.reused_from}
    assert reused == {row.row_id for row in questions(104)}
    assert all(outcome.origin.run_id.startswith("run-") for outcome in outcomes)
    assert plan_range(store, store.entries(manifest.snapshot), Intent("x")).todo == []


def _eventually(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + PATIENCE * seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
