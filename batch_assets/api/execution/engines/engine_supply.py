"""The engines that serve a model: configured endpoints, or the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batch_assets.api.models import Models, known_models
from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.fleet_database.wait_reason import WaitKind
from gpu_runner.inference.windows.first_token_window import InteractiveShare
from gpu_runner.rows import Task
from resources.fleet.leased_engine import KnownEngine


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


class EngineAway(Exception):
    """No engine can be had now. `awaited`: what is waited for."""

    def __init__(self, said: str = "", awaited: Awaited = Awaited.ENGINE) -> None:
        super().__init__(said)
        self.awaited = awaited


class NobodyWaits(EngineAway):
    """Raised where a feed that asked for an engine wants none any more."""


class NoFurtherEngine(EngineAway):
    """Those there are of this model are in use by the same feed."""


@dataclass(slots=True, eq=False)
class ServingEngine(KnownEngine):
    """An engine that serves a model. `ending` is set when it takes no new rows.

    `leased`: it is to be given back when there is no work. `share`: interactive requests on it, to which rows give way.
    `name`: in the fleet; empty: it is not of the fleet. `shared` is set while other replicas send interactive requests
    there.
    """

    ending: asyncio.Event = field(default_factory=asyncio.Event)
    leased: bool = False
    share: InteractiveShare | None = None
    name: str = ""
    shared: threading.Event = field(default_factory=threading.Event)


Waits = Callable[[], bool]


def for_ever() -> bool:
    """An engine is wanted however long it takes."""
    return True


class EngineSupply(Protocol):
    """Where engines come from."""

    def engine(
        self, model: str, task: Task, waits: Waits = for_ever
    ) -> contextlib.AbstractAsyncContextManager[ServingEngine]:
        """An engine for as long as the body runs. Raises EngineAway.

        `waits`: whether one is still wanted, asked about once a second on the loop. One that is being started comes all
        the same; else NobodyWaits is raised.
        """

    def running(self, model: str) -> Sequence[ServingEngine]:
        """Engines of a model that may be asked something now; none is begun for it. On the loop of `engine`."""

    def awaited(self, model: str, task: Task) -> Awaited | None:
        """What those wait for who are in `engine` now, where that is known."""


class EndpointSupply:
    """The engine of one `--endpoint`."""

    def __init__(
        self, endpoint: str, api_key: str | None, max_num_seqs: int | None = None, tls: TlsFiles | None = None
    ) -> None:
        self._engine = ServingEngine(endpoint, api_key, max_num_seqs, "endpoint", "endpoint", tls=tls)

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        """Always the same; whether it answers is seen by whoever asks it."""
        yield self._engine

    def running(self, model: str) -> Sequence[ServingEngine]:
        """The same."""
        return [self._engine]

    def awaited(self, model: str, task: Task) -> Awaited | None:
        """Nobody waits for it here."""
        return None


class EndpointsSupply:
    """The engines of several `--endpoint`s, each for one caller of a model and task at a time. For one event loop.

    A feed asks as many times at once as there are endpoints, so it holds all that serve its model. Who asks again after
    an engine was away gets the one that nobody else holds: so that one is tried, and the others go on.
    """

    def __init__(self, endpoints: Sequence[tuple[EngineSupply, Models]]) -> None:
        self._endpoints = list(endpoints)
        self._held: set[tuple[int, str, Task]] = set()
        self._last = 0

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        """In turn, of those that serve the model or do not say what they serve. Raises NoFurtherEngine, and EngineAway
        when none of them does."""
        said = await asyncio.gather(*(known_models(models) for _, models in self._endpoints))
        serve = [known is None or model in known for known in said]
        count = len(self._endpoints)
        if not any(serve):
            raise EngineAway(f"none of {count} endpoints serves it now", Awaited.ANSWER)
        turns = ((self._last + turn) % count for turn in range(1, count + 1))
        chosen = next((at for at in turns if serve[at] and (at, model, task) not in self._held), None)
        if chosen is None:
            raise NoFurtherEngine(f"all {sum(serve)} endpoints that serve it are in use")
        self._last = chosen
        self._held.add((chosen, model, task))
        try:
            async with self._endpoints[chosen][0].engine(model, task) as engine:
                yield engine
        finally:
            self._held.discard((chosen, model, task))

    def running(self, model: str) -> Sequence[ServingEngine]:
        """All of them, those first that are in use for it."""
        held = {place for place, name, _ in self._held if name == model}
        places = sorted(range(len(self._endpoints)), key=lambda place: place not in held)
        return [engine for place in places for engine in self._endpoints[place][0].running(model)]

    def awaited(self, model: str, task: Task) -> Awaited | None:
        """Nobody waits for one here."""
        return None
