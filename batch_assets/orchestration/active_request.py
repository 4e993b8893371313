"""What is being made of one dataset now: which request, which batches it still wants, and how much work that is.

Read from the catalog, the fleet's database and a few batch footers. Nothing is listed but the answers of other datasets
that can be reused, once a minute. So 80,000 batches take under a second.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import (
    OpenBackfill,
    backfill_keys,
    latest_request,
    open_backfills,
    range_of,
    range_runs,
    snapshot_asked,
)
from batch_assets.catalog.progress import dead_end
from batch_assets.catalog.ranges import RangeRunRecord
from batch_assets.orchestration.trial import wanted_entries
from batch_assets.snapshot.cache import SnapshotCache
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.request_options import BY_HAND, begin, request_of, request_options
from batch_assets.tags import CANCELED_TAG, CHAIN_TAG, REDRIVE_TAG, REFRESH_TAG, ROWS_TAG, STREAMING_TAG
from gpu_runner.fleet_database.database import FleetDatabase, RunBeat
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.fleet_database.wait_reason import WaitReason
from gpu_runner.offers.workload import Workload
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore

MOST_SPREAD = 0.5  # of rows to come: before there are any, nobody knows how many it takes


@dataclass(frozen=True, slots=True)
class ActiveDataset:
    """A request under way. `work` holds the rows left, less those finished in open batches and those of which other
    datasets have the answer; None: nothing to plan.

    `batches`: those left; `units`: the most instances that can work on them, as each needs a run of its own; `spread`:
    how uncertain the tokens are. `waits`: what its unfinished runs wait for. `model`: that of the snapshot, which
    `batch-assets run --model` may set; "": nothing is planned.
    """

    request: str
    tags: Mapping[str, str]
    work: Workload | None
    spread: float
    batches: int
    units: int
    waits: tuple[WaitReason, ...]
    model: str = ""


class WorkWatcher:
    """Looks at one dataset again and again; what did not change is not read again."""

    def __init__(self, spec: GeneratedDatasetSpec, store: DatasetStore, folder: Path) -> None:
        self._spec, self._store = spec, store
        self._in_hand = WorkloadEstimator(spec, store, folder)
        self._cache = SnapshotCache()
        self.missing = (
            0  # batches of the request in the fleet's database that the catalog did not have at the last look
        )

    def look(
        self, instance: dg.DagsterInstance, beats: Sequence[RunBeat], target: DatasetTarget | None
    ) -> ActiveDataset | None:
        """The request that is under way, or None. `target`: what the fleet's database holds of the dataset."""
        name = self._spec.name
        backfills = open_backfills(instance, name)
        refresh, redrive = (latest_request(instance, tag, name) for tag in (REFRESH_TAG, REDRIVE_TAG))
        runs = _runs(instance, name, [run.run_id for run in (refresh, redrive) if run is not None])
        unfinished = [run for run in runs if run.outcome == "unfinished"]
        # The ledger last: what a run that ends meanwhile reports is in it.
        snapshot, entries = self._cache.entries(self._store)
        versions = ledger.ledger_versions(instance, name)
        missing = [entry for entry in entries if _object(entry, versions) is None]
        current = target.request if target else ""
        going = _backfills_and_runs(instance, backfills, unfinished)
        owed = _wanted(missing, _keys_of(instance, name, refresh.run_id, entries) if refresh is not None else None)
        going |= _asked(instance, refresh, redrive, runs, [entry.key for entry in owed], snapshot, bool(backfills))
        self.missing = len(_wanted(missing, _keys_of(instance, name, current, entries)))
        request = _current(instance, current, going)
        if request is None:
            return None
        found, tags = request
        left = _wanted(missing, _keys_of(instance, name, found, entries))
        own = {run.run_id for run in unfinished}
        waits = tuple(beat.wait for beat in beats if beat.run_id in own and beat.wait is not None)
        if snapshot is None or not left:
            return ActiveDataset(found, tags, None, 0.0, 0, 0, waits)
        committed = [batch for entry in entries if (batch := _object(entry, versions)) is not None]
        reusable = self._in_hand.reusable(snapshot)
        free = {entry.key: min(entry.rows, reusable[entry.key]) for entry in left if entry.key in reusable}
        settled = _settled_rows(unfinished, beats, entries, {entry.key for entry in missing}, free)
        rows = max(1, sum(entry.rows for entry in left) - settled)
        more, deviation = self._in_hand.to_come(snapshot)
        work, spread = self._in_hand.left(snapshot, rows + more, committed)
        spread = math.hypot(spread, min(MOST_SPREAD, deviation / (rows + more)))
        units = len(left)
        if refresh is None or found != refresh.run_id:  # Dagster, not our launcher, cuts these into runs
            units = _most_runs(left, unfinished, self._spec.batches_per_run)
        return ActiveDataset(found, tags, work, spread, len(left), units, waits, self._in_hand.model(snapshot))


