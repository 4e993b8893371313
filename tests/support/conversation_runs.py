"""Runs of conversations on an engine of the test's process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from batch_assets.generation.range_run import Intent, RangeRun
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.builder import build_snapshot
from gpu_runner.rows import Outcome
from resources.fleet.resource import LeasedEngine
from resources.store.dataset_store import DatasetStore, SnapshotManifest
from support.dataset_project import MODEL
from support.plain_engine import PlainEngine
from support.range_runs import a_run, generate, leased
from support.specs import spec

TURNS = {"system": "Be kind.", "turns": ["{{ q }}?", "Why?", "Shorter, {{ q }}."]}


def said(request: dict[str, Any]) -> str:
    return "|".join(message["content"] for message in request["messages"])


def answer(request: dict[str, Any]) -> str:
    """Says how many answers there were before."""
    return f"a{sum(message['role'] == 'assistant' for message in request['messages']) + 1}"


def write(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def questions(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "q": f"q{i}"} for i in range(count)]


def snapshot_of(folder: Path, store: DatasetStore, **attributes: Any) -> SnapshotManifest:
    made = spec(**{"prompt": TURNS, "model": MODEL, "id": "id", "batch_rows": 4, **attributes})
    number = len(list(folder.glob("work-*")))
    return build_snapshot(made, store, now=1.0, workdir=folder / f"work-{number}", base=folder)


def finish(
    store: DatasetStore, manifest: SnapshotManifest, url: str, run_id: str, intent: Intent | None = None
) -> None:
    run = a_run(store, manifest, run_id, intent)
    asyncio.run(generate(run, url))
    run.close()


def found(store: DatasetStore, manifest: SnapshotManifest) -> dict[str, Outcome]:
    current = store.current_objects(store.entries(manifest.snapshot)).values()
    return {one.row_id: one for batch in current for one in store.outcomes(batch)}


def table_of(store: DatasetStore, manifest: SnapshotManifest, folder: Path, **more: Any) -> pl.DataFrame:
    publish(store, manifest, card=Card(), now=1.0, workdir=folder, **more)
    table = published_table(store)
    assert table is not None
    return pl.read_parquet(table.glob(store.objects))


def killed(
    run: RangeRun,
    engine: PlainEngine,
    requests: int,
    answer: Callable[[dict[str, Any]], str] = answer,
    lease: LeasedEngine | None = None,
) -> None:
    """The run is broken off after so many answers at most, and what it had is in its journal."""
    many, over = threading.Event(), threading.Event()

    def count(request: dict[str, Any]) -> str:
        if len(engine.requests) > requests:
            many.set()
            over.wait(30)
        return answer(request)

    async def main() -> None:
        assert await run.prepare()
        serving = asyncio.create_task(run.serve(lease or leased(engine.url)))
        assert await asyncio.to_thread(many.wait, 30)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await run.flush()

    engine.text = count
    asyncio.run(main())
    over.set()
    engine.text = answer
