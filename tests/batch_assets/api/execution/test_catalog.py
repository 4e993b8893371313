"""What Dagster's catalog hears of batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import dagster as dg
import pytest
from support.api_service import CHAT, api_service, jsonl, line
from support.open_batch import answered
from support.simulated_engine import simulated_engine

from batch_assets.api.batches.snapshot import check_input
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT, EXPIRE
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.catalog import (
    KEY,
    PARTITIONS,
    CatalogReports,
    materialized,
    missing,
    partition_of,
    report,
)
from batch_assets.api.settings import ApiLimits
from resources.objects.opening import LocalObjects


@pytest.mark.slow
def test_each_250_lines_are_a_materialized_partition_found_from_the_store_alone(tmp_path: Path) -> None:
    async def made() -> str:
        async with api_service(tmp_path, engine.url) as site:
            batch = await site.until((await site.create([line(f"{number}") for number in range(251)]))["id"])
            state = site.app.state
            (record,) = state.batches.unreported()
            assert record.id == batch["id"]
            found = missing(lambda named: (), state.objects, record)
            report(instance, found)
            assert missing(lambda named: materialized(instance, named), state.objects, record) == []
            state.batches.set_reported(record.id)
            assert state.batches.unreported() == []
            return str(batch["id"])

    with simulated_engine("--speed", "20", "--output-tokens", "fixed:8") as engine, dg.instance_for_test() as instance:
        batch_id = asyncio.run(made())
        keys = {partition_of(batch_id, "00000"), partition_of(batch_id, "00001")}
        assert set(instance.get_dynamic_partitions(PARTITIONS)) == keys
        assert instance.get_materialized_partitions(KEY) == keys
        rows = {}
        for record in instance.fetch_materializations(KEY, limit=10).records:
            assert record.asset_materialization is not None
            rows[record.asset_materialization.partition] = record.asset_materialization.metadata["rows"].value
        assert rows == {partition_of(batch_id, "00000"): 250, partition_of(batch_id, "00001"): 1}


def ended(batches: BatchRecords, objects: LocalObjects, batch_id: str) -> BatchRun:
    """A batch of 251 lines that has expired with all its answers."""
    lines = [line(f"{number}") for number in range(251)]
    objects.put("input", jsonl(lines))
    assert check_input(objects, "input", batch_id, CHAT, None, ApiLimits()).errors == []
    record = batches.create(BatchRecord(batch_id, "t", CHAT, "file-1", "1h", 1, 2, batch_id, epoch=0))
    held = batches.claim(batch_id, "me", 1.0, 5.0)
    assert held is not None
    run = BatchRun(objects, record, held, "me")
    run.load()
    for part in run.batches():
        run.commit(
            part.key,
            [replace(answered(row.row_id), row_key=row.row_key) for row in part.rows],
        )
    assert batches.move(held, ACCEPT, 1, total=251) and batches.move(held, EXPIRE, 2)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["index", "object"])
def test_a_damaged_batch_holds_up_the_report_of_no_other(tmp_path: Path, damaged: str) -> None:
    with closing(Records(f"sqlite:///{tmp_path}/api.db")) as records, dg.instance_for_test() as instance:
        batches, objects = BatchRecords(records), LocalObjects(tmp_path / "store")
        runs = [ended(batches, objects, f"batch_{number}") for number in range(2)]
        store = runs[0].store
        index, batch_object = (
            store.snapshot_path("input", "batches.parquet"),
            store.batch_path(runs[0].objects["00000"]),
        )
        objects.put(index if damaged == "index" else batch_object, b"torn")
        CatalogReports(tmp_path, batches, objects, lambda home: instance)._report_missing(instance)
        whole = [("batch_1", "00000"), ("batch_1", "00001")]
        expected = whole if damaged == "index" else [("batch_0", "00001"), *whole]
        assert instance.get_materialized_partitions(KEY) == {partition_of(*one) for one in expected}
        assert batches.unreported() == []


@pytest.mark.slow
def test_all_ended_batches_are_compared_at_one_look_and_no_other_is_read(tmp_path: Path) -> None:
    """The catalog keeps the partitions of all batches that ever were: to read them for each look grows for ever."""
    with closing(Records(f"sqlite:///{tmp_path}/api.db")) as records, dg.instance_for_test() as instance:
        batches, objects = BatchRecords(records), LocalObjects(tmp_path / "store")
        runs = [ended(batches, objects, f"batch_{number}") for number in range(22)]  # more than are read together
        reports = CatalogReports(tmp_path, batches, objects, lambda home: instance)
        report(instance, missing(lambda named: (), objects, runs[0].record)[:1])
        asked: list[set[str]] = []
        storage, there = instance.event_log_storage, instance.event_log_storage.get_latest_storage_id_by_partition

        def of_some(key: dg.AssetKey, kind: dg.DagsterEventType, named: set[str]) -> Mapping[str, int]:
            asked.append(named)
            return there(key, kind, named)

        with (
            patch.object(storage, "get_materialized_partitions", side_effect=AssertionError("all were read")),
            patch.object(storage, "get_latest_storage_id_by_partition", of_some),
        ):
            reports._report_missing(instance)
        assert batches.unreported() == [] and len(asked) == 22 and all(len(named) == 2 for named in asked)
        found = instance.fetch_materializations(KEY, limit=100).records
        assert sorted(str(one.partition_key) for one in found) == sorted(set().union(*asked))


def test_a_decision_on_engines_is_an_observation_of_the_asset(tmp_path: Path) -> None:
    with closing(Records(f"sqlite:///{tmp_path}/api.db")) as records, dg.instance_for_test() as instance:
        reports = CatalogReports(tmp_path, BatchRecords(records), LocalObjects(tmp_path), lambda home: instance)
        reports.decided(dg.AssetObservation(KEY, description="tiny: 3 instances"))
        reports._report_decisions(instance)
        (found,) = instance.fetch_observations(KEY, limit=10).records
        assert found.asset_observation is not None
        assert found.asset_observation.description == "tiny: 3 instances"
