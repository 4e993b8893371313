"""What the definitions show of a dataset's source and of its table's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.snapshots import commit, questions, write_snapshot

from batch_assets.asset_metadata.materialization import short_type, table_metadata
from batch_assets.orchestration.assets import rows_asset
from batch_assets.orchestration.source_assets import source_asset
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore


def spec(source: dict[str, Any]) -> GeneratedDatasetSpec:
    return load_spec({"name": "d", "source": source, "prompt": {"user": "{{ q }}"}, "model": "m"}, "defs.yaml")


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ({"grid": {"q": ["a"]}}, {"yaml"}),
        ({"path": "questions.jsonl.gz"}, {"jsonl"}),
        ({"path": "s3://bucket/v1.5/part-*.parquet"}, {"parquet", "s3"}),
        ({"path": "data/part-*", "format": "csv"}, {"csv"}),
        ({"path": "data/part-*"}, {"file"}),
    ],
)
def test_the_source_shows_its_format_in_the_lineage(source: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    shown = source_asset(spec(source), tmp_path)
    assert shown.kinds == kinds
    assert (shown.key.path, shown.group_name) == (["d", "source"], "d")


@pytest.mark.parametrize(
    ("words", "kind"),
    [({"prompt": {"user": "{{ q }}"}}, "llm"), ({"prompt": {"text": "{{ q }}"}, "task": "embedding"}, "embedding")],
)
def test_the_rows_show_what_makes_them_and_no_engine_that_may_be_another(
    tmp_path: Path, words: dict[str, Any], kind: str
) -> None:
    declared = load_spec({"name": "d", "source": {"grid": {"q": ["a"]}}, "model": "m", **words}, "defs.yaml")
    (shown,) = rows_asset(declared, tmp_path).specs
    assert shown.kinds == {kind, "parquet"}


def test_a_long_type_leaves_room_for_the_description_of_its_column() -> None:
    assert short_type("list<item: struct<role: string, content: string>>") == "list<…>"
    assert short_type("timestamp[us, tz=UTC]") == "timestamp[us, tz=UTC]"


def test_every_column_of_the_table_is_explained_in_the_catalog(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest)
    table = publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path)
    columns = table_metadata(store, table, None)["columns"].schema.columns
    told = {column.name: column.description for column in columns}
    assert told["topic"] == "column of the source"
    assert told["output"] == "what the model wrote; null for a row without a completion"
    assert all(told.values())
