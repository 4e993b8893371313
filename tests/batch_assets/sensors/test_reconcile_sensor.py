"""The reconcile sensor over several datasets and several slices: everything is looked at, and nothing stops the others.

Instance, events and store are real; the sensors are kept from tick to tick, as a code server keeps them. Nothing runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
import pytest
from support.sensor_dataset import KEYS, SPEC, S, SensorDataset
from support.snapshots import commit, questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.catalog.publications import publish_job
from batch_assets.orchestration import reconcile
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.differences import Difference
from batch_assets.publishing.publish import publish
from batch_assets.request_status.dataset_status import Observer
from batch_assets.sensors import catalog_changes
from batch_assets.sensors import reconcile_sensor as reconcile_sensor
from batch_assets.tags import PUBLISH_VOID_TAG
from resources.objects.opening import CorruptObject, LocalObjects, ObjectInfo, StoreError
from resources.store.dataset_store import BatchStore, DatasetStore

NAMES = ["d0", "d1", "d2"]
ROWS = 60
BATCHES = ROWS // 10
FOREVER = 1e9


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SensorDataset]:
    """Three datasets of the same rows, each of six batches that are committed and reported."""
    monkeypatch.setattr(reconcile_sensor, "TICK_CPU_SECONDS", FOREVER)  # whatever this machine takes
    with contextlib.ExitStack() as stack:
        instance = dg.DagsterInstance.ephemeral()
        site = SensorDataset.open(tmp_path, instance, stack, *({**SPEC, "name": name} for name in NAMES))
        for name in NAMES:
            complete(site, name)
        yield site


def data(site: SensorDataset, name: str) -> DatasetStore:
    return DatasetStore(site.store.objects, name)


def complete(site: SensorDataset, name: str) -> None:
    """A snapshot whose batches are all committed and reported."""
    store = data(site, name)
    manifest = write_snapshot(store, questions(ROWS))
    site.instance.add_dynamic_partitions(name, KEYS[:BATCHES])
    for footer in commit(store, manifest).values():
        site.instance.report_runless_asset_event(ledger.batch_event(store, footer, manifest.snapshot))


def sensors(site: SensorDataset) -> dict[str, dg.SensorDefinition]:
    """The sensors of a new process."""
    store = BatchStore(root=str(site.folder / "store"))
    return {**site.sensors(), "reconcile": reconcile_sensor.reconcile_sensor(lambda: site.specs, store)}


def ticked(site: SensorDataset, kept: Mapping[str, dg.SensorDefinition]) -> str:
    """One tick of the reconcile sensor: what it says. It always has a cursor: for an empty one the daemon keeps the
    one from before."""
    said = site.tick("reconcile", kept).skip_message or ""
    assert site.cursors["reconcile"]
    return said


def lose(site: SensorDataset, name: str, key: str) -> None:
    """The object of a batch is deleted past the platform."""
    objects = site.store.objects
    (path,) = [info.path for info in objects.list(f"{name}/batches/") if f"/{key}" in info.path]
    objects.delete([path])


@pytest.mark.slow
def test_after_a_tick_that_was_broken_off_the_first_slices_are_looked_at_again(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reconcile, "SLICE_BATCHES", 2)
    kept = sensors(site)
    monkeypatch.setattr(reconcile_sensor, "TICK_SECONDS", 0.0)
    ticked(site, kept)
    ticked(site, kept)
    assert site.cursors["reconcile"] == "d0:2"
    monkeypatch.setattr(reconcile_sensor, "TICK_SECONDS", FOREVER)
    ticked(site, kept)
    lose(site, "d0", "00000")
    lose(site, "d1", "00005")
    said = ticked(site, kept)
    assert "d0: 1 batches are void" in said
    assert "d1: 1 batches are void" in said


@pytest.mark.slow
def test_a_tick_that_has_used_its_share_of_the_processor_begins_no_further_slice(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reconcile, "SLICE_BATCHES", 2)
    monkeypatch.setattr(reconcile_sensor, "TICK_CPU_SECONDS", 0.0)
    kept = sensors(site)
    assert ticked(site, kept).endswith("(1 looks)")
    assert site.cursors["reconcile"] == "d0:1"
    monkeypatch.setattr(reconcile_sensor, "TICK_CPU_SECONDS", FOREVER)
    assert ticked(site, kept).startswith("store and catalog agree")
    assert site.cursors["reconcile"] == "d0:0"


def published(site: SensorDataset, kept: Mapping[str, dg.SensorDefinition], *names: str) -> set[str]:
    """The publisher's tick, and of the runs that it asks for those of `names`. Returns the datasets of all."""
    asked = site.tick("publisher", kept).run_requests or []
    jobs = {publish_job(name): name for name in NAMES}
    for one in asked:
        name = jobs[one.job_name or ""]
        if name in names:
            run_id = site.run(S.STARTED, one.tags, job_name=one.job_name)
            store = data(site, name)
            manifest = store.manifest(store.current_snapshot() or "")
            publish(store, manifest, card=Card("", [], []), now=1.75e9, workdir=site.folder)
            site.end(run_id)
    return {jobs[one.job_name or ""] for one in asked}


