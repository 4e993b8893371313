"""Follows one request from the source to the published table, and gives it up when asked to.

Only looks: what has to be started, launcher and publisher start. Every look says where the work is, and at last how it
ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import dagster as dg

from batch_assets import ledger
from batch_assets.backfills import latest_request, open_backfill, range_runs
from batch_assets.dagster_client import DagsterClient
from batch_assets.launcher import CANCELED_TAG, REFRESH_TAG, REQUEST_TAG, RangeRunRecord
from batch_assets.progress import Figures, Meter, dead_end
from batch_assets.publisher_sensor import PUBLISH_ATTEMPTS, PUBLISH_TAG, PUBLISH_VOID_TAG, ledger_state, publish_runs
from batch_assets.run_story import failed_checks, failure_text
from batch_assets.status import Observer, Sight, unfinished
from resources.objects import StoreError
from resources.store_health import is_store_trouble

Phase = Literal["source", "rows", "publish", "end"]
QUIET_SECONDS = 45.0
CANCEL_SECONDS = 60.0
STILL_SECONDS = 1.5
NAMED_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class Ending:
    """How the work ended. `runs` are those to look at, newest first."""

    ok: bool
    said: str = ""
    runs: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the work is. `figures` is None until the source has been read."""

    phase: Phase
    said: str
    figures: Figures | None = None
    rate: float = 0.0
    ending: Ending | None = None


class Follower:
    """Follows the refresh that the run `request` asks for."""

    def __init__(self, observer: Observer, request: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.observer, self.request = observer, request
        self._instance, self._dataset = observer.instance, observer.store.dataset
        self._clock = clock
        self._meter = Meter()
        self._moved_at = clock()
        self._silent_since: float | None = None
        self._had_snapshot = False

    def look(self) -> Moment:
        """Where the work is now."""
        run = self._instance.get_run_by_id(self.request)
        if run is None:
            return _ended(Ending(False, f"run {self.request} is not in Dagster any more"))
        if ledger.RETRY_RUN_TAG in run.tags:
            self.request = run.tags[ledger.RETRY_RUN_TAG]
            return Moment("source", "reading the source again")
        if run.status == dg.DagsterRunStatus.CANCELED:
            return _ended(Ending(False, "canceled while the source was read", (run.run_id,)))
        if run.status == dg.DagsterRunStatus.FAILURE and not ledger.will_be_retried(run):
            return _ended(Ending(False, failure_text(self._instance, run.run_id), (run.run_id,)))
        if run.status != dg.DagsterRunStatus.SUCCESS:
            waits = run.status in (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTING)
            return Moment("source", "starting" if waits else "reading the source")
        newest = latest_request(self._instance, REFRESH_TAG, self._dataset)
        try:
            moment = self._look_at_rows(newest or run)
        except Exception as error:
            if not is_store_trouble(error):
                raise
            return self._store_is_silent()
        self._silent_since = None
        return moment

    def _store_is_silent(self) -> Moment:
        """The work may go on when the store does: nobody gives it up for that."""
        self._silent_since = self._silent_since or time.time()
        since = time.strftime("%H:%M:%S", time.localtime(self._silent_since))
        return Moment("rows", f"the store {self.observer.store.objects.root} does not answer since {since}")

    def _look_at_rows(self, request: dg.DagsterRun) -> Moment:
        sight = self.observer.look()
        if sight.snapshot is None and self._had_snapshot:
            raise StoreError("the store has not the snapshot any more")
        self._had_snapshot = sight.snapshot is not None
        self._meter.note(self._clock(), sight.figures.rows_done)
        if not sight.missing:
            return self._look_at_table(sight)
        runs = range_runs(self._instance, self._dataset, request.run_id)
        backfill = open_backfill(self._instance, self._dataset)
        reason = dead_end(sight.missing, runs, request.run_id, backfill_open=backfill)
        if CANCELED_TAG in request.tags and not reason and not _busy(runs):
            reason = f"canceled: {len(sight.missing)} batches are not committed"
        if reason:
            return _ended(self._failed(reason, request.run_id, runs), sight.figures)
        return Moment("rows", self._said(sight, runs, backfill), sight.figures, self._meter.rate())

    def _said(self, sight: Sight, runs: Sequence[RangeRunRecord], backfill: bool) -> str:
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

    def _failed(self, reason: str, request: str, runs: Sequence[RangeRunRecord]) -> Ending:
        own = [run for run in runs if run.request == request and run.outcome in ("failed", "canceled")]
        texts = list(dict.fromkeys(failure_text(self._instance, run.run_id) for run in own if run.outcome == "failed"))
        return Ending(False, "\n".join([reason, *texts[:3]]), tuple(run.run_id for run in own[:3]))

    def _look_at_table(self, sight: Sight) -> Moment:
        rate = self._meter.rate()
        if sight.snapshot is None:
            return Moment("rows", "waiting for the snapshot")
        versions = {key: report.version for key, report in sight.current.items()}
        state = ledger_state(sight.snapshot, sight.entries, versions)
        newest = self._instance.get_runs(publish_runs(self._dataset, state), limit=PUBLISH_ATTEMPTS)
        runs = [run for run in newest if PUBLISH_VOID_TAG not in run.tags]
        done = next((run for run in runs if run.status == dg.DagsterRunStatus.SUCCESS), None)
        if done is not None:
            return _ended(self._published(sight, done.run_id), sight.figures)
        if len(runs) >= PUBLISH_ATTEMPTS and all(run.is_finished for run in runs):
            said = f"every batch is committed, but the table was not published: {failure_text_of(self._instance, runs)}"
            return _ended(Ending(False, said, tuple(run.run_id for run in runs)), sight.figures)
        return Moment("publish", "publishing the table", sight.figures, rate)

    def _published(self, sight: Sight, run_id: str) -> Ending:
        if problems := self.observer.problems(sight):
            said = f"the store has changed since the catalog was written: {'; '.join(problems[:NAMED_PROBLEMS])}"
            return Ending(False, f"{said}; `batch-assets run {self._dataset}` mends it", (run_id,))
        table = self.observer.table()
        if table is None or table.version != sight.table_version:
            found = f"version {table.version}" if table else "none"
            said = f"the catalog says that table {sight.table_version} is published, but the store has {found}"
            return Ending(False, f"{said}; `batch-assets run {self._dataset}` mends it", (run_id,))
        errors, warnings = failed_checks(self._instance, run_id)
        if errors:
            return Ending(False, "failed checks: " + "; ".join(errors), (run_id,), tuple(warnings))
        return Ending(True, warnings=tuple(warnings))


def failure_text_of(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun]) -> str:
    """Why the newest of these runs failed."""
    failed = [run for run in runs if run.status == dg.DagsterRunStatus.FAILURE]
    return failure_text(instance, failed[0].run_id) if failed else "its runs were canceled"


def _busy(runs: Sequence[RangeRunRecord]) -> bool:
    return any(run.outcome == "unfinished" for run in runs)


def _ended(ending: Ending, counts: Figures | None = None) -> Moment:
    return Moment("end", ending.said, counts, ending=ending)


def give_up(
    dagster: DagsterClient,
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
        if cancelable := [run.run_id for run in runs if run.status != dg.DagsterRunStatus.CANCELING]:
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
        for instance, _, released in observer.book.history(run)
        if not released
    ]
