"""Engines of the fleet for batches: leased like a run's, kept while there is work, given back when there is none.

Everything that may block (the fleet's database, a provider, a boot of minutes) is in a thread for each lease. The
fleet knows the lease by the name `api/MODEL`, as if that were a dataset: `batch-assets fleet` shows it and its cost.

Feeds of one model and of different tasks share a lease where no further engine can be had at once: an engine that
stands in fleet.yaml with all tasks, one that was started for a task with tasks of the same kind (it makes embeddings,
or generates).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from batch_assets.api.billing.margin import fleet_name
from batch_assets.api.execution.engines.engine_supply import (
    OF_KIND,
    Awaited,
    EngineAway,
    NobodyWaits,
    ServingEngine,
    Waits,
    for_ever,
)
from batch_assets.api.models import EndpointModels, Models, known_models
from gpu_runner.cost_meter import CostMeter, SharedMeter
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError, RunEnded
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.rows import Task
from resources.fleet.leased_engine import KnownEngine
from resources.fleet.resource import (
    EngineStartError,
    FleetConfigError,
    GpuFleet,
    LeasedEngine,
    Requirement,
)
from resources.pricing.price_files import PricingError

LOOK_SECONDS = 1.0
WAIT_SECONDS = 1.0  # between two tries to lease: one may wait for as long as another replica holds the engine
END_SECONDS = 10.0
SHARED_SECONDS = 30.0  # how long an engine is shared at least, before a further one is looked for


class _Closed(Exception):
    """Nobody waits for the engine any more."""


@dataclass(slots=True, eq=False)
class _Held:
    """An engine that is leased, for one feed or several. `tasks`: of those. `failed`: it was lost by one of them.
    `models`: what it lists.
    """

    model: str
    engine: ServingEngine
    lease: _Lease
    tasks: list[Task] = field(default_factory=list)
    meters: list[CostMeter] = field(default_factory=list)
    failed: bool = False
    models: Models | None = None

    async def lists(self, model: str) -> bool:
        """Whether the engine says that it serves the model. Where it does not say that, it is not shared."""
        if self.models is None:
            self.models = EndpointModels(self.engine.endpoint, self.engine.api_key, self.engine.tls)
        return model in (await known_models(self.models) or ())

    def may_serve(self, model: str, task: Task) -> bool:
        """Whether a feed of this model and task, which does not use it, may."""
        if self.model != model or self.failed or self.engine.ending.is_set() or not self.tasks or task in self.tasks:
            return False
        return self.lease.standing or all((task == "embedding") == (one == "embedding") for one in self.tasks)


class FleetSupply:
    """Leases engines of one fleet."""

    def __init__(self, fleet: GpuFleet, reserve: Mapping[str, int] | None = None) -> None:
        """`reserve`: engines of a model that may be leased at once, where that is more than one."""
        self._fleet, self._reserve = fleet, reserve or {}
        self._held: list[_Held] = []
        self._waiting: list[_Lease] = []

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        """Wait for an engine, and hold it while the body runs. Raises EngineAway.

        Who would wait for one gets what a feed of another task holds, where that may serve both and lists the model.
        """
        held = await self._leased(model, task, waits)
        meter = SharedMeter(held.engine.spending, held.meters)
        ending = held.engine.ending
        watching: asyncio.Task[None] | None = None
        if len(held.tasks) > 1:
            ending = asyncio.Event()
            watching = asyncio.create_task(_share(held, ending))
        try:
            yield replace(held.engine, spending=meter, ending=ending)
        except Exception:
            held.failed = True
            raise
        finally:
            if watching is not None:
                watching.cancel()
            held.meters.remove(meter)
            held.tasks.remove(task)
            if not held.tasks:
                self._held.remove(held)
                await held.lease.close()

    async def _leased(self, model: str, task: Task, waits: Waits) -> _Held:
        """An engine of its own, or one to share. It is marked as in use for the task."""
        need = Requirement(fleet_name(model), model, task)
        lease = _Lease(self._fleet, need, asyncio.get_running_loop(), self._reserve.get(model, 1))
        _mark(lease.unwanted, await self._to_share(model, task) is not None)
        lease.thread.start()
        held: _Held | None = None
        self._waiting.append(lease)
        try:
            while not lease.engine.done():
                await asyncio.wait([lease.engine], timeout=LOOK_SECONDS)
                _mark(lease.unwanted, not waits() or await self._to_share(model, task) is not None)
            try:
                held = _Held(model, await lease.engine, lease)
                self._held.append(held)
            except NobodyWaits:
                held = await self._to_share(model, task) if waits() else None
                if held is None:
                    raise
            held.tasks.append(task)
            return held
        finally:
            self._waiting.remove(lease)
            if held is None or held.lease is not lease:
                await lease.close()

    async def _to_share(self, model: str, task: Task) -> _Held | None:
        """What it returns may be marked as in use before anything else runs."""
        for one in list(self._held):
            if one.may_serve(model, task) and await one.lists(model) and one.may_serve(model, task):
                return one
        return None

    def running(self, model: str) -> Sequence[ServingEngine]:
        """Those that are leased for it now."""
        return [one.engine for one in self._held if one.model == model and not one.engine.ending.is_set()]

    def awaited(self, model: str, task: Task) -> Awaited | None:
        """What the first of those waits for that wait for a lease."""
        return next((one.awaited for one in self._waiting if one.is_for(model, task)), None)


async def _share(held: _Held, ending: asyncio.Event) -> None:
    """Sets `ending` when the engine takes no new rows, or when the model may have a further one."""
    share_until = time.monotonic() + SHARED_SECONDS
    while not held.engine.ending.is_set():
        shared = len(held.tasks) > 1
        _mark(held.lease.shared, shared)
        if shared and held.lease.room and time.monotonic() >= share_until:
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await held.engine.ending.wait()
    ending.set()


class _Lease:
    """The thread that gets an engine, looks after it, and gives it back."""

    def __init__(self, fleet: GpuFleet, need: Requirement, loop: asyncio.AbstractEventLoop, least: int) -> None:
        self._fleet, self._need, self._loop, self._least = fleet, need, loop, least
        self.engine: asyncio.Future[ServingEngine] = loop.create_future()
        self.closing, self.unwanted = threading.Event(), threading.Event()
        self.standing = False  # what is leased stands in fleet.yaml
        self.shared = threading.Event()  # by several feeds: then it is looked whether there is
        self.room = False  # for a further lease
        self._heartbeat: Heartbeat | None = None
        self.thread = threading.Thread(target=self._run, name="api-lease", daemon=True)

    def is_for(self, model: str, task: Task) -> bool:
        """Whether an engine of this model is leased for this task."""
        return (self._need.model, self._need.task) == (model, task)

    @property
    def awaited(self) -> Awaited | None:
        """What it waits for now; None: it has only just begun."""
        if (heartbeat := self._heartbeat) is None:
            return None
        if heartbeat.state == "leased":
            return Awaited.BOOT
        wait = heartbeat.activity.wait
        return None if wait is None else OF_KIND.get(wait.kind)

    async def close(self) -> None:
        """Give up waiting, or give the engine back."""
        if not self.engine.cancel() and not self.engine.cancelled():
            self.engine.exception()  # who is cancelled when it comes does not hear it: no news for asyncio
        self.closing.set()
        await asyncio.shield(asyncio.to_thread(self.thread.join, END_SECONDS))

    def _run(self) -> None:
        try:
            with self._fleet.open_database() as fleet_db:
                heartbeat = self._heartbeat = self._fleet.heartbeat(fleet_db, f"api-{uuid.uuid4()}")
                with heartbeat.beating(self._need.dataset, "", ""):
                    self._hold(fleet_db, heartbeat)
        except _Closed:
            self._tell(NobodyWaits("nobody waits for an engine any more"))
        except (FleetConfigError, PricingError) as error:
            self._tell(EngineAway(str(error), Awaited.SETTINGS))
        except EngineStartError as error:
            self._tell(EngineAway(str(error), Awaited.START))
        except (RunEnded, FleetDatabaseError) as error:
            self._tell(EngineAway(str(error)))
        except Exception as error:  # a provider's own: the next try may do better
            self._tell(EngineAway(type(error).__name__))

    def _hold(self, fleet_db: FleetDatabase, heartbeat: Heartbeat) -> None:
        target = fleet_db.target(self._need.dataset)
        planned = target is not None and target.request  # then the plan knows of the reserve
        if not planned and fleet_db.instances(self._need.dataset) < self._least:
            fleet_db.set_instances(self._need.dataset, self._least)
        client = self._fleet.client(fleet_db, heartbeat, self._need)
        leased = client.acquire(self._need, say=lambda _: None, pause=lambda seconds: self._pause(seconds, heartbeat))
        try:
            engine = serving(leased)
            self.standing = leased.offer is None and not leased.own
            self._tell(engine)
            while not self.closing.wait(LOOK_SECONDS):
                signals = client.look(leased)
                _mark(engine.shared, fleet_db.shared_by_others(self._need.dataset, heartbeat.ttl))
                self.room = self.shared.is_set() and self._has_room(fleet_db)
                over = not heartbeat.check(leased.lease) or signals.succeeded or signals.retired is not None
                if over or signals.notice_seconds is not None:
                    self._call(engine.ending.set)
        finally:
            client.release(leased)

    def _has_room(self, fleet_db: FleetDatabase) -> bool:
        dataset = self._need.dataset
        return fleet_db.instances(dataset) > fleet_db.leases_of(dataset)

    def _pause(self, seconds: float, heartbeat: Heartbeat) -> None:
        """What is being started is leased already, and not given up because nobody asks just now."""
        starting = heartbeat.state == "leased"
        if self.unwanted.is_set() and not starting:
            raise _Closed
        if self.closing.wait(seconds if starting else WAIT_SECONDS) or (self.unwanted.is_set() and not starting):
            raise _Closed

    def _tell(self, found: ServingEngine | EngineAway) -> None:
        def settle() -> None:
            if self.engine.done():
                if isinstance(found, EngineAway) and not self.engine.cancelled() and not self.engine.exception():
                    self.engine.result().ending.set()
            elif isinstance(found, EngineAway):
                self.engine.set_exception(found)
            else:
                self.engine.set_result(found)

        self._call(settle)

    def _call(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)


def _mark(event: threading.Event, true: bool) -> None:
    if true:
        event.set()
    else:
        event.clear()


def serving(leased: LeasedEngine) -> ServingEngine:
    """A leased engine as the feed of a model takes it."""
    known = {one.name: getattr(leased, one.name) for one in fields(KnownEngine)}
    return ServingEngine(**known, leased=True, name=leased.name)
