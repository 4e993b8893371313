"""What a request still costs: rows whose answers other datasets have cost nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.dataset_project import dataset_project
from support.sensor_dataset import KEYS, SPEC, SensorDataset

from batch_assets.capacity_planning import workload_estimate
from batch_assets.capacity_planning.workload_estimate import REUSABLE_SECONDS, WorkloadEstimator
from batch_assets.catalog.ranges import KeyRange, RangeRunRecord
from batch_assets.orchestration import active_request
from batch_assets.orchestration.active_request import WorkWatcher
from batch_assets.tags import REFRESH_TAG
from gpu_runner.fleet_database.database import RunBeat
from resources.store.dataset_store import BatchEntry
from resources.store.reusable_answers import ReusableAnswers, ReusableBatch

ENTRIES = [BatchEntry(f"{i:05d}", 10, "v", 0, i) for i in range(6)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(
            tmp_path, dg.DagsterInstance.ephemeral(), stack, {**SPEC, "reuse": True, "sampling": {"seed": 1}}
        )


def listed(monkeypatch: pytest.MonkeyPatch, rows: dict[str, int]) -> Counter[str]:
    """Answers of other datasets as a listing would show them; counts the listings."""
    listings = Counter[str]()

    def of_snapshot(answers: ReusableAnswers, snapshot: str, *_: Any) -> dict[str, ReusableBatch]:
        listings[snapshot] += 1
        return {key: ReusableBatch(key, count) for key, count in rows.items()}

    monkeypatch.setattr(workload_estimate.ReusableAnswers, "of_snapshot", of_snapshot)
    return listings


def test_rows_that_can_be_reused_are_no_work_and_are_listed_once(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = site.snapshot()
    site.request()
    listings = listed(monkeypatch, {KEYS[0]: 10, KEYS[1]: 7, KEYS[5]: 10})
    spec, folder = site.specs["d"]
    watcher = WorkWatcher(spec, site.store, folder)
    for _ in range(3):
        found = watcher.look(site.instance, [], None)
        assert found is not None and found.work is not None
        assert (found.batches, found.work.rows) == (12, 120 - 27), "their batches are to be made all the same"
    assert listings == {manifest.snapshot: 1}
    site.commit(KEYS[0])
    found = watcher.look(site.instance, [], None)
    assert found is not None and found.work is not None and found.work.rows == 110 - 17


def test_answers_that_are_found_later_count_within_a_minute(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, now, rows = site.snapshot(), 100.0, dict[str, int]()
    listings = listed(monkeypatch, rows)
    spec, folder = site.specs["d"]
    estimator = WorkloadEstimator(spec, site.store, folder, lambda: now)
    assert estimator.reusable(manifest.snapshot) == {}
    rows[KEYS[0]] = 5
    now += REUSABLE_SECONDS / 2
    assert estimator.reusable(manifest.snapshot) == {}
    now += REUSABLE_SECONDS
    assert estimator.reusable(manifest.snapshot) == {KEYS[0]: 5} and listings.total() == 2
    assert estimator.reusable("another") and listings["another"] == 1


@pytest.mark.parametrize(
    ("done", "free", "settled"),
    [
        (0, {}, 0),
        (0, {"00000": 4, "00005": 6}, 10),
        (7, {}, 7),
        (7, {"00000": 4}, 7),
        (3, {"00000": 4, "00001": 5}, 9),
        (7, {"00000": 4, "00005": 6}, 13),
        (99, {"00000": 10}, 30),
    ],
)
def test_what_a_run_has_finished_and_what_it_can_take_are_not_counted_twice(
    done: int, free: dict[str, int], settled: int
) -> None:
    run = RangeRunRecord("r", KeyRange("00000", "00002"), "unfinished", None)
    beats = [RunBeat("r", "d", "00000", "00002", "running", "", done, "host", 1, 0.0)]
    missing = {entry.key for entry in ENTRIES}
    assert active_request._settled_rows([run], beats, ENTRIES, missing, free) == settled


@pytest.mark.slow
def test_a_refresh_looks_once_at_all_batches_for_the_request_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = list[str](), WorkWatcher.look

    def counted(watcher: WorkWatcher, instance: dg.DagsterInstance, *more: Any) -> Any:
        looks.append("look")
        return look(watcher, instance, *more)

    monkeypatch.setattr(WorkWatcher, "look", counted)
    with dataset_project(tmp_path) as site:
        site.source(["a", "b"])
        for _ in range(2):  # the second finds the request of the first in the fleet's database
            run = site.materialize("prompts", tags={REFRESH_TAG: "d"})
            (event,) = run.asset_materializations_for_node("d__prompts")
            assert event.metadata["plan"].value != "nothing is missing"
    assert looks == ["look"]
