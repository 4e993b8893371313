"""Follows one request from the source to the published table, and gives it up when asked to.

What has to be started, launcher and publisher start. Every look says where the work is, and at last how it ended. The
last one verifies, and has made again what is not as it was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import latest_request, open_backfill, range_runs
from batch_assets.catalog.progress import Figures, Meter, dead_end, named
from batch_assets.catalog.publications import PUBLISH_ATTEMPTS, ledger_state, publish_runs
from batch_assets.catalog.ranges import RangeRunRecord
from batch_assets.catalog.run_errors import failed_checks, failure_text
from batch_assets.local_dagster.dagster_client import DagsterClient, OwnDagster
from batch_assets.orchestration.trial import wanted_entries
from batch_assets.publishing.dead_letters import dead_batches
from batch_assets.publishing.verify import Verification
from batch_assets.request_status.dataset_status import DatasetObservation, Observer, unfinished
from batch_assets.request_status.final_check import FinalChecker
from batch_assets.tags import (
    CANCELED_TAG,
    PUBLISH_TAG,
    PUBLISH_VOID_TAG,
    REFRESH_TAG,
    REQUEST_TAG,
    RETRY_RUN_TAG,
    ROWS_TAG,
)
from gpu_runner.fleet_database.capacity_plan import Pause, PauseKind
from resources.objects.opening import CorruptObject, StoreError
from resources.objects.store_health import GIVE_UP_SILENT_SECONDS, is_store_trouble

Phase = Literal["source", "rows", "publish", "verify", "end"]
QUIET_SECONDS = 45.0
CANCEL_SECONDS = 60.0
STILL_SECONDS = 1.5
NAMED_PROBLEMS = 3
# One that is canceled before it is queued would never end: Dagster's daemon does not queue it then.
NOT_CANCELABLE = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.CANCELING)
ENDS = (PauseKind.BUDGET_REACHED, PauseKind.LEASE_REFUSED, PauseKind.QUALITY)  # what somebody has to decide on


@dataclass(frozen=True, slots=True)
class RunResult:
    """How the work ended. `runs` are those to look at, newest first.

    `verification`: None when nothing was verified. `trial`: figures of a trial that left batches over. `pause`: its
    budget, or a gate, stopped it; the runs that are under way wait until somebody decides. `spent_usd`: US dollars of
    the request when that was decided. `short`: why fewer rows than wanted were accepted, and what to do.
    """

    ok: bool
    said: str = ""
    runs: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    verification: Verification | None = None
    verify_seconds: float = 0.0
    trial: Figures | None = None
    pause: Pause | None = None
    spent_usd: float = 0.0
    short: str = ""


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """Where the work is. `figures` is None until the source has been read; `remark`: what is to stay readable."""

    phase: Phase
    said: str
    figures: Figures | None = None
    rate: float = 0.0
    ending: RunResult | None = None
    remark: str = ""


class RequestMonitor:
    """Follows the refresh that the run `request` asks for.

    `progress` is told where a verification is, in this thread: raising ends it. `verifies`: without, the end is checked
    by names and sizes only. `redrive_error`: the request is a re-drive, of dead letters of this error; "": of all.
    `waits`: a request that is paused is followed until somebody lets it go on.
    """

    def __init__(
        self,
        observer: Observer,
        request: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        progress: Callable[[ProgressUpdate], None] = lambda _: None,
        verifies: bool = True,
        redrive_error: str | None = None,
        waits: bool = False,
    ) -> None:
        self.observer, self.request = observer, request
        self._redrive_error, self._dead = redrive_error, list[str]()
        self._redrive_seen = False
        self._progress, self._waits = progress, waits
        self._checker = FinalChecker(observer, self._verifying) if verifies else None
        self._figures: Figures | None = None
        self._instance, self._dataset = observer.instance, observer.store.dataset
        self._clock = clock
        self._meter = Meter()
        self._moved_at = clock()
        self._silent_since: float | None = None

    def look(self) -> ProgressUpdate:
        """Where the work is now."""
        record = self._instance.get_run_record_by_id(self.request)
        if record is None:
            return _ended(RunResult(False, f"run {self.request} is not in Dagster any more"))
        run = record.dagster_run
        if RETRY_RUN_TAG in run.tags:
            self.request = run.tags[RETRY_RUN_TAG]
            return ProgressUpdate("source", "reading the source again")
        if run.status == dg.DagsterRunStatus.CANCELED:
            return _ended(RunResult(False, "canceled while the source was read", (run.run_id,)))
        if run.status == dg.DagsterRunStatus.FAILURE and not ledger.will_be_retried(record, time.time()):
            return _ended(RunResult(False, failure_text(self._instance, run.run_id), (run.run_id,)))
        if run.status != dg.DagsterRunStatus.SUCCESS:
            waits = run.status in (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTING)
            reading = "reading the source" if self._redrive_error is None else "listing the dead letters"
            return ProgressUpdate("source", "starting" if waits else reading)
        try:
            if self._redrive_error is not None:
                moment = self._look_at_redrive(run, self._redrive_error)
            else:
                newest = latest_request(self._instance, REFRESH_TAG, self._dataset)
                moment = self._look_at_rows(newest or run)
        except CorruptObject as error:
            return _ended(RunResult(False, str(error)))
        except Exception as error:
            if not is_store_trouble(error):
                raise
            return self._store_is_silent()
        self._silent_since = None
        return moment

    def _store_is_silent(self) -> ProgressUpdate:
        """The work goes on when the store does; after as long as a run waits for it, so does nobody."""
        if self._silent_since is None:
            self._silent_since = self._clock()
        seconds = self._clock() - self._silent_since
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        said = f"the store {self.observer.store.objects.root} does not answer since {since}"
        if seconds >= GIVE_UP_SILENT_SECONDS:
            return _ended(RunResult(False, f"{said}; `batch-assets run {self._dataset}` goes on when it is back"))
        return ProgressUpdate("rows", said)

    def _look_at_rows(self, request: dg.DagsterRun) -> ProgressUpdate:
        sight = self.observer.look()
        if sight.snapshot is None:
            raise self._without_snapshot()
        whole = sight
        if ROWS_TAG in request.tags:
            sight = sight.part(wanted_entries(sight.entries, request.tags))
        self._meter.note(self._clock(), sight.figures.rows_done)
        if not whole.missing:
            return self._look_at_table(whole)
        if not sight.missing:
            return _ended(RunResult(True, trial=sight.figures), sight.figures)
        runs = range_runs(self._instance, self._dataset, request.run_id)
        backfill = open_backfill(self._instance, self._dataset)
        reason = dead_end(sight.missing, runs, request.run_id, backfill_open=backfill)
        if CANCELED_TAG in request.tags and not reason and not _busy(runs):
            reason = f"canceled: {len(sight.missing)} batches are not committed"
        if reason:
            return _ended(self._failed(reason, request.run_id, runs), sight.figures)
        if not self._waits and (paused := self._paused(request.run_id)) is not None:
            return _ended(paused, sight.figures)
        return ProgressUpdate("rows", self._said(sight, runs, backfill), sight.figures, self._meter.rate())

    def _paused(self, request: str) -> RunResult | None:
        """The end of a request that its budget or a gate has paused; None while it goes on, or rows are in flight.

        Until the capacity sensor has begun the request, the fleet's database holds the command for the one before. A
        command from before the last lease ended was about what was held then: a cheaper offer may fit what is left now.
        """
        target = self.observer.fleet_db.target(self._dataset)
        if target is None or target.request != request or target.pause is None or target.pause.kind not in ENDS:
            return None
        leased = any(one.works_for == self._dataset for one in self.observer.fleet_db.fleet())
        leased = leased or self.observer.fleet_db.engines_held()[self._dataset] > 0
        if leased:
            return None
        if self.observer.fleet_db.leased_since_command(self._dataset):
            return None
        spent = 0.0 if target.plan is None else target.plan.usd_spent
        return RunResult(False, f"paused: {target.pause.describe()}", pause=target.pause, spent_usd=spent)

    def _look_at_redrive(self, request: dg.DagsterRun, error: str) -> ProgressUpdate:
        """A re-drive ends with its runs: each batch that held dead letters at its start is tried once."""
        sight = self.observer.look()
        if sight.snapshot is None:
            raise self._without_snapshot()
        if not self._redrive_seen:
            if sight.missing:
                said = f"{named(sight.missing)} not committed: `batch-assets run {self._dataset}` first"
                return _ended(RunResult(False, said), sight.figures)
            self._dead, self._redrive_seen = dead_batches(self.observer.store, error), True
        self._meter.note(self._clock(), sight.figures.rows_done)
        runs = range_runs(self._instance, self._dataset, request.run_id)
        own = [run for run in runs if run.request == request.run_id]
        done = [run for run in own if run.outcome == "succeeded"]
        left = [key for key in self._dead if not any(key in run.keys for run in done)]
        if not left and not _busy(own):
            newest = latest_request(self._instance, REFRESH_TAG, self._dataset)
            return self._look_at_rows(newest or request) if sight.missing else self._look_at_table(sight)
        backfill = open_backfill(self._instance, self._dataset)
        reason = dead_end(left, runs, request.run_id, backfill_open=backfill)
        if CANCELED_TAG in request.tags and not reason and not _busy(own):
            reason = f"canceled: {len(left)} batches are not tried again"
        if reason:
            return _ended(self._failed(reason, request.run_id, runs), sight.figures)
        return ProgressUpdate("rows", self._said(sight, runs, backfill), sight.figures, self._meter.rate())

    def _without_snapshot(self) -> StoreError | CorruptObject:
        """The request has made a snapshot, and there is none: a store whose mount is gone is empty, too."""
        store = self.observer.store
        if next(store.objects.list(f"{self._dataset}/"), None) is None:
            return StoreError("the store has not the snapshot any more")
        return CorruptObject(f"{self._dataset}: expected a current snapshot, found none; {store.mended_by_run}")

    def _said(self, sight: DatasetObservation, runs: Sequence[RangeRunRecord], backfill: bool) -> str:
        """What the runs say of themselves, or what is waited for."""
        notes = [f"run {beat.run_id[:8]}: {beat.note or 'starting'}" for beat in sight.beats]
        if notes or _busy(runs):
            self._moved_at = self._clock()
            return "; ".join(notes) or "starting a run"
        if backfill:
            return "a backfill of these batches is open: its runs are awaited"
        if self._clock() - self._moved_at > QUIET_SECONDS:
            return (
                f"nothing has started for {self._clock() - self._moved_at:.0f} s: is the sensor "
                "`launcher` on (UI: Automation), and is the daemon running?"
            )
        return "starting a run"

    def _failed(self, reason: str, request: str, runs: Sequence[RangeRunRecord]) -> RunResult:
        own = [run for run in runs if run.request == request and run.outcome in ("failed", "refused", "canceled")]
        failed = [run.run_id for run in own if run.outcome != "canceled"]
        texts = list(dict.fromkeys(failure_text(self._instance, run_id) for run_id in failed))
        command = "run" if self._redrive_error is None else "redrive"
        reason += f": `batch-assets {command} {self._dataset}` goes on from there"
        return RunResult(False, "\n".join([reason, *texts[:3]]), tuple(run.run_id for run in own[:3]))

    def _look_at_table(self, sight: DatasetObservation) -> ProgressUpdate:
        rate = self._meter.rate()
        assert sight.snapshot is not None, "_look_at_rows has seen it"
        versions = {key: report.version for key, report in sight.current.items()}
        state = ledger_state(sight.snapshot, sight.entries, versions)
        newest = self._instance.get_runs(publish_runs(self._dataset, state), limit=PUBLISH_ATTEMPTS)
        runs = [run for run in newest if PUBLISH_VOID_TAG not in run.tags]
        done = next((run for run in runs if run.status == dg.DagsterRunStatus.SUCCESS), None)
        if done is not None:
            return self._published(sight, done.run_id)
        if len(runs) >= PUBLISH_ATTEMPTS and all(run.is_finished for run in runs):
            self._figures = sight.figures
            if self._checker is not None and (again := self._checker.make_lost_batches_again(sight)):
                return ProgressUpdate("verify", again, sight.figures, remark=again)
            why = failure_text_of(self._instance, runs)
            return _ended(
                RunResult(False, self._unpublished(sight, why), tuple(run.run_id for run in runs)), sight.figures
            )
        return ProgressUpdate("publish", "publishing the table", sight.figures, rate)

    def _unpublished(self, sight: DatasetObservation, why: str) -> str:
        """What the last publication has not made: the table, or something of it, as the rows that pass."""
        table = self.observer.table()
        if table is None or table.version not in sight.table_versions:
            return f"every batch is committed, but the table was not published: {why}"
        again = f"When that is mended, `batch-assets run {self._dataset}` makes it, and asks no row"
        return f"the table is published, but not all that is made of it: {why}\n{again}"

    def _published(self, sight: DatasetObservation, run_id: str) -> ProgressUpdate:
        """The catalog says that all is done. Is it?"""
        verified: Verification | None = None
        seconds = 0.0
        if self._checker is None:
            if problems := self._unlike_catalog(sight):
                said = f"{problems}; `batch-assets run {self._dataset}` mends it"
                return _ended(RunResult(False, said, (run_id,)), sight.figures)
        else:
            self._figures = sight.figures
            found = self._checker.check(sight)
            if found.waits:
                return ProgressUpdate("verify", found.waits, sight.figures)
            if found.made_again:
                return ProgressUpdate("verify", found.made_again, sight.figures, remark=found.made_again)
            if found.failed:
                return _ended(RunResult(False, found.failed, (run_id,)), sight.figures)
            verified, seconds = found.verification, self._checker.seconds
        errors, warnings = failed_checks(self._instance, run_id)
        if errors:
            said = "failed checks: " + "; ".join(errors)
            return _ended(RunResult(False, said, (run_id,), tuple(warnings)), sight.figures)
        return _ended(RunResult(True, "", (), tuple(warnings), verified, seconds), sight.figures)

    def _verifying(self, said: str) -> None:
        self._progress(ProgressUpdate("verify", f"verifying: {said}", self._figures))

    def _unlike_catalog(self, sight: DatasetObservation) -> str:
        """What differs by names and sizes, or ""."""
        if problems := self.observer.problems(sight):
            return f"the store has changed since the catalog was written: {'; '.join(problems[:NAMED_PROBLEMS])}"
        table = self.observer.table()
        if table is None or table.version not in sight.table_versions:
            found = f"version {table.version}" if table else "none"
            promised = " or ".join(sight.table_versions)
            return f"the catalog says that table {promised} is published, but the store has {found}"
        return ""


def failure_text_of(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun]) -> str:
    """Why the newest of these runs failed."""
    failed = [run for run in runs if run.status == dg.DagsterRunStatus.FAILURE]
    return failure_text(instance, failed[0].run_id) if failed else "its runs were canceled"


def _busy(runs: Sequence[RangeRunRecord]) -> bool:
    return any(run.outcome == "unfinished" for run in runs)


def _ended(ending: RunResult, counts: Figures | None = None) -> ProgressUpdate:
    return ProgressUpdate("end", ending.said, counts, ending=ending)


def give_up(
    dagster: DagsterClient | OwnDagster,
    observer: Observer,
    request: str,
    *,
    every_request: bool,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Cancel the request's runs through Dagster; wait until they are over and their leases are given back.

    `every_request` takes in runs that the launcher started for other requests of the dataset: right when this Dagster
    ends with us. Returns what is left after a minute, in words.
    """
    instance, deadline = observer.instance, clock() + CANCEL_SECONDS
    if instance.get_run_by_id(request) is not None:
        instance.add_run_tags(request, {CANCELED_TAG: "true"})
    asked: set[str] = set()
    quiet_since: float | None = None
    while clock() < deadline:
        records = unfinished(instance, observer.store.dataset)
        runs = [item.dagster_run for item in records if _is_ours(item.dagster_run, request, every_request)]
        asked |= {run.run_id for run in runs}
        if cancelable := [run.run_id for run in runs if run.status not in NOT_CANCELABLE]:
            dagster.terminate(cancelable)
        held = _held(observer, asked)
        if runs or held:
            quiet_since = None
        elif quiet_since is None:
            quiet_since = clock()
        elif clock() - quiet_since >= STILL_SECONDS:  # a launcher that was at work has had its last word
            return []
        pause(0.25)
    return [f"run {run.run_id} is still {run.status.value}" for run in runs] + held


def _is_ours(run: dg.DagsterRun, request: str, every_request: bool) -> bool:
    if run.run_id == request or run.tags.get(REQUEST_TAG) == request or run.root_run_id == request:
        return True
    return every_request and (REQUEST_TAG in run.tags or PUBLISH_TAG in run.tags)


def _held(observer: Observer, runs: set[str]) -> list[str]:
    """Leases that these runs have not given back."""
    return [
        f"instance {instance} is still leased by run {run}"
        for run in sorted(runs)
        for instance, _, released in observer.fleet_db.history(run)
        if not released
    ]
