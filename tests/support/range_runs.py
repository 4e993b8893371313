"""Runs of a range for tests: made and served by an engine as if leased, what a journal holds, steps until something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from batch_assets.generation.engine_supervisor import EngineSupervisor, StepKind
from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from gpu_runner.fleet_database.database import Lease
from gpu_runner.inference.policy import FeedPolicy
from resources.fleet.resource import LeasedEngine
from resources.store.dataset_store import DatasetStore, SnapshotManifest
from support.timing import PATIENCE


def leased(url: str) -> LeasedEngine:
    return LeasedEngine(url, None, 64, "simulated", "simulated-h200", lease=Lease("e", 7, "run", "d"))


def journaled(store: DatasetStore) -> set[str]:
    """Ids of the rows that the journal holds."""
    segments = store.journal.segments(("00000", "99999"))
    return {o.row_id for path in segments for rows in store.journal.read(path).values() for o in rows}


def step_until(supervisor: EngineSupervisor, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE * 30
    while not true():
        assert supervisor.step().kind is not StepKind.FAILED and time.monotonic() < deadline
        supervisor.wait(0.02)


def a_run(
    store: DatasetStore,
    manifest: SnapshotManifest,
    run_id: str,
    intent: Intent | None = None,
    policy: FeedPolicy | None = None,
    user_elsewhere: bool = False,
) -> RangeRun:
    """Of all batches of the snapshot."""
    entries = store.entries(manifest.snapshot)
    intent = intent or Intent(run_id)
    identity = RunIdentity(run_id, intent, (entries[0].key, entries[-1].key))
    plan = plan_range(store, entries, intent)
    return RangeRun(store, manifest, plan, identity, journal_seconds=0.1, policy=policy, user_elsewhere=user_elsewhere)


async def generate(run: RangeRun, url: str, seconds: float = 60) -> None:
    """The whole range on the engine at this address."""
    async with asyncio.timeout(seconds):
        if await run.prepare():
            await run.serve(leased(url))


def first_committed(store: DatasetStore, manifest: SnapshotManifest) -> int:
    """Rows of the batches that the run `run-1` has committed."""
    footers = plan_range(store, store.entries(manifest.snapshot), Intent("x")).done
    return sum(footer.rows for footer in footers if footer.run_id == "run-1")
