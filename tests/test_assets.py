"""What the definitions show of a dataset's source and of its table's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from snapshots import commit, questions, write_snapshot

from batch_assets.assets import source_asset, table_metadata
from batch_assets.card import Card
from batch_assets.publish import publish
from batch_assets.spec import GeneratedDatasetSpec, load_spec
from resources.objects import Objects
from resources.store import DatasetStore


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
def test_the_source_shows_its_format_in_the_lineage(source: dict[str, Any], kinds: set[str]) -> None:
    shown = source_asset(spec(source))
    assert shown.kinds == kinds
    assert (shown.key.path, shown.group_name) == (["d", "source"], "d")


def test_every_column_of_the_table_is_explained_in_the_catalog(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest)
    table = publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path)
    columns = table_metadata(store, table, None)["dagster/column_schema"].columns
    told = {column.name: column.description for column in columns}
    assert told["topic"] == "column of the source"
    assert told["output"] == "what the model wrote; null for a row without a completion"
    assert all(told.values())
