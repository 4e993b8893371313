"""An OpenAI batch that the code of commit d80bf39 has left half-finished is continued by today's worker."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.api.execution.engines.engine_supply import EndpointSupply
from batch_assets.api.execution.worker import Worker

from .test_worker import site_of

LEFT = Path(__file__).parents[3] / "fixtures" / "half_finished" / "openai_batch"
KEYS = ("00000", "99999")


def test_a_batch_of_the_version_before_is_finished_and_keeps_what_was_done(tmp_path: Path) -> None:
    shutil.copytree(LEFT / "store", tmp_path / "store")
    with contextlib.closing(sqlite3.connect(tmp_path / "api.db")) as connection:
        connection.executescript((LEFT / "api.sql").read_text())

    async def finished(url: str) -> BatchRecord:
        working = asyncio.create_task(Worker(replace(site, engines=EndpointSupply(url, None))).run())
        try:
            async with asyncio.timeout(30 * PATIENCE):
                while (record := site.batches.get("t", "batch_1")) is None or record.status != "completed":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        return record

    with site_of(tmp_path) as site:
        store = batch_store(site.objects, "batch_1")
        entries = store.entries(SNAPSHOT)
        (committed,) = store.current_objects(entries).values()
        done = store.outcomes(committed)
        segments = [store.journal.read(path) for path in store.journal.segments(KEYS)]
        done += [row for segment in segments for key, rows in segment.items() if key != committed.key for row in rows]
        with simulated_engine("--speed", "50", model="tiny") as engine:
            record = asyncio.run(finished(engine.url))
        parts = store.current_objects(entries).values()
        found = {row.row_id: row for part in parts for row in store.outcomes(part)}
        assert 250 < len(done) < 400 == len(found) and all(found[row.row_id] == row for row in done)
        assert (record.completed, record.failed, record.epoch) == (400, 0, 2)
        assert not list(store.journal.segments(KEYS))
