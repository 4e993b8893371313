"""Where a dataset stands now: read from the snapshot, the catalog, the fleet's books and the published table.

Needs no running Dagster and opens no batch object: 10,000 batches take about half a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from batch_assets import ledger, settings
from batch_assets.backfills import UNFINISHED
from batch_assets.catalog import BatchReport, Catalog, current_reports
from batch_assets.clock_scale import scale_words
from batch_assets.progress import Figures, eta_seconds, figures, recent_rate
from batch_assets.publish import PublishedTable, published_table, table_version
from batch_assets.publisher_sensor import PUBLISH_VOID_TAG, ledger_state, publish_runs
from batch_assets.reconcile import empty_store
from batch_assets.stack import ensure_storage, prepare_home
from batch_assets.store_check import listed_differences
from gpu_runner.fleet import FleetBook, RunBeat
from gpu_runner.targets import DatasetTarget
from resources.objects import StoreError, open_objects
from resources.store import BatchEntry, BatchObject, DatasetStore
from resources.store_health import is_store_trouble

OBSERVE_SECONDS = 8.0  # after which the store is said not to answer
CHECK_SECONDS = 60.0  # between two listings of the store, while somebody watches
_NOTHING = Figures(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class RunLine:
    """One unfinished run of a dataset: what it does, in which state, and what it says of itself."""

    run_id: str
    what: str
    status: str
    note: str
    age_seconds: float
    rows_done: int


@dataclass(frozen=True, slots=True)
class DatasetStatus:
    """What `status --json` prints: counts of the snapshot, and of its committed batches.

    `table` is where the published table lies, or None; `table_current` says whether it is that of the snapshot.
    `problems`: what the catalog promises and the store has not, or why the store cannot be read. Batches whose object
    is gone are not done.
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

    def as_json(self) -> dict[str, Any]:
        """Plain values, stable keys."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """What is wanted of the request under way, or was of the last one, and what is expected of it.

    Moments are Unix seconds by the fleet's database, money is in US dollars since the request began. `on_time`: is the
    deadline expected to be met, or was it; None without one. `finished_at`: None while it is under way. `p50`: the
    median of what is expected, `p95`: not passed in 95 of 100 cases. `paused`: why nothing may be rented. `missing`:
    batches that were not there when it ended. `clock`: what seconds and dollars mean where a clock is scaled.
    """

    request: str | None = None
    deadline: float | None = None
    budget_usd: float | None = None
    on_time: bool | None = None
    finish_p50: float | None = None
    finish_p95: float | None = None
    finished_at: float | None = None
    usd_spent: float = 0.0
    usd_wasted: float = 0.0
    usd_p50: float | None = None
    usd_p95: float | None = None
    instances: int = 1
    paused: str = ""
    reason: str = ""
    missing: int = 0
    clock: str = ""


def request_status(book: FleetBook, dataset: str) -> RequestStatus:
    """As the fleet's books have it."""
    target = book.target(dataset)
    if target is None or (not target.request and not target.plan):
        return RequestStatus()
    plan, clock = target.plan, scale_words({one.provider: one.clock for one in book.costs()})
    if not target.request:
        known = {name: plan[name] for name in RequestStatus.__dataclass_fields__ if name in plan}
        return RequestStatus(**known | {"clock": clock})
    mine = [charge for charge in book.charges(target.since) if charge.dataset == dataset]
    return RequestStatus(
        request=target.request,
        deadline=target.deadline_at,
        budget_usd=target.budget_usd,
        on_time=_on_time(target),
        finish_p50=plan.get("finish_p50") if target.instances else None,
        finish_p95=plan.get("finish_p95") if target.instances else None,
        usd_spent=sum(charge.usd.total for charge in mine),
        usd_wasted=sum(charge.usd.wasted for charge in mine),
        usd_p50=plan.get("usd_p50"),
        usd_p95=plan.get("usd_p95"),
        instances=target.instances,
        paused=target.pause,
        reason=plan.get("reason", ""),
        clock=clock,
    )


def _on_time(target: DatasetTarget) -> bool | None:
    """As the sensor expected it last, unless that cannot be true any more: the deadline has passed since, or nothing
    may work."""
    if target.deadline_in is None or "on_time" not in target.plan:
        return None
    works = target.instances > 0 and not target.pause
    return works and target.deadline_in > 0 and bool(target.plan["on_time"])


@dataclass(frozen=True, slots=True)
class Sight:
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

    @property
    def table_version(self) -> str | None:
        """Version of the table that the committed batches make; None while batches are missing."""
        if self.snapshot is None or self.missing:
            return None
        versions = {key: report.version for key, report in self.current.items()}
        objects = {key: BatchObject(key, found.data_version, found.generation) for key, found in versions.items()}
        return table_version(self.snapshot, objects)