def request_under_way(
    instance: dg.DagsterInstance,
    fleet_db: FleetDatabase,
    spec: GeneratedDatasetSpec,
    store: DatasetStore,
    folder: Path,
) -> DatasetTarget | None:
    """What is wanted of the request under way; None where nothing is, or another one than in the fleet's database.

    The fleet's database keeps a request until a capacity sensor sees that it is over, and none sees it where Dagster
    ended with the request. So the rule of that sensor is asked. Where the snapshot is damaged the request stands.
    """
    target = fleet_db.target(spec.name)
    if target is None or not target.request:
        return None
    try:
        found = WorkWatcher(spec, store, folder).look(instance, (), target)
    except (CorruptObject, FileNotFoundError):  # a damaged snapshot does not show it, and is about to be made again
        return target
    return target if found is not None and found.request == target.request else None


def begin_or_go_on(
    instance: dg.DagsterInstance,
    fleet_db: FleetDatabase,
    spec: GeneratedDatasetSpec,
    request: str,
    tags: Mapping[str, str],
) -> DatasetTarget:
    """Begin a request. Where an earlier one of the same step of a chain is under way, the new one goes on in its place:
    its time and what it has spent count for both. Raises InvalidTag."""
    known = fleet_db.target(spec.name)
    if known is not None and known.request != request and same_chain(instance, known.request, tags.get(CHAIN_TAG)):
        request_options(spec, tags)
        fleet_db.continue_request(spec.name, known.request, request)
    return begin(fleet_db, spec, request, tags)


def same_chain(instance: dg.DagsterInstance, request: str, chain: str | None) -> bool:
    """Whether a request is a step of this chain."""
    run = instance.get_run_by_id(request) if chain is not None and request else None
    return run is not None and run.tags.get(CHAIN_TAG) == chain


Going = dict[str, Mapping[str, str]]


def _runs(instance: dg.DagsterInstance, dataset: str, requests: Sequence[str]) -> list[RangeRunRecord]:
    found = {run.run_id: run for request in requests or [""] for run in range_runs(instance, dataset, request)}
    return list(found.values())


def _backfills_and_runs(
    instance: dg.DagsterInstance, backfills: Sequence[OpenBackfill], unfinished: Sequence[RangeRunRecord]
) -> Going:
    """Requests that Dagster itself carries out: open backfills, and runs that somebody started by hand."""
    going: Going = {one.backfill_id: one.tags for one in backfills}
    for one in unfinished:
        if one.request is None and not backfills:
            found = instance.get_run_by_id(one.run_id)
            if found is not None:
                going[request_of(one.root_run_id or one.run_id, found.tags)] = found.tags
    return going


