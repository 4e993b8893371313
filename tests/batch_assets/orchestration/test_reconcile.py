"""Store and catalog: what is lost is noticed, said, and made again; what somebody else reports changes nothing."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
from support.dataset_project import MODEL, dataset_project
from support.healed_dataset import KINDS, QUESTIONS, SPEC, HealedDataset
from support.simulated_engine import SimulatedEngine, simulated_engine

from batch_assets.catalog import ledger
from batch_assets.orchestration import reconcile
from batch_assets.sensors import reconcile_sensor as reconcile_sensor
from batch_assets.tags import REFRESH_TAG


@dataclass
class Shared:
    """One dataset for all tests, as each leaves it healed; a new one after a test that did not."""

    template: Path
    engine: SimulatedEngine
    folders: pytest.TempPathFactory
    stack: contextlib.ExitStack
    site: HealedDataset | None = None

    def whole(self) -> HealedDataset:
        if self.site is None or not self.site.verify().ok or self.site.status().problems:
            folder = self.folders.mktemp("site")
            shutil.copytree(self.template / "store", folder / "store")
            shutil.copy(self.template / "questions.jsonl", folder)
            self.site = HealedDataset(self.stack.enter_context(dataset_project(folder, **SPEC)), self.engine)
            assert self.site.run().ok
        self.site.reconcile()
        return self.site


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "1000", "--max-num-seqs", "64", model=MODEL) as engine:
        yield engine


@pytest.fixture(scope="module")
def template(engine: SimulatedEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a dataset that was generated and published, with duplicates, a reject and a dead letter."""
    folder = tmp_path_factory.mktemp("template")
    with dataset_project(folder, **SPEC) as found:
        site = HealedDataset(found, engine)
        found.source([*QUESTIONS, QUESTIONS[0], "word " * 40_000])
        with (folder / "questions.jsonl").open("a") as file:
            file.write("broken\n")
        assert site.run().ok
        assert site.verify().ok
    return folder


@pytest.fixture(scope="module")
def shared(template: Path, engine: SimulatedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with contextlib.ExitStack() as stack:
        yield Shared(template, engine, tmp_path_factory, stack)


@pytest.fixture
def site(shared: Shared) -> HealedDataset:
    return shared.whole()


AGREE = "store and catalog agree"


@pytest.mark.slow
def test_these_are_all_kinds_of_objects(site: HealedDataset):
    assert sorted(site.paths()) == KINDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_is_deleted_is_said_everywhere_and_mended_by_run(site: HealedDataset, kind: str):
    path = site.paths()[kind]
    site.site.store.objects.delete([path])
    if kind == "dead_letters/json":  # its list is there and whole
        assert "has no checksum" in site.verify().notes[-1]
        return
    assert not site.verify().ok
    assert site.status().problems
    assert not site.reconcile().startswith(AGREE)
    assert site.run().ok
    assert site.verify().differences == ()
    assert site.status().problems == ()
    assert site.reconcile().startswith(AGREE)


POINTERS = ["snapshots/CURRENT", "published/CURRENT", "dead_letters/CURRENT"]


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"\xff\x00garbage", b"0123456789abcdef", b"../../../etc/passwd", b"x" * 5000])
@pytest.mark.parametrize("kind", POINTERS)
def test_a_damaged_pointer_is_a_sentence_everywhere_and_mended_by_run(site: HealedDataset, kind: str, content: bytes):
    store = site.site.store
    store.objects.put(f"d/{kind}", content)
    (difference, *_) = site.verify().differences
    assert "CURRENT" in difference.found or "0123456789abcdef" in difference.found + difference.expected
    assert site.status().problems
    for sensor in ("launcher", "publisher"):
        assert site.site.tick(sensor).skip_message
    assert not site.reconcile().startswith(AGREE)
    assert site.run().ok
    assert site.verify().ok


