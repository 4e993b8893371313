"""One run of a range as a process of its own, to be killed: `python range_worker.py STORE DATABASE ENGINE RUN_ID`.

A further argument is the address of the engine whose model plays the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import replace

from batch_assets.generation.range_run import Intent, RangeRun, RunClaims, RunIdentity, plan_range
from gpu_runner.fleet_database.database import FleetDatabase, Lease
from gpu_runner.fleet_database.heartbeat import Heartbeat
from resources.fleet.resource import LeasedEngine
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

TTL, BEAT = 8.0, 0.3  # a worker that gets no processor time for so long loses its batches to another
SLOTS = 8


async def work(run: RangeRun, engine: LeasedEngine) -> None:
    """Everything that is missing; without an engine while another run works on all that is left."""
    while await run.prepare():
        stop = asyncio.Event()
        serving = asyncio.create_task(run.serve(engine, stop))
        while not serving.done():
            await asyncio.wait([serving], timeout=0.1)
            if run.waits:
                stop.set()
        await serving
        if run.progress().finished:
            return


def main(root: str, database: str, url: str, run_id: str, user_url: str | None = None) -> None:
    store = DatasetStore(open_objects(root), "d")
    snapshot = store.current_snapshot()
    assert snapshot is not None
    entries = store.entries(snapshot)
    keys = (entries[0].key, entries[-1].key)
    with contextlib.closing(FleetDatabase(database)) as fleet_db:
        heartbeat = Heartbeat(fleet_db, run_id, ttl=TTL, interval=BEAT)
        with heartbeat.beating("d", *keys):
            identity = RunIdentity(run_id, Intent(run_id), keys)
            claims = RunClaims(fleet_db, run_id, "d", heartbeat.ttl)
            plan = plan_range(store, entries, identity.intent)
            run = RangeRun(
                store,
                store.manifest(snapshot),
                plan,
                identity,
                journal_seconds=0.1,
                claims=claims,
                reuse=True,
                user_elsewhere=user_url is not None,
            )
            heartbeat.rows_done = lambda: run.progress().rows_done
            with contextlib.closing(run):
                engine = LeasedEngine(url, None, SLOTS, "sim", "h100", lease=Lease("e", 1, run_id, "d"))
                if user_url is not None:
                    engine.user = replace(engine, endpoint=user_url, lease=Lease("api/d", 1, run_id, "d"))
                asyncio.run(work(run, engine))
                assert run.missing() == []


if __name__ == "__main__":
    main(*sys.argv[1:])
