"""A store that goes away in the middle of a run: it is said, the lease is given back, nothing finished is lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.engine_supply import NEED, FleetClient, Heartbeat, engines
from support.range_runs import journaled, step_until
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.snapshots import questions, write_snapshot
from support.timing import PATIENCE

import batch_assets.generation.engine_supervisor
from batch_assets.generation.engine_supervisor import EngineSupervisor
from batch_assets.generation.loop_thread import LoopThread
from batch_assets.generation.op import probed
from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from resources.objects.opening import CorruptObject, LocalObjects, StoreError
from resources.objects.store_health import Probe, StoreHealth
from resources.store.dataset_store import DatasetStore

QUESTIONS = [f"What is {i} plus {i}?" for i in range(300)]


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "20", "--max-num-seqs", "16", model=MODEL) as engine:
        yield engine


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DatasetProject]:
    with dataset_project(tmp_path) as site:
        site.source(QUESTIONS)
        assert site.materialize("prompts").success
        yield site


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds * PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_folder_that_is_renamed_away_is_said_and_the_lease_given_back_and_the_run_goes_on(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_assets.generation.engine_supervisor, "SAY_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(batch_assets.generation.engine_supervisor, "RELEASE_SILENT_SECONDS", 2.0)
    folder, seen = site.folder, list[str]()

    def notes() -> list[str]:
        return [beat.note for beat in site.fleet_db.runs()]

    def away() -> None:
        until(lambda: len(list((folder / "store/d/batches").rglob("*.parquet"))) > 0)
        (folder / "store").rename(folder / "away")
        until(lambda: any("does not answer since" in note for note in notes()))
        seen.extend(notes())
        until(lambda: site.fleet_db.runs()[0].state == "waiting")
        seen.append("given back")
        assert not (folder / "store").exists()  # nothing was written where the store had been
        (folder / "away").rename(folder / "store")

    thread = threading.Thread(target=away)
    thread.start()
    done = site.run_rows("00000", "00029", engine.url)
    thread.join()
    assert done.success
    assert "the store does not answer since" in seen[0]
    assert seen[-1] == "given back"
    assert len(site.store.objects_by_batch()) == 30


@pytest.mark.slow
def test_a_run_whose_store_stays_away_ends_with_the_reason(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_assets.generation.engine_supervisor, "SAY_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(batch_assets.generation.engine_supervisor, "RELEASE_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(batch_assets.generation.engine_supervisor, "GIVE_UP_SILENT_SECONDS", 3.0)
    folder = site.folder

    def away() -> None:
        until(lambda: len(list((folder / "store/d/batches").rglob("*.parquet"))) > 0)
        (folder / "store").rename(folder / "away")

    thread = threading.Thread(target=away)
    thread.start()
    done = site.run_rows("00000", "00029", engine.url)
    thread.join()
    assert not done.success
    assert "the store does not answer since" in site.reason()
    assert "start it again when the store is back" in site.reason()
    assert not (folder / "store").exists()
    (folder / "away").rename(folder / "store")
    assert site.run_rows("00000", "00029", engine.url).success


def test_a_call_without_an_answer_is_silence_from_its_start_and_a_success_ends_it():
    now = [100.0]
    health = StoreHealth(lambda: now[0])
    with health.call("write"):
        now[0] += 4
        assert health.silent_seconds() == 0
        now[0] += 8
        assert health.silent_seconds() == 12
    assert health.silent_seconds() == 0
    with pytest.raises(OSError, match="full"), health.call("write"):
        raise OSError("full")
    now[0] += 30
    with health.call("read"):
        pass
    assert health.silent_seconds() == 30
    assert "does not answer since" in health.words(1e9)
    assert "OSError" in health.words(1e9)
    with health.call("write"):
        pass
    assert health.silent_seconds() == 0


def test_a_store_that_is_asked_for_nothing_is_probed():
    health = StoreHealth()
    assert health.silent_seconds() == 0
    with Probe(health, lambda: False, lambda: None, seconds=0.01):
        until(lambda: health.silent_seconds() > 0)


def test_a_write_that_failed_is_made_again_by_the_probe_once_reads_answer():
    health, there, writes = StoreHealth(), threading.Event(), list[int]()

    def write() -> None:
        with health.call("write"):
            writes.append(1)

    with pytest.raises(OSError, match="full"), health.call("write"):
        raise OSError("full")
    with Probe(health, there.is_set, write, seconds=0.01):
        until(lambda: "StoreError" in health.words(1e9))
        assert not writes
        there.set()
        until(lambda: health.silent_seconds() == 0)
        time.sleep(0.1)
    assert len(writes) == 1  # none while writes succeed


@pytest.mark.slow
def test_after_the_lease_was_given_back_a_store_that_takes_writes_again_is_noticed_and_the_run_goes_on(
    local_objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
):
    """One segment of the journal failed and nobody writes any more: reads alone cannot tell that writes succeed."""
    monkeypatch.setattr(batch_assets.generation.engine_supervisor, "SAY_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(batch_assets.generation.engine_supervisor, "RELEASE_SILENT_SECONDS", 0.6)
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(250), batch_rows=250)
    identity = RunIdentity("run", Intent("run"), ("00000", "00000"))
    plan = plan_range(store, store.entries(manifest.snapshot), identity.intent)
    run = RangeRun(store, manifest, plan, identity, journal_seconds=0.05)
    obstacle, said = local_objects.folder / "d/journal", list[str]()
    obstacle.touch()  # no folder can be made here, so that no segment can be written
    with engines(2, speed="5") as found, LoopThread() as loop, contextlib.closing(run), probed(run, loop, 0.05):
        client = FleetClient(*found)
        supervisor = EngineSupervisor(
            client, Heartbeat(), NEED, run, loop, say=said.append, warn=said.append, decided=lambda _: None
        )
        try:
            step_until(supervisor, lambda: bool(client.released))
            assert "the store answers again" not in said
            finished = run.progress().rows_done
            assert 0 < finished < 250
            obstacle.unlink()
            step_until(supervisor, lambda: "the store answers again" in said)
            assert len(journaled(store)) == finished
            step_until(supervisor, lambda: not run.missing())
        finally:
            supervisor.end()
    assert client.asked == 2


def test_with_nothing_to_write_something_small_tells_whether_writes_succeed(
    local_objects: LocalObjects, tmp_path: Path
):
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(10))
    identity = RunIdentity("run", Intent("run"), ("00000", "00000"))
    run = RangeRun(store, manifest, plan_range(store, store.entries(manifest.snapshot), identity.intent), identity)
    with pytest.raises(OSError, match="full"), run.health.call("write"):
        raise OSError("full")
    with contextlib.closing(run):
        folder = local_objects.folder.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match="the store's folder is gone"):
            asyncio.run(run.write_again())
        assert run.health.fails("write") and not local_objects.folder.exists()
        folder.rename(local_objects.folder)
        asyncio.run(run.write_again())
        assert not run.health.fails("write")
    assert [info.path for info in local_objects.list("") if "/snapshots/" not in info.path] == []


@pytest.mark.slow
def test_a_damaged_object_while_the_store_is_there_is_no_reason_to_wait(site: DatasetProject, engine: SimulatedEngine):
    manifest = site.manifest()
    shard = site.store.snapshot_path(manifest.snapshot, manifest.shards[0].path)
    site.store.objects.delete([shard])
    assert not site.run_rows("00000", "00029", engine.url).success
    assert CorruptObject.__name__ in site.reason()
    assert "`batch-assets run d` mends it" in site.reason()
