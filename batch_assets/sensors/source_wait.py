"""A tick that waits for a source to be read, so that its batches are started at once and not at the next tick.

Dagster's daemon looks for due sensors every five seconds (dagster/_daemon/sensor.py, MIN_INTERVAL_LOOP_TIME). Reading a
source often takes less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import dagster as dg

from batch_assets.tags import REDRIVE_TAG, REFRESH_TAG

WAIT_SECONDS = 4.0  # less than from one tick to the next
LOOK_SECONDS = 0.25
_UNDER_WAY = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]


class SourceWait:
    """Repeats a tick that has found nothing to start while a refresh or re-drive of the datasets is under way.

    The first tick of a new process waits for one to begin: a Dagster is often started because of one.
    """

    def __init__(
        self,
        names: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._names, self._clock, self._pause = list(names), clock, pause
        self._first = True

    def tick(self, instance: dg.DagsterInstance, look: Callable[[], dg.SensorResult]) -> dg.SensorResult:
        """What the last look found: runs to start, or nothing after at most four seconds."""
        deadline, first, self._first = self._clock() + WAIT_SECONDS, self._first, False
        while True:
            awaited = self.reading(instance) or first  # before the look: one that ends in between is looked for again
            found = look()
            if found.run_requests or not awaited or self._clock() >= deadline:
                return found
            self._pause(LOOK_SECONDS)

    def reading(self, instance: dg.DagsterInstance) -> bool:
        """Whether a run that asks for batches is under way."""
        return any(
            instance.get_runs(dg.RunsFilter(tags={tag: self._names}, statuses=_UNDER_WAY), limit=1)
            for tag in (REFRESH_TAG, REDRIVE_TAG)
        )
