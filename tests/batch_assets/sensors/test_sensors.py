"""The sensors, evaluated in process against a real Dagster instance on SQLite: what they start, what they leave alone.

The instance is what a deployment has: ledger events, runs, backfills and dynamic partitions are real rows of its
tables. `backfills.py` reads some of them through names that Dagster does not promise: its tests stand here too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.definitions.run_request import RunRequest
from dagster._core.events import EngineEventData
from dagster._core.execution.backfill import BULK_ACTION_TERMINAL_STATUSES, BulkActionStatus
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG
from support.sensor_dataset import KEYS, ROWS, SPEC, S, SensorDataset, publish_run, report_in_bulk
from support.snapshots import questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import UNFINISHED, open_backfill, range_runs
from batch_assets.catalog.publications import PUBLISH_ATTEMPTS
from batch_assets.catalog.ranges import KeyRange
from batch_assets.generation.op import ENDPOINT_TAG
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.request_status.dataset_status import Observer, dataset_status
from batch_assets.sensors.launcher_sensor import SPARE_RUNS
from batch_assets.sensors.liveness_sensor import lost_workers
from batch_assets.tags import (
    CANCELED_TAG,
    PARTITION_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    REDRIVE_ERROR_TAG,
    REDRIVE_TAG,
    REFRESH_TAG,
    REFUSED_TAG,
    REQUEST_TAG,
    RETRY_RUN_TAG,
    WILL_RETRY_TAG,
)
from gpu_runner.fleet_database.wait_reason import RunActivity

LARGE = 10_000


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SensorDataset]:
    with contextlib.ExitStack() as stack:
        yield SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack)


# launcher


def test_without_a_request_nothing_is_started(site: SensorDataset):
    site.snapshot()
    assert site.reason() == "d: nothing was requested"


def test_a_refresh_starts_range_runs_over_all_missing_batches(site: SensorDataset):
    site.snapshot()
    request = site.request(**{ENDPOINT_TAG: "http://127.0.0.1:1"})
    launches = site.launches()
    for found, (first, last) in zip(launches, [(0, 3), (4, 7), (8, 11)], strict=True):
        own = {tag: value for tag, value in found.tags.items() if not tag.startswith("dagster/sensor")}
        assert own == {
            REQUEST_TAG: request,
            RANGE_START_TAG: KEYS[first],
            RANGE_END_TAG: KEYS[last],
            ENDPOINT_TAG: "http://127.0.0.1:1",
        }
        assert found.asset_selection == [ROWS]
        assert not found.run_config
    assert len({found.run_key for found in launches}) == 3


def test_only_what_is_missing_is_started_and_sparse_gaps_share_a_run(site: SensorDataset):
    site.snapshot()
    site.request()
    site.commit(*(key for key in KEYS if key not in ("00002", "00005", "00009", "00011")))
    assert site.ranges() == [("00002", "00011")]
    (found,) = site.launches()
    assert found.run_config == {"ops": {"d__rows": {"config": {"only": "00002 00005 00009 00011"}}}}
    site.commit("00002", "00005", "00009", "00011")
    assert site.reason().endswith("nothing is missing")


def test_a_batch_whose_rows_changed_is_missing_again(site: SensorDataset):
    site.snapshot()
    site.commit(*KEYS)
    rows = questions(120)
    rows[57] = replace(rows[57], question="What else?")
    write_snapshot(site.store, rows)
    site.request()
    assert site.ranges() == [("00005", "00005")]


def test_the_newest_snapshot_counts_as_soon_as_its_batches_are_registered(site: SensorDataset):
    site.snapshot()
    site.commit(*KEYS)
    site.request()
    assert site.launches() == []
    write_snapshot(site.store, questions(130))
    assert site.launches() == []
    site.instance.add_dynamic_partitions("d", ["00012"])
    assert site.ranges() == [("00012", "00012")]


def test_ranges_of_unfinished_runs_are_left_alone_whoever_started_them(site: SensorDataset):
    site.snapshot()
    request = site.request()
    site.batches(S.STARTING, "00000", "00003", request)
    site.batches(S.STARTED, "00006", "00006")
    assert site.ranges() == [("00004", "00005"), ("00007", "00010")]
    single = {PARTITION_TAG: "00005"}
    site.run(S.CANCELING, single, job_name="__ASSET_JOB", asset_selection=frozenset([ROWS]))
    assert ("00004", "00004") in site.ranges()


def test_a_lost_run_that_waits_for_its_retry_still_holds_its_range(site: SensorDataset):
    site.snapshot()
    request = site.request()
    lost = site.batches(S.FAILURE, "00000", "00003", request, **{WILL_RETRY_TAG: "true"})
    assert site.ranges() == [("00004", "00007"), ("00008", "00011")]
    retry = site.batches(S.STARTING, "00000", "00003", request)
    site.instance.add_run_tags(lost, {RETRY_RUN_TAG: retry})
    assert site.ranges() == [("00004", "00007"), ("00008", "00011")]
    run = site.instance.get_run_by_id(retry)
    assert run is not None
    site.instance.report_run_failed(run)
    assert site.ranges()[0] == ("00000", "00003")


def test_a_retry_that_was_promised_and_never_came_is_not_waited_for(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    """Seen once: Dagster read the event of a failure before its run's status was written, and never looked again."""
    site.snapshot()
    site.batches(S.FAILURE, "00000", "00003", site.request(), **{WILL_RETRY_TAG: "true"})
    assert ("00000", "00003") not in site.ranges()
    monkeypatch.setattr(ledger, "RETRY_SECONDS", 0.0)
    assert ("00000", "00003") in site.ranges()