@pytest.mark.slow
def test_a_lost_batch_is_void_and_generated_again_as_its_next_generation(site: HealedDataset):
    (before, *_) = site.site.store.current_objects(site.site.store.entries(site.site.manifest().snapshot)).values()
    old = [site.site.store.batch_path(one) for one in site.site.store.objects_by_batch("00000", "00000")["00000"]]
    site.site.store.objects.delete(old)
    assert "1 batches are void" in site.reconcile()
    assert site.status().batches_done == site.status().batches - 1
    assert site.step() == 1
    (batch,) = site.site.store.objects_by_batch("00000", "00000")["00000"]
    assert site.site.store.batch_path(batch) not in old
    assert batch.generation == before.generation + 1
    site.step()
    assert site.verify().ok
    assert site.reconcile().startswith(AGREE)


@pytest.mark.slow
def test_a_changed_batch_is_void_and_its_next_generation_keeps_nothing_of_it(site: HealedDataset):
    store, path = site.site.store, site.newest("00000")
    assert site.reconcile().startswith(AGREE)
    data = bytearray(store.objects.get(path))
    data[len(data) // 3] ^= 1
    store.objects.put(path, bytes(data))
    assert "not as it was written" in site.reconcile()
    assert site.run().ok
    assert site.newest("00000") != path
    assert site.verify().ok


@pytest.mark.slow
def test_a_truncated_batch_is_noticed_by_its_size_also_by_who_never_saw_it_whole(site: HealedDataset):
    store, path = site.site.store, site.newest("00000")
    store.objects.put(path, store.objects.get(path)[:-100])
    assert any("corrupt object" in problem for problem in site.status().problems)
    assert "not as it was written" in site.reconcile()
    assert site.run().ok


@pytest.mark.slow
def test_a_batch_that_comes_back_as_it_was_is_not_generated_again(site: HealedDataset):
    store, path = site.site.store, site.newest("00000")
    data = store.objects.get(path)
    store.objects.delete([path])
    assert "1 batches are void" in site.reconcile()
    store.objects.put(path, data)
    assert "1 batches reported again" in site.reconcile()
    assert site.step() == 0
    assert site.verify().ok


@pytest.mark.slow
def test_when_most_is_gone_at_once_nothing_is_paid_before_somebody_asks(site: HealedDataset):
    paths = [info.path for info in site.site.store.objects.list("d/batches/")]
    site.site.store.objects.delete(paths[:-1])
    assert "is it mounted? `batch-assets run d` generates them again" in site.reconcile()
    assert site.step() == 0
    assert site.run().ok
    assert site.verify().ok


@pytest.mark.slow
def test_a_store_that_is_not_there_is_said_and_not_generated_anew(site: HealedDataset):
    (site.site.folder / "store").rename(site.site.folder / "away")
    assert "is it mounted" in site.reconcile()
    assert any("is it mounted" in problem for problem in site.status().problems)
    ending = site.run()
    assert not ending.ok
    assert "is it mounted" in ending.said
    shutil.rmtree(site.site.folder / "store", ignore_errors=True)
    (site.site.folder / "away").rename(site.site.folder / "store")
    assert site.run().ok
    assert site.verify().ok


@pytest.mark.slow
def test_a_materialization_that_somebody_reports_changes_nothing(site: HealedDataset):
    before = ledger.ledger_versions(site.site.instance, "d")
    for key in before:
        event = dg.AssetMaterialization(ledger.rows_key("d"), partition=key, description="reported in the UI")
        site.site.instance.report_runless_asset_event(event)
    with_version = {"dagster/data_version": "mine"}
    event = dg.AssetMaterialization(ledger.rows_key("d"), partition="00002", tags=with_version)
    site.site.instance.report_runless_asset_event(event)
    for name in ("prompts", "dataset"):
        site.site.instance.report_runless_asset_event(dg.AssetMaterialization(dg.AssetKey(["d", name])))
    assert ledger.ledger_versions(site.site.instance, "d") == before
    status = site.status()
    assert (status.batches_done, status.problems) == (status.batches, ())
    assert site.step() == 0
    assert site.verify().ok
    assert site.run().ok


@pytest.mark.slow
def test_a_store_restored_from_an_older_copy_is_healed_by_run(site: HealedDataset):
    """Fewer batches, an older snapshot, an older table: what the catalog says of them is no longer true."""
    folder = site.site.folder
    shutil.copytree(folder / "store", folder / "copy")
    lines = (folder / "questions.jsonl").read_text().splitlines()
    changed = [line.replace("What is 7 plus 7?", "What is 7 times 7?") for line in lines]
    more = [f'{{"id": "new-{i}", "question": "What is {i} minus {i}?"}}' for i in range(25)]
    (folder / "questions.jsonl").write_text("\n".join([*changed, *more]) + "\n")
    assert site.run().ok
    newer = site.status()
    shutil.rmtree(folder / "store")
    (folder / "copy").rename(folder / "store")
    batches = [info.path for info in site.site.store.objects.list("d/batches/")]
    site.site.store.objects.delete(batches[2:4])
    assert not site.verify().ok
    assert site.run().ok
    assert site.verify().ok
    assert (site.status().snapshot, site.status().rows) == (newer.snapshot, newer.rows)


@pytest.mark.slow
def test_a_publication_that_failed_three_times_is_tried_again_by_a_new_request(site: HealedDataset):
    store = site.site.store
    part = site.paths()["published/part"]
    store.objects.delete([part])
    assert "published again" in site.reconcile()
    (request,) = site.site.tick("publisher").run_requests or []
    batch = site.newest("00001")
    data = store.objects.get(batch)
    store.objects.delete([batch])
    for _ in range(3):
        assert not site.publish(request.tags)
    store.objects.put(batch, data)
    assert "failed 3 times" in (site.site.tick("publisher").skip_message or "")
    assert site.run().ok
    assert site.verify().ok


@pytest.mark.parametrize("flips", [3, pytest.param(14, marks=pytest.mark.soak("rows"))])  # of 11 kinds of objects: 154
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "/CURRENT" not in kind])
def test_verify_sees_every_flipped_bit(site: HealedDataset, kind: str, flips: int):
    store, draw = site.site.store, random.Random(kind)
    path = site.paths()[kind]
    whole = store.objects.get(path)
    unseen = []
    for _ in range(flips):
        place, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        store.objects.put(path, whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        if site.verify().ok:
            unseen.append((place, bit))
    store.objects.put(path, whole)
    assert unseen == []
    assert site.verify().ok


def test_a_store_from_before_there_were_checksums_still_verifies_and_says_so(site: HealedDataset):
    store = site.site.store
    manifest = site.site.manifest().model_copy(update={"files": []})
    path = store.snapshot_path(manifest.snapshot, "manifest.json")
    store.objects.put(path, manifest.model_dump_json(exclude={"checksum", "files"}).encode())
    found = site.verify()
    assert found.ok
    assert "before there were checksums" in found.notes[0]


def test_a_tick_over_a_dataset_that_agreed_reads_no_object(site: HealedDataset, monkeypatch: pytest.MonkeyPatch):
    assert site.reconcile().startswith(AGREE)
    reads: list[str] = []
    monkeypatch.setattr(reconcile, "check_object", lambda *args: reads.append("object"))
    assert site.reconcile().startswith(AGREE)
    assert reads == []


def test_a_tick_is_bounded_and_the_next_one_goes_on(site: HealedDataset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reconcile, "SLICE_BATCHES", 2)
    slices = -(-site.status().batches // 2)
    assert site.reconcile() == f"store and catalog agree ({slices} looks)"
    monkeypatch.setattr(reconcile_sensor, "TICK_SECONDS", 0.0)
    cursors = [site.ticked().cursor for _ in range(slices)]
    assert cursors == [*(f"d:{number}" for number in range(1, slices)), "d:0"]


def test_a_refresh_run_reads_the_catalog_before_it_voids(site: HealedDataset):
    assert site.site.materialize("prompts", tags={REFRESH_TAG: "d"}).success
    assert not any(version.void for version in ledger.ledger_versions(site.site.instance, "d").values())
