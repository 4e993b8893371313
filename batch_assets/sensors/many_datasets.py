"""One tick of a sensor for many datasets: what each wants started, how much of it one tick may start, what it says.

A dataset that cannot be looked at is named and holds up no other. What there is no time or room for is left to the next
tick.

A dataset is looked at when the catalog has news of it, while it has open work, and now and then all the same, because a
store that was restored or a run that was deleted writes no event. All of this is kept in memory: a new process looks at
every dataset once. One that could not be looked at is tried again later, after all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import dagster as dg

from batch_assets.orchestration.launch_plan import State
from batch_assets.sensors.catalog_changes import CatalogChanges
from resources.objects.opening import CorruptObject

AGAIN_SECONDS = 300.0  # without news
RETRY_SECONDS = 30.0  # after an error, so that a store that is away does not take up every tick


@dataclass(slots=True)
class Turn:
    """What is known of one dataset. `looked_at` and `failed_at` by the monotonic clock."""

    looked_at: float | None = None
    news: bool = True
    state: State = "settled"
    reason: str = ""
    failed_at: float | None = None

    def due(self, now: float) -> bool:
        """Whether it is to be looked at now."""
        if self.failed_at is not None:
            return now - self.failed_at > RETRY_SECONDS
        return self.news or self.state == "open" or self.looked_at is None

    def stale(self, now: float) -> bool:
        """Whether it was not looked at for long."""
        return self.failed_at is None and self.looked_at is not None and now - self.looked_at > AGAIN_SECONDS


class Turns:
    """The turns of all datasets; names may come and go."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes = CatalogChanges(clock)
        self._of: dict[str, Turn] = {}

    def due(self, instance: dg.DagsterInstance, names: Collection[str]) -> list[str]:
        """Those to look at now: first the one that has waited longest, last those that could not be looked at."""
        self._of = {name: self._of.get(name) or Turn() for name in names}
        for name in self._changes.since_last_look(instance, self._of):
            self._of[name].news = True
        now = self._clock()
        due = {name for name, turn in self._of.items() if turn.due(now)}
        # A few at a time: they were all looked at in the same moment when this process began.
        stale = sorted((name for name, turn in self._of.items() if turn.stale(now)), key=self.order)
        return sorted(due | set(stale[: 1 + len(self._of) // 30]), key=self.order)

    def order(self, name: str) -> tuple[bool, float, str]:
        """Sorts: first the one that was not looked at for longest, last those that could not be looked at."""
        turn = self._of[name]
        return turn.failed_at is not None, turn.looked_at or 0.0, name

    def looked(self, name: str, state: State, reason: str = "", *, news: bool = False) -> None:
        """What a look found. `news`: not all of it was acted upon."""
        self._of[name] = Turn(self._clock(), news, state, reason)

    def failed(self, name: str, error: Exception) -> str:
        """Note that a dataset could not be looked at; returns why, in words."""
        turn = self._of[name]
        turn.failed_at, turn.state = self._clock(), "blocked"
        turn.reason = f"could not be looked at: {type(error).__name__}: {error}"
        return turn.reason

    def reason(self, name: str) -> str:
        """What the last look said."""
        return self._of[name].reason

    def blocked(self) -> list[str]:
        """Datasets of which a person should know."""
        return [name for name, turn in self._of.items() if turn.state == "blocked"]


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
