"""The engines that serve a model: configured endpoints, or the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batch_assets.api.execution.engines.engine_wait import Awaited
from batch_assets.api.models import Models, known_models
from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.cost_meter import CostMeter
from gpu_runner.inference.windows.first_token_window import InteractiveShare
from gpu_runner.reachability import Reachability, always_open
from gpu_runner.request_limits import NO_LIMITS, RequestLimits
from gpu_runner.rows import Task


class EngineAway(Exception):
    """No engine can be had now. `awaited`: what is waited for."""

    def __init__(self, said: str = "", awaited: Awaited = Awaited.ENGINE) -> None:
        super().__init__(said)
        self.awaited = awaited


class NobodyWaits(EngineAway):
    """Raised where a feed that asked for an engine wants none any more."""


class NoFurtherEngine(EngineAway):
    """Those there are of this model are in use by the same feed."""


@dataclass(frozen=True, slots=True, eq=False)
class ServingEngine:
    """An engine to send to. `max_num_seqs`: its slots, where they are known.

    `ending` is set when it takes no new rows. `leased`: it is to be given back when there is no work. `share`:
    interactive requests on it, to which rows give way. `reachability`: of the way to it. `tls`: certificates of ours
    and of authorities. `region`: where it is; empty: nobody says. `name`: in the fleet; empty: it is not of the fleet.
    `shared` is set while other replicas send interactive requests there. `own`: a process of ours, that ends with it.
    """

    endpoint: str
    api_key: str | None = field(repr=False)
    max_num_seqs: int | None
    provider: str
    instance_type: str
    spot: bool = False
    limits: RequestLimits = NO_LIMITS
    spending: CostMeter = field(default_factory=CostMeter)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    leased: bool = False
    share: InteractiveShare | None = None
    reachability: Callable[[], Reachability] = always_open
    tls: TlsFiles | None = None
    region: str = ""
    name: str = ""
    shared: threading.Event = field(default_factory=threading.Event)
    own: bool = False


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
