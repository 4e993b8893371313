"""Which datasets have open work now: what the capacity sensor looks at before it decides, within the time of a tick."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from batch_assets.catalog.backfills import datasets_with_backfills
from batch_assets.orchestration.active_request import ActiveDataset, WorkWatcher, begin_or_go_on
from batch_assets.sensors.instance import instance_of
from batch_assets.sensors.many_datasets import Turns
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.request_options import InvalidTag, begin
from gpu_runner.fleet_database.database import FleetDatabase, RunBeat
from gpu_runner.fleet_database.targets import DatasetTarget
from resources.objects.opening import StoreError
from resources.store.dataset_store import BatchStore

Datasets = Mapping[str, tuple[GeneratedDatasetSpec, Path]]
LOOK_SECONDS = 20.0  # for datasets without open work, of a sensor's 60 s


@dataclass(frozen=True, slots=True)
class Open:
    """One dataset with open work, and what is wanted of it."""

    spec: GeneratedDatasetSpec
    open: ActiveDataset
    target: DatasetTarget

    @property
    def planned(self) -> GeneratedDatasetSpec:
        """The spec with the model that is asked: that of the snapshot."""
        model = self.open.model or self.spec.model
        return self.spec if model == self.spec.model else self.spec.model_copy(update={"model": model})


@dataclass(slots=True)
class Seen:
    """What a tick has seen: datasets with open work, and requests that are over, with the batches still missing."""

    questions: list[Open] = field(default_factory=list)
    over: list[tuple[DatasetTarget, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class OpenDatasets:
    """Looks at the declared datasets. Keeps a watcher of each, and whose turn it is. `datasets` is asked each time."""

    def __init__(self, datasets: Callable[[], Datasets]) -> None:
        self._datasets = datasets
        self._known: Datasets = {}
        self._watchers: dict[str, tuple[GeneratedDatasetSpec, WorkWatcher]] = {}
        self._turns = Turns()

    def look(self, context: dg.SensorEvaluationContext, store: BatchStore, fleet_db: FleetDatabase) -> Seen:
        """Looks at the datasets with a request or a backfill, then at others in turn, for as long as there is time."""
        try:
            self._known = self._datasets()
        except SpecError as error:
            context.log.warning(f"the datasets as they were before: {error}")
        seen, beats = Seen(), fleet_db.runs()
        targets = {target.dataset: target for target in fleet_db.targets()}
        working = {name for name, target in targets.items() if target.request}
        for name in sorted(name for name in working - self._known.keys() if "/" not in name):  # api/MODEL has a slash
            seen.said.append(f"{name} is being made, but no file declares it that can be used: nothing more is started")
        due = working | datasets_with_backfills(instance_of(context))
        due |= set(self._turns.due(instance_of(context), self._known))
        began = time.monotonic()
        for name in sorted(due & self._known.keys(), key=lambda one: (one not in working, self._turns.order(one))):
            if time.monotonic() - began <= LOOK_SECONDS:
                self._look_at(context, store, fleet_db, name, targets.get(name), beats, seen)
            elif name in working:  # its command stands; the store is slow, or does not answer
                seen.said.append(f"{name} could not be looked at: no time was left")
            # the rest at the next tick; a new process looks at all of them once
        return seen

    def _look_at(
        self,
        context: dg.SensorEvaluationContext,
        store: BatchStore,
        fleet_db: FleetDatabase,
        name: str,
        target: DatasetTarget | None,
        beats: Sequence[RunBeat],
        seen: Seen,
    ) -> None:
        spec, folder = self._known[name]
        watching = self._watcher(spec, folder, store)
        try:
            found = watching.look(instance_of(context), beats, target)
        except StoreError as error:
            seen.said.append(f"{name} {self._turns.failed(name, error)}")
            context.log.warning(seen.said[-1])
            return
        except Exception as error:  # of one dataset: the others are looked after
            seen.said.append(f"{name} {self._turns.failed(name, error)}")
            context.log.exception(seen.said[-1])
            return
        self._turns.looked(name, "settled" if found is None else "open")
        if found is not None:
            seen.questions.append(Open(spec, found, _begin(context, fleet_db, spec, found)))
        elif target is not None and target.request:
            seen.over.append((target, watching.missing))

    def _watcher(self, spec: GeneratedDatasetSpec, folder: Path, store: BatchStore) -> WorkWatcher:
        if spec.name not in self._watchers or self._watchers[spec.name][0] != spec:
            self._watchers[spec.name] = spec, WorkWatcher(spec, store.for_sensor(spec.name), folder)
        return self._watchers[spec.name][1]


def _begin(
    context: dg.SensorEvaluationContext, fleet_db: FleetDatabase, spec: GeneratedDatasetSpec, found: ActiveDataset
) -> DatasetTarget:
    try:
        return begin_or_go_on(instance_of(context), fleet_db, spec, found.request, found.tags)
    except InvalidTag as error:
        context.log.warning(f"{spec.name}: {error}; it is left out")
        return begin(fleet_db, spec, found.request, {})
