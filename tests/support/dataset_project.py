"""A dataset `d` with its real definitions, run in process: a Dagster instance, a store, and the fleet's database."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorExecutionData

from batch_assets.catalog import ledger
from batch_assets.component import dataset_definitions
from batch_assets.definitions import platform
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.tags import ENDPOINT_TAG, RANGE_END_TAG, RANGE_START_TAG
from gpu_runner.fleet_database.database import FleetDatabase
from resources.endpoints import allow
from resources.fleet.resource import GpuFleet
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchStore, DatasetStore, SnapshotManifest

MODEL = "simulated/tiny"
BATCH = 10


@dataclass
class DatasetProject:
    """Batches of ten rows. `run_rows` is one range run, as a backfill or the launcher starts it."""

    folder: Path
    instance: dg.DagsterInstance
    fleet_db: FleetDatabase
    store: DatasetStore
    fleet: GpuFleet
    definitions: dg.Definitions
    specs: Mapping[str, tuple[GeneratedDatasetSpec, Path]]

    def source(self, questions: Sequence[str]) -> None:
        lines = [json.dumps({"id": f"id-{i:04d}", "question": question}) for i, question in enumerate(questions)]
        (self.folder / "questions.jsonl").write_text("\n".join(lines) + "\n")

    def asset(self, name: str) -> dg.AssetsDefinition:
        assets = [asset for asset in self.definitions.assets or () if isinstance(asset, dg.AssetsDefinition)]
        return next(asset for asset in assets if asset.key == dg.AssetKey(["d", *name.split("/")]))

    def materialize(self, name: str, **more: Any) -> dg.ExecuteInProcessResult:
        asked = {"instance": self.instance, "resources": self.resources, "raise_on_error": False, **more}
        return dg.materialize([self.asset(name)], **asked)

    @property
    def resources(self) -> dict[str, Any]:
        return {"store": BatchStore(root=self.store.objects.root), "fleet": self.fleet}

    def tick(self, sensor: str) -> SensorExecutionData:
        """One evaluation of a sensor, by a new process."""
        store = BatchStore(root=self.store.objects.root)
        whole = dg.Definitions.merge(self.definitions, platform(self.definitions, self.specs, store, self.fleet))
        repository = whole.get_repository_def()
        with dg.build_sensor_context(self.instance, repository_def=repository, resources=whole.resources) as context:
            return repository.get_sensor_def(sensor).evaluate_tick(context)

    def run_rows(
        self, first: str, last: str, url: str | None, *, config: Mapping[str, bool] | None = None, **more: Any
    ) -> dg.ExecuteInProcessResult:
        tags = {RANGE_START_TAG: first, RANGE_END_TAG: last}
        if url:
            allow(self.folder, url, None)
            tags[ENDPOINT_TAG] = url
        run_config = {"ops": {"d__rows": {"config": dict(config)}}} if config else None
        return self.materialize("rows", tags=tags, run_config=run_config, **more)

    def manifest(self) -> SnapshotManifest:
        snapshot = self.store.current_snapshot()
        assert snapshot is not None
        return self.store.manifest(snapshot)

    def events(self) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
        """(batch, tags, metadata) of every ledger entry, oldest first."""
        found = self.instance.fetch_materializations(ledger.rows_key("d"), limit=1000, ascending=True).records
        entries = [record.asset_materialization for record in found]
        return [
            (entry.partition or "", dict(entry.tags or {}), {key: value.value for key, value in entry.metadata.items()})
            for entry in entries
            if entry is not None
        ]

    def reason(self) -> str:
        """Why the newest run failed, in the words of the op."""
        run = self.instance.get_runs(limit=1)[0]
        (failure,) = self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        assert failure.dagster_event is not None
        data = failure.dagster_event.step_failure_data
        if data.user_failure_data is not None:
            return data.user_failure_data.description or ""
        return data.error.to_string() if data.error else ""


@contextlib.contextmanager
def dataset_project(folder: Path, home: Path | None = None, **attributes: Any) -> Iterator[DatasetProject]:
    """An empty dataset of questions with the id column `id`, and simulated providers unless there is a fleet.yaml.

    `home`: where events and logs are kept as files. An attribute that is None is left out.
    """
    given = {
        "name": "d",
        "source": {"path": "questions.jsonl"},
        "prompt": {"user": "{{ question }}"},
        "id": "id",
        "model": MODEL,
        "sampling": {"temperature": 0, "max_tokens": 16},
        "batch_rows": BATCH,
        **attributes,
    }
    spec = {name: value for name, value in given.items() if value is not None}
    if not (folder / "fleet.yaml").exists():
        (folder / "fleet.yaml").write_text("simulated: default\n")
    database = f"sqlite:///{folder}/fleet.db"
    kept = dg.DagsterInstance.ephemeral() if home is None else dg.DagsterInstance.local_temp(str(home))
    with kept as instance, contextlib.closing(FleetDatabase(database)) as fleet_db:
        yield DatasetProject(
            folder,
            instance,
            fleet_db,
            DatasetStore(open_objects(str(folder / "store")), "d"),
            GpuFleet(database=database, home=str(folder), config_path=str(folder / "fleet.yaml"), ttl=3.0, beat=0.5),
            dataset_definitions(load_spec(spec, "d"), folder),
            {"d": (load_spec(spec, "d"), folder)},
        )
