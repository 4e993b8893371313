"""Where a dataset stands now: read from the snapshot, the catalog, the fleet's database and the published table.

Needs no running Dagster and opens no batch object: 10,000 batches take about half a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from batch_assets import settings
from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import UNFINISHED, last_done_at, open_backfills, range_of
from batch_assets.catalog.catalog_reader import BatchReport, Catalog, current_reports
from batch_assets.catalog.ledger import will_be_retried
from batch_assets.catalog.progress import Figures, eta_seconds, figures, recent_rate
from batch_assets.catalog.publications import ledger_state, publish_runs
from batch_assets.catalog.run_errors import failure_text
from batch_assets.filtering.passed_table import PassedStore, read_report
from batch_assets.judging.judged_table import read_report as read_judge_report
from batch_assets.local_dagster.home import ensure_storage, prepare_home
from batch_assets.orchestration.reconcile import empty_store
from batch_assets.orchestration.request_summary import RequestStatus, request_status
from batch_assets.orchestration.store_check import listed_differences
from batch_assets.publishing.published_table import PublishedTable, published_table, table_versions
from batch_assets.snapshot.left_out import rejects_path
from batch_assets.tags import (
    PUBLISH_VOID_TAG,
    REFRESH_TAG,
    RETRY_RUN_TAG,
)
from gpu_runner.fleet_database.database import FleetDatabase, RunBeat
from gpu_runner.fleet_database.wait_reason import WaitKind, WaitReason
from resources.objects.opening import CorruptObject, StoreError, open_objects
from resources.objects.store_health import is_store_trouble
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore

KEPT = "catalog_cache"  # folder of DAGSTER_HOME
OBSERVE_SECONDS = 8.0  # after which the store is said not to answer
CHECK_SECONDS = 60.0  # between two listings of the store, while somebody watches
_NOTHING = Figures(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class RefreshFailure:
    """A refresh that failed: its run, when it ended (Unix seconds), and why. The snapshot before it stays."""

    run_id: str
    failed_at: float
    reason: str


def refresh_failure(instance: dg.DagsterInstance, dataset: str, now: float) -> RefreshFailure | None:
    """The newest refresh if it failed and is not tried again by itself; else None. `now`: Unix seconds."""
    for record in instance.get_run_records(dg.RunsFilter(tags={REFRESH_TAG: dataset}), limit=1):
        run = record.dagster_run
        if run.status != dg.DagsterRunStatus.FAILURE or RETRY_RUN_TAG in run.tags or will_be_retried(record, now):
            return None
        ended = record.end_time or record.update_timestamp.timestamp()
        return RefreshFailure(run.run_id, ended, failure_text(instance, run.run_id))
    return None


@dataclass(frozen=True, slots=True)
class RunWait:
    """What a run waits for, and since when (Unix seconds).

    Where every request to its engine fails: the code of the error, the HTTP status if one came, and the server's
    sentence, or what is wrong with its answer.
    """

    kind: WaitKind
    since: float
    code: str | None = None
    status: int | None = None
    sentence: str | None = None

    @classmethod
    def of(cls, wait: WaitReason, now: float) -> RunWait:
        """`now` is in Unix seconds."""
        since, failure = round(now - wait.seconds, 1), wait.failure
        if failure is None:
            return cls(wait.kind, since)
        return cls(wait.kind, since, failure.code, failure.status, failure.sentence)


@dataclass(frozen=True, slots=True)
class RunLine:
    """One unfinished run of a dataset: what it does, in which state, and what it says of itself.

    `wait`: None: it does not wait.
    """

    run_id: str
    what: str
    status: str
    note: str
    age_seconds: float
    rows_done: int
    wait: RunWait | None = None


@dataclass(frozen=True, slots=True)
class Streaming:
    """Rows `read` so far `of` those of another dataset."""

    read: int
    of: int

    def __str__(self) -> str:
        return f"streaming, {self.read:,} of {self.of:,} rows so far"


@dataclass(frozen=True, slots=True)
class DatasetStatus:
    """What `status --json` prints: counts of the snapshot, and of its committed batches.

    `table` is where the published table lies, or None; `table_current` says whether it is that of the snapshot.
    `problems`: what the catalog promises and the store has not, or why the store cannot be read. Batches whose object
    is gone are not done. `rows_reused` of the committed rows were not asked for when their batch was made: they have
    the outcome of an earlier object of the dataset, or of another dataset (`reuse`). `rejected` of `source_rows` are
    left out by the snapshot (`on_bad_row: skip`), and listed in `rejects`. `rows_passed`, `rows_fallen`,
    `fallen_by_rule`: of the newest rows that the filter made; None: there are none. `rows_wanted`: of those that pass.
    `rows_judged`, `votes`, `votes_lost`, `judge_figures` (mean score, agreement): of the newest rows that the dataset
    judged.
    `refresh_failed`: the newest refresh failed.
    `streaming`: how much was read so far of the dataset that this one reads, which is not complete; None: all of it.
    """

    dataset: str
    rows: int
    ok: int
    dead: int
    batches: int
    batches_done: int
    prompt_tokens: int
    completion_tokens: int
    table: str | None
    table_version: str | None
    table_rows: int | None
    table_current: bool
    simulated: bool | None
    snapshot: str | None
    rows_open: int
    rows_per_second: float
    eta_seconds: float | None
    runs: tuple[RunLine, ...]
    request: RequestStatus
    problems: tuple[str, ...] = ()
    rows_reused: int = 0
    source_rows: int = 0
    rejected: int = 0
    rejects: str | None = None
    refresh_failed: RefreshFailure | None = None
    streaming: Streaming | None = None
    rows_passed: int | None = None
    rows_fallen: int | None = None
    fallen_by_rule: dict[str, int] | None = None
    rows_judged: int | None = None
    votes: int | None = None
    votes_lost: int | None = None
    judge_figures: dict[str, float | None] | None = None
    rows_wanted: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, stable keys."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class DatasetObservation:
    """One look at a dataset. Before the first snapshot there are no entries."""

    snapshot: str | None
    entries: list[BatchEntry]
    current: Mapping[str, BatchReport]
    beats: tuple[RunBeat, ...]
    figures: Figures

    @property
    def missing(self) -> list[str]:
        """Keys of the batches that the catalog does not have at their data version."""
        return [entry.key for entry in self.entries if entry.key not in self.current]

    def part(self, entries: Sequence[BatchEntry]) -> DatasetObservation:
        """What is seen of some of the batches."""
        keys = {entry.key for entry in entries}
        current = {key: report for key, report in self.current.items() if key in keys}
        rows_of_runs = {beat.run_id: beat.rows_done for beat in self.beats}
        counts = figures(entries, current, rows_of_runs)
        return dataclasses.replace(self, entries=list(entries), current=current, figures=counts)

    @property
    def table_versions(self) -> tuple[str, ...]:
        """Versions of the tables that the committed batches make, with and without prompts; none while batches are
        missing."""
        if self.snapshot is None or self.missing:
            return ()
        versions = {key: report.version for key, report in self.current.items()}
        objects = {key: BatchObject(key, found.data_version, found.generation) for key, found in versions.items()}
        return table_versions(self.snapshot, objects)


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Rows of the source that a snapshot was made of, how many of them it leaves out, and whether more are to come."""

    rows: int = 0
    rejected: int = 0
    streaming: Streaming | None = None


