"""A store that is away while a run prepares: it is waited for as long as in generation, and no absence is believed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE

import batch_assets.generation.op
from batch_assets.generation import store_reads
from batch_assets.generation.range_run import RangeRun
from batch_assets.generation.store_reads import while_store_answers
from batch_assets.orchestration.reconcile import Reconciler
from resources.objects import store_health
from resources.objects.opening import LocalObjects, StoreError
from resources.objects.store_health import StoreAway, StoreHealth

QUESTIONS = [f"What is {i} plus {i}?" for i in range(30)]


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "1000", model=MODEL) as engine:
        yield engine


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetProject]:
    monkeypatch.setattr(store_reads, "SAY_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(store_reads, "GIVE_UP_SILENT_SECONDS", 2.0)
    monkeypatch.setattr(store_reads, "ASK_SECONDS", 0.1)
    with dataset_project(tmp_path) as site:
        site.source(QUESTIONS)
        assert site.materialize("prompts").success
        yield site


def gone(site: DatasetProject, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    """The store's folder is renamed away when this function is called first."""
    real, called = getattr(where, name), threading.Event()

    def first(*args: Any, **more: Any) -> Any:
        if not called.is_set():
            called.set()
            (site.folder / "store").rename(site.folder / "away")
        return real(*args, **more)

    monkeypatch.setattr(where, name, first)


PREPARATIONS = [(batch_assets.generation.op, "plan_range"), (RangeRun, "prepare")]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name"), PREPARATIONS, ids=["plan", "prepare"])
def test_a_run_whose_store_stays_away_while_it_prepares_ends_with_the_reason(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
):
    gone(site, monkeypatch, where, name)
    began = time.monotonic()
    assert not site.run_rows("00000", "00002", engine.url).success
    assert 2.0 < time.monotonic() - began < 20 * PATIENCE
    assert "the store does not answer since" in site.reason()
    assert "start it again when the store is back" in site.reason()
    assert not (site.folder / "store").exists()
    (site.folder / "away").rename(site.folder / "store")
    assert site.run_rows("00000", "00002", engine.url).success


@pytest.mark.slow
def test_a_run_waits_for_its_store_and_believes_no_empty_listing(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    assert site.run_rows("00000", "00002", engine.url).success
    before = site.store.objects_by_batch()
    gone(site, monkeypatch, batch_assets.generation.op, "plan_range")

    def comes_back() -> None:
        while not (site.folder / "away").exists():
            time.sleep(0.02)
        time.sleep(0.7)
        (site.folder / "away").rename(site.folder / "store")

    thread = threading.Thread(target=comes_back)
    thread.start()
    assert site.run_rows("00000", "00002", None).success  # no engine: all of it is there
    thread.join()
    assert site.store.objects_by_batch() == before


@pytest.mark.slow
def test_the_source_is_not_read_for_ever_beside_a_store_that_hangs(
    site: DatasetProject, monkeypatch: pytest.MonkeyPatch
):
    answers, real = threading.Event(), LocalObjects.exists

    def hangs(self: LocalObjects, path: str) -> bool:
        answers.wait(60)
        return real(self, path)

    monkeypatch.setattr(LocalObjects, "exists", hangs)
    monkeypatch.setattr(store_health, "PATIENCE_SECONDS", 0.5)  # after which a call is unanswered
    monkeypatch.setattr(store_reads, "GIVE_UP_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(batch_assets.orchestration.assets, "self_test", lambda objects: answers.wait(60))
    try:
        assert not site.materialize("prompts").success
        assert "start it again when the store is back" in site.reason()
    finally:
        answers.set()


def test_what_the_work_returns_or_raises_is_passed_on_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_reads, "ASK_SECONDS", 1e4)  # who waited for the next question would not end
    assert while_store_answers(lambda: 7, lambda: True, note=print) == 7
    with pytest.raises(ValueError, match="x"):
        while_store_answers(lambda: int("x"), lambda: True, note=print)


def test_silence_is_noted_and_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_reads, "SAY_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(store_reads, "ASK_SECONDS", 0.02)
    there, noted = threading.Event(), list[str]()

    def ask() -> bool:
        return there.is_set()

    def note(words: str) -> None:
        noted.append(words)
        if words:
            there.set()
        else:
            done.set()

    done = threading.Event()
    assert while_store_answers(lambda: done.wait(20), ask, note=note)
    assert ["does not answer since" in words for words in noted] == [True, False]


def test_silence_that_is_too_long_is_an_error():
    now = [0.0]
    health = StoreHealth(lambda: now[0])
    with pytest.raises(StoreAway, match="start it again"), health.call("read"):
        now[0] = store_reads.GIVE_UP_SILENT_SECONDS
        store_reads.silence(health)


@pytest.mark.slow
def test_a_store_that_goes_away_while_it_is_compared_makes_no_batch_void(
    site: DatasetProject, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
):
    assert site.run_rows("00000", "00002", engine.url).success
    gone(site, monkeypatch, batch_assets.orchestration.reconcile, "object_infos")
    with pytest.raises(StoreError, match="is it mounted"):
        Reconciler(site.instance, site.store).look()
