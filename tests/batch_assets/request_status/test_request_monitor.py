"""Following a request: every way in which it can end is noticed and said, and giving it up cancels what it started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test
from support.fleet_databases import ready
from support.snapshots import commit, questions, write_snapshot

from batch_assets.catalog import ledger
from batch_assets.catalog.publications import ledger_state, publish_job
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.publishing.publish import publish
from batch_assets.request_status.dataset_status import Observer, dataset_status
from batch_assets.request_status.display import request_lines
from batch_assets.request_status.request_monitor import (
    QUIET_SECONDS,
    STILL_SECONDS,
    ProgressUpdate,
    RequestMonitor,
    give_up,
)
from batch_assets.tags import (
    CANCELED_TAG,
    PUBLISH_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    REDRIVE_TAG,
    REFRESH_TAG,
    REFUSED_TAG,
    REQUEST_TAG,
    RETRY_RUN_TAG,
    ROWS_TAG,
    WILL_RETRY_TAG,
)
from gpu_runner.fleet_database.capacity_plan import CapacityMemory, CapacityPlan, Pause, PauseKind
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.wait_reason import RunActivity
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest

S = dg.DagsterRunStatus
REFRESH = {REFRESH_TAG: "d"}


@dataclass
class RequestedDataset:
    """A dataset of four batches; its runs are entries on an ephemeral instance, no daemon starts anything."""

    instance: dg.DagsterInstance
    fleet_db: FleetDatabase
    store: DatasetStore
    folder: Path
    manifest: SnapshotManifest = field(init=False)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.manifest = write_snapshot(self.store, questions(40))
        self.observer = Observer(self.instance, self.fleet_db, self.store)

    def run(self, status: S, tags: Mapping[str, str], **more: Any) -> str:
        return create_run_for_test(self.instance, **{"job_name": "d_refresh", **more}, status=status, tags=tags).run_id

    def batches(self, request: str, status: S, first: str = "00000", last: str = "00003") -> str:
        """A run over batches that the launcher started for the request."""
        tags = {REQUEST_TAG: request, RANGE_START_TAG: first, RANGE_END_TAG: last}
        return self.run(status, tags, job_name="__ASSET_JOB", asset_selection=frozenset([ledger.rows_key("d")]))

    def failing(self, message: str, tags: Mapping[str, str], job: str = "d_refresh") -> str:
        """A run that really fails, with this message."""

        @dg.op(name="step")
        def step() -> None:
            raise dg.Failure(message)

        found = dg.GraphDefinition(job, node_defs=[step]).to_job()
        return found.execute_in_process(instance=self.instance, tags=dict(tags), raise_on_error=False).run_id

    def follow(self, request: str) -> RequestMonitor:
        return RequestMonitor(self.observer, request, clock=lambda: self.now)

    def redrive(self, error: str = "") -> tuple[str, RequestMonitor]:
        """A re-drive whose job has listed the dead letters, and who follows it."""
        request = self.run(S.SUCCESS, {REDRIVE_TAG: "d"}, job_name="d_redrive")
        return request, RequestMonitor(self.observer, request, clock=lambda: self.now, redrive_error=error)

    def look(self, request: str) -> ProgressUpdate:
        return self.follow(request).look()

    def commit(self, *keys: str) -> None:
        """Commit batches and report them, as a run does."""
        for footer in commit(self.store, self.manifest, keys=keys or None).values():
            self.instance.report_runless_asset_event(ledger.batch_event(self.store, footer, self.manifest.snapshot))

    def publish(self, checks: Sequence[dg.AssetCheckResult] = ()) -> str:
        """Publish the table in a run that carries the publisher's tag; returns the run id."""
        sight = self.observer.look()
        state = ledger_state(
            self.manifest.snapshot, sight.entries, {key: found.version for key, found in sight.current.items()}
        )
        key = dg.AssetKey(["d", "dataset"])

        @dg.asset(key=key, check_specs=[dg.AssetCheckSpec(str(found.check_name), asset=key) for found in checks])
        def dataset():
            publish(self.store, self.manifest, card=Card("", [], []), now=1.0, workdir=self.folder)
            return dg.MaterializeResult(check_results=list(checks))

        job = dg.define_asset_job(publish_job("d"), selection=[dataset])
        resolved = dg.Definitions(assets=[dataset], jobs=[job]).resolve_job_def(job.name)
        tags = {PUBLISH_TAG: state}
        return resolved.execute_in_process(instance=self.instance, tags=tags, raise_on_error=False).run_id


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RequestedDataset]:
    with (
        dg.DagsterInstance.ephemeral() as instance,
        contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db")) as fleet_db,
    ):
        work = tmp_path / "work"
        work.mkdir()
        yield RequestedDataset(instance, fleet_db, DatasetStore(open_objects(str(tmp_path / "store")), "d"), work)