class Observer:
    """Looks at one dataset again and again; what did not change is not read again. `kept`: see `Catalog`."""

    def __init__(
        self, instance: dg.DagsterInstance, fleet_db: FleetDatabase, store: DatasetStore, kept: Path | None = None
    ) -> None:
        self.instance, self.fleet_db, self.store = instance, fleet_db, store
        self._catalog = Catalog(instance, store.dataset, kept)
        self._snapshot: str | None = None
        self._entries: list[BatchEntry] = []
        self._source_counts: tuple[str, SourceCounts] | None = None
        self._lost: frozenset[str] = frozenset()
        self._problems: list[str] = []
        self._checked_at = -math.inf

    def look(self) -> DatasetObservation:
        """The dataset as it is now."""
        snapshot = self.store.current_snapshot()
        beats = tuple(beat for beat in self.fleet_db.runs() if beat.dataset == self.store.dataset and beat.first_key)
        if snapshot is None:
            return DatasetObservation(None, [], {}, beats, _NOTHING)
        if snapshot != self._snapshot:
            self._snapshot, self._entries = snapshot, self.store.entries(snapshot)
        current = current_reports(self._entries, self._catalog.reports())
        rows_of_runs = {beat.run_id: beat.rows_done for beat in beats}
        return DatasetObservation(
            snapshot, self._entries, current, beats, figures(self._entries, current, rows_of_runs)
        )

    def problems(self, sight: DatasetObservation) -> list[str]:
        """What the catalog promises and the store has not, by one listing of all its objects: not for every look."""
        if sight.snapshot is None:
            versions = ledger.ledger_versions(self.instance, self.store.dataset).values()
            known = sum(not version.void for version in versions)
            return [empty_store(self.store, known)] if known else []
        published = self._was_published(sight)
        found = listed_differences(self.store, sight.snapshot, sight.entries, sight.current, published=published)
        self._lost = frozenset(one.batch for one in found if one.batch is not None)
        return [f"{one.batch or 'dataset'}: {one.kind.replace('_', ' ')}: {one.expected}: {one.found}" for one in found]

    def _was_published(self, sight: DatasetObservation) -> bool:
        """Whether the catalog says that the table of just these batches was published."""
        if sight.snapshot is None or sight.missing:
            return False
        versions = {key: report.version for key, report in sight.current.items()}
        state = ledger_state(sight.snapshot, sight.entries, versions)
        done = publish_runs(self.store.dataset, state, dg.DagsterRunStatus.SUCCESS)
        return any(PUBLISH_VOID_TAG not in run.tags for run in self.instance.get_runs(done))

    def checked(self, now: float) -> tuple[DatasetObservation, list[str]]:
        """The dataset with what the store lost left out, and the problems. Lists the store at most every minute."""
        sight = self.look()
        if now - self._checked_at >= CHECK_SECONDS or now < self._checked_at:
            self._problems, self._checked_at = self.problems(sight), now
        if self._lost:
            current = {key: report for key, report in sight.current.items() if key not in self._lost}
            beats = {beat.run_id: beat.rows_done for beat in sight.beats}
            sight = dataclasses.replace(sight, current=current, figures=figures(sight.entries, current, beats))
        return sight, self._problems

    def source_counts(self, snapshot: str | None) -> SourceCounts:
        """What a snapshot says of its source; zeros where its manifest cannot be read, which `problems` and `verify`
        say."""
        if snapshot is None:
            return SourceCounts()
        if self._source_counts is None or self._source_counts[0] != snapshot:
            try:
                manifest = self.store.manifest(snapshot)
            except CorruptObject:
                return SourceCounts()
            so_far = manifest.streaming
            streaming = None if so_far is None else Streaming(so_far.read, so_far.of)
            self._source_counts = snapshot, SourceCounts(manifest.source_rows, manifest.rejected, streaming)
        return self._source_counts[1]

    def reports(self) -> dict[str, BatchReport]:
        """The newest ledger entry of every batch, also of those that the snapshot does not have."""
        return self._catalog.reports()

    def table(self) -> PublishedTable | None:
        """The table that readers see."""
        return published_table(self.store)


