"""A place to evaluate sensors in process: a Dagster instance on SQLite, fleet database, store, definitions."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import sqlalchemy as sa
from dagster._core.definitions.run_request import RunRequest
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.storage.event_log import SqlEventLogStorage
from dagster._core.storage.event_log.schema import AssetEventTagsTable as TAGS
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable as EVENTS
from dagster._core.test_utils import create_run_for_test

from batch_assets.catalog import ledger
from batch_assets.component import dataset_definitions
from batch_assets.definitions import platform
from batch_assets.orchestration.cost_report import cost_report_sensor
from batch_assets.sensors.capacity_sensor import capacity_sensor
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.tags import PUBLISH_TAG, RANGE_END_TAG, RANGE_START_TAG, REFRESH_TAG, REQUEST_TAG
from gpu_runner.fleet_database.database import FleetDatabase
from resources.fleet.resource import GpuFleet
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchEntry, BatchStore, DatasetStore, SnapshotManifest
from support.snapshots import MODEL, commit, questions, write_snapshot

S = dg.DagsterRunStatus
ROWS = ledger.rows_key("d")
KEYS = [f"{i:05d}" for i in range(12)]
PER_RUN = 4
SPEC = {
    "name": "d",
    "source": {"path": "questions.jsonl"},
    "prompt": {"user": "{{ question }}"},
    "model": MODEL,
    "batches_per_run": PER_RUN,
}


@dataclass
class SensorDataset:
    """One dataset: instance, fleet's database, store, and the definitions of it and its neighbours. Nothing runs."""

    folder: Path
    instance: dg.DagsterInstance
    fleet_db: FleetDatabase
    store: DatasetStore
    fleet: GpuFleet
    definitions: dg.Definitions
    datasets: dg.Definitions
    specs: dict[str, tuple[GeneratedDatasetSpec, Path]]
    cursors: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: Path,
        instance: dg.DagsterInstance,
        stack: contextlib.ExitStack,
        *specs: Mapping[str, Any],
    ) -> SensorDataset:
        """The project of the first spec (default: SPEC). `specs` may be changed while it is open: it is read again."""
        database = f"sqlite:///{folder}/fleet.db"
        fleet = GpuFleet(database=database, home=str(folder), config_path=str(folder / "fleet.yaml"))
        resources = {"store": BatchStore(root=str(folder / "store")), "fleet": fleet}
        found = {str(one["name"]): (load_spec(one, "defs.yaml"), folder) for one in specs or (SPEC,)}
        own = dg.Definitions.merge(*(dataset_definitions(*one) for one in found.values()))
        shared = dg.Definitions(sensors=[cost_report_sensor, capacity_sensor(lambda: found, 30)], resources=resources)
        return cls(
            folder,
            stack.enter_context(instance),
            stack.enter_context(contextlib.closing(FleetDatabase(database))),
            DatasetStore(open_objects(str(folder / "store")), next(iter(found))),
            fleet,
            dg.Definitions.merge(own, shared),
            own,
            found,
        )

    def sensors(self) -> dict[str, dg.SensorDefinition]:
        """The sensors that all datasets share, as a new process has them: without memory."""
        store = BatchStore(root=str(self.folder / "store"))
        shared = platform(self.datasets, self.specs, store, self.fleet).sensors or ()
        return {one.name: one for one in shared if isinstance(one, dg.SensorDefinition)}

    def tick(self, sensor: str, kept: Mapping[str, dg.SensorDefinition] | None = None) -> SensorExecutionData:
        """One evaluation of a sensor: of those `kept`, or else by a new process."""
        repository = self.definitions.get_repository_def()
        resources = self.definitions.resources
        known = {one.name: one for one in repository.sensor_defs}
        definition = (kept or {}).get(sensor) or known.get(sensor) or self.sensors()[sensor]
        cursor = self.cursors.get(sensor)
        with dg.build_sensor_context(
            self.instance, repository_def=repository, resources=resources, cursor=cursor
        ) as context:
            found = definition.evaluate_tick(context)
        self.cursors[sensor] = found.cursor
        return found

    def launches(self) -> list[RunRequest]:
        """What the launcher would start now."""
        return list(self.tick("launcher").run_requests or ())

    def ranges(self) -> list[tuple[str, str]]:
        return [(found.tags[RANGE_START_TAG], found.tags[RANGE_END_TAG]) for found in self.launches()]

    def reason(self, sensor: str = "launcher") -> str:
        """Why a sensor starts nothing."""
        found = self.tick(sensor)
        assert not found.run_requests
        return found.skip_message or ""

    def snapshot(
        self, rows: int = 120, *, keys: Sequence[str] = KEYS, batch_rows: int = 10, model: str = ""
    ) -> SnapshotManifest:
        """A snapshot whose keys are registered, of this model or the spec's. A large one has few shards."""
        per_shard = 3 if rows <= 120 else 100
        asked = model or self.specs[self.store.dataset][0].model
        manifest = write_snapshot(
            self.store, questions(rows), batch_rows=batch_rows, batches_per_shard=per_shard, model=asked
        )
        self.instance.add_dynamic_partitions("d", list(keys))
        return manifest

    def commit(self, *keys: str, dead: Sequence[str] = (), generation: int = 0) -> None:
        """Commit batches and report them, as a run does."""
        snapshot = self.store.current_snapshot()
        assert snapshot is not None
        manifest = self.store.manifest(snapshot)
        for footer in commit(self.store, manifest, keys=keys, dead=dead, generation=generation).values():
            self.instance.report_runless_asset_event(ledger.batch_event(self.store, footer, snapshot))

    def run(self, status: S, tags: Mapping[str, str], **more: Any) -> str:
        return create_run_for_test(self.instance, **{"job_name": "j", **more}, status=status, tags=tags).run_id

    def request(self, **tags: str) -> str:
        """A refresh that has read the source, and said so."""
        run_id = self.run(S.STARTED, {REFRESH_TAG: "d", **tags}, job_name="d_refresh")
        self.end(run_id)
        return run_id

    def batches(self, status: S, first: str, last: str, request: str | None = None, **tags: str) -> str:
        """A run over a range of batches."""
        asked = {REQUEST_TAG: request} if request else {}
        tags = {RANGE_START_TAG: first, RANGE_END_TAG: last, **asked, **tags}
        return self.run(status, tags, job_name="__ASSET_JOB", asset_selection=frozenset([ROWS]))

    def backfill(self, status: BulkActionStatus, keys: Sequence[str], asset: dg.AssetKey = ROWS) -> None:
        """A real backfill row, as the UI's launch makes it."""
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of Dagster's own, about Dagster
            made = PartitionBackfill.from_asset_partitions(
                backfill_id=f"b{len(self.instance.get_backfills())}",
                asset_graph=self.definitions.resolve_asset_graph(),
                partition_names=list(keys),
                asset_selection=[asset],
                backfill_timestamp=time.time(),
                tags={},
                dynamic_partitions_store=self.instance,
                all_partitions=False,
                title=None,
                description=None,
                run_config=None,
            )
        self.instance.add_backfill(made.with_status(status))

    def status(self, run_id: str) -> S:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    def end(self, run_id: str, kind: dg.DagsterEventType = dg.DagsterEventType.RUN_SUCCESS) -> None:
        """A run ends by itself, as its worker would say."""
        self.instance.report_dagster_event(dg.DagsterEvent(kind.value, "j"), run_id)