def _asked(
    instance: dg.DagsterInstance,
    refresh: dg.DagsterRun | None,
    redrive: dg.DagsterRun | None,
    runs: Sequence[RangeRunRecord],
    missing: Sequence[str],
    snapshot: str | None,
    backfill_open: bool,
) -> Going:
    """Requests that our launcher carries out. Only a refresh is owed what is missing; a re-drive ends with its runs."""
    going: Going = {}
    for run in (refresh, redrive):
        if run is None:
            continue
        own = [one for one in runs if one.request == run.run_id]
        if any(one.outcome == "unfinished" for one in own):
            going[run.run_id] = run.tags
    if refresh is not None and missing and CANCELED_TAG not in refresh.tags:
        wanted = snapshot_asked(instance, refresh) in (None, snapshot)
        if wanted and not dead_end(missing, runs, refresh.run_id, backfill_open=backfill_open):
            going[refresh.run_id] = refresh.tags
    return going


def _current(instance: dg.DagsterInstance, current: str, going: Going) -> tuple[str, Mapping[str, str]] | None:
    """The request to plan for and its tags: the database's while it goes on, else another one that does."""
    if current in going:
        return current, going[current]
    reading = instance.get_run_by_id(current) if current else None
    if reading is not None and not reading.is_finished:
        return current, reading.tags  # it still reads its source
    return next(iter(going.items()), None)


def _keys_of(
    instance: dg.DagsterInstance, dataset: str, request: str, entries: Sequence[BatchEntry]
) -> Container[str] | None:
    """The batches that a request is about; None: all."""
    if request.startswith(BY_HAND):
        run = instance.get_run_by_id(request.removeprefix(BY_HAND))
        return None if run is None else range_of(run)
    if not request:
        return None
    asked_by = instance.get_run_by_id(request)
    if asked_by is None:
        return backfill_keys(instance, dataset, request)
    some = not {ROWS_TAG, STREAMING_TAG}.isdisjoint(asked_by.tags)
    return {entry.key for entry in wanted_entries(entries, asked_by.tags)} if some else None


def _wanted(entries: Sequence[BatchEntry], keys: Container[str] | None) -> list[BatchEntry]:
    return list(entries) if keys is None else [entry for entry in entries if entry.key in keys]


def _most_runs(left: Sequence[BatchEntry], unfinished: Sequence[RangeRunRecord], batches_per_run: int) -> int:
    """Runs that can be at work at once: those there are, and those that the rest will be cut into."""
    rest = sum(not any(entry.key in run.keys for run in unfinished) for entry in left)
    return max(1, min(len(left), len(unfinished) + -(-rest // batches_per_run)))


def _object(entry: BatchEntry, versions: Mapping[str, ledger.LedgerVersion]) -> BatchObject | None:
    found = versions.get(entry.key)
    if found is None or found.data_version != entry.data_version:
        return None
    return BatchObject(entry.key, found.data_version, found.generation)


def _settled_rows(
    runs: Sequence[RangeRunRecord],
    beats: Sequence[RunBeat],
    entries: Sequence[BatchEntry],
    missing: set[str],
    free: Mapping[str, int],
) -> int:
    """Rows of batches that are not committed yet that need no engine: living runs have finished them, or other datasets
    have their answers (`free`, by batch). `entries` in the order of keys.

    What a run has finished may be answers that it took, so of its batches the greater of both counts.
    """
    done = {beat.run_id: beat.rows_done for beat in beats}
    keys = [entry.key for entry in entries]
    found, elsewhere = 0, dict(free)
    for run in runs:
        if finished := done.get(run.run_id, 0):
            inside = entries[bisect.bisect_left(keys, run.keys.first) : bisect.bisect_right(keys, run.keys.last)]
            own = [entry for entry in inside if entry.key in run.keys]
            open_rows = sum(entry.rows for entry in own if entry.key in missing)
            committed = sum(entry.rows for entry in own) - open_rows
            taken = sum(elsewhere.pop(entry.key, 0) for entry in own if entry.key in missing)
            found += max(taken, min(open_rows, max(0, finished - committed)))
    return found + sum(elsewhere.values())