def voids(site: SensorDataset) -> list[str]:
    """Jobs of the publications that count no more."""
    return [run.job_name for run in site.instance.get_runs() if PUBLISH_VOID_TAG in run.tags]


def test_a_dataset_that_is_not_published_yet_voids_no_publication_of_another_of_the_same_rows(site: SensorDataset):
    """The state of both is the same."""
    kept = sensors(site)
    assert published(site, kept, "d0") == set(NAMES)
    assert ticked(site, kept).startswith("store and catalog agree")
    assert voids(site) == []
    for name in NAMES:
        observer = Observer(site.instance, site.fleet_db, data(site, name))
        assert observer.problems(observer.look()) == []


def test_a_new_request_for_one_dataset_leaves_failed_publications_of_another_alone(site: SensorDataset):
    kept = sensors(site)
    (request, *_) = site.tick("publisher", kept).run_requests or []
    site.end(site.run(S.STARTED, request.tags, job_name=publish_job("d0")), dg.DagsterEventType.RUN_FAILURE)
    reconcile.reconcile(site.instance, data(site, "d1"))
    assert voids(site) == []
    reconcile.reconcile(site.instance, data(site, "d0"))
    assert voids(site) == [publish_job("d0")]


@pytest.mark.slow
def test_a_lost_table_is_published_again_by_the_next_tick_of_the_publisher(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catalog_changes, "OVERLAP_SECONDS", 0.0)
    kept = sensors(site)
    published(site, kept, *NAMES)
    ticked(site, kept)
    assert published(site, kept) == set()
    published(site, kept)
    assert site.tick("publisher", kept).skip_message == "3 more datasets: nothing to do"
    (part, *_) = [info.path for info in site.store.objects.list("d1/published/") if info.path.endswith(".parquet")]
    site.store.objects.delete([part])
    assert "d1: the table will be published again" in ticked(site, kept)
    assert published(site, kept, "d1") == {"d1"}
    assert ticked(site, kept).startswith("store and catalog agree")
    assert published(site, kept) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("rows"), "d0: could not be compared with the catalog: KeyError: 'rows'"),
        (CorruptObject("d0/x: expected a list, found none"), "d0: d0/x: expected a list, found none"),
        (StoreError("no reply"), "does not answer: no reply"),
    ],
)
def test_an_error_of_one_dataset_is_said_and_the_others_are_looked_at(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
):
    problems = reconcile.snapshot_problems

    def failing(store: DatasetStore, snapshot: str) -> Iterator[Difference]:
        if store.dataset == "d0":
            raise error
        return problems(store, snapshot)

    monkeypatch.setattr(reconcile, "snapshot_problems", failing)
    kept = sensors(site)
    lose(site, "d2", "00003")
    said = ticked(site, kept)
    assert words in said
    assert ("does not answer" in said) == (type(error) is StoreError)
    assert "d2: 1 batches are void" in said


@pytest.mark.slow
def test_a_dataset_of_several_slices_is_not_listed_whole_at_every_tick(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reconcile, "SLICE_BATCHES", 2)
    kept = sensors(site)
    ticked(site, kept)
    listed: list[str] = []
    whole = LocalObjects.list

    def noting(objects: LocalObjects, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        listed.append(prefix)
        return whole(objects, prefix, start_after)

    monkeypatch.setattr(LocalObjects, "list", noting)
    assert ticked(site, kept).startswith("store and catalog agree")
    assert listed
    assert {f"{name}/" for name in NAMES} & set(listed) == set()
