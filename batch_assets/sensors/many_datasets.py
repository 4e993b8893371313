"""One tick of a sensor for many datasets: what each wants started, how much of it one tick may start, what it says.

A dataset that cannot be looked at is named and holds up no other. What there is no time or room for is left to the next
tick.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import dagster as dg

from batch_assets.orchestration.launch_plan import State
from batch_assets.sensors.round_robin import Turns
from resources.objects.opening import CorruptObject

TICK_SECONDS = 20.0  # for new looks; a sensor has 60 s (DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS)
MOST_RUNS = 20  # started by one tick: the daemon starts them one after the other, and does not look meanwhile
MOST_BATCHES = 1_000  # in those runs: each is an event to write
TOLD_DATASETS = 20


@dataclass(frozen=True, slots=True)
class TickOutcome:
    """What one look at a dataset found. `batches`: how many each of the runs is over."""

    reason: str
    state: State = "settled"
    requests: Sequence[dg.RunRequest] = ()
    batches: Sequence[int] = ()


@dataclass(slots=True)
class _Room:
    """What the tick may still start. The first run always has room."""

    runs: int = MOST_RUNS
    batches: int = MOST_BATCHES
    taken: list[dg.RunRequest] = field(default_factory=list)

    def take(self, look: TickOutcome) -> bool:
        """Take the look's runs as far as there is room; False when some are left for the next tick."""
        for request, batches in zip(look.requests, look.batches or [1] * len(look.requests), strict=True):
            if self.taken and (self.runs < 1 or self.batches < batches):
                return False
            self.runs, self.batches = self.runs - 1, self.batches - batches
            self.taken.append(request)
        return True

    @property
    def full(self) -> bool:
        return bool(self.taken) and (self.runs < 1 or self.batches < 1)


class Rounds:
    """Takes turns among datasets, tick by tick."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names = tuple(names)
        self._clock = clock
        self._turns = Turns(clock)

    def tick(
        self, context: dg.SensorEvaluationContext, instance: dg.DagsterInstance, look: Callable[[str], TickOutcome]
    ) -> dg.SensorResult:
        """Look at those whose turn it is; returns what is to be started, and the reasons in words."""
        began, room = self._clock(), _Room()
        looked: list[str] = []
        for name in self._turns.due(instance, self._names):
            if looked and (room.full or self._clock() - began > TICK_SECONDS):
                break
            looked.append(name)
            try:
                found = look(name)
            except Exception as error:  # of one dataset: the others are looked after
                damaged = isinstance(error, CorruptObject)  # its text says everything
                context.log.warning(f"{name}: {self._turns.failed(name, error)}", exc_info=not damaged)
                continue
            taken = room.take(found)
            self._turns.looked(name, found.state, found.reason, news=not taken)
        said = self._said(looked)
        if room.taken:
            context.log.info(said)
            return dg.SensorResult(run_requests=room.taken)
        return dg.SensorResult(skip_reason=said)

    def _said(self, looked: Sequence[str]) -> str:
        """What the datasets looked at said, and those of which a person should know."""
        told = list(dict.fromkeys([*looked, *self._turns.blocked()]))
        lines = [f"{name}: {self._turns.reason(name)}" for name in told[:TOLD_DATASETS]]
        if left := len(self._names) - len(lines):
            more = len(told) - len(lines)
            lines.append(f"{left} more datasets" + (f", {more} of them with news" if more else ": nothing to do"))
        return "; ".join(lines)
