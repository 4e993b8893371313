"""One sensor for many datasets: whose turn it is, what each said last, and how much one tick may do.

A dataset is looked at when the catalog has news of it, while it has open work, and now and then all the same, because a
store that was restored or a run that was deleted writes no event. All of this is kept in memory: a new process looks at
every dataset once. One that cannot be looked at is named, tried again later, and holds up no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import dagster as dg

from batch_assets.changes import CatalogChanges
from batch_assets.launcher import State

TICK_SECONDS = 20.0  # for new looks; a sensor has 60 s (DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS)
AGAIN_SECONDS = 300.0  # without news
RETRY_SECONDS = 30.0  # after an error, so that a store that is away does not take up every tick
MOST_RUNS = 20  # started by one tick: the daemon starts them one after the other, and does not look meanwhile
MOST_BATCHES = 1_000  # in those runs: each is an event to write
TOLD_DATASETS = 20


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a dataset found. `batches`: how many each of the runs is over."""

    reason: str
    state: State = "settled"
    requests: Sequence[dg.RunRequest] = ()
    batches: Sequence[int] = ()


@dataclass(slots=True)
class _Turn:
    looked_at: float | None = None
    news: bool = True
    state: State = "settled"
    reason: str = ""
    failed_at: float | None = None


@dataclass(slots=True)
class _Room:
    """What the tick may still start. The first run always has room."""

    runs: int = MOST_RUNS
    batches: int = MOST_BATCHES
    taken: list[dg.RunRequest] = field(default_factory=list)

    def take(self, look: Look) -> bool:
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
        self._turns = {name: _Turn() for name in names}
        self._clock = clock
        self._changes = CatalogChanges(clock)

    def tick(
        self, context: dg.SensorEvaluationContext, instance: dg.DagsterInstance, look: Callable[[str], Look]
    ) -> dg.SensorResult:
        """Look at those whose turn it is; returns what is to be started, and the reasons in words."""
        began, room = self._clock(), _Room()
        looked: list[str] = []
        for name in self.due(instance):
            if looked and (room.full or self._clock() - began > TICK_SECONDS):
                break
            looked.append(name)
            try:
                found = look(name)
            except Exception as error:  # of one dataset: the others are looked after
                self._failed(name, error)
                context.log.warning(f"{name}: {self._turns[name].reason}", exc_info=True)
                continue
            done = room.take(found)
            self._turns[name] = _Turn(self._clock(), not done, found.state, found.reason)
        said = self._said(looked)
        if room.taken:
            context.log.info(said)
            return dg.SensorResult(run_requests=room.taken)
        return dg.SensorResult(skip_reason=said)

    def due(self, instance: dg.DagsterInstance) -> list[str]:
        """Datasets to look at now: those that could not be looked at come last, else the longest waiting first."""
        for name in self._changes.since_last_look(instance, self._turns):
            self._turns[name].news = True
        now = self._clock()
        due = [name for name, turn in self._turns.items() if self._is_due(turn, now)]
        again = [
            name
            for name, turn in self._turns.items()
            if turn.failed_at is None and turn.looked_at is not None and now - turn.looked_at > AGAIN_SECONDS
        ]
        # A few at a time: they were all looked at in the same moment when this process began.
        again.sort(key=lambda name: self._turns[name].looked_at or 0.0)
        due = list(dict.fromkeys([*due, *again[: 1 + len(self._turns) // 30]]))
        return sorted(due, key=lambda name: self._order(self._turns[name]))

    @staticmethod
    def _is_due(turn: _Turn, now: float) -> bool:
        if turn.failed_at is not None:
            return now - turn.failed_at > RETRY_SECONDS
        return turn.news or turn.state == "open" or turn.looked_at is None

    @staticmethod
    def _order(turn: _Turn) -> tuple[bool, float]:
        return turn.failed_at is not None, turn.looked_at or 0.0

    def _failed(self, name: str, error: Exception) -> None:
        turn = self._turns[name]
        turn.failed_at, turn.state = self._clock(), "blocked"
        turn.reason = f"could not be looked at: {type(error).__name__}: {error}"

    def _said(self, looked: Sequence[str]) -> str:
        """What the datasets looked at said, and those of which a person should know."""
        told = list(looked) + [name for name, turn in self._turns.items() if turn.state == "blocked"]
        told = list(dict.fromkeys(told))
        lines = [f"{name}: {self._turns[name].reason}" for name in told[:TOLD_DATASETS]]
        left = len(self._turns) - len(lines)
        if left:
            more = len(told) - len(lines)
            lines.append(f"{left} more datasets" + (f", {more} of them with news" if more else ": nothing to do"))
        return "; ".join(lines) or "no datasets"
