"""Assets of other projects take tables in the type that they name, in the version that the catalog names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
from support.snapshots import commit, questions, write_snapshot

from batch_assets import published_tables, table_input
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.table_access.opened_table import Table
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

KEY = dg.AssetKey(["sums", "dataset"])


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def published(objects: Objects, workdir: Path, rows: int) -> str:
    """Publish a table of so many rows; returns its version."""
    store = DatasetStore(objects, "sums")
    manifest = write_snapshot(store, questions(rows))
    commit(store, manifest)
    return publish(store, manifest, card=Card(), now=float(rows), workdir=workdir).version


def reported(instance: dg.DagsterInstance, version: str) -> None:
    tags = {"dagster/data_version": version}
    instance.report_runless_asset_event(dg.AssetMaterialization(KEY, tags=tags))


def taken(instance: dg.DagsterInstance, store: str, kind: Any) -> Any:
    """What an asset with this annotation is given."""
    given = []

    def asset(rows: Any) -> None:
        given.append(rows)

    asset.__annotations__["rows"] = kind
    mine = dg.asset(name="mine", ins={"rows": table_input("sums")})(asset)
    defs = dg.Definitions.merge(published_tables("sums", store=store), dg.Definitions(assets=[mine]))
    job = defs.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(instance=instance, asset_selection=[mine.key], raise_on_error=False)
    if not done.success:
        failure = next(event for event in done.all_events if event.is_step_failure).step_failure_data
        raise AssertionError(f"{failure.error.cause or failure.error}")
    return given[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (Any, lambda rows: len(rows.collect())),
        (pl.LazyFrame, lambda rows: len(rows.collect())),
        (pl.DataFrame, len),
        (pa.Table, len),
        (pyarrow.dataset.Dataset, lambda rows: rows.count_rows()),
        (duckdb.DuckDBPyRelation, lambda rows: len(rows.fetchall())),
        (Table, lambda rows: rows.rows),
    ],
)
def test_the_annotation_says_what_an_asset_is_given(
    kind: Any, count: Any, local_objects: Objects, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    published(local_objects, tmp_path, 15)
    found = taken(instance, local_objects.root, kind)
    assert kind is Any or isinstance(found, kind)
    assert count(found) == 15


def test_the_version_of_the_newest_materialization_is_read_and_noted(
    local_objects: Objects, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    first = published(local_objects, tmp_path, 10)
    reported(instance, first)
    published(local_objects, tmp_path, 20)  # not in the catalog yet
    assert taken(instance, local_objects.root, Table).version == first
    (seen,) = instance.fetch_observations(KEY, limit=5).records
    observation = seen.asset_observation
    assert observation is not None and observation.metadata["version"].value == first
    event = instance.get_latest_materialization_event(dg.AssetKey("mine"))
    assert event is not None and event.asset_materialization is not None
    assert (event.asset_materialization.tags or {})["dagster/input_data_version/sums/dataset"] == first


def test_a_version_that_is_gone_and_another_annotation_are_said(
    local_objects: Objects, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    there = published(local_objects, tmp_path, 10)
    with pytest.raises(AssertionError, match=r"expected an annotation of .*polars.LazyFrame"):
        taken(instance, local_objects.root, int)
    reported(instance, "0" * 16)
    with pytest.raises(AssertionError, match=f"expected version 0000000000000000, found {there}"):
        taken(instance, local_objects.root, pl.LazyFrame)


def test_tables_of_two_modules_can_be_merged() -> None:
    defs = dg.Definitions.merge(published_tables("sums"), published_tables("others"))
    assert {"sums/dataset", "others/dataset"} == {key.to_user_string() for key in defs.resolve_all_asset_keys()}