def trouble_text(store: DatasetStore, error: Exception) -> str:
    """Why the store cannot be looked at, in one line."""
    if isinstance(error, StoreError):
        return str(error)
    return f"the store {store.objects.root} does not answer ({type(error).__name__})"


@contextlib.contextmanager
def observing(datasets: Sequence[str]) -> Iterator[list[Observer]]:
    """An observer of each dataset on this DAGSTER_HOME and store, for as long as the body runs."""
    home = prepare_home()
    ensure_storage(home)
    objects = open_objects(settings.store_root(), retry_seconds=OBSERVE_SECONDS, request_seconds=OBSERVE_SECONDS)
    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db,
    ):
        ledger.remember_entries(instance)
        kept = home / KEPT
        yield [Observer(instance, fleet_db, DatasetStore(objects, name), kept / f"{name}.json") for name in datasets]


def dataset_status(observer: Observer, now: float) -> DatasetStatus:
    """Status of one dataset; `now` is in Unix seconds. A store that cannot be read is one of its problems."""
    try:
        with _no_collections():
            sight, problems = observer.checked(now)
        table, passed = observer.table(), read_report(PassedStore(observer.store))
        judged = read_judge_report(observer.store)
        source = observer.source_counts(sight.snapshot)
    except Exception as error:
        if not isinstance(error, StoreError) and not is_store_trouble(error):
            raise
        sight, table, passed, judged = DatasetObservation(None, [], {}, (), _NOTHING), None, None, None
        problems, source = [trouble_text(observer.store, error)], SourceCounts()
    records = unfinished(observer.instance, observer.store.dataset)
    beats = {beat.run_id: beat for beat in sight.beats}
    working = [record.start_time for record in records if record.start_time and record.dagster_run.run_id in beats]
    rate = recent_rate(sight.current.values(), now, min(working, default=None))
    counts = sight.figures
    current = table is not None and table.version in sight.table_versions
    request = request_status(observer.fleet_db, observer.store.dataset)
    if current and not records and counts.batches_done == counts.batches:
        request = _as_over(observer, request)
    return DatasetStatus(
        dataset=observer.store.dataset,
        rows=counts.rows,
        ok=counts.ok,
        dead=counts.dead,
        batches=counts.batches,
        batches_done=counts.batches_done,
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        table=table.uri(observer.store.objects) if table else None,
        table_version=table.version if table else None,
        table_rows=table.rows if table else None,
        table_current=current,
        simulated=table.simulated if table else None,
        snapshot=sight.snapshot,
        rows_open=counts.rows_done - counts.rows_committed,
        rows_per_second=round(rate, 1),
        eta_seconds=_eta(counts, rate),
        runs=tuple(_line(record, beats.get(record.dagster_run.run_id), now) for record in records),
        request=request,
        problems=tuple(problems),
        rows_reused=counts.rows_reused,
        source_rows=source.rows,
        rejected=source.rejected,
        rejects=_rejects(observer.store, sight.snapshot) if source.rejected else None,
        streaming=source.streaming,
        refresh_failed=refresh_failure(observer.instance, observer.store.dataset, now),
        rows_passed=passed.passed if passed else None,
        rows_fallen=passed.fallen if passed else None,
        fallen_by_rule=passed.removed if passed else None,
        rows_judged=judged.rows if judged else None,
        votes=judged.votes if judged else None,
        votes_lost=judged.lost if judged else None,
        judge_figures=judged.figures if judged else None,
        rows_wanted=passed.all_wanted if passed else None,
    )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collection while a million objects are made that all live: it would be a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _as_over(observer: Observer, request: RequestStatus) -> RequestStatus:
    """The request of a dataset that is complete: it ends with the next tick of the capacity sensor, which may be days
    away where Dagster ended together with it."""
    name = observer.store.dataset
    if request.request is None or request.finished_at is not None or open_backfills(observer.instance, name):
        return request
    done = last_done_at(observer.instance, name, request.request)
    if done is None:
        return request
    met = None if request.deadline is None else done <= request.deadline
    return dataclasses.replace(request, finished_at=done, on_time=met, paused="")