class Observer:
    """Looks at one dataset again and again; what did not change is not read again."""

    def __init__(self, instance: dg.DagsterInstance, book: FleetBook, store: DatasetStore) -> None:
        self.instance, self.book, self.store = instance, book, store
        self._catalog = Catalog(instance, store.dataset)
        self._snapshot: str | None = None
        self._entries: list[BatchEntry] = []
        self._lost: frozenset[str] = frozenset()
        self._problems: list[str] = []
        self._checked_at = -math.inf

    def look(self) -> Sight:
        """The dataset as it is now."""
        snapshot = self.store.current_snapshot()
        beats = tuple(beat for beat in self.book.runs() if beat.dataset == self.store.dataset and beat.first_key)
        if snapshot is None:
            return Sight(None, [], {}, beats, _NOTHING)
        if snapshot != self._snapshot:
            self._snapshot, self._entries = snapshot, self.store.entries(snapshot)
        current = current_reports(self._entries, self._catalog.reports())
        rows_of_runs = {beat.run_id: beat.rows_done for beat in beats}
        return Sight(snapshot, self._entries, current, beats, figures(self._entries, current, rows_of_runs))

    def problems(self, sight: Sight) -> list[str]:
        """What the catalog promises and the store has not, by one listing of all its objects: not for every look."""
        if sight.snapshot is None:
            versions = ledger.ledger_versions(self.instance, self.store.dataset).values()
            known = sum(not version.void for version in versions)
            return [empty_store(self.store, known)] if known else []
        published = self._was_published(sight)
        found = listed_differences(self.store, sight.snapshot, sight.entries, sight.current, published=published)
        self._lost = frozenset(one.batch for one in found if one.batch is not None)
        return [f"{one.batch or 'dataset'}: {one.kind.replace('_', ' ')}: {one.expected}: {one.found}" for one in found]

    def _was_published(self, sight: Sight) -> bool:
        """Whether the catalog says that the table of just these batches was published."""
        if sight.snapshot is None or sight.missing:
            return False
        versions = {key: report.version for key, report in sight.current.items()}
        state = ledger_state(sight.snapshot, sight.entries, versions)
        done = publish_runs(self.store.dataset, state, dg.DagsterRunStatus.SUCCESS)
        return any(PUBLISH_VOID_TAG not in run.tags for run in self.instance.get_runs(done))

    def checked(self, now: float) -> tuple[Sight, list[str]]:
        """The dataset with what the store lost left out, and the problems. Lists the store at most every minute."""
        sight = self.look()
        if now - self._checked_at >= CHECK_SECONDS or now < self._checked_at:
            self._problems, self._checked_at = self.problems(sight), now
        if self._lost:
            current = {key: report for key, report in sight.current.items() if key not in self._lost}
            beats = {beat.run_id: beat.rows_done for beat in sight.beats}
            sight = dataclasses.replace(sight, current=current, figures=figures(sight.entries, current, beats))
        return sight, self._problems

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
        contextlib.closing(FleetBook(settings.fleet_database())) as book,
    ):
        yield [Observer(instance, book, DatasetStore(objects, name)) for name in datasets]


def dataset_status(observer: Observer, now: float) -> DatasetStatus:
    """Status of one dataset; `now` is in Unix seconds. A store that cannot be read is one of its problems."""
    try:
        sight, problems = observer.checked(now)
        table = observer.table()
    except Exception as error:
        if not isinstance(error, StoreError) and not is_store_trouble(error):
            raise
        sight, problems, table = Sight(None, [], {}, (), _NOTHING), [trouble_text(observer.store, error)], None
    records = unfinished(observer.instance, observer.store.dataset)
    beats = {beat.run_id: beat for beat in sight.beats}
    working = [record.start_time for record in records if record.start_time and record.dagster_run.run_id in beats]
    rate = recent_rate(sight.current.values(), now, min(working, default=None))
    counts = sight.figures
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
        table_current=table is not None and table.version == sight.table_version,
        simulated=table.simulated if table else None,
        snapshot=sight.snapshot,
        rows_open=counts.rows_done - counts.rows_committed,
        rows_per_second=round(rate, 1),
        eta_seconds=_eta(counts, rate),
        runs=tuple(_line(record, beats.get(record.dagster_run.run_id), now) for record in records),
        request=request_status(observer.book, observer.store.dataset),
        problems=tuple(problems),
    )


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
    )


def _what(run: dg.DagsterRun) -> str:
    first = run.tags.get(ledger.RANGE_START_TAG) or run.tags.get(ledger.PARTITION_TAG)
    if first is not None:
        return f"batches {first}-{run.tags.get(ledger.RANGE_END_TAG, first)}"
    assets = sorted(key.path[-1] for key in run.asset_selection or ())
    return ", ".join(assets) if assets else run.job_name
