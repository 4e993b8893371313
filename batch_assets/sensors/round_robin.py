"""The turns of many datasets that one sensor looks after.

A dataset is looked at when the catalog has news of it, while it has open work, and now and then all the same, because a
store that was restored or a run that was deleted writes no event. All of this is kept in memory: a new process looks at
every dataset once. One that could not be looked at is tried again later, after all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import dagster as dg

from batch_assets.orchestration.launch_plan import State
from batch_assets.sensors.catalog_changes import CatalogChanges

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
