"""Requests, runs and backfills of a dataset's batches, as Dagster's instance knows them.

Backfills have no public query: what we lean on here is held by `tests/batch_assets/sensors/test_sensors.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.ranges import KeyRange, RangeRunRecord, RunOutcome
from batch_assets.dagster_internals import BulkActionsFilter, BulkActionStatus, PartitionBackfill
from batch_assets.dagster_internals.event_batches import only_of
from batch_assets.tags import PARTITION_TAG, RANGE_END_TAG, RANGE_START_TAG, REFUSED_TAG, REQUEST_TAG, WILL_RETRY_TAG

UNFINISHED = [status for status in dg.DagsterRunStatus if status not in (
    dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)]  # fmt: skip
DECISION_SECONDS = 60.0
_OPEN = [BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING, BulkActionStatus.FAILING]


def range_runs(instance: dg.DagsterInstance, dataset: str, request: str) -> list[RangeRunRecord]:
    """Every run of the request, and every unfinished run over the dataset's batches, whoever started it."""
    own = instance.get_run_records(dg.RunsFilter(tags={REQUEST_TAG: request}))
    unfinished = instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED))
    over_rows = [found for found in unfinished if ledger.rows_key(dataset) in (found.dagster_run.asset_selection or ())]
    newest = {record.dagster_run.run_id: record for record in (*own, *over_rows)}
    return [_record(instance, record, keys) for record in newest.values() if (keys := range_of(record.dagster_run))]


def _record(instance: dg.DagsterInstance, record: dg.RunRecord, keys: KeyRange) -> RangeRunRecord:
    run = record.dagster_run
    now = time.time()
    outcome = "unfinished" if _is_undecided(instance, record, now) else _outcome(record, now)
    return RangeRunRecord(
        run.run_id,
        keys,
        outcome,
        run.tags.get(REQUEST_TAG),
        run.root_run_id or run.run_id,
        queued=run.status in (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.QUEUED),
    )


def range_of(run: dg.DagsterRun) -> KeyRange | None:
    """The batches that a run is for; None when it is not over batches."""
    if RANGE_START_TAG in run.tags:
        return KeyRange(run.tags[RANGE_START_TAG], run.tags[RANGE_END_TAG], only_of(run.run_config))
    if PARTITION_TAG in run.tags:
        return KeyRange(run.tags[PARTITION_TAG], run.tags[PARTITION_TAG])
    return None


def _outcome(record: dg.RunRecord, now: float) -> RunOutcome:
    run = record.dagster_run
    if run.status == dg.DagsterRunStatus.SUCCESS:
        return "succeeded"
    if run.status == dg.DagsterRunStatus.FAILURE:
        if ledger.will_be_retried(record, now):
            return "unfinished"
        return "refused" if run.tags.get(REFUSED_TAG) == run.run_id else "failed"
    return "canceled" if run.status == dg.DagsterRunStatus.CANCELED else "unfinished"


def _is_undecided(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """A run that failed a moment ago, of which Dagster has not yet said whether it will be retried.

    It writes the status first and the tag after it: a range started in between would run twice.
    """
    run = record.dagster_run
    if run.status != dg.DagsterRunStatus.FAILURE or WILL_RETRY_TAG in run.tags or record.end_time is None:
        return False
    return instance.run_retries_enabled and abs(now - record.end_time) < DECISION_SECONDS


def latest_request(instance: dg.DagsterInstance, tag: str, dataset: str) -> dg.DagsterRun | None:
    """The newest successful run that asked for work on the dataset."""
    found = instance.get_runs(dg.RunsFilter(tags={tag: dataset}, statuses=[dg.DagsterRunStatus.SUCCESS]), limit=1)
    return found[0] if found else None


def last_done_at(instance: dg.DagsterInstance, dataset: str, request: str) -> float | None:
    """When a run of the request ended last, or a batch of the dataset was reported, in Unix seconds; None: never."""
    own = [
        *instance.get_run_records(dg.RunsFilter(run_ids=[request]), limit=1),
        *instance.get_run_records(dg.RunsFilter(tags={REQUEST_TAG: request})),
    ]
    moments = [record.end_time for record in own if record.end_time is not None]
    newest = instance.get_latest_materialization_event(ledger.rows_key(dataset))
    return max([*moments, *([newest.timestamp] if newest is not None else [])], default=None)


def snapshot_asked(instance: dg.DagsterInstance, request: dg.DagsterRun) -> str | None:
    """The snapshot that a request was made for, as its own materialization says; None when that was wiped."""
    for entry in instance.all_logs(request.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        found = entry.asset_materialization.metadata.get("snapshot") if entry.asset_materialization else None
        if found is not None:
            return str(found.value)
    return None


@dataclass(frozen=True, slots=True)
class OpenBackfill:
    """A backfill over the dataset's batches that is not finished. `keys` None: it could not be told which."""

    backfill_id: str
    tags: Mapping[str, str]
    keys: frozenset[str] | None


def open_backfills(instance: dg.DagsterInstance, dataset: str) -> list[OpenBackfill]:
    """Unfinished backfills that target the dataset's batches, newest first."""
    return [
        OpenBackfill(found.backfill_id, found.tags, _targets(found, ledger.rows_key(dataset)))
        for found in _open(instance, dataset)
    ]


def open_backfill(instance: dg.DagsterInstance, dataset: str) -> bool:
    """True while a backfill that targets the dataset's batches is not finished."""
    return next(_open(instance, dataset), None) is not None


def datasets_with_backfills(instance: dg.DagsterInstance) -> set[str]:
    """Datasets with a backfill that is not finished: to begin one writes no event."""
    found = instance.get_backfills(filters=BulkActionsFilter(statuses=_OPEN))
    return {key.path[0] for backfill in found for key in backfill.asset_selection or ()}


def _open(instance: dg.DagsterInstance, dataset: str) -> Iterator[PartitionBackfill]:
    key = ledger.rows_key(dataset)
    for backfill in instance.get_backfills(filters=BulkActionsFilter(statuses=_OPEN)):
        if backfill.is_asset_backfill and key in (backfill.asset_selection or ()):
            yield backfill


def backfill_keys(instance: dg.DagsterInstance, dataset: str, backfill_id: str) -> frozenset[str] | None:
    """The dataset's batches that a backfill targets, finished or not; None when there is none or it cannot be told."""
    found = instance.get_backfill(backfill_id)
    return None if found is None else _targets(found, ledger.rows_key(dataset))


def _targets(backfill: PartitionBackfill, key: dg.AssetKey) -> frozenset[str] | None:
    data = backfill.asset_backfill_data
    if data is None or key not in data.target_subset.asset_keys:
        return None
    return frozenset(data.target_subset.get_partitions_subset(key).get_partition_keys())
