"""The asset `api/batches`, materialized in Dagster: lines without an answer become a batch of their own."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.api_service import CHAT, ApiService, api_service, jsonl, line
from support.simulated_engine import simulated_engine

from batch_assets.api.batches.redrive import REDRIVE_OF, BatchRedrive, RedriveRefused
from batch_assets.api.database.batch_records import BatchRecords
from batch_assets.api.database.file_records import FileRecords
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import END_CANCEL
from batch_assets.api.execution.catalog import KEY, PARTITIONS, missing, part_of, partition_of, report
from batch_assets.orchestration.front_door.api_batches import api_batches
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchStore, DatasetStore

REFUSED_ONCE = json.dumps([{"kind": "too_long", "match": {"contains": "oops"}, "times": 1}])
ENGINE = ("--speed", "20", "--output-tokens", "fixed:8", "--faults", REFUSED_ONCE)


def lines(count: int, *bad: int) -> list[Any]:
    return [line(f"oops {number}" if number in bad else f"{number}") for number in range(count)]


def materialize(home: Path, instance: dg.DagsterInstance, *partitions: str) -> dg.ExecuteInProcessResult:
    """As the UI does it for a range of partitions: in one run."""
    tags = {"dagster/asset_partition_range_start": partitions[0], "dagster/asset_partition_range_end": partitions[-1]}
    store = BatchStore(root=str(home / "store"))
    return dg.materialize([api_batches], instance=instance, resources={"store": store}, tags=tags, raise_on_error=False)


async def ended(site: ApiService, instance: dg.DagsterInstance, wanted: list[Any], **more: Any) -> Any:
    """A batch that has ended, and is in the catalog."""
    batch = await site.until((await site.create(wanted, **more))["id"])
    record = site.app.state.batches.of_any_tenant(batch["id"])
    report(instance, missing(lambda named: frozenset(), site.app.state.objects, record))
    return batch


def failure(result: dg.ExecuteInProcessResult) -> str:
    (event,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
    return str(event.step_failure_data.error.message) if event.step_failure_data.error else ""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCH_ASSETS_API_DB", f"sqlite:///{tmp_path}/api.db")
    return tmp_path


@pytest.mark.slow
def test_a_backfill_asks_for_the_lines_without_an_answer_once_more(home: Path) -> None:
    async def steps(instance: dg.DagsterInstance) -> None:
        async with api_service(home, engine.url) as site:
            batch = await ended(site, instance, lines(600, 7, 599), window="2h", metadata={"who": "me"})
            assert batch["request_counts"] == {"total": 600, "completed": 598, "failed": 2}
            keys = [partition_of(batch["id"], f"{number:05}") for number in range(3)]
            assert set(instance.get_dynamic_partitions(PARTITIONS)) == set(keys)
            result = await asyncio.to_thread(materialize, home, instance, *keys)
            assert result.success
            found = {
                event.partition: event.step_materialization_data.materialization.metadata
                for event in result.get_asset_materialization_events()
            }
            assert [found[key]["redriven_lines"].value for key in keys] == [1, 0, 1]
            assert [found[key]["rows"].value for key in keys] == [250, 250, 100]
            new_id = str(found[keys[0]]["redriven_as"].value)
            assert found[keys[2]]["redriven_as"].value == new_id and "redriven_as" not in found[keys[1]]
            again = await site.until(new_id)
            assert again["status"] == "completed" and again["endpoint"] == batch["endpoint"]
            assert again["metadata"] == {"who": "me", REDRIVE_OF: batch["id"]}
            assert again["expires_at"] - again["created_at"] == 7200 and again["completion_window"] == "2h"
            output, errors = await site.results(again)
            assert {one["custom_id"] for one in output} == {"oops 7", "oops 599"} and errors == []
            assert await site.get(batch["id"]) == batch, "an ended batch never changes"

    with simulated_engine(*ENGINE) as engine, dg.DagsterInstance.ephemeral() as instance:
        asyncio.run(steps(instance))


@pytest.mark.slow
def test_what_cannot_be_re_driven_is_named_and_the_rest_goes_on(home: Path) -> None:
    async def steps(instance: dg.DagsterInstance) -> None:
        async with api_service(home, engine.url) as site:
            first = await ended(site, instance, lines(2, 1))
            instance.add_dynamic_partitions(PARTITIONS, [partition_of("batch_unknown", "00000")])
            last = await ended(site, instance, lines(3, 2))
            keys = instance.get_dynamic_partitions(PARTITIONS)
            result = await asyncio.to_thread(materialize, home, instance, *keys)
            assert not result.success and "batch_unknown: expected a batch of this service's records" in failure(result)
            newest = instance.fetch_materializations(KEY, limit=2).records
            metadata = [one.asset_materialization.metadata for one in newest[::-1] if one.asset_materialization]
            for batch, one in zip((first, last), metadata, strict=True):
                made = await site.until(str(one["redriven_as"].value))
                assert made["metadata"] == {REDRIVE_OF: batch["id"]} and made["request_counts"]["total"] == 1

    with simulated_engine(*ENGINE) as engine, dg.DagsterInstance.ephemeral() as instance:
        asyncio.run(steps(instance))


def test_the_same_request_makes_one_batch_and_its_refusals_say_what_was_found(home: Path) -> None:
    async def steps() -> tuple[str, str]:
        async with api_service(home, engine.url) as site:
            bad = await site.until((await site.create(lines(2, 0)))["id"])
            good = await site.until((await site.create(lines(2)))["id"])
            return str(bad["id"]), str(good["id"])

    with simulated_engine(*ENGINE) as engine:
        bad, good = asyncio.run(steps())
    now = int(time.time())
    objects = open_objects(str(home / "store"))
    with closing(Records(f"sqlite:///{home}/api.db")) as records:
        batches, files = BatchRecords(records), FileRecords(records)
        redrive = BatchRedrive(batches, files, objects)
        found = redrive.redrive(bad, ["00000"], "run-1", now)
        assert redrive.redrive(bad, ["00000"], "run-1", now + 5) == found and found.batch_id is not None
        other = redrive.redrive(bad, ["00000"], "run-2", now)
        assert other.batch_id not in (None, found.batch_id)
        assert redrive.redrive(good, ["00000"], "run-1", now).batch_id is None
        with pytest.raises(RedriveRefused, match="expected one that has ended, found one that is validating"):
            redrive.redrive(found.batch_id, ["00000"], "run-3", now)
        with pytest.raises(RedriveRefused, match="part 00009 has no results"):
            redrive.redrive(bad, ["00009"], "run-3", now)
        batches.cancel("default", found.batch_id, now)
        held = batches.claim(found.batch_id, "worker", now, 5.0)
        assert held is not None and batches.move(held, END_CANCEL, now)
        with pytest.raises(RedriveRefused, match=f"has made batch {found.batch_id} before, which is cancelled"):
            redrive.redrive(bad, ["00000"], "run-1", now)
        record = batches.of_any_tenant(bad)
        assert record is not None
        folder = home / "store" / "api" / "batches" / bad
        (folder / "batches").rename(folder / "away")
        with pytest.raises(RedriveRefused, match="part 00000 has no results"):
            redrive.redrive(bad, ["00000"], "run-3", now)
        (folder / "away").rename(folder / "batches")
        (folder / "snapshots").rename(folder / "away")
        with pytest.raises(RedriveRefused, match="found none: they were deleted with its files"):
            redrive.redrive(bad, ["00000"], "run-3", now)
        (folder / "away").rename(folder / "snapshots")
        files.delete("default", record.input_file_id, now)
        with pytest.raises(RedriveRefused, match="expected its input file, found none: it was deleted or has expired"):
            redrive.redrive(bad, ["00000"], "run-3", now)


@pytest.mark.slow
def test_a_part_with_all_its_answers_is_not_read_and_the_new_file_lives_no_longer_than_the_old_one(home: Path) -> None:
    async def steps() -> str:
        async with api_service(home, engine.url) as site:
            form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
            files = {"file": ("in.jsonl", jsonl(lines(600, 7, 599)))}
            file = (await site.client.post("/v1/files", files=files, data=form)).json()
            asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "1h"}
            made = (await site.client.post("/v1/batches", json=asked)).json()
            return str((await site.until(made["id"]))["id"])

    with simulated_engine(*ENGINE) as engine:
        batch_id = asyncio.run(steps())
    now = int(time.time())
    objects = open_objects(str(home / "store"))
    with closing(Records(f"sqlite:///{home}/api.db")) as records:
        batches, files = BatchRecords(records), FileRecords(records)
        read: list[str] = []
        read_table = DatasetStore.batch_table
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                DatasetStore, "batch_table", lambda self, batch: read.append(batch.key) or read_table(self, batch)
            )
            found = BatchRedrive(batches, files, objects).redrive(batch_id, ["00000", "00001", "00002"], "run", now)
        assert read == ["00000", "00002"] and [part.lines for part in found.parts] == [1, 0, 1]
        old, new = (batches.of_any_tenant(one) for one in (batch_id, str(found.batch_id)))
        assert old is not None and new is not None
        inputs = [files.get("default", one.input_file_id, now) for one in (old, new)]
        assert inputs[0] is not None and inputs[1] is not None and inputs[0].expires_at == inputs[1].expires_at


def test_without_a_service_nothing_is_made(home: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        key = partition_of("batch_1", "00000")
        instance.add_dynamic_partitions(PARTITIONS, [key])
        result = materialize(home, instance, key)
        assert not result.success and "expected the records of `batch-assets serve`, found none" in failure(result)
        assert not (home / "api.db").exists()
        assert instance.get_latest_materialization_event(KEY) is None


def test_a_partition_key_names_its_batch_and_its_part() -> None:
    assert part_of(partition_of("batch_0af3", "00012")) == ("batch_0af3", "00012")
