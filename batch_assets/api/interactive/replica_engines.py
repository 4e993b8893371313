"""Engines that other replicas lease for a model: announced here, too, so that all replicas send requests there.

The limit of engines counts over the whole fleet. A replica that may lease none, because another one holds it, is no
reason to refuse a request: the fleet's records say where that engine is. While a model is asked for here its engines
are looked up every second; before a caller hears that there is none, they are looked up once more. The holder is told
that others share its engine, so that its rows leave room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

from batch_assets.api.billing.margin import fleet_name
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from gpu_runner.fleet_database.database import FleetDatabase, RunEnded
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitKind, WaitReason
from gpu_runner.repeated_task import RepeatedTask
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.resource import GpuFleet
from resources.fleet.shared_engines import SharedEngine, SharedEngines

log = logging.getLogger(__name__)

WANTED_SECONDS = 300.0  # since the last request for a model: as long as an engine is kept for it
LOOK_SECONDS = 1.0
SHORTEST_SECONDS = 0.1  # between two looks, however many ask
FIND_SECONDS = 5.0  # the longest that a request waits for a look
MOST_ASKED = 1000  # requests that wait for one look
CONFIG_SECONDS = 30.0  # until fleet.yaml is read again


@dataclass(frozen=True, slots=True)
class _View:
    """What is open while models are asked for. `read_at`: when `config` was read."""

    open: contextlib.ExitStack
    fleet_db: FleetDatabase
    shared: SharedEngines
    config: FleetConfig
    read_at: float


@dataclass(slots=True)
class _Run:
    """What tells the holders of a model's engines that this process sends requests there."""

    id: str
    beat_at: float


class ReplicaEngines:
    """Context manager with a thread of its own. `clock`: monotonic seconds."""

    def __init__(
        self, fleet: GpuFleet, directory: EngineDirectory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet, self._directory, self._clock = fleet, directory, clock
        self._guard = threading.Lock()
        self._wanted: dict[str, float] = {}  # until when, by model
        self._asked: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._announced: dict[str, EngineTarget] = {}
        self._runs: dict[str, _Run] = {}  # by model
        self._view: _View | None = None
        self._trouble: type[Exception] | tuple[()] = ()  # the last look, of which the log has been told
        self._task = RepeatedTask("api-replica-engines", self._look_again, pause=SHORTEST_SECONDS, last=True)

    def __enter__(self) -> Self:
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.end(FIND_SECONDS)

    def want(self, model: str) -> None:
        """Somebody asks for this model. For any thread."""
        with self._guard:
            new = model not in self._wanted
            self._wanted[model] = self._clock() + WANTED_SECONDS
        if new:
            self._task.wake()

    async def find(self, model: str) -> None:
        """Returns when the fleet was asked for this model's engines, after FIND_SECONDS at the latest; at once where
        many wait for that.
        """
        loop = asyncio.get_running_loop()
        looked: asyncio.Future[None] = loop.create_future()
        with self._guard:
            self._wanted[model] = self._clock() + WANTED_SECONDS
            if len(self._asked) >= MOST_ASKED:
                return
            self._asked.append((loop, looked))
        self._task.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIND_SECONDS):
                await looked

    def _look_again(self) -> None:
        if self._task.ended:
            self._look_safely(())
            return
        with self._guard:
            wanted, asked, self._asked = self._still_wanted(), self._asked, []
        self._look_safely(wanted)
        for loop, looked in asked:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, looked)
        self._task.seconds = LOOK_SECONDS if wanted else None

    def _still_wanted(self) -> set[str]:
        """Models that were asked for not long ago, or are being answered: a stream may last longer."""
        now = self._clock()
        busy = {one.model for one in self._announced.values() if self._directory.in_flight(one)}
        self._wanted = {model: until for model, until in self._wanted.items() if until > now or model in busy}
        return set(self._wanted)

    def _look_safely(self, wanted: Collection[str]) -> None:
        """While the fleet's database or a provider is away, what is announced stays."""
        try:
            if wanted:
                self.look(wanted)
            else:
                self._rest()
        except Exception as error:
            if not isinstance(error, self._trouble):
                log.warning("engines of other replicas are not looked up now: %s", type(error).__name__)
            self._trouble = type(error)
        else:
            self._trouble = ()

    def look(self, wanted: Collection[str]) -> None:
        """Announce what others lease of these models, and nothing else. For one thread. Raises what the fleet does."""
        view = self._view = self._opened()
        announced = self._directory.targets()
        # What a feed of this process holds by a way of its own is not announced twice.
        held = {one.name for one in announced if one.name and self._announced.get(one.name) != one}
        models = {fleet_name(model): model for model in wanted}
        found = {
            one.name: _target(one, models[one.dataset]) for one in view.shared.look(view.fleet_db, models, without=held)
        }
        before, self._announced = self._announced, found
        for name, target in found.items():
            if before.get(name) != target:
                self._directory.announce(target)
        for name, target in before.items():
            if found.get(name) != target:
                self._directory.withdraw(target)
        self._tell(view.fleet_db)

    def _opened(self) -> _View:
        now, view = self._clock(), self._view
        if view is not None and now - view.read_at < CONFIG_SECONDS:
            return view
        config = self._fleet.config()
        if view is not None:
            if config != view.config:
                view.shared.configure(config, self._fleet.providers(config))
            return _View(view.open, view.fleet_db, view.shared, config, now)
        shared = SharedEngines(config, self._fleet.providers(config), self._clock)
        with contextlib.ExitStack() as stack:
            fleet_db = stack.enter_context(self._fleet.open_database())
            stack.callback(shared.close)
            return _View(stack.pop_all(), fleet_db, shared, config, now)

    def _rest(self) -> None:
        """Nobody asks: nothing is announced, and nothing open."""
        for target in self._announced.values():
            self._directory.withdraw(target)
        self._announced = {}
        if (view := self._view) is None:
            return
        self._view = None
        with view.open:
            self._tell(view.fleet_db)

    def _tell(self, fleet_db: FleetDatabase) -> None:
        """Say of which models the engines are used that others lease."""
        used = {one.model for one in self._announced.values() if self._directory.times_announced(one) == 1}
        now, activity = self._clock(), RunActivity("interactive requests", WaitReason(WaitKind.INTERACTIVE))
        for model in used - self._runs.keys():
            run_id = f"api-{uuid.uuid4()}"
            with contextlib.suppress(RunEnded):
                fleet_db.begin_run(run_id, fleet_name(model), "", "")
                self._runs[model] = _Run(run_id, float("-inf"))
        for model, run in list(self._runs.items()):
            if model not in used:
                fleet_db.end_run(run.id)
                del self._runs[model]
            elif now - run.beat_at >= self._fleet.beat:
                run.beat_at = now
                if not fleet_db.beat(run.id, "waiting", activity, 0):
                    del self._runs[model]  # it was declared dead while this process was stopped: another one begins


def _settle(looked: asyncio.Future[None]) -> None:
    if not looked.done():
        looked.set_result(None)


def _target(one: SharedEngine, model: str) -> EngineTarget:
    return EngineTarget(
        url=one.endpoint.rstrip("/").removesuffix("/v1"),
        model=model,
        api_key=one.api_key,
        tls=one.tls,
        hardware=f"{one.provider}/{one.instance_type}",
        places=one.max_num_seqs,
        region=one.region,
        name=one.name,
    )
