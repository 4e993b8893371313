"""Published tables for other programs: each reader gets the lines of one version, from a folder and from S3."""

from __future__ import annotations

from pathlib import Path

import duckdb
import polars as pl
import pytest
from support.snapshots import commit, questions, write_snapshot

import batch_assets
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.table_access.opened_table import TableError, table
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore


def published(objects: Objects, workdir: Path, rows: int, now: float = 0.0, name: str = "sums") -> str:
    """Publish a table of so many rows; returns its version."""
    store = DatasetStore(objects, name)
    manifest = write_snapshot(store, questions(rows))
    commit(store, manifest, dead=["id-000003"])
    return publish(store, manifest, card=Card(), now=now, workdir=workdir, part_rows=10).version


@pytest.mark.slow
def test_every_reader_has_the_lines_of_the_table(any_objects: Objects, tmp_path: Path) -> None:
    version = published(any_objects, tmp_path, 25)
    found = table("sums", store=any_objects.root)
    assert (found.name, found.version, found.rows, len(found.uris)) == ("sums", version, 25, 3)
    ids = [f"id-{i:06d}" for i in range(25)]
    assert found.lazy().select("row_id").collect().to_series().to_list() == ids
    assert found.arrow(["row_id"]).column("row_id").to_pylist() == ids
    assert tuple(found.arrow().column_names) == found.columns
    assert found.dataset().count_rows() == 25
    with duckdb.connect() as connection:
        dead = found.relation(connection).filter("error IS NOT NULL").project("row_id").fetchall()
    assert dead == [("id-000003",)]
    assert len(found.relation().fetchall()) == 25


def test_a_version_stays_as_it_is_when_a_newer_one_is_published(local_objects: Objects, tmp_path: Path) -> None:
    first = published(local_objects, tmp_path, 20, now=1.0)
    opened = table("sums", store=local_objects.root)
    rows = opened.lazy()
    second = published(local_objects, tmp_path, 30, now=2.0)
    assert (len(rows.collect()), table("sums", store=local_objects.root).version) == (20, second)
    assert table("sums", first, store=local_objects.root).uris == opened.uris
    third = published(local_objects, tmp_path, 40, now=3.0)
    with pytest.raises(TableError, match="expected version") as gone:
        table("sums", first, store=local_objects.root)
    assert second in str(gone.value) and f"current: {third}" in str(gone.value)


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("../sums", None, "expected the name of a dataset"),
        ("sums/published", None, "expected the name of a dataset"),
        ("", None, "expected the name of a dataset"),
        ("sums", "../../other/published/0123456789abcdef", "expected a version of 16 hex digits"),
        ("others", None, "`batch-assets run others` makes one"),
        ("sums", "0123456789abcdef", "expected version 0123456789abcdef, found "),
    ],
)
def test_what_is_no_table_is_said(
    name: str, version: str | None, said: str, local_objects: Objects, tmp_path: Path
) -> None:
    published(local_objects, tmp_path, 5)
    with pytest.raises(TableError) as error:
        table(name, version, store=local_objects.root)
    assert said in str(error.value)


def test_a_table_whose_files_are_gone_is_not_opened(local_objects: Objects, tmp_path: Path) -> None:
    version = published(local_objects, tmp_path, 25)
    local_objects.delete([f"sums/published/{version}/part-00001.parquet"])
    with pytest.raises(TableError, match=r"part-00001.parquet gone or of another size"):
        table("sums", store=local_objects.root)


def test_the_store_of_the_settings_is_the_default(
    local_objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(local_objects, tmp_path, 5)
    monkeypatch.setenv("BATCH_ASSETS_STORE", local_objects.root)
    assert isinstance(batch_assets.table("sums").lazy(), pl.LazyFrame)


def test_a_folder_with_signs_of_a_pattern_in_its_name(tmp_path: Path) -> None:
    from resources.objects.opening import open_objects

    objects = open_objects(str(tmp_path / "a [b]*{c}"))
    published(objects, tmp_path, 5)
    found = table("sums", store=objects.root)
    assert len(found.lazy().collect()) == found.arrow().num_rows == len(found.relation().fetchall()) == 5
