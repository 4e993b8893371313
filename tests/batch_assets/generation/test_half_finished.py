"""A dataset that the code of commit d80bf39 has left half-finished, in its store, is continued by today's."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import dagster as dg
from support.range_runs import a_run, generate
from support.simulated_engine import simulated_engine
from support.snapshots import MODEL

from batch_assets.catalog.catalog_reader import Catalog
from batch_assets.catalog.ledger import batch_event
from batch_assets.catalog.progress import figures
from gpu_runner.rows import Outcome
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

LEFT = Path(__file__).parents[2] / "fixtures" / "half_finished" / "dataset" / "store"
KEYS = ("00000", "00003")


def test_a_dataset_of_the_version_before_is_finished_and_no_row_that_is_done_is_asked(tmp_path: Path) -> None:
    shutil.copytree(LEFT, tmp_path / "store")
    store = DatasetStore(open_objects(str(tmp_path / "store")), "questions")
    snapshot = store.current_snapshot()
    assert snapshot is not None
    manifest = store.manifest(snapshot)
    entries = store.entries(snapshot)
    (committed,) = store.current_objects(entries).values()
    done: list[Outcome] = store.outcomes(committed)
    committed_rows, committed_by = len(done), store.footer(committed).run_id
    segments = [store.journal.read(path) for path in store.journal.segments(KEYS)]
    done += [row for segment in segments for key, rows in segment.items() if key != committed.key for row in rows]
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        run = a_run(store, manifest, "run-2")
        asyncio.run(generate(run, engine.url))
        run.close()
    assert 10 < len(done) < 40 and run.missing() == []
    assert run.progress().requests == 40 - len(done)
    found = {row.row_id: row for part in store.current_objects(entries).values() for row in store.outcomes(part)}
    assert len(found) == 40 and all(found[row.row_id] == row for row in done)
    assert not list(store.journal.segments(KEYS))
    footers = [store.footer(part) for part in store.current_objects(entries).values()]
    taken = sum((Counter(footer.journaled) for footer in footers), Counter())
    assert sum(taken.values()) == len(done) - committed_rows > 0 and "run-2" not in taken, "and the footers say whose"
    with dg.DagsterInstance.ephemeral() as instance:
        for footer in footers:
            instance.report_runless_asset_event(batch_event(store, footer, snapshot))
        reports = Catalog(instance, "questions").reports()
    asked_by = figures(entries, reports, {}).asked_by
    assert {run: asked_by[run] for run in taken if run != committed_by} == {
        run: rows for run, rows in taken.items() if run != committed_by
    }
    assert asked_by["run-2"] == 40 - len(done)
