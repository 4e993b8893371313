"""What is being made of one dataset now: which request, which batches it still wants, and how much work that is.

Read from the catalog, the fleet's books and a few batch footers; nothing is listed, so 80,000 batches take under a
second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from batch_assets import ledger
from batch_assets.backfills import OpenBackfill, open_backfills, range_runs
from batch_assets.launcher import CANCELED_TAG, REDRIVE_TAG, REFRESH_TAG, RangeRunRecord
from batch_assets.progress import dead_end
from batch_assets.sensors import SnapshotCache, latest_request, snapshot_asked
from batch_assets.spec import GeneratedDatasetSpec
from batch_assets.wishes import request_of
from batch_assets.work_in_hand import WorkInHand
from gpu_runner.fleet import RunBeat
from gpu_runner.targets import DatasetTarget
from gpu_runner.workload import Workload
from resources.store import BatchEntry, BatchObject, DatasetStore


@dataclass(frozen=True, slots=True)
class OpenWork:
    """A request under way. `work` holds the rows left, less those finished in open batches; None: nothing to plan.

    `batches`: those left; `spread`: how uncertain the tokens are. `runs`: unfinished range runs over the dataset.
    """

    request: str
    tags: Mapping[str, str]
    work: Workload | None
    spread: float
    batches: int
    runs: int


class WorkWatcher:
    """Looks at one dataset again and again; what did not change is not read again."""

    def __init__(self, spec: GeneratedDatasetSpec, store: DatasetStore, folder: Path) -> None:
        self._spec, self._store = spec, store
        self._in_hand = WorkInHand(spec, store, folder)
        self._cache = SnapshotCache()
        self.missing = 0  # batches that the catalog did not have at the last look

    def look(
        self, instance: dg.DagsterInstance, beats: Sequence[RunBeat], target: DatasetTarget | None
    ) -> OpenWork | None:
        """The request that is under way, or None. `target`: what the books hold of the dataset."""
        name = self._spec.name
        backfills = open_backfills(instance, name)
        newest = [latest_request(instance, tag, name) for tag in (REFRESH_TAG, REDRIVE_TAG)]
        asked = [run for run in newest if run is not None]
        current = target.request if target else ""
        runs = range_runs(instance, name, asked[0].run_id if asked else "")
        unfinished = [run for run in runs if run.outcome == "unfinished"]
        # The ledger last: what a run that ends meanwhile reports is in it.
        snapshot, entries = self._cache.entries(self._store)
        versions = ledger.ledger_versions(instance, name)
        missing = [entry for entry in entries if _object(entry, versions) is None]
        self.missing = len(missing)
        request = _request(instance, current, asked, backfills, runs, missing, snapshot)
        if request is None:
            return None
        found, tags = request
        wanted = next((one.keys for one in backfills if one.backfill_id == found), None)
        left = [entry for entry in missing if wanted is None or entry.key in wanted]
        if snapshot is None or not left:
            return OpenWork(found, tags, None, 0.0, 0, len(unfinished))
        committed = [batch for entry in entries if (batch := _object(entry, versions)) is not None]
        rows = sum(entry.rows for entry in left)
        rows = max(1, rows - _open_rows(unfinished, beats, entries, {entry.key for entry in missing}))
        work, spread = self._in_hand.left(snapshot, rows, committed)
        return OpenWork(found, tags, work, spread, len(left), len(unfinished))


def _request(
    instance: dg.DagsterInstance,
    current: str,
    asked: Sequence[dg.DagsterRun],
    backfills: Sequence[OpenBackfill],
    runs: Sequence[RangeRunRecord],
    missing: Sequence[BatchEntry],
    snapshot: str | None,
) -> tuple[str, Mapping[str, str]] | None:
    """The request to plan for and its tags: the one of the books while it goes on, else the newest that does."""
    going: dict[str, Mapping[str, str]] = {one.backfill_id: one.tags for one in backfills}
    for run in asked:
        own = [one for one in runs if one.request == run.run_id]
        busy = any(one.outcome == "unfinished" for one in own)
        wanted = bool(missing) and CANCELED_TAG not in run.tags and snapshot_asked(instance, run) in (None, snapshot)
        keys = [entry.key for entry in missing]
        if busy or (wanted and not dead_end(keys, runs, run.run_id, backfill_open=bool(backfills))):
            going[run.run_id] = run.tags
    for one in runs:
        if one.outcome == "unfinished" and one.request is None and not backfills:
            found = instance.get_run_by_id(one.run_id)
            if found is not None:
                going[request_of(one.root_run_id or one.run_id, found.tags)] = found.tags
    if current in going:
        return current, going[current]
    reading = instance.get_run_by_id(current) if current else None
    if reading is not None and not reading.is_finished:
        return current, reading.tags  # it still reads its source
    return next(iter(going.items()), None)


def _object(entry: BatchEntry, versions: Mapping[str, ledger.LedgerVersion]) -> BatchObject | None:
    found = versions.get(entry.key)
    if found is None or found.data_version != entry.data_version:
        return None
    return BatchObject(entry.key, found.data_version, found.generation)


def _open_rows(
    runs: Sequence[RangeRunRecord], beats: Sequence[RunBeat], entries: Sequence[BatchEntry], missing: set[str]
) -> int:
    """Rows that living runs have finished in batches that are not committed yet."""
    done = {beat.run_id: beat.rows_done for beat in beats}
    found = 0
    for run in runs:
        if finished := done.get(run.run_id, 0):
            own = [entry for entry in entries if entry.key in run.keys]
            open_rows = sum(entry.rows for entry in own if entry.key in missing)
            committed = sum(entry.rows for entry in own) - open_rows
            found += min(open_rows, max(0, finished - committed))
    return found
