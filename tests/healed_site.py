"""A dataset that was generated and published, and the steps of `batch-assets run` one by one, in process."""

from __future__ import annotations

from dataclasses import dataclass, field

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dataset_site import DatasetSite
from simulated_engine import SimulatedEngine

from batch_assets import ledger
from batch_assets.dead_letters import current_dead_letters
from batch_assets.follow import Ending, Follower
from batch_assets.launcher import REFRESH_TAG
from batch_assets.reconcile_sensor import reconcile_sensor
from batch_assets.report import ledger_of_reports
from batch_assets.status import DatasetStatus, Observer, dataset_status
from batch_assets.verify import Verification, verify
from resources.endpoints import allow
from resources.store import BatchStore

STEPS = 8


@dataclass
class HealedSite:
    """`run` does what the command, daemon and sensors do; the engine is simulated, everything else is real."""

    site: DatasetSite
    engine: SimulatedEngine
    cursor: str | None = None
    sensor: dg.SensorDefinition = field(init=False)

    def __post_init__(self) -> None:
        store = BatchStore(root=str(self.site.folder / "store"))
        self.sensor = reconcile_sensor(lambda: {"d": None}, store)
        allow(self.site.folder, self.engine.url, None)

    @property
    def observer(self) -> Observer:
        return Observer(self.site.instance, self.site.book, self.site.store)

    def run(self) -> Ending:
        asked = self.site.materialize("prompts", tags={REFRESH_TAG: "d"})
        follower = Follower(self.observer, asked.run_id)
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
            first, last = one.tags[ledger.RANGE_START_TAG], one.tags[ledger.RANGE_END_TAG]
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
