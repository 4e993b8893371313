"""The last refresh of a dataset, where it failed before it could ask for rows."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg

from batch_assets.catalog.ledger import will_be_retried
from batch_assets.catalog.run_errors import failure_text
from batch_assets.tags import REFRESH_TAG, RETRY_RUN_TAG


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
