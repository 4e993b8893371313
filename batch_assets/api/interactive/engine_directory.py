"""Which engines serve which model now: those that feeds of this or another replica hold, and configured endpoints.

Whoever holds an engine announces it and withdraws it, in any thread; all else belongs to one event loop. A configured
endpoint is asked for its models (`GET /v1/models`), at most every `fresh` seconds, beside requests for models that are
known: one that does not answer holds up nobody who can be served by another.

An engine that fails requests rests: else it would look the least loaded, and get them all. After the rest one request
goes there; when that fails, too, the next rest is twice as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_runner.bounded_http.tls_files import TlsFiles

log = logging.getLogger(__name__)

LACKING_SECONDS = 60.0  # how long a route that an engine has not is not asked for: its address may be another's then
MOST_LACKING = 1000
REST_SECONDS = 2.0  # how long an engine that could not be reached is asked last; the first rest of one that fails
MOST_REST = 60.0
FAILURES = 3  # in a row, after which an engine rests: one request that breaks it says little


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """One engine. `url` without `/v1`. `api_key`: for this engine only.

    `hardware`: what it runs on, `places`: requests that it runs at once, and `region`: where it is, where somebody
    knows it. `name`: in the fleet; empty: it is not of the fleet.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    hardware: str = field(default="", compare=False)
    places: int | None = field(default=None, compare=False)
    region: str = field(default="", compare=False)
    name: str = field(default="", compare=False)


@dataclass(slots=True)
class _Load:
    """`failures`: in a row. `rests`: in a row, the last one until `rest_until`. `probing`: its one request is there."""

    in_flight: int = 0
    unreachable_at: float | None = None
    failures: int = 0
    rests: int = 0
    rest_until: float = -math.inf
    probing: bool = False


@dataclass(slots=True, eq=False)
class _Endpoint:
    """A configured endpoint, and what it said last. `asked_at`: seconds of the directory's clock."""

    url: str
    region: str = ""
    engines: tuple[EngineTarget, ...] = ()
    asked_at: float | None = None
    answered: bool = False
    asking: asyncio.Task[None] | None = None


ListModels = Callable[[str], Awaitable[list[str]]]
CountRows = Callable[[], int]


