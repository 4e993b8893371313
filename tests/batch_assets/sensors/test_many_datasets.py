"""One launcher and one publisher for all datasets: whose turn it is, what an idle tick costs, what stops nobody else.

The sensors are kept from tick to tick, as a code server keeps them; the instance, its events and the store are real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.definitions.run_request import RunRequest
from dagster._core.instance.ref import InstanceRef
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin
from support.defs_folders import write, write_text
from support.sensor_dataset import KEYS, SPEC, S, SensorDataset
from support.snapshots import commit, questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.catalog.publications import publish_job
from batch_assets.definitions import platform
from batch_assets.orchestration.reconcile import Findings, Reconciler
from batch_assets.sensors import catalog_changes, instance, many_datasets
from batch_assets.spec.discovery import declarations, known_datasets
from batch_assets.spec.last_known import keep
from batch_assets.tags import CANCELED_TAG, PUBLISH_TAG, RANGE_END_TAG, RANGE_START_TAG, REFRESH_TAG, REQUEST_TAG
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchStore, DatasetStore

NAMES = [f"d{number}" for number in range(4)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    """Four datasets."""
    with contextlib.ExitStack() as stack:
        yield opened(tmp_path, dg.DagsterInstance.ephemeral(), stack)


@pytest.fixture
def site_on_files(tmp_path: Path) -> Iterator[SensorDataset]:
    """The same; its event log is what a deployment on SQLite has: a file for each run, and an index of some events."""
    (tmp_path / "home").mkdir()
    with contextlib.ExitStack() as stack:
        yield opened(tmp_path, dg.DagsterInstance.local_temp(str(tmp_path / "home")), stack)


def opened(folder: Path, instance: dg.DagsterInstance, stack: contextlib.ExitStack) -> SensorDataset:
    return SensorDataset.open(folder, instance, stack, *({**SPEC, "name": name} for name in NAMES))


def store(site: SensorDataset, name: str) -> DatasetStore:
    return DatasetStore(site.store.objects, name)


def refreshed(site: SensorDataset, name: str, rows: int = 120) -> str:
    """A refresh that read a source of so many rows, with the events that its worker writes; returns its run id."""
    run_id = site.run(S.STARTED, {REFRESH_TAG: name}, job_name=f"{name}_refresh")
    write_snapshot(store(site, name), questions(rows))
    site.instance.add_dynamic_partitions(name, KEYS[: rows // 10])
    site.end(run_id)
    return run_id


def committed(site: SensorDataset, name: str) -> None:
    """Every batch of the dataset is committed and reported."""
    data = store(site, name)
    snapshot = data.current_snapshot()
    assert snapshot is not None
    for footer in commit(data, data.manifest(snapshot)).values():
        site.instance.report_runless_asset_event(ledger.batch_event(data, footer, snapshot))


def started(found: dg.SensorResult | object) -> list[RunRequest]:
    return list(getattr(found, "run_requests", None) or ())


def datasets(found: object) -> set[str]:
    """Whose batches the tick starts runs over."""
    return {key.path[0] for one in started(found) for key in one.asset_selection or ()}


@contextlib.contextmanager
def statements() -> Iterator[list[str]]:
    """SQL that is run meanwhile, without SQLite's own."""
    asked: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith(("PRAGMA", "SELECT name FROM")):
            asked.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


def launched(site: SensorDataset, kept: Mapping[str, dg.SensorDefinition], running: bool = True) -> set[str]:
    """Tick the launcher and carry out what it asks for, as the daemon does; returns the datasets."""
    found = site.tick("launcher", kept)
    for one in started(found):
        run_id = site.run(
            S.STARTING, one.tags, job_name="__ASSET_JOB", asset_selection=frozenset(one.asset_selection or ())
        )
        site.end(run_id, dg.DagsterEventType.RUN_START)
    return datasets(found)


def test_there_are_as_many_sensors_for_four_datasets_as_for_one(site: SensorDataset, tmp_path: Path):
    (tmp_path / "one").mkdir()
    with contextlib.ExitStack() as stack:
        one = SensorDataset.open(tmp_path / "one", dg.DagsterInstance.ephemeral(), stack)
        assert site.sensors().keys() == one.sensors().keys()
    assert not site.datasets.sensors


def test_the_definitions_of_several_datasets_load(site: SensorDataset):
    shared = platform(site.datasets, site.specs, BatchStore(root=str(site.folder / "store")), site.fleet)
    repository = dg.Definitions.merge(site.datasets, shared).get_repository_def()
    publisher = repository.get_sensor_def("publisher")
    assert {target.job_name for target in publisher.targets} == {publish_job(name) for name in NAMES}


@pytest.mark.parametrize("sensor", ["launcher", "publisher"])
def test_an_idle_tick_asks_the_database_one_question_whatever_the_number_of_datasets(site: SensorDataset, sensor: str):
    kept = site.sensors()
    site.tick(sensor, kept)
    with statements() as asked:
        assert site.tick(sensor, kept).skip_message == "4 more datasets: nothing to do"
    assert len(asked) == 1, asked


