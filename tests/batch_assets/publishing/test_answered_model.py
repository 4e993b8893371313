"""The column `model` is what the answer named; what was asked for is in the table's manifest, metadata and card."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from support.dataset_project import MODEL, dataset_project
from support.plain_engine import plain_engine
from support.snapshots import commit, questions, write_snapshot

from batch_assets.asset_metadata.materialization import table_metadata
from batch_assets.publishing import table_files
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.publishing.published_table import PublishedTable, published_table
from gpu_runner.rows import Origin
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

SIMULATED = Origin("m (simulated)", "simulated-1", "test", "cpu", False, "run")
REAL = Origin("m", "vllm-1", "test", "gpu", False, "run")
NAMED = "tiny-2026-08-06"


@pytest.mark.slow
def test_rows_have_the_model_that_their_answer_names_and_the_table_the_one_that_was_asked_for(tmp_path: Path) -> None:
    with plain_engine(MODEL) as engine, dataset_project(tmp_path) as site:
        site.source([f"What is {i}?" for i in range(10)])
        assert site.materialize("prompts").success
        engine.model = NAMED
        assert site.run_rows("00000", "00000", engine.url).success
        assert {one["model"] for one in engine.requests} == {MODEL}
        assert site.materialize("dataset").success
        table = published_table(site.store)
        assert table is not None and not table.simulated and table.model == MODEL
        frame = pl.read_parquet(table.glob(site.store.objects)).sort("row_id")
        assert frame["model"].to_list() == [NAMED] * 10
        assert table_metadata(site.store, table, None)["model"] == MODEL
        card = site.store.objects.get(f"{table.path}/README.md").decode()
        assert f"| task, model | chat, {MODEL} |" in card and f"| answered by | {NAMED} |" in card


@pytest.mark.parametrize(
    ("origin", "named", "model"),
    [
        (REAL, None, "m"),
        (REAL, "m", "m"),
        (REAL, "m-2", "m-2"),
        (REAL, "m-2 (simulated)", "m"),  # no answer makes a simulated row of a real one
        (SIMULATED, "m", "m (simulated)"),
        (SIMULATED, "m-2", "m-2 (simulated)"),
        (SIMULATED, "m-2 (simulated)", "m (simulated)"),
    ],
)
def test_what_an_answer_names_says_nothing_of_who_is_simulated(origin: Origin, named: str | None, model: str) -> None:
    found = origin.answered_as(named)
    assert (found.model, found.simulated) == (model, origin.simulated)


def test_a_manifest_of_before_is_read_and_other_names_are_counted_together(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(5))
    commit(store, manifest)
    table = publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path)
    before = table.model_dump(exclude={"model"})
    assert PublishedTable.model_validate(before).model is None
    assert "model" not in table_metadata(store, PublishedTable.model_validate(before), None)
    monkeypatch.setattr(table_files, "MOST_ORIGINS", 2)
    totals = table_files.Totals()
    lines = pl.read_parquet(table.glob(local_objects))
    for name in ("a", "b", "c", "d", "a"):
        totals.add(lines.with_columns(pl.lit(name).alias("model")).to_arrow())
    assert {source.model: source.rows for source in totals.sources()} == {
        "a": 10,
        "b": 5,
        "other models (simulated)": 10,
    }