def test_the_source_is_read_first(site: RequestedDataset):
    assert site.look(site.run(S.STARTING, REFRESH)).said == "starting"
    assert site.look(site.run(S.STARTED, REFRESH)).said == "reading the source"


def test_a_source_that_cannot_be_used_ends_it_with_file_and_line(site: RequestedDataset):
    moment = site.look(site.failing("questions.jsonl, line 7: not valid JSON", REFRESH))
    assert moment.ending is not None
    assert not moment.ending.ok
    assert moment.ending.said == "questions.jsonl, line 7: not valid JSON"


def test_a_lost_worker_that_is_retried_is_followed_to_its_retry(site: RequestedDataset):
    retry = site.run(S.STARTED, REFRESH)
    lost = site.run(S.FAILURE, {**REFRESH, WILL_RETRY_TAG: "true"})
    assert site.look(lost).ending is None
    site.instance.add_run_tags(lost, {RETRY_RUN_TAG: retry})
    follower = site.follow(lost)
    follower.look()
    assert follower.request == retry


def test_a_budget_that_pauses_it_ends_it_with_the_sum_that_would_do_unless_it_is_waited_for(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.batches(request, S.STARTED)
    site.fleet_db.begin_request("d", request, deadline_at=None, budget_usd=0.1)
    pause = Pause(PauseKind.BUDGET_REACHED, "budget reached: 0.10 $ are left", 1.37)
    assert site.look(request).ending is None
    assert site.fleet_db.command("d", request, 0, (), pause, CapacityMemory(), CapacityPlan())
    ending = site.look(request).ending
    assert ending is not None and (ending.ok, ending.pause) == (False, pause)
    waiting = RequestMonitor(site.observer, request, clock=lambda: site.now, waits=True)
    assert waiting.look().ending is None


def test_a_pause_that_was_decided_while_a_dear_instance_was_held_ends_nothing_before_the_next_decision(
    site: RequestedDataset,
):
    """What was held has ended meanwhile: a cheaper offer may fit what is left, which the next tick decides."""
    request = site.run(S.SUCCESS, REFRESH)
    site.batches(request, S.STARTED)
    site.fleet_db.begin_request("d", request, budget_usd=1000.0)
    lease = ready(site.fleet_db, dataset="d", ttl=600)
    pause = Pause(PauseKind.BUDGET_REACHED, "budget reached: 0.05 $ are left", 1.37)
    word = ("d", request, 0, (), pause, CapacityMemory(), CapacityPlan())
    assert site.fleet_db.command(*word)
    assert site.look(request).ending is None
    assert site.fleet_db.give_up(lease, "paused")
    site.fleet_db.ended("ba-1", 0)
    assert site.look(request).ending is None
    assert site.fleet_db.command(*word)  # and nothing fits
    ending = site.look(request).ending
    assert ending is not None and ending.pause == pause


def test_a_request_is_not_paused_by_the_budget_of_the_request_before_it(site: RequestedDataset):
    before = site.run(S.SUCCESS, REFRESH)
    site.fleet_db.begin_request("d", before, budget_usd=0.01)
    pause = Pause(PauseKind.BUDGET_REACHED, "budget reached: 0.01 $ are left", 0.02)
    assert site.fleet_db.command("d", before, 0, (), pause, CapacityMemory(), CapacityPlan())
    assert site.look(before).ending is not None
    request = site.run(S.SUCCESS, REFRESH)
    assert site.look(request).ending is None  # the capacity sensor has not looked yet
    site.fleet_db.begin_request("d", request, budget_usd=0.015)
    assert site.look(request).ending is None
    own = Pause(PauseKind.LEASE_REFUSED, "budget of 0.015 $ leaves no room", 0.02)
    assert site.fleet_db.command("d", request, 0, (), own, CapacityMemory(), CapacityPlan(usd_spent=0.004))
    ending = site.look(request).ending
    assert ending is not None and (ending.pause, ending.spent_usd) == (own, 0.004)  # of the moment of the sum


def test_canceling_the_source_run_ends_it(site: RequestedDataset):
    ending = site.look(site.run(S.CANCELED, REFRESH)).ending
    assert ending is not None
    assert "canceled" in ending.said


def test_while_batches_run_the_figures_and_the_note_of_the_run_are_shown(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    run = site.batches(request, S.STARTED)
    site.commit("00000", "00002")
    site.fleet_db.begin_run(run, "d", "00000", "00003")
    site.fleet_db.beat(run, "waiting", RunActivity("waiting: embedded is held by run x"), 3)
    moment = site.look(request)
    assert (moment.phase, moment.ending) == ("rows", None)
    assert moment.said == f"run {run[:8]}: waiting: embedded is held by run x"
    assert moment.figures is not None
    assert (moment.figures.batches_done, moment.figures.rows_committed, moment.figures.open_rows) == (2, 20, 3)


def test_a_redrive_ends_when_each_batch_with_dead_letters_was_tried_once_and_the_table_is_there(site: RequestedDataset):
    request, follower = site.redrive()
    assert "not committed: `batch-assets run d` first" in str(follower.look().ending)
    for footer in commit(site.store, site.manifest, dead=["id-000003", "id-000033"]).values():
        site.instance.report_runless_asset_event(ledger.batch_event(site.store, footer, site.manifest.snapshot))
    dead_letters(site.store, site.manifest)
    request, follower = site.redrive()
    assert (follower.look().phase, follower.look().said) == ("rows", "starting a run")
    site.batches(request, S.SUCCESS, "00000", "00000")
    assert follower.look().phase == "rows"
    site.batches(request, S.SUCCESS, "00003", "00003")
    assert follower.look().phase == "publish"
    site.publish()
    assert site.redrive("another")[1].look().phase in ("publish", "verify", "end")  # nothing to try again


def test_a_redrive_that_fails_says_how_it_goes_on(site: RequestedDataset):
    for footer in commit(site.store, site.manifest, dead=["id-000003"]).values():
        site.instance.report_runless_asset_event(ledger.batch_event(site.store, footer, site.manifest.snapshot))
    dead_letters(site.store, site.manifest)
    request, follower = site.redrive()
    tags = {REQUEST_TAG: request, RANGE_START_TAG: "00000", RANGE_END_TAG: "00000"}
    for _ in range(3):
        site.failing('The server says: "no credit"', tags, job="rows")
    ending = follower.look().ending
    assert ending is not None and not ending.ok
    assert "`batch-assets redrive d` goes on from there" in ending.said and "no credit" in ending.said


def test_batches_that_failed_three_times_end_it_with_their_reason(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit("00000")
    tags = {REQUEST_TAG: request, RANGE_START_TAG: "00001", RANGE_END_TAG: "00003"}
    runs = [site.failing("the engine refuses the key", tags, job="rows") for _ in range(3)]
    ending = site.look(request).ending
    assert ending is not None
    assert ending.said == (
        "failed 3 times: 3 batches (00001, 00002, 00003) are not committed: `batch-assets run d` goes on "
        "from there\nthe engine refuses the key"
    )
    assert set(ending.runs) == set(runs)


def test_one_run_whose_engine_refuses_every_request_ends_it_with_the_sentence(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit("00000")
    tags = {REQUEST_TAG: request, RANGE_START_TAG: "00001", RANGE_END_TAG: "00003"}
    run = site.failing('The server says: "no credit"', tags, job="rows")
    assert site.look(request).ending is None
    site.instance.add_run_tags(run, {REFUSED_TAG: run})
    ending = site.look(request).ending
    assert ending is not None
    assert ending.said == (
        "refused by the engine: 3 batches (00001, 00002, 00003) are not committed: `batch-assets run d` goes on "
        'from there\nThe server says: "no credit"'
    )
    assert (ending.ok, ending.runs) == (False, (run,))


def test_a_run_canceled_in_the_ui_ends_it(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    canceled = site.batches(request, S.CANCELED)
    ending = site.look(request).ending
    assert ending is not None
    assert ending.said.startswith("canceled: 4 batches")
    assert ending.runs == (canceled,)


def test_a_long_silence_names_what_may_be_off(site: RequestedDataset):
    follower = site.follow(site.run(S.SUCCESS, REFRESH))
    assert follower.look().said == "starting a run"
    site.now += QUIET_SECONDS + 1
    assert "is the sensor `launcher` on" in follower.look().said


def test_a_complete_snapshot_waits_for_its_table(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit()
    moment = site.look(request)
    assert (moment.phase, moment.ending) == ("publish", None)
    assert moment.figures is not None
    assert moment.figures.complete


def test_a_published_table_is_the_end(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit()
    site.publish()
    ending = site.look(request).ending
    assert ending is not None
    assert ending.ok
    status = dataset_status(site.observer, now=0.0)
    assert status.table_current
    assert (status.rows, status.ok, status.batches_done, status.table_rows) == (40, 40, 4, 40)
    assert status.as_json()["table"] == status.table


def test_the_request_of_a_finished_table_is_done_before_a_sensor_has_ended_it(site: RequestedDataset):
    """`run` ends its Dagster with the request: the next capacity tick may be days away."""
    request = site.run(S.SUCCESS, REFRESH)
    site.fleet_db.begin_request("d", request, deadline_at=time.time() + 3600)
    site.commit()
    assert dataset_status(site.observer, now=0.0).request.finished_at is None
    site.publish()
    status = dataset_status(site.observer, now=0.0)
    assert status.request.finished_at is not None and status.request.on_time is True
    assert "done" in request_lines(status, time.time())[0] and "before its deadline" in request_lines(status, 0.0)[0]
    site.run(S.STARTED, REFRESH)
    assert dataset_status(site.observer, now=0.0).request.finished_at is None


@pytest.mark.parametrize("severity", list(dg.AssetCheckSeverity))
def test_a_failed_check_of_severity_error_fails_the_request_a_warning_does_not(
    site: RequestedDataset, severity: dg.AssetCheckSeverity
):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit()
    site.publish([dg.AssetCheckResult(passed=False, check_name="empty_rate", severity=severity, description="3 of 40")])
    ending = site.look(request).ending
    assert ending is not None
    assert ending.ok == (severity == dg.AssetCheckSeverity.WARN)
    assert "empty_rate: 3 of 40" in (ending.warnings[0] if ending.ok else ending.said)


def test_a_table_that_is_gone_from_the_store_is_no_success_and_published_again(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit()
    site.publish()
    site.store.objects.delete(["d/published/CURRENT"])
    follower = site.follow(request)
    moment = follower.look()
    assert moment.ending is None
    assert "missing table" in moment.remark
    assert (follower.look().said, site.publish() != "") == ("publishing the table", True)
    ending = follower.look().ending
    assert ending is not None
    assert ending.ok


def test_three_failed_publications_end_it_with_their_reason(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit()
    sight = site.observer.look()
    versions = {key: found.version for key, found in sight.current.items()}
    tags = {PUBLISH_TAG: ledger_state(site.manifest.snapshot, sight.entries, versions)}
    for _ in range(3):
        site.failing("no space left", tags, job="d_publish")
    ending = site.look(request).ending
    assert ending is not None
    assert ending.said.endswith("the table was not published: no space left")


def test_a_table_of_which_the_filter_failed_is_not_called_unpublished(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    site.commit()
    published_table_run = site.publish()
    site.instance.delete_run(published_table_run)
    sight = site.observer.look()
    versions = {key: found.version for key, found in sight.current.items()}
    tags = {PUBLISH_TAG: ledger_state(site.manifest.snapshot, sight.entries, versions)}
    for _ in range(3):
        site.failing("filter.a: nofile.jsonl: no such file", tags, job="d_publish")
    ending = site.look(request).ending
    assert ending is not None and not ending.ok
    assert ending.said.startswith("the table is published, but not all that is made of it: filter.a: nofile.jsonl")
    assert "`batch-assets run d` makes it, and asks no row" in ending.said


class Canceling:
    """A Dagster that cancels a run when it is asked for the second time, as a busy one does."""

    def __init__(self, site: RequestedDataset) -> None:
        self.site, self.asked = site, []

    def terminate(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            run = self.site.instance.get_run_by_id(run_id)
            assert run is not None
            if run_id in self.asked:
                self.site.instance.report_run_canceled(run)
            self.asked.append(run_id)


def test_giving_up_cancels_the_requests_runs_and_waits_for_their_leases(site: RequestedDataset):
    request = site.run(S.SUCCESS, REFRESH)
    mine, other = site.batches(request, S.STARTED), site.batches("another", S.STARTED)
    lease = site.fleet_db.try_lease("embedded", mine, "d", 60)
    assert lease is not None
    dagster, pauses = Canceling(site), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        site.now += seconds
        if len(pauses) == 8:
            site.fleet_db.release(lease)

    left = give_up(dagster, site.observer, request, every_request=False, pause=pause, clock=lambda: site.now)
    assert left == []
    assert len(pauses) >= 8 + STILL_SECONDS / 0.25
    assert set(dagster.asked) == {mine}
    statuses = {run.run_id: run.status for run in site.instance.get_runs()}
    assert (statuses[mine], statuses[other]) == (S.CANCELED, S.STARTED)
    marked = site.instance.get_run_by_id(request)
    assert marked is not None
    assert CANCELED_TAG in marked.tags


def test_giving_up_with_our_own_dagster_takes_in_what_earlier_requests_started(site: RequestedDataset):
    request = site.run(S.STARTED, REFRESH)
    other = site.batches("another", S.STARTING)
    dagster = Canceling(site)

    def pause(seconds: float) -> None:
        site.now += seconds

    assert give_up(dagster, site.observer, request, every_request=True, pause=pause, clock=lambda: site.now) == []
    assert set(dagster.asked) == {request, other}


def test_a_run_that_does_not_end_is_named(site: RequestedDataset):
    request = site.run(S.STARTED, REFRESH)

    class Deaf:
        def terminate(self, run_ids: Sequence[str]) -> None:
            pass

    def pause(seconds: float) -> None:
        site.now += 10 * seconds

    left = give_up(Deaf(), site.observer, request, every_request=True, pause=pause, clock=lambda: site.now)
    assert left == [f"run {request} is still STARTED"]


def test_a_run_that_the_daemon_is_still_creating_is_canceled_once_it_is_submitted(site: RequestedDataset):
    """Canceled earlier it stays CANCELING for ever: the daemon does not queue it any more."""
    request = site.run(S.SUCCESS, REFRESH)
    created = site.batches(request, S.NOT_STARTED)
    asked: list[S] = []

    class Coordinator:
        def terminate(self, run_ids: Sequence[str]) -> None:
            for run in map(site.instance.get_run_by_id, run_ids):
                assert run is not None
                asked.append(run.status)
                site.instance.report_run_canceled(run)

    def pause(seconds: float) -> None:
        site.now += seconds
        run = site.instance.get_run_by_id(created)
        if run is not None and run.status == S.NOT_STARTED and site.now > 1001:
            submitted = dg.DagsterEvent(dg.DagsterEventType.RUN_STARTING.value, run.job_name)
            site.instance.report_dagster_event(submitted, created)

    left = give_up(Coordinator(), site.observer, request, every_request=False, pause=pause, clock=lambda: site.now)
    assert (left, asked) == ([], [S.STARTING])


def test_a_trial_ends_when_its_batches_are_there_and_says_what_it_has(site: RequestedDataset):
    request = site.run(S.SUCCESS, {REFRESH_TAG: "d", ROWS_TAG: "15"})
    moment = site.look(request)
    assert moment.figures is not None and (moment.figures.rows, moment.figures.batches) == (20, 2)
    site.commit("00000")
    assert site.look(request).ending is None
    site.commit("00001")
    ending = site.look(request).ending
    assert ending is not None and ending.ok
    assert ending.trial is not None and (ending.trial.rows_committed, ending.trial.batches_done) == (20, 2)


def test_a_trial_that_completes_the_snapshot_is_followed_to_its_table(site: RequestedDataset):
    request = site.run(S.SUCCESS, {REFRESH_TAG: "d", ROWS_TAG: "15"})
    site.commit()
    assert site.look(request).phase == "publish"
    site.publish()
    ending = site.look(request).ending
    assert ending is not None and ending.ok and ending.trial is None
