"""One sensor for all datasets that compares store and catalog, a bounded piece at a time."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.orchestration.reconcile import Findings, Reconciler, heal, too_many
from batch_assets.sensors.instance import instance_of
from resources.objects.opening import CorruptObject, StoreError
from resources.objects.store_health import is_store_trouble
from resources.store.dataset_store import BatchStore, DatasetStore

SECONDS = 60
# After which no further slice is begun: in all, and of this thread's processor, which other sensors wait for.
TICK_SECONDS, TICK_CPU_SECONDS = 5.0, 0.5
LOSS_SECONDS = 20.0  # the same where a loss was found; a sensor has 60 s (DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS)


def reconcile_sensor(datasets: Callable[[], Mapping[str, Any]], store: BatchStore) -> dg.SensorDefinition:
    """`datasets`: those that are declared, by name."""
    known: dict[str, Reconciler] = {}
    catalog = _NewestEvents()

    @dg.sensor(
        name="reconcile",
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Compares store and catalog: what is gone or changed is marked void, and made again.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        instance = instance_of(context)
        names = sorted(datasets())
        said, looked = list[str](), 0
        place = _place(context.cursor, names)
        newest = catalog(instance, names)
        time_left = _TimeLeft(time.monotonic(), time.thread_time())
        for step in range(len(names)):
            name = names[(place[0] + step) % len(names)]
            reconciler = known.setdefault(name, Reconciler(instance, store.for_sensor(name)))
            reconciler.instance, reconciler.store = instance, store.for_sensor(name)  # new ones at each tick
            walk = _Walk(reconciler, place[1] if step == 0 else 0, time_left, context.log)
            walk.go(newest.get(name))
            said, looked = said + walk.said, looked + walk.looked
            if walk.unfinished or not time_left(lost=False):
                after = name if walk.unfinished else names[(place[0] + step + 1) % len(names)]
                context.update_cursor(f"{after}:{walk.number if walk.unfinished else 0}")
                break
        else:  # all of it: the next tick begins at the front. For an empty cursor the daemon keeps the one before.
            context.update_cursor(f"{names[0]}:0" if names else None)
        for sentence in said:
            context.log.warning(sentence)
        return dg.SkipReason("; ".join(said) or f"store and catalog agree ({looked} looks)")

    return sensor


@dataclass(frozen=True, slots=True)
class _TimeLeft:
    """Whether a tick has time for another slice. `began`: monotonic seconds, and processor seconds of its thread."""

    began: float
    cpu_began: float

    def __call__(self, *, lost: bool) -> bool:
        """`lost`: something is, and all of it is to be found."""
        seconds = time.monotonic() - self.began
        if lost:
            return seconds < LOSS_SECONDS
        return seconds < TICK_SECONDS and time.thread_time() - self.cpu_began < TICK_CPU_SECONDS


@dataclass(slots=True)
class _Walk:
    """Through the slices of one dataset, from `number` on, as far as the time goes.

    Where something is lost, the walk takes longer and comes round to the slices before the one that it began with. All
    losses are then written down together, so that the launcher packs them into few runs.
    """

    reconciler: Reconciler
    number: int
    time_left: _TimeLeft
    log: logging.Logger
    said: list[str] = field(default_factory=list)
    looked: int = 0
    unfinished: bool = False
    _lost: Findings = field(default_factory=Findings)

    def go(self, newest: int | None) -> None:
        """Look and heal. An error is of this dataset: it is said, and looked at again at the next tick."""
        store = self.reconciler.store
        try:
            if self.number == 0 and self.reconciler.unchanged(newest):
                return
            try:
                self._look_round(newest)
            finally:
                self._write_losses()
        except Exception as error:
            known = isinstance(error, CorruptObject) or is_store_trouble(error)
            if not known:
                self.log.exception(f"{store.dataset}: the comparison ended early")
            self.said.append(f"{store.dataset}: {_words(store, error)}")
            self.unfinished = False

    def _look_round(self, newest: int | None) -> None:
        first, came_round = self.number, False
        while True:
            self._look(newest)
            if self.number >= self.reconciler.slices() and self._lost.lost and first and not came_round:
                self.number, came_round = 0, True
            end = min(first, self.reconciler.slices()) if came_round else self.reconciler.slices()
            self.unfinished = self.number < end
            if not self.unfinished or not self.time_left(lost=bool(self._lost.lost)):
                return

    def _look(self, newest: int | None) -> None:
        reconciler, store = self.reconciler, self.reconciler.store
        found = reconciler.look(self.number) if self.number else reconciler.look_once(newest)
        self.number, self.looked = self.number + 1, self.looked + 1
        self.said += [f"{store.dataset}: {problem}" for problem in found.problems]
        self._lost = Findings(found.snapshot, self._lost.lost + found.lost)
        self.said += heal(reconciler.instance, store, replace(found, lost=[]))

    def _write_losses(self) -> None:
        reconciler, store = self.reconciler, self.reconciler.store
        if not self._lost.lost:
            return
        said = ledger.ledger_versions(reconciler.instance, store.dataset)  # a batch may have been made anew meanwhile
        lost = [one for one in self._lost.lost if said.get(one.key) == one.version]
        if too_many(replace(self._lost, lost=lost), reconciler.batches):
            self.said.append(
                f"{store.dataset}: {len(lost)} batches are gone from {store.objects.root} at once: is it mounted? "
                f"`batch-assets run {store.dataset}` generates them again"
            )
        else:
            self.said += heal(reconciler.instance, store, replace(self._lost, lost=lost))


def _words(store: DatasetStore, error: Exception) -> str:
    """Why a dataset could not be compared; the text of a CorruptObject says everything."""
    text = str(error).partition("\n")[0]
    if isinstance(error, CorruptObject):
        return text
    if is_store_trouble(error):
        said = text if isinstance(error, StoreError) else type(error).__name__
        return f"the store {store.objects.root} does not answer: {said}"
    return f"could not be compared with the catalog: {type(error).__name__}: {text}"


class _NewestEvents:
    """Storage id of the newest materialization of each dataset's batches; asked for only when any event is new."""

    def __init__(self) -> None:
        self._at: tuple[int | None, list[str]] | None = None
        self._found: dict[str, int | None] = {}

    def __call__(self, instance: dg.DagsterInstance, names: list[str]) -> dict[str, int | None]:
        at = (instance.event_log_storage.get_maximum_record_id(), names)
        if at != self._at or at[0] is None:
            keys = {ledger.rows_key(name): name for name in names}
            records = instance.get_asset_records(list(keys))
            self._found = {
                keys[one.asset_entry.asset_key]: one.asset_entry.last_materialization_storage_id for one in records
            }
            self._at = at
        return self._found


def _place(cursor: str | None, names: list[str]) -> tuple[int, int]:
    """Where the last tick stopped: index of the dataset and number of its slice."""
    name, _, number = (cursor or "").partition(":")
    return (names.index(name), int(number or 0)) if name in names else (0, 0)
