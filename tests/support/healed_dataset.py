"""A dataset that was generated and published, and the steps of `batch-assets run` one by one, in process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorExecutionData

from batch_assets.publishing.dead_letters import current_dead_letters
from batch_assets.publishing.verify import Verification, ledger_of_reports, verify
from batch_assets.request_status.dataset_status import DatasetStatus, Observer, dataset_status
from batch_assets.request_status.request_monitor import RequestMonitor, RunResult
from batch_assets.sensors.reconcile_sensor import reconcile_sensor
from batch_assets.tags import RANGE_END_TAG, RANGE_START_TAG, REFRESH_TAG
from resources.endpoints import allow
from resources.store.dataset_store import BatchStore
from support.dataset_project import DatasetProject
from support.simulated_engine import SimulatedEngine

STEPS = 8


@dataclass
class HealedDataset:
    """`run` does what the command, daemon and sensors do; the engine is simulated, everything else is real."""

    site: DatasetProject
    engine: SimulatedEngine
    cursor: str | None = None
    sensor: dg.SensorDefinition = field(init=False)

    def __post_init__(self) -> None:
        store = BatchStore(root=str(self.site.folder / "store"))
        self.sensor = reconcile_sensor(lambda: {"d": None}, store)
        allow(self.site.folder, self.engine.url, None)

    @property
    def observer(self) -> Observer:
        return Observer(self.site.instance, self.site.fleet_db, self.site.store)

    def run(self) -> RunResult:
        asked = self.site.materialize("prompts", tags={REFRESH_TAG: "d"})
        follower = RequestMonitor(self.observer, asked.run_id)
        for _ in range(STEPS):
            moment = follower.look()
            if moment.ending is not None:
                return moment.ending
            self.step()
        raise AssertionError(f"no end after {STEPS} steps: {moment.said}")

    def step(self) -> int:
        """What launcher and publisher start now, carried out. Returns how many range runs there were."""
        requests = self.site.tick("launcher").run_requests or []
        for one in requests:
            first, last = one.tags[RANGE_START_TAG], one.tags[RANGE_END_TAG]
            tags = {**one.tags, "batch/endpoint": self.engine.url}
            done = self.site.materialize("rows", tags=tags, run_config=one.run_config)
            assert done.success, (first, last, self.site.reason())
        for one in self.site.tick("publisher").run_requests or []:
            self.publish(one.tags)
        return len(requests)

    def publish(self, tags: dict[str, str]) -> bool:
        whole = dg.Definitions.merge(self.site.definitions, dg.Definitions(resources=self.site.resources))
        job = whole.resolve_job_def("d_publish")
        return job.execute_in_process(instance=self.site.instance, tags=tags, raise_on_error=False).success

    def reconcile(self) -> str:
        """One tick of the sensor: what it says."""
        return self.ticked().skip_message or ""

    def ticked(self) -> SensorExecutionData:
        """One tick of the sensor, going on where the last one stopped."""
        with dg.build_sensor_context(self.site.instance, resources=self.site.resources, cursor=self.cursor) as context:
            found = self.sensor.evaluate_tick(context)
        self.cursor = found.cursor
        return found

    def status(self, now: float = 1e9) -> DatasetStatus:
        return dataset_status(self.observer, now)

    def verify(self) -> Verification:
        return verify(self.site.store, ledger_of_reports(self.observer.reports()))

    def newest(self, key: str) -> str:
        """Path of the current object of a batch."""
        entries = [entry for entry in self.site.store.entries(self.site.manifest().snapshot) if entry.key == key]
        return self.site.store.batch_path(self.site.store.current_objects(entries)[key])

    def paths(self) -> dict[str, str]:
        """One object of each kind that the store has of the dataset, of those that are current."""
        store = self.site.store
        current = {f"snapshots/{store.current_snapshot()}/", f"published/{store.current_published()}/"}
        current |= {f"dead_letters/{current_dead_letters(store)}", "/CURRENT"}
        found = {"batch": self.newest("00000")}
        for info in store.objects.list("d/"):
            if any(part in info.path for part in current):
                found.setdefault(kind_of(info.path), info.path)
        return found


def kind_of(path: str) -> str:
    """What an object is: `batch`, `published/part`, `snapshots/CURRENT`, …"""
    _, folder, *_, name = path.split("/")
    if folder == "batches":
        return "batch"
    if folder == "dead_letters" and name != "CURRENT":
        return f"{folder}/{name.split('.')[-1]}"
    return f"{folder}/{name.split('.')[0].rsplit('-', 1)[0]}"


SPEC: dict[str, Any] = {
    "dedupe": True,
    "on_bad_row": "skip",
    "batches_per_run": 8,
    "checks": {"max_dead_rate": 0.5},
}


QUESTIONS = [f"What is {i} plus {i}?" for i in range(60)]


KINDS = [
    "batch",
    "dead_letters/CURRENT",
    "dead_letters/json",
    "dead_letters/parquet",
    "published/CURRENT",
    "published/README",
    "published/manifest",
    "published/part",
    "snapshots/CURRENT",
    "snapshots/batches",
    "snapshots/duplicates",
    "snapshots/manifest",
    "snapshots/prompts",
    "snapshots/rejects",
]
