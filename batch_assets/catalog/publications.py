"""Publications of a table, as the instance knows them: their job, and the state of the ledger that each published."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.tags import PUBLISH_TAG
from resources.store.dataset_store import BatchEntry

PUBLISH_ATTEMPTS = 3


def publish_job(dataset: str) -> str:
    """Name of the job that publishes the table."""
    return f"{dataset}_publish"


def publish_runs(dataset: str, state: str, *statuses: dg.DagsterRunStatus) -> dg.RunsFilter:
    """Runs that published this state of the dataset; of any status where none is given.

    Its job too: two datasets of the same rows have the same state.
    """
    return dg.RunsFilter(job_name=publish_job(dataset), tags={PUBLISH_TAG: state}, statuses=list(statuses) or None)


def ledger_state(snapshot: str, entries: Sequence[BatchEntry], versions: Mapping[str, ledger.LedgerVersion]) -> str:
    """Hash of the snapshot and of every batch's newest generation: changes with each regenerate and re-drive."""
    digest = hashlib.sha256(snapshot.encode())
    for entry in entries:
        digest.update(f"{entry.key}:{entry.data_version}:{versions[entry.key].generation};".encode())
    return digest.hexdigest()[:16]