class EngineDirectory:
    """`clock`: monotonic seconds. `endpoints` and `models`: configured addresses, and how one is asked for models.
    `regions`: of those addresses of which one is named.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        endpoints: Sequence[str] = (),
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        models: ListModels | None = None,
        fresh: float = 30.0,
        retry: float = 2.0,
        regions: Mapping[str, str] | None = None,
    ) -> None:
        self._clock, self._fresh, self._retry = clock, fresh, retry
        self._api_key, self._tls, self._models = api_key, tls, models
        places = regions or {}
        self._endpoints = [_Endpoint(url.rstrip("/").removesuffix("/v1"), places.get(url, "")) for url in endpoints]
        self._changing = threading.Lock()
        self._announced: dict[EngineTarget, int] = {}  # replaced, never changed: other threads announce
        self._feeds: dict[str, tuple[CountRows, ...]] = {}  # by address; replaced, never changed
        self._load: dict[EngineTarget, _Load] = {}
        self._lacking: OrderedDict[tuple[str, str], float] = OrderedDict()  # (address, path), since when

    def lacks_route(self, engine: EngineTarget, path: str) -> None:
        """The engine has answered that it does not know this path; that is believed for a while."""
        self._lacking[engine.url, path] = self._clock()
        self._lacking.move_to_end((engine.url, path))
        if len(self._lacking) > MOST_LACKING:
            self._lacking.popitem(last=False)

    def has_route(self, engine: EngineTarget, path: str) -> bool:
        """Whether the engine may know this path."""
        since = self._lacking.get((engine.url, path))
        return since is None or self._clock() - since >= LACKING_SECONDS

    def announce(self, engine: EngineTarget) -> None:
        """Somebody holds this engine; as often as it is announced it must be withdrawn."""
        with self._changing:
            self._announced = {**self._announced, engine: self._announced.get(engine, 0) + 1}

    def withdraw(self, engine: EngineTarget) -> None:
        """One that held it does so no more."""
        with self._changing:
            held = {**self._announced, engine: self._announced.get(engine, 0) - 1}
            self._announced = {one: times for one, times in held.items() if times > 0}

    def times_announced(self, engine: EngineTarget) -> int:
        """How many hold it now."""
        return self._announced.get(engine, 0)

    def in_flight(self, engine: EngineTarget) -> int:
        """Requests that are under way there. For any thread."""
        load = self._load.get(engine)
        return 0 if load is None else load.in_flight

    @contextlib.contextmanager
    def feeding(self, url: str, rows: CountRows) -> Iterator[None]:
        """Meanwhile a feed of this process has batch rows on the engine with this address: so many as `rows` says, in
        any thread.
        """
        with self._changing:
            self._feeds = {**self._feeds, url: (*self._feeds.get(url, ()), rows)}
        try:
            yield
        finally:
            with self._changing:
                left = tuple(one for one in self._feeds[url] if one is not rows)
                self._feeds = {name: feeds for name, feeds in {**self._feeds, url: left}.items() if feeds}

    def batch_rows(self, url: str) -> int:
        """Rows of batches that feeds of this process have on the engine with this address now."""
        return sum(rows() for rows in self._feeds.get(url, ()))

    async def engines(self, model: str) -> list[EngineTarget]:
        """Engines of a model: reachable ones first, then those with the fewest requests. Empty: nobody serves it."""
        asked = self._ask_due(bool(self._known(model)))
        while asked and not self._known(model):
            _, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return sorted(self._known(model), key=self._rank)

    def targets(self) -> list[EngineTarget]:
        """All engines that are known now."""
        return sorted({*self._announced, *self._configured}, key=lambda engine: (engine.url, engine.model))

    def serves(self, url: str) -> bool:
        """Whether an engine with this address is known now."""
        return any(engine.url == url for engine in (*self._announced, *self._configured))

    def resting(self, engine: EngineTarget) -> bool:
        """Whether it could not be reached a moment ago, or fails what it is asked."""
        load = self._load.get(engine)
        if load is None:
            return False
        now, since = self._clock(), load.unreachable_at
        if since is not None and now - since < REST_SECONDS:
            return True
        return load.rests > 0 and (load.probing or now < load.rest_until)

    async def models(self) -> list[str]:
        """All models that are served now."""
        if asked := self._ask_due(True):
            await asyncio.wait(asked)
        return sorted({engine.model for engine in (*self._announced, *self._configured)})

    def begin(self, engine: EngineTarget) -> bool:
        """A request goes to it. True: it is the one after a rest, which `end` is told."""
        load = self._load.setdefault(engine, _Load())
        load.in_flight += 1
        probe = load.rests > 0 and not load.probing and self._clock() >= load.rest_until
        load.probing = load.probing or probe
        return probe

    def answered(self, engine: EngineTarget, *, well: bool) -> None:
        """Tell that an engine answered a request that is under way, or broke it: `well` is False for failures of its
        own.
        """
        load = self._load.setdefault(engine, _Load())
        if well:
            load.failures = load.rests = 0
            return
        load.failures += 1
        now = self._clock()
        if load.failures >= FAILURES and now >= load.rest_until:  # of many that were sent before, the first counts
            load.rest_until = now + min(MOST_REST, REST_SECONDS * 2.0 ** min(load.rests, 10))
            load.rests += 1

    def end(self, engine: EngineTarget, *, reached: bool, probe: bool = False) -> None:
        """Tell that the request has ended."""
        load = self._load.setdefault(engine, _Load())
        load.in_flight -= 1
        load.probing = load.probing and not probe
        load.unreachable_at = None if reached else self._clock()
        if not reached or load.failures:  # seldom: also those that have gone since are forgotten now
            there = {*self._announced, *self._configured}
            self._load = {one: load for one, load in self._load.items() if load.in_flight or one in there}
        elif not load.in_flight:
            del self._load[engine]

    def _known(self, model: str) -> set[EngineTarget]:
        return {engine for engine in (*self._announced, *self._configured) if engine.model == model}

    def _rank(self, engine: EngineTarget) -> tuple[bool, int, str]:
        load = self._load.get(engine) or _Load()
        return self.resting(engine), load.in_flight, engine.url

    @property
    def _configured(self) -> list[EngineTarget]:
        return [engine for endpoint in self._endpoints for engine in endpoint.engines]

    def _ask_due(self, known: bool) -> set[asyncio.Task[None]]:
        """Ask the endpoints whose time it is; returns who is being asked. `known`: what is wanted is there anyway."""
        if self._models is None:
            return set()
        now = self._clock()
        for endpoint in self._endpoints:
            wait = self._fresh if known and endpoint.answered else self._retry
            if endpoint.asking is None and (endpoint.asked_at is None or now - endpoint.asked_at >= wait):
                endpoint.asked_at = now
                endpoint.asking = asyncio.create_task(self._ask(endpoint, self._models))
        return {endpoint.asking for endpoint in self._endpoints if endpoint.asking is not None}

    async def _ask(self, endpoint: _Endpoint, models: ListModels) -> None:
        try:
            names = await models(endpoint.url)
        except Exception as error:  # whatever it is: the list that is known stays
            endpoint.answered = False
            log.warning("models of a configured endpoint: %s", type(error).__name__)
        else:
            endpoint.answered = True
            endpoint.engines = tuple(
                EngineTarget(endpoint.url, name, self._api_key, self._tls, region=endpoint.region) for name in names
            )
        finally:
            endpoint.asking = None

    async def close(self) -> None:
        """Nobody is asked any more."""
        asking = [endpoint.asking for endpoint in self._endpoints if endpoint.asking is not None]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
