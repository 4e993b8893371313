"""What the definitions show of a dataset's source and of its table's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.snapshots import commit, questions, write_snapshot

from batch_assets.asset_metadata.materialization import (
    column_lineage,
    short_type,
    shown_rows,
    table_metadata,
    view_link,
)
from batch_assets.orchestration.assets import rows_asset
from batch_assets.orchestration.source_assets import source_asset
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.settings import SettingError, viewer_url
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
        ({"path": "hf://datasets/a/b@v1.5/part-*.parquet"}, {"parquet", "huggingface"}),
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


def test_the_table_says_of_which_columns_its_columns_are_made(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest)
    table = publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path)
    words = {"name": "sums", "model": "m", "keep_columns": ["topic"], "prompt": {"user": "{{ a }} of {{ question }}"}}

    def lineage(source: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
        declared = load_spec({**words, "source": source}, "defs.yaml")
        found = column_lineage(declared, tmp_path, table)["dagster/column_lineage"].value
        return {
            name: [(one.asset_key.to_user_string(), one.column_name) for one in deps]
            for name, deps in found.deps_by_column.items()
        }

    asked = [("sums/source", "a"), ("sums/source", "question")]
    of_file = lineage({"path": "a.jsonl"})
    assert of_file == {"topic": [("sums/source", "topic")], "prompt": asked, "output": asked}
    of_table = lineage({"dataset": "other", "rename": {"output": "question"}})
    assert of_table["output"] == [("other/dataset", "a"), ("other/dataset", "output")]


def test_shares_of_dead_and_cut_rows_are_numbers_that_dagster_plots(local_objects: Objects, tmp_path: Path) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest, dead=["id-000003"])
    table = publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path)
    shown = shown_rows(store, table, samples=True)
    assert (shown["dead_rate"].value, shown["cut_rate"].value) == (0.1, 0.0)
    assert list(shown)[:3] == ["first_rows", "sample_rows", "histograms"]  # above all else


@pytest.mark.parametrize("base", ["http://127.0.0.1:3002/", "https://rows.example.com"])
def test_the_page_of_the_table_links_to_the_viewer_only_where_there_is_one(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    store = DatasetStore(local_objects, "sums")
    manifest = write_snapshot(store, questions(3))
    commit(store, manifest)
    table = publish(store, manifest, card=Card(), now=0.0, workdir=tmp_path)
    monkeypatch.delenv("BATCH_ASSETS_VIEWER_URL", raising=False)
    assert view_link(table) == {}
    monkeypatch.setenv("BATCH_ASSETS_VIEWER_URL", base)
    assert view_link(table)["view"].value == f"{base.rstrip('/')}/?dataset=sums&version={table.version}"
    monkeypatch.setenv("BATCH_ASSETS_VIEWER_URL", "javascript:alert(1)")
    assert view_link(table) == {}  # no table is lost for it
    with pytest.raises(SettingError, match="BATCH_ASSETS_VIEWER_URL: expected http"):
        viewer_url()