def test_a_run_that_ends_while_the_launcher_looks_is_not_started_again(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    """Its last batches are not in the ledger as it was read, and the run is over a moment later."""
    site.snapshot()
    run_id = site.batches(S.STARTED, "00000", "00011", site.request())
    read = ledger.ledger_versions

    def read_while_the_run_ends(*of: Any) -> Any:
        found = read(*of)
        site.commit(*KEYS)
        site.end(run_id)
        return found

    monkeypatch.setattr(ledger, "ledger_versions", read_while_the_run_ends)
    assert site.launches() == []
    monkeypatch.undo()
    assert site.launches() == []


def test_no_more_runs_than_instances_and_a_few_spare_ones(site: SensorDataset):
    site.snapshot(400, keys=[f"{i:05d}" for i in range(40)])
    request = site.request()
    assert len(site.launches()) == 1 + SPARE_RUNS
    site.fleet_db.set_instances("d", 3)
    assert len(site.launches()) == 3 + SPARE_RUNS
    site.batches(S.STARTED, "00000", "00003", request)
    assert len(site.launches()) == 2 + SPARE_RUNS


def test_nothing_is_started_beside_an_open_backfill(site: SensorDataset):
    site.snapshot()
    site.request()
    site.backfill(BulkActionStatus.REQUESTED, KEYS[:2])
    assert site.reason().endswith("a backfill of these batches is open")


def test_nothing_is_started_after_a_cancel_until_the_next_request(site: SensorDataset):
    site.snapshot()
    site.batches(S.CANCELED, "00000", "00003", site.request())
    assert "a run of this request was canceled" in site.reason()
    site.request()
    assert len(site.launches()) == 3


def test_nothing_is_started_for_a_request_that_was_given_up(site: SensorDataset):
    site.snapshot()
    request = site.request()
    site.instance.add_run_tags(request, {CANCELED_TAG: "true"})
    assert "this request was canceled" in site.reason()


def test_a_request_that_failed_or_still_reads_the_source_starts_nothing(site: SensorDataset):
    site.snapshot()
    for status in (S.FAILURE, S.CANCELED, S.STARTED, S.STARTING):
        site.run(status, {REFRESH_TAG: "d"})
    assert site.reason() == "d: nothing was requested"


def test_each_new_attempt_at_a_range_has_a_key_of_its_own(site: SensorDataset):
    """Dagster starts a run key once for ever."""
    site.snapshot()
    request = site.request()
    first = site.launches()[0]
    site.batches(S.FAILURE, "00000", "00003", request)
    second = site.launches()[0]
    assert (first.tags[RANGE_START_TAG], second.tags[RANGE_START_TAG]) == ("00000", "00000")
    assert first.run_key != second.run_key


def test_batches_that_failed_three_times_are_said_and_left_alone(site: SensorDataset):
    site.snapshot()
    request = site.request()
    for _ in range(3):
        site.batches(S.FAILURE, "00000", "00011", request)
    assert "12 batches failed 3 times" in site.reason()


def test_nothing_is_started_after_an_engine_refused_every_request_until_the_next_request(site: SensorDataset):
    site.snapshot()
    request = site.request()
    refused = site.batches(S.FAILURE, "00000", "00003", request)
    site.instance.add_run_tags(refused, {REFUSED_TAG: refused})
    assert "the engine refuses every request" in site.reason()
    site.request()
    assert len(site.launches()) == 3


def test_a_run_that_has_the_tags_of_a_refused_one_is_not_refused_itself(site: SensorDataset):
    """Dagster copies tags when somebody runs a failed run again."""
    site.snapshot()
    again = site.batches(S.FAILURE, "00000", "00003", "r", **{REFUSED_TAG: "the first run"})
    assert [(run.run_id, run.outcome) for run in range_runs(site.instance, "d", "r")] == [(again, "failed")]


# re-drive


def test_a_redrive_starts_runs_over_batches_with_dead_letters_once_nothing_is_missing(site: SensorDataset):
    manifest = site.snapshot()
    site.commit(*KEYS[:11], dead=["id-000013", "id-000047"])
    dead_letters(site.store, manifest)
    request = site.run(S.SUCCESS, {REDRIVE_TAG: "d"}, job_name="d_redrive")
    assert site.launches() == []
    site.commit("00011")
    (found,) = site.launches()
    assert (found.tags[RANGE_START_TAG], found.tags[RANGE_END_TAG]) == ("00001", "00004")
    assert found.tags[REQUEST_TAG] == request
    assert found.run_config == {"ops": {"d__rows": {"config": {"redrive": True, "only": "00001 00004"}}}}


def test_a_redrive_tries_each_batch_once(site: SensorDataset):
    manifest = site.snapshot()
    site.commit(*KEYS, dead=["id-000013", "id-000047"])
    dead_letters(site.store, manifest)
    request = site.run(S.SUCCESS, {REDRIVE_TAG: "d"}, job_name="d_redrive")
    site.batches(S.SUCCESS, "00001", "00002", request)
    assert site.ranges() == [("00004", "00004")]
    site.batches(S.SUCCESS, "00004", "00004", request)
    assert site.launches() == []


def test_a_redrive_of_one_error_starts_runs_over_batches_with_such_dead_letters_only(site: SensorDataset):
    manifest = site.snapshot()
    site.commit(*KEYS, dead=["id-000013", "id-000047"])
    dead_letters(site.store, manifest)
    (error,) = dead_letters(site.store, manifest).by_error
    site.run(S.SUCCESS, {REDRIVE_TAG: "d", REDRIVE_ERROR_TAG: "another"}, job_name="d_redrive")
    assert site.launches() == []
    site.run(S.SUCCESS, {REDRIVE_TAG: "d", REDRIVE_ERROR_TAG: error}, job_name="d_redrive")
    (found,) = site.launches()
    asked = {"redrive": True, "redrive_error": error, "only": "00001 00004"}
    assert found.run_config == {"ops": {"d__rows": {"config": asked}}}


# publisher


def test_nothing_is_published_before_the_first_snapshot_or_while_batches_are_missing(site: SensorDataset):
    assert site.reason("publisher") == "d: no snapshot yet"
    site.snapshot()
    site.commit(*KEYS[:11])
    assert "1 of 12 batches are missing" in site.reason("publisher")


def test_a_complete_snapshot_is_published_once(site: SensorDataset):
    site.snapshot()
    site.commit(*KEYS)
    publish_run(site, S.STARTED)
    assert "is being published" in site.reason("publisher")
    run = site.instance.get_runs()[0]
    site.instance.report_run_failed(run)
    publish_run(site, S.SUCCESS)
    assert "is published" in site.reason("publisher")


def test_a_new_generation_of_a_batch_is_published_again(site: SensorDataset):
    site.snapshot()
    site.commit(*KEYS)
    publish_run(site, S.SUCCESS)
    site.commit("00005", generation=1)
    publish_run(site, S.SUCCESS)
    assert "is published" in site.reason("publisher")


def test_a_table_is_not_published_while_runs_over_it_may_still_report(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    site.snapshot()
    site.commit(*KEYS)
    redrive = site.batches(S.STARTED, "00005", "00005")
    assert "1 runs over its batches are under way" in site.reason("publisher")
    read = ledger.ledger_versions

    def read_while_the_run_ends(*of: Any) -> Any:
        found = read(*of)
        site.commit("00005", generation=1)
        site.end(redrive)
        return found

    monkeypatch.setattr(ledger, "ledger_versions", read_while_the_run_ends)
    assert "1 runs over its batches are under way" in site.reason("publisher")
    monkeypatch.undo()
    publish_run(site, S.SUCCESS)
    assert "is published" in site.reason("publisher")


def test_an_entry_that_is_reported_again_is_not_published_again(site: SensorDataset):
    site.snapshot()
    site.commit(*KEYS)
    publish_run(site, S.SUCCESS)
    site.commit(*KEYS)
    assert "is published" in site.reason("publisher")


def test_a_publication_that_fails_again_and_again_is_left_to_people(site: SensorDataset):
    site.snapshot()
    site.commit(*KEYS)
    keys = set()
    for _ in range(PUBLISH_ATTEMPTS):
        keys |= {found.run_key for found in site.tick("publisher").run_requests or ()}
        publish_run(site, S.FAILURE)
    assert len(keys) == PUBLISH_ATTEMPTS
    assert f"failed {PUBLISH_ATTEMPTS} times" in site.reason("publisher")


# watchdog


def silent_run(site: SensorDataset, status: S, age: float = 100.0, **tags: str) -> str:
    """A run that beat `age` seconds ago for the last time, with a lease on the instance `gpu`."""
    run_id = site.batches(status, "00000", "00003", **tags)
    site.fleet_db.begin_run(run_id, "d", "00000", "00003")
    site.fleet_db.try_lease("gpu", run_id, "d", 60)
    with site.fleet_db.engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE batch_runs SET beat_at = beat_at - :age WHERE run_id = :run"), {"age": age, "run": run_id}
        )
    return run_id


def test_a_run_whose_heartbeat_stopped_is_failed_and_its_lease_is_free(site: SensorDataset):
    run_id = silent_run(site, S.STARTED)
    assert site.fleet_db.holder("gpu") == run_id
    assert "no heartbeat for 100 s" in site.reason("watchdog")
    assert site.status(run_id) == S.FAILURE
    assert site.fleet_db.holder("gpu") is None
    assert site.fleet_db.runs() == []
    assert "0 runs" in site.reason("watchdog")


def test_a_launcher_that_knows_its_workers_decides_when_a_silent_run_has_failed(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    run_id = silent_run(site, S.STARTED)
    monkeypatch.setattr(type(site.instance.run_launcher), "supports_check_run_worker_health", True)
    assert "no heartbeat for 100 s (last: waiting, 0 rows); the run launcher looks for its worker" in site.reason(
        "watchdog"
    )
    assert site.status(run_id) == S.STARTED
    assert site.fleet_db.holder("gpu") is None
    assert site.fleet_db.runs() == []


def test_a_queued_retry_goes_before_fresh_runs(site: SensorDataset):
    location = GrpcServerCodeLocationOrigin(host="127.0.0.1", port=1, location_name="here")
    repository = RepositoryPythonOrigin("python", ModuleCodePointer("m", "d"))
    more = {
        "job_name": "__ASSET_JOB",
        "asset_selection": frozenset([ROWS]),
        "remote_job_origin": RemoteJobOrigin(RemoteRepositoryOrigin(location, "r"), "__ASSET_JOB"),
        "job_code_origin": JobPythonOrigin("__ASSET_JOB", repository),
    }
    fresh = site.run(S.QUEUED, {}, **more)
    retry = site.run(S.QUEUED, {"dagster/retry_number": "1"}, **more)
    assert f"retry {retry[:8]} goes first" in site.reason("watchdog")
    found = {run.run_id: run.tags.get("dagster/priority") for run in site.instance.get_runs()}
    assert (found[fresh], found[retry]) == (None, "10")
    assert "goes first" not in site.reason("watchdog")


def test_a_canceled_run_whose_worker_is_gone_becomes_canceled(site: SensorDataset):
    run_id = silent_run(site, S.CANCELING)
    site.tick("watchdog")
    assert site.status(run_id) == S.CANCELED
    assert site.fleet_db.holder("gpu") is None


def test_runs_that_beat_are_left_alone_also_while_they_wait(site: SensorDataset):
    waiting, late = silent_run(site, S.STARTED, age=0), silent_run(site, S.STARTED, age=site.fleet.ttl)
    site.fleet_db.beat(waiting, "waiting", RunActivity("waiting: gpu is held by another run"), 0)
    assert "2 runs, all of them alive" in site.reason("watchdog")
    assert {site.status(waiting), site.status(late)} == {S.STARTED}
    assert site.fleet_db.holder("gpu") == waiting


@pytest.mark.parametrize("status", [S.SUCCESS, S.FAILURE, S.CANCELED])
def test_the_row_of_a_run_that_is_over_is_ended_and_the_run_is_not_touched(site: SensorDataset, status: S):
    run_id = silent_run(site, status)
    site.tick("watchdog")
    assert site.status(run_id) == status
    assert site.fleet_db.runs() == []
    assert site.fleet_db.holder("gpu") is None


def test_the_row_of_a_run_that_the_catalog_does_not_know_is_ended(site: SensorDataset):
    site.fleet_db.begin_run("unknown", "d", "00000", "00003")
    with site.fleet_db.engine.begin() as connection:
        connection.execute(sa.text("UPDATE batch_runs SET beat_at = beat_at - 100"))
    site.tick("watchdog")
    assert site.fleet_db.runs() == []


def test_one_silent_run_does_not_cost_the_others_their_lives(site: SensorDataset):
    dead, alive = silent_run(site, S.STARTED), silent_run(site, S.STARTED, age=0)
    site.tick("watchdog")
    assert (site.status(dead), site.status(alive)) == (S.FAILURE, S.STARTED)


OWN = "__repository__@batch_assets"  # as the storage tags the runs of our code location


def begun(site: SensorDataset, status: S, pid: int, *, beats: bool = False, **tags: str) -> str:
    """A run whose worker has said that it began; without a heartbeat unless it `beats`."""
    tags = {REPOSITORY_LABEL_TAG: OWN, **tags}
    run_id = silent_run(site, status, age=0, **tags) if beats else site.batches(status, "00000", "00003", **tags)
    run = site.instance.get_run_by_id(run_id)
    site.instance.report_engine_event(f"Started process for run (pid: {pid}).", run, EngineEventData.in_process(pid))
    return run_id


@pytest.fixture
def new_code_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code server was started again after all that a test has begun."""
    later = functools.partial(lost_workers, born=time.time() + 60)
    monkeypatch.setattr("batch_assets.sensors.liveness_sensor.lost_workers", later)
    monkeypatch.setattr("batch_assets.sensors.liveness_sensor.repository_label", lambda context: OWN)


@pytest.mark.parametrize(
    ("status", "end"), [(S.STARTING, S.FAILURE), (S.STARTED, S.FAILURE), (S.CANCELING, S.CANCELED)]
)
@pytest.mark.usefixtures("new_code_server")
def test_a_run_that_died_with_its_code_server_before_its_first_beat_is_ended(site: SensorDataset, status: S, end: S):
    gone = subprocess.Popen(["true"])
    gone.wait()
    run_id = begun(site, status, gone.pid)
    assert f"process {gone.pid} is gone" in site.reason("watchdog")
    assert site.status(run_id) == end


@pytest.mark.usefixtures("new_code_server")
def test_a_run_that_died_with_its_code_server_is_ended_before_its_heartbeat_is_given_up(site: SensorDataset):
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = begun(site, S.STARTED, gone.pid, beats=True)
    there = begun(site, S.STARTED, os.getpid(), beats=True)
    with site.fleet_db.engine.begin() as connection:
        connection.execute(sa.text("UPDATE batch_runs SET beat_at = beat_at - 8"))
    assert f"process {gone.pid} is gone" in site.reason("watchdog")
    assert (site.status(dead), site.status(there)) == (S.FAILURE, S.STARTED)
    assert site.fleet_db.holder("gpu") is None
    assert [beat.run_id for beat in site.fleet_db.runs()] == [there]


@pytest.mark.usefixtures("new_code_server")
def test_workers_that_live_beat_or_belong_to_others_are_left_alone(site: SensorDataset):
    gone = subprocess.Popen(["true"])
    gone.wait()
    foreign = {REPOSITORY_LABEL_TAG: "__repository__@other"}
    runs = [
        begun(site, S.STARTED, os.getpid()),
        begun(site, S.STARTED, gone.pid, beats=True),
        begun(site, S.STARTED, gone.pid, **foreign),
        site.batches(S.STARTING, "00000", "00003", **{REPOSITORY_LABEL_TAG: OWN}),
    ]
    before = [site.status(run_id) for run_id in runs]
    assert "1 runs, all of them alive" in site.reason("watchdog")
    assert [site.status(run_id) for run_id in runs] == before


def test_the_end_of_a_worker_is_told_by_the_code_server_that_started_it(
    site: SensorDataset, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("batch_assets.sensors.liveness_sensor.repository_label", lambda context: OWN)
    gone = subprocess.Popen(["true"])
    gone.wait()
    run_id = begun(site, S.STARTING, gone.pid)
    site.tick("watchdog")
    # This process began before the run did.
    assert site.status(run_id) == S.STARTING


# backfills.py: what we lean on is not promised by Dagster


@pytest.mark.slow
@pytest.mark.parametrize("status", list(BulkActionStatus))
def test_a_backfill_is_open_until_it_has_ended(site: SensorDataset, status: BulkActionStatus):
    """Ended: what Dagster's own list of terminal states says, and its daemon's legacy COMPLETED."""
    site.snapshot()
    site.backfill(status, KEYS[:3])
    working = {BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING, BulkActionStatus.FAILING}
    assert open_backfill(site.instance, "d") == (status in working)
    assert (status not in working) == (status in BULK_ACTION_TERMINAL_STATUSES)


def test_backfills_of_other_assets_and_datasets_are_not_ours(site: SensorDataset):
    site.snapshot()
    site.backfill(BulkActionStatus.REQUESTED, KEYS[:3])
    assert not open_backfill(site.instance, "e")


def test_unfinished_is_every_state_from_which_a_run_may_still_write(site: SensorDataset):
    assert set(UNFINISHED) == set(S) - {S.SUCCESS, S.FAILURE, S.CANCELED}


def test_runs_are_read_with_range_request_outcome_and_the_root_of_their_retries(site: SensorDataset):
    site.snapshot()
    request = site.request()
    first = site.batches(S.FAILURE, "00000", "00003", request)
    tags = {RANGE_START_TAG: "00000", RANGE_END_TAG: "00003", REQUEST_TAG: request}
    family = {"root_run_id": first, "parent_run_id": first}
    retry = site.run(S.STARTED, tags, job_name="__ASSET_JOB", asset_selection=frozenset([ROWS]), **family)
    foreign = site.batches(S.STARTED, "00005", "00006")
    site.batches(S.SUCCESS, "00008", "00009")
    site.run(S.STARTED, {}, job_name="__ASSET_JOB", asset_selection=frozenset([ledger.prompts_key("d")]))
    found = {run.run_id: run for run in range_runs(site.instance, "d", request)}
    assert found.keys() == {first, retry, foreign}
    assert found[first].outcome == "failed"
    assert (found[retry].outcome, found[retry].root_run_id) == ("unfinished", first)
    assert (found[foreign].keys, found[foreign].request) == (KeyRange("00005", "00006"), None)


@pytest.mark.parametrize("retries", [True, False])
def test_a_run_is_unfinished_until_dagster_has_said_whether_it_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: bool
):
    """The status is written first, the tag a moment later; without retries no tag ever comes."""
    settings = {"run_retries": {"enabled": retries, "max_retries": 2}}
    with contextlib.ExitStack() as stack:
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(settings=settings), stack)
        site.snapshot()
        request = site.request()
        run_id = site.batches(S.STARTED, "00000", "00003", request)

        def outcomes() -> list[str]:
            return [run.outcome for run in range_runs(site.instance, "d", request)]

        tag = type(site.instance).add_run_tags
        monkeypatch.setattr(type(site.instance), "add_run_tags", lambda *given: None)
        site.end(run_id, dg.DagsterEventType.RUN_FAILURE)
        assert outcomes() == (["unfinished"] if retries else ["failed"])
        monkeypatch.setattr("batch_assets.catalog.backfills.DECISION_SECONDS", 0.0)
        assert outcomes() == ["failed"]
        monkeypatch.undo()
        tag(site.instance, run_id, {WILL_RETRY_TAG: "false"})
        assert outcomes() == ["failed"]
        tag(site.instance, run_id, {WILL_RETRY_TAG: "true"})
        assert outcomes() == ["unfinished"]


def test_status_says_how_many_batches_of_its_range_a_run_is_for(site: SensorDataset):
    tags = {RANGE_START_TAG: "00001", RANGE_END_TAG: "00009"}
    some = {"ops": {"d__rows": {"config": {"only": "00001 00009"}}}}
    site.run(S.STARTED, tags, job_name="__ASSET_JOB", asset_selection=frozenset([ROWS]), run_config=some)
    site.batches(S.STARTED, "00002", "00003")
    seen = dataset_status(Observer(site.instance, site.fleet_db, site.store), time.time())
    assert [run.what for run in seen.runs] == ["2 of batches 00001-00009", "batches 00002-00003"]


# speed


@pytest.fixture
def large_site(tmp_path: Path) -> Iterator[SensorDataset]:
    """10,000 batches on SQLite files: 8,000 committed with gaps everywhere, 80 runs behind us, 4 in flight."""
    (tmp_path / "home").mkdir()
    keys = [f"{i:05d}" for i in range(LARGE)]
    done, flying, size = LARGE * 8 // 10, LARGE * 4 // 100, LARGE // 100
    with contextlib.ExitStack() as stack:
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.local_temp(str(tmp_path / "home")), stack)
        write_snapshot(site.store, questions(LARGE), batch_rows=1, batches_per_shard=400)
        site.instance.add_dynamic_partitions("d", keys)
        report_in_bulk(site, [key for i, key in enumerate(keys) if i % 5 != 2])
        site.fleet_db.set_instances("d", 4)
        request = site.request()
        for number, first in enumerate(range(0, done, size)):
            site.batches(S.SUCCESS if number % 3 else S.FAILURE, keys[first], keys[first + size - 1], request)
        for first in range(done, done + flying, size):
            run_id = site.batches(S.STARTED, keys[first], keys[first + size - 1], request)
            site.fleet_db.begin_run(run_id, "d", keys[first], keys[first + size - 1])
        yield site


@pytest.mark.slow
@pytest.mark.soak("dagster")
def test_the_sensors_tick_at_10_000_batches(large_site: SensorDataset):
    """benchmarks/scale.py measures how long a tick takes."""
    launches: list[RunRequest] = []
    for sensor in ("launcher", "publisher", "watchdog"):
        found = large_site.tick(sensor)
        launches += found.run_requests or ()
    assert len(launches) == SPARE_RUNS


ENGINE = {"name": "lab", "kind": "endpoint", "url": "http://127.0.0.1:9000"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engines", "tags", "runs"),
    [
        ([ENGINE], {}, 1),
        ([ENGINE, {**ENGINE, "name": "other", "models": ["n"]}], {}, 1),  # the other one serves another model
        ([ENGINE, {**ENGINE, "name": "second", "url": "http://127.0.0.1:9001"}], {}, 3),
        (None, {ENDPOINT_TAG: "http://127.0.0.1:9000"}, 1),
        (None, {}, 3),  # more can be rented
    ],
)
def test_48_rows_on_one_engine_are_one_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engines: list[dict[str, Any]] | None,
    tags: dict[str, str],
    runs: int,
):
    """Also by a deadline, where work is else cut into runs for as many instances as may be rented."""
    monkeypatch.delenv("BATCH_ASSETS_ENDPOINT", raising=False)
    if engines is not None:
        (tmp_path / "fleet.yaml").write_text(json.dumps({"engines": engines}))
    with contextlib.ExitStack() as stack:
        spec = {**SPEC, "batches_per_run": 100, "deadline": "6h"}
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, spec)
        site.snapshot(48, batch_rows=4)
        site.request(**tags)
        assert len(site.ranges()) == runs


def test_a_plan_that_begins_with_one_instance_leaves_runs_for_those_that_may_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One run with all batches would leave nothing to the second instance, however late the first one is."""
    monkeypatch.delenv("BATCH_ASSETS_ENDPOINT", raising=False)
    with contextlib.ExitStack() as stack:
        spec = {**SPEC, "batches_per_run": 100, "deadline": "6h"}
        site = SensorDataset.open(tmp_path, dg.DagsterInstance.ephemeral(), stack, spec)
        site.snapshot(48, batch_rows=4)
        site.request()
        site.tick("capacity")
        target = site.fleet_db.target(SPEC["name"])
        assert target is not None and target.plan is not None and target.plan.instances_wanted == 1
        assert len(site.ranges()) == 3
