"""Engines of the fleet for batches: leased like a run's, kept while there is work, given back when there is none.

Everything that may block (the fleet's database, a provider, a boot of minutes) is in a thread for each lease. The
fleet knows the lease by the name `api/MODEL`, as if that were a dataset: `batch-assets fleet` shows it and its cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from batch_assets.api.billing.margin import fleet_name
from batch_assets.api.execution.engines.engine_supply import EngineAway, NobodyWaits, ServingEngine, Waits, for_ever
from gpu_runner.fleet.database import FleetDatabase, FleetDatabaseError, RunEnded
from gpu_runner.fleet.heartbeat import Heartbeat
from gpu_runner.rows import Task
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


class _Closed(Exception):
    """Nobody waits for the engine any more."""


class FleetSupply:
    """Leases engines of one fleet."""

    def __init__(self, fleet: GpuFleet, reserve: Mapping[str, int] | None = None) -> None:
        """`reserve`: engines of a model that may be leased at once, where that is more than one."""
        self._fleet, self._reserve = fleet, reserve or {}
        self._running: list[tuple[str, ServingEngine]] = []

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        """Wait for an engine, and hold it while the body runs. Raises EngineAway."""
        need = Requirement(fleet_name(model), model, task, simulate=True)
        lease = _Lease(self._fleet, need, asyncio.get_running_loop(), self._reserve.get(model, 1))
        lease.thread.start()
        running: list[tuple[str, ServingEngine]] = []
        try:
            while not lease.engine.done():
                await asyncio.wait([lease.engine], timeout=LOOK_SECONDS)
                _mark(lease.unwanted, not waits())
            engine = await lease.engine
            running.append((model, engine))
            self._running += running
            yield engine
        finally:
            self._running = [one for one in self._running if one not in running]
            if not lease.engine.cancel() and not lease.engine.cancelled():
                lease.engine.exception()  # who is cancelled when it comes does not hear it: no news for asyncio
            lease.closing.set()
            await asyncio.shield(asyncio.to_thread(lease.thread.join, END_SECONDS))

    def running(self, model: str) -> Sequence[ServingEngine]:
        """Those that are leased for it now."""
        return [engine for name, engine in self._running if name == model and not engine.ending.is_set()]


class _Lease:
    """The thread that gets an engine, looks after it, and gives it back."""

    def __init__(self, fleet: GpuFleet, need: Requirement, loop: asyncio.AbstractEventLoop, least: int) -> None:
        self._fleet, self._need, self._loop, self._least = fleet, need, loop, least
        self.engine: asyncio.Future[ServingEngine] = loop.create_future()
        self.closing, self.unwanted = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="api-lease", daemon=True)

    def _run(self) -> None:
        try:
            with self._fleet.open_database() as fleet_db:
                heart = self._fleet.heart(fleet_db, f"api-{uuid.uuid4()}")
                with heart.beating(self._need.dataset, "", ""):
                    self._hold(fleet_db, heart)
        except _Closed:
            self._tell(NobodyWaits("nobody waits for an engine any more"))
        except (FleetConfigError, PricingError, EngineStartError, RunEnded, FleetDatabaseError) as error:
            self._tell(EngineAway(str(error)))
        except Exception as error:  # a provider's own: the next try may do better
            self._tell(EngineAway(type(error).__name__))

    def _hold(self, fleet_db: FleetDatabase, heart: Heartbeat) -> None:
        target = fleet_db.target(self._need.dataset)
        planned = target is not None and target.request  # then the plan knows of the reserve
        if not planned and fleet_db.instances(self._need.dataset) < self._least:
            fleet_db.set_instances(self._need.dataset, self._least)
        client = self._fleet.renter(fleet_db, heart, self._need)
        leased = client.acquire(self._need, say=lambda _: None, pause=lambda seconds: self._pause(seconds, heart))
        try:
            engine = serving(leased)
            self._tell(engine)
            while not self.closing.wait(LOOK_SECONDS):
                signals = client.look(leased)
                _mark(engine.shared, fleet_db.shared_by_others(self._need.dataset, heart.ttl))
                over = not heart.check(leased.lease) or signals.succeeded or signals.retired is not None
                if over or signals.notice_seconds is not None:
                    self._call(engine.ending.set)
        finally:
            client.release(leased)

    def _pause(self, seconds: float, heart: Heartbeat) -> None:
        """What is being started is leased already, and not given up because nobody asks just now."""
        starting = heart.state == "leased"
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
    return ServingEngine(
        leased.endpoint,
        leased.api_key,
        leased.max_num_seqs,
        leased.provider,
        leased.instance_type,
        leased.spot,
        leased.request_seconds,
        leased.spending,
        asyncio.Event(),
        leased=True,
        reachability=leased.reachability,
        tls=leased.tls,
        region=leased.region,
        name=leased.name,
        own=leased.own,
    )
