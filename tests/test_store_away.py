"""A store that goes away in the middle of a run: it is said, the lease is given back, nothing finished is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dataset_site import MODEL, DatasetSite, dataset_site
from simulated_engine import SimulatedEngine, simulated_engine

import batch_assets.crew
from resources.objects import CorruptObject
from resources.store_health import Probe, StoreHealth

QUESTIONS = [f"What is {i} plus {i}?" for i in range(300)]


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "20", "--max-num-seqs", "16", model=MODEL) as engine:
        yield engine


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DatasetSite]:
    with dataset_site(tmp_path) as site:
        site.source(QUESTIONS)
        assert site.materialize("prompts").success
        yield site


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_folder_that_is_renamed_away_is_said_and_the_lease_given_back_and_the_run_goes_on(
    site: DatasetSite, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_assets.crew, "SAY_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(batch_assets.crew, "RELEASE_SILENT_SECONDS", 2.0)
    folder, seen = site.folder, list[str]()

    def notes() -> list[str]:
        return [beat.note for beat in site.book.runs()]

    def away() -> None:
        until(lambda: len(list((folder / "store/d/batches").rglob("*.parquet"))) > 0)
        (folder / "store").rename(folder / "away")
        until(lambda: any("does not answer since" in note for note in notes()))
        seen.extend(notes())
        until(lambda: site.book.runs()[0].state == "waiting")
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
    site: DatasetSite, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_assets.crew, "SAY_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(batch_assets.crew, "RELEASE_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(batch_assets.crew, "GIVE_UP_SILENT_SECONDS", 3.0)
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
    with Probe(health, lambda: False, seconds=0.01):
        until(lambda: health.silent_seconds() > 0)


def test_a_damaged_object_while_the_store_is_there_is_no_reason_to_wait(site: DatasetSite, engine: SimulatedEngine):
    manifest = site.manifest()
    shard = site.store.snapshot_path(manifest.snapshot, manifest.shards[0].path)
    site.store.objects.delete([shard])
    assert not site.run_rows("00000", "00029", engine.url).success
    assert CorruptObject.__name__ in site.reason()
    assert "`batch-assets run d` mends it" in site.reason()
