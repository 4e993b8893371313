"""One sensor for all datasets that compares store and catalog, a bounded piece at a time."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from batch_assets.reconcile import Reconciler, heal, too_many
from resources.objects import StoreError
from resources.store import BatchStore

SECONDS = 60
TICK_SECONDS = 5.0  # after which no further slice is begun


def reconcile_sensor(datasets: Callable[[], Mapping[str, Any]]) -> dg.SensorDefinition:
    """`datasets`: those that are declared, by name."""
    known: dict[str, Reconciler] = {}

    @dg.sensor(
        name="reconcile",
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Compares store and catalog: what is gone or changed is marked void, and made again.",
    )
    def sensor(context: dg.SensorEvaluationContext, store: BatchStore) -> dg.SkipReason:
        names = sorted(datasets())
        began, said, looked = time.monotonic(), list[str](), 0
        place = _place(context.cursor, names)
        for step in range(len(names)):
            name = names[(place[0] + step) % len(names)]
            data = store.dataset(name)
            reconciler = known.get(name)
            if reconciler is None or reconciler.instance is not context.instance:
                reconciler = known[name] = Reconciler(context.instance, data)
            number = place[1] if step == 0 else 0
            try:
                while True:
                    found = reconciler.look(number)
                    looked += 1
                    said += [f"{name}: {problem}" for problem in found.problems]
                    if too_many(found, reconciler.batches):
                        said.append(
                            f"{name}: {len(found.lost)} batches are gone from {data.objects.root} at once: is it "
                            f"mounted? `batch-assets run {name}` generates them again"
                        )
                    else:
                        said += heal(context.instance, data, found)
                    number += 1
                    if number >= reconciler.slices() or time.monotonic() - began > TICK_SECONDS:
                        break
            except (StoreError, OSError) as error:
                said.append(f"{name}: the store does not answer ({type(error).__name__}): {_first_line(error)}")
                number = 0
            except Exception as error:
                if not type(error).__module__.startswith("obstore"):
                    raise
                said.append(f"{name}: the store does not answer ({type(error).__name__})")
                number = 0
            unfinished = 0 < number < reconciler.slices()
            if unfinished or time.monotonic() - began > TICK_SECONDS:
                after = name if unfinished else names[(place[0] + step + 1) % len(names)]
                context.update_cursor(f"{after}:{number if unfinished else 0}")
                break
        for sentence in said:
            context.log.warning(sentence)
        return dg.SkipReason("; ".join(said) or f"store and catalog agree ({looked} looks)")

    return sensor


def _place(cursor: str | None, names: list[str]) -> tuple[int, int]:
    """Where the last tick stopped: index of the dataset and number of its slice."""
    name, _, number = (cursor or "").partition(":")
    return (names.index(name), int(number or 0)) if name in names else (0, 0)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