def _rejects(store: DatasetStore, snapshot: str | None) -> str | None:
    return None if snapshot is None else store.objects.uri(rejects_path(store, snapshot))


def _eta(counts: Figures, rate: float) -> float | None:
    seconds = eta_seconds(counts.rows - counts.rows_done, rate)
    return None if seconds is None else round(seconds, 1)


def unfinished(instance: dg.DagsterInstance, dataset: str) -> list[dg.RunRecord]:
    """Runs of any of the dataset's assets or jobs that have not ended, oldest first."""
    records = instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED), ascending=True)
    return [record for record in records if belongs(record.dagster_run, dataset)]


def belongs(run: dg.DagsterRun, dataset: str) -> bool:
    """Whether the run is one of the dataset's jobs or materializes one of its assets."""
    jobs = {f"{dataset}_{name}" for name in ("refresh", "redrive", "publish")}
    return run.job_name in jobs or any(key.path[0] == dataset for key in run.asset_selection or ())


def _line(record: dg.RunRecord, beat: RunBeat | None, now: float) -> RunLine:
    run = record.dagster_run
    return RunLine(
        run_id=run.run_id,
        what=_what(run),
        status=run.status.value,
        note=beat.note if beat else "",
        age_seconds=round(max(0.0, now - record.create_timestamp.timestamp()), 1),
        rows_done=beat.rows_done if beat else 0,
        wait=RunWait.of(beat.wait, now) if beat and beat.wait else None,
    )


def _what(run: dg.DagsterRun) -> str:
    keys = range_of(run)
    if keys is not None:
        some = "" if keys.only is None else f"{len(keys.only)} of "
        return f"{some}batches {keys.first}-{keys.last}"
    assets = sorted(key.path[-1] for key in run.asset_selection or ())
    return ", ".join(assets) if assets else run.job_name
