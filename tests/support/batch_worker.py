"""A run on a Batch API as a process of its own, to be killed: `python batch_worker.py STORE URL RUN_ID`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing

from gpu_runner.batch_api import batch_client, patient_calls
from gpu_runner.fleet_database.database import Lease
from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.request_limits import BatchLimits, RequestLimits
from resources.fleet.resource import LeasedEngine
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore
from support.range_runs import a_run

# Batches that end one after the other, so that a kill finds some in every state.
LIMITS = BatchLimits(max_requests=25, gather_seconds=0.1, poll_seconds=0.05)
POLICY = FeedPolicy(retry=RetryPolicy(backoff_min=0.02, backoff_max=0.05, proof_lag=0.05), poll_seconds=0.1)
LISTED_SECONDS = 1.0  # until a batch is in the provider's list, at most


async def work(root: str, url: str, run_id: str) -> None:
    """Everything that is missing."""
    store = DatasetStore(open_objects(root), "d")
    snapshot = store.current_snapshot()
    assert snapshot is not None
    with closing(a_run(store, store.manifest(snapshot), run_id, policy=POLICY)) as run:
        if await run.prepare():
            limits = RequestLimits(batches=LIMITS)
            await run.serve(
                LeasedEngine(url, None, None, "batch", "batch", limits=limits, lease=Lease("e", 7, run_id, "d"))
            )
        assert run.missing() == []


def main(root: str, url: str, run_id: str) -> None:
    """As quick as the double is."""
    batch_client.FIRST_POLL_SECONDS = patient_calls.FIRST_WAIT_SECONDS = 0.02
    patient_calls.LOOK_AFTER_SECONDS = (0.0, LISTED_SECONDS / 2, LISTED_SECONDS)
    asyncio.run(work(root, url, run_id))


if __name__ == "__main__":
    main(*sys.argv[1:])