def report_in_bulk(site: SensorDataset, keys: Sequence[str]) -> None:
    """Ledger entries as `report_runless_asset_event` writes them, without its transaction for each: one is copied."""
    versions = {entry.key: entry for entry in site.store.entries(site.store.current_snapshot() or "")}
    site.commit(keys[0])
    storage = site.instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    with storage.index_connection() as connection:
        (event,) = connection.execute(sa.select(EVENTS).where(EVENTS.c.partition == keys[0])).mappings().all()
        tags = connection.execute(sa.select(TAGS).where(TAGS.c.event_id == event["id"])).mappings().all()
        top = connection.execute(sa.select(sa.func.max(EVENTS.c.id))).scalar_one()
        events, tag_lines = [], []
        for number, key in enumerate(keys[1:], start=top + 1):
            old, new = versions[keys[0]], versions[key]

            def own(text: str, old: BatchEntry = old, new: BatchEntry = new) -> str:
                return text.replace(old.data_version, new.data_version).replace(f'"{old.key}"', f'"{new.key}"')

            events.append({**event, "id": number, "partition": key, "event": own(event["event"])})
            tag_lines += [
                {name: value for name, value in tag.items() if name != "id"}
                | {"event_id": number, "value": own(tag["value"])}
                for tag in tags
            ]
        connection.execute(EVENTS.insert(), events)
        connection.execute(TAGS.insert(), tag_lines)


def publish_run(site: SensorDataset, status: S) -> None:
    """A publication that the publisher asked for."""
    (found,) = site.tick("publisher").run_requests or ()
    site.run(status, {PUBLISH_TAG: found.tags[PUBLISH_TAG]}, job_name="d_publish")