def test_a_dataset_that_was_never_asked_for_is_compared_with_its_store_without_a_query(site: SensorDataset):
    reconciler = Reconciler(site.instance, store(site, "d0"))
    with statements() as asked:
        assert reconciler.look_once(None) == Findings()
    assert not asked
    assert reconciler.unchanged(None)


def test_a_dataset_is_compared_once_its_store_or_the_catalog_has_something_of_it(site: SensorDataset):
    data = store(site, "d0")
    reconciler = Reconciler(site.instance, data)
    reconciler.look_once(None)
    write_snapshot(data, questions(20))
    assert not reconciler.unchanged(None)
    assert reconciler.look_once(None).snapshot == data.current_snapshot()
    assert Reconciler(site.instance, store(site, "d1")).look_once(1).snapshot is None
    committed(site, "d0")
    reported = DatasetStore(open_objects(str(site.folder / "empty")), "d0")
    found = Reconciler(site.instance, reported).look_once(1)
    assert found.problems, "the catalog has batches, the store nothing"


@pytest.mark.slow
def test_of_two_hundred_files_of_which_three_are_broken_none_is_read_again_by_a_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "home").mkdir()
    for number in range(200):
        write(tmp_path / "defs", f"d{number}")
    keep(declarations().files, Path.read_text)
    for number in (3, 50, 199):
        write_text(tmp_path / "defs" / f"d{number}", "type: [\n")
    assert (len(declarations().datasets), len(declarations().broken), len(known_datasets())) == (197, 3, 200)
    for name in ("discovery.read_documents", "discovery.read_text"):
        monkeypatch.setattr(f"batch_assets.spec.{name}", lambda _: pytest.fail("read again"))
    assert (len(declarations().datasets), len(declarations().broken), len(known_datasets())) == (197, 3, 200)


@pytest.mark.slow
def test_a_request_is_seen_by_the_next_tick_and_only_its_dataset_is_looked_at(site_on_files: SensorDataset):
    site = site_on_files
    kept = site.sensors()
    assert launched(site, kept) == set()
    request = refreshed(site, "d2")
    found = site.tick("launcher", kept)
    assert datasets(found) == {"d2"}
    assert {one.tags[REQUEST_TAG] for one in started(found)} == {request}


def test_what_only_describes_an_asset_is_no_news(site: SensorDataset):
    """Dagster's freshness daemon writes an event for each asset of a new deployment; our own sensors observe."""
    kept = site.sensors()
    launched(site, kept)
    site.instance.report_runless_asset_event(dg.AssetObservation(ledger.rows_key("d1")))
    assert site.tick("launcher", kept).skip_message == "4 more datasets: nothing to do"


def test_two_requests_at_the_same_moment_are_both_started_once(site: SensorDataset):
    kept = site.sensors()
    launched(site, kept)
    refreshed(site, "d1")
    refreshed(site, "d3")
    assert launched(site, kept) == {"d1", "d3"}
    assert launched(site, kept) == set()


@pytest.mark.slow
def test_when_more_runs_have_news_than_are_asked_for_every_dataset_is_looked_at(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catalog_changes, "MOST_RUNS", 1)
    kept = site.sensors()
    launched(site, kept)
    for name in NAMES:
        refreshed(site, name)
    assert launched(site, kept) == set(NAMES)


def test_a_new_process_goes_on_where_the_old_one_ended_and_starts_nothing_twice(site: SensorDataset):
    refreshed(site, "d0")
    refreshed(site, "d1")
    assert launched(site, site.sensors()) == {"d0", "d1"}
    assert launched(site, site.sensors()) == set()


def test_batches_that_are_lost_from_the_ledger_are_seen(site: SensorDataset):
    kept = site.sensors()
    refreshed(site, "d1")
    committed(site, "d1")
    assert launched(site, kept) == set()
    version = ledger.ledger_versions(site.instance, "d1")[KEYS[3]]
    void = ledger.void_event("d1", KEYS[3], version.voided(), "snapshot", "its object is gone", None)
    site.instance.report_runless_asset_event(void)
    assert launched(site, kept) == {"d1"}


def test_a_damaged_store_is_named_and_stops_no_other_dataset(site: SensorDataset, monkeypatch: pytest.MonkeyPatch):
    kept = site.sensors()
    launched(site, kept)
    for name in ("d0", "d1"):
        refreshed(site, name)
    good = store(site, "d0").current_snapshot()
    store(site, "d0").set_current_snapshot("gone")
    assert launched(site, kept) == {"d1"}
    assert "d0: could not be looked at: CorruptObject: d0/snapshots" in (site.tick("launcher", kept).skip_message or "")
    assert good is not None
    store(site, "d0").set_current_snapshot(good)
    monkeypatch.setattr(many_datasets, "RETRY_SECONDS", 0.0)
    assert datasets(site.tick("launcher", kept)) >= {"d0"}


