"""What a feed without an engine waits for, and since when: in words for its clients.

They name no engine, host or other tenant. Who operates the service finds more in its log, and in the fleet's database.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu_runner.fleet_database.wait_reason import WaitKind


class Awaited(enum.StrEnum):
    """What is waited for. The values are what clients read."""

    ENGINE = "an engine that serves the model"
    BOOT = "an engine that is being started"
    ANSWER = "the engine that serves the model: it does not answer"
    ACCEPTANCE = "the engine that serves the model: it refuses all requests"
    FREE_ENGINE = "an engine: all that serve the model are in use"
    PLAN = "an engine: the plan of the fleet has none for this model now"
    BUDGET = "an engine: a budget of the fleet allows none now"
    FLEET_LIMIT = "an engine: the fleet has as many instances as it may have"
    OFFER = "an engine: nothing that is offered now can serve the model"
    START = "an engine: those that were started did not come up"
    SETTINGS = "an engine: fleet.yaml has none for this model, or cannot be used"


OF_KIND = {
    WaitKind.CAPACITY: Awaited.PLAN,
    WaitKind.PAUSED: Awaited.BUDGET,
    WaitKind.BUDGET: Awaited.BUDGET,
    WaitKind.DATASET_LIMIT: Awaited.FREE_ENGINE,
    WaitKind.FLEET_LIMIT: Awaited.FLEET_LIMIT,
    WaitKind.ENGINES_HELD: Awaited.FREE_ENGINE,
    WaitKind.NO_OFFER: Awaited.OFFER,
    WaitKind.OFFERS_FAILED: Awaited.START,
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is waited for, since when: Unix seconds."""

    what: Awaited
    since: float


class EngineWait:
    """The wait of one feed. `clock`: Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._serving = 0
        self._since: float | None = None
        self._what = Awaited.ENGINE

    def begin(self) -> None:
        """One of the feed's loops wants an engine."""
        if not self._serving and self._since is None:
            self._since = self._clock()

    def failed(self, what: Awaited) -> None:
        """There was none, for this reason."""
        self._what = what

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """An engine has answered, and gets rows while the body runs."""
        self._serving += 1
        self._since, self._what = None, Awaited.ENGINE
        try:
            yield
        finally:
            self._serving -= 1

    def look(self, now: Awaited | None) -> Waiting | None:
        """None: an engine serves, or none is wanted. `now`: what is waited for at this moment, where that is known."""
        return None if self._serving or self._since is None else Waiting(now or self._what, self._since)
