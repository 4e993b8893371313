"""Runs and backfills of a dataset's batches, as Dagster's instance knows them.

Backfills have no public query: what we lean on here is held by `tests/test_sensors.py`.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus

from batch_assets import ledger
from batch_assets.launcher import REQUEST_TAG, RangeRunRecord, RunOutcome
from batch_assets.packing import KeyRange

UNFINISHED = [status for status in dg.DagsterRunStatus if status not in (
    dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)]  # fmt: skip
_OPEN = [BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING, BulkActionStatus.FAILING]


def range_runs(instance: dg.DagsterInstance, dataset: str, request: str) -> list[RangeRunRecord]:
    """Every run of the request, and every unfinished run over the dataset's batches, whoever started it."""
    found = {run.run_id: run for run in instance.get_runs(dg.RunsFilter(tags={REQUEST_TAG: request}))}
    for run in instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)):
        if ledger.rows_key(dataset) in (run.asset_selection or ()):
            found[run.run_id] = run
    return [_record(run) for run in found.values() if _keys(run) is not None]


def _record(run: dg.DagsterRun) -> RangeRunRecord:
    keys = _keys(run)
    assert keys is not None
    return RangeRunRecord(run.run_id, keys, _outcome(run), run.tags.get(REQUEST_TAG), run.root_run_id or run.run_id)


def _keys(run: dg.DagsterRun) -> KeyRange | None:
    if ledger.RANGE_START_TAG in run.tags:
        return KeyRange(run.tags[ledger.RANGE_START_TAG], run.tags[ledger.RANGE_END_TAG])
    if ledger.PARTITION_TAG in run.tags:
        return KeyRange(run.tags[ledger.PARTITION_TAG], run.tags[ledger.PARTITION_TAG])
    return None


def _outcome(run: dg.DagsterRun) -> RunOutcome:
    if run.status == dg.DagsterRunStatus.SUCCESS:
        return "succeeded"
    if run.status == dg.DagsterRunStatus.FAILURE:
        return "unfinished" if ledger.will_be_retried(run) else "failed"
    return "canceled" if run.status == dg.DagsterRunStatus.CANCELED else "unfinished"


def open_backfill(instance: dg.DagsterInstance, dataset: str) -> bool:
    """True while a backfill that targets the dataset's batches is not finished."""
    key = ledger.rows_key(dataset)
    for backfill in instance.get_backfills(filters=BulkActionsFilter(statuses=_OPEN)):
        if backfill.is_asset_backfill and key in (backfill.asset_selection or ()):
            return True
    return False