@pytest.mark.slow
def test_a_store_that_was_restored_without_an_event_is_seen_in_time(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    kept = site.sensors()
    refreshed(site, "d1")
    first = store(site, "d1").current_snapshot()
    committed(site, "d1")
    refreshed(site, "d1", rows=110)
    assert first is not None
    committed(site, "d1")
    launched(site, kept)
    monkeypatch.setattr("batch_assets.sensors.catalog_changes.OVERLAP_SECONDS", 0.0)
    launched(site, kept)
    store(site, "d1").set_current_snapshot(first)
    assert first not in (site.tick("launcher", kept).skip_message or "")
    monkeypatch.setattr(many_datasets, "AGAIN_SECONDS", 0.0)
    said = [site.tick("launcher", kept).skip_message or "" for _ in NAMES]
    assert any(f"d1: snapshot {first}" in one for one in said)


def test_a_tick_that_has_no_time_left_goes_on_with_the_others_next_time(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(many_datasets, "TICK_SECONDS", -1.0)
    kept = site.sensors()
    for name in NAMES:
        refreshed(site, name)
    found = [launched(site, kept) for _ in range(len(NAMES))]
    assert sorted(name for tick in found for name in tick) == NAMES
    assert all(len(tick) == 1 for tick in found)


@pytest.mark.slow
def test_a_tick_starts_so_many_runs_and_the_next_ones_the_rest_each_once(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(many_datasets, "MOST_RUNS", 2)
    kept = site.sensors()
    for name in NAMES:
        refreshed(site, name)
    for _ in range(12):
        launched(site, kept)
    runs = [run for run in site.instance.get_runs() if REQUEST_TAG in run.tags]
    ranges = {(run.tags[REQUEST_TAG], run.tags[RANGE_START_TAG]) for run in runs}
    assert len(runs) == len(ranges) == 3 * len(NAMES)


def test_a_canceled_request_is_told_at_every_tick_but_not_looked_at_again(site: SensorDataset):
    kept = site.sensors()
    request = refreshed(site, "d1")
    site.instance.add_run_tags(request, {CANCELED_TAG: "true"})
    site.tick("launcher", kept)
    said = site.tick("launcher", kept).skip_message or ""
    assert "d1:" in said and "this request was canceled" in said
    assert said.endswith("3 more datasets: nothing to do")


def test_a_run_that_the_launchers_of_an_older_version_started_is_not_started_again(site: SensorDataset):
    request = refreshed(site, "d1")
    old = {"dagster/sensor_name": "d1_launcher", "dagster/run_key": f"{request}:00000:00003:0"}
    tags = {RANGE_START_TAG: "00000", RANGE_END_TAG: "00003", REQUEST_TAG: request, **old}
    site.run(S.STARTING, tags, job_name="__ASSET_JOB", asset_selection=frozenset([ledger.rows_key("d1")]))
    found = started(site.tick("launcher"))
    assert [one.tags[RANGE_START_TAG] for one in found] == ["00004", "00008"]


@pytest.mark.slow
def test_two_datasets_of_the_same_rows_are_both_published(site: SensorDataset):
    """Their snapshots have the same id, and so has what is published of them."""
    kept = site.sensors()
    for name in ("d1", "d2"):
        refreshed(site, name)
        committed(site, name)
    found = started(site.tick("publisher", kept))
    assert [one.job_name for one in found] == ["d1_publish", "d2_publish"]
    assert len({one.tags[PUBLISH_TAG] for one in found}) == 1
    assert len({one.run_key for one in found}) == 2
    site.end(site.run(S.STARTED, found[0].tags, job_name=publish_job("d1")))
    assert [one.job_name for one in started(site.tick("publisher"))] == ["d2_publish"]


def test_ticks_of_a_code_server_share_one_instance_and_what_it_knows_of_the_catalog(
    site_on_files: SensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look of the capacity sensor opened another one, which read the whole ledger and opened its connections."""
    site, opened, from_ref = site_on_files, list[dg.DagsterInstance](), dg.DagsterInstance.from_ref
    refreshed(site, "d0")
    committed(site, "d0")

    def counted(reference: InstanceRef) -> dg.DagsterInstance:
        opened.append(from_ref(reference))
        return opened[-1]

    monkeypatch.setattr(dg.DagsterInstance, "from_ref", counted)
    monkeypatch.setattr(instance, "_kept", {})
    repository, known = site.definitions.get_repository_def(), site.sensors()
    for _ in range(2):
        for sensor in (one for one in known.values() if not one.required_resource_keys):
            with dg.SensorEvaluationContext(
                site.instance.get_ref(),
                cursor=site.cursors.get(sensor.name),
                repository_def=repository,
                last_sensor_start_time=1.0,
                code_location_origin=GrpcServerCodeLocationOrigin(host="127.0.0.1", port=1),
            ) as context:
                site.cursors[sensor.name] = sensor.evaluate_tick(context).cursor
                context.log.info("looked")
    assert len(opened) == 1
