"""Engines for runs: a fleet that hands out what a test lines up, and simulated engines to line up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from gpu_runner.fleet_database.database import FleetDatabaseError, Lease
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitReason
from gpu_runner.offers.offer import Offer
from gpu_runner.reachability import Reachability
from resources.fleet.leased_engine import LeasedEngine, LeaseSignals, Requirement
from resources.fleet.migration import Migration
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.snapshots import MODEL

OFFER = Offer("sim", "r", "h100", "H100", 1, 80, False, 3.0, 60.0, 1.0, 0.0, "test")


NEED = Requirement("d", MODEL, "chat")


class Heartbeat:
    """A heartbeat that somebody else stops."""

    run_id = "run"
    drain_seconds: Callable[[], float]

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.activity = RunActivity()
        self.ended = SimpleNamespace(is_set=lambda: False)

    def tell(self, note: str, wait: WaitReason | None = None) -> None:
        self.activity = RunActivity(note, wait)

    def check(self, lease: Lease) -> bool:
        return lease.instance not in self.lost


class FleetClient:
    """Hands out the engines that a test lines up, in order, and remembers what was given back and why."""

    def __init__(self, *engines: SimulatedEngine | Exception) -> None:
        self.config = SimpleNamespace(move_seconds=0.2)
        self.waiting = list(engines)
        self.released: list[tuple[str, str, bool]] = []
        self.handed_on: list[str] = []
        self.notices: dict[str, float] = {}
        self.retired: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.reachability = Reachability.OPEN
        self.offers_better = False
        self.hold_on = self.away = False
        self.succeeded: set[str] = set()
        self.asked = 0

    def acquire(
        self, need: Requirement, *, say: Any, pause: Callable[[float], None], replaces: LeasedEngine | None = None
    ) -> LeasedEngine:
        self.asked += 1
        if self.away:
            raise FleetDatabaseError
        while self.hold_on or not self.waiting:
            pause(0.02)
        engine = self.waiting.pop(0)
        if isinstance(engine, Exception):
            raise engine
        name = f"i{self.asked}"
        lease = Lease(name, 1, "run", "d")
        reachability = lambda: self.reachability  # noqa: E731
        return LeasedEngine(engine.url, None, 8, "sim", "h100", lease=lease, offer=OFFER, reachability=reachability)

    def move(self, need: Requirement, leased: LeasedEngine, decision: Migration, **more: Any) -> LeasedEngine:
        return self.acquire(need, say=more["say"], pause=more["pause"], replaces=leased)

    def better(self, need: Requirement, leased: LeasedEngine, rows_left: int) -> Migration | None:
        if not self.offers_better:
            return None
        self.offers_better = False
        return Migration(leased.name, OFFER, OFFER, 1e6, 1e3, 1e3, 1.5, f"{leased.name}: move and save 1.50 $")

    def release(self, leased: LeasedEngine, *, reason: str = "", retire: bool = False, lost: bool = False) -> None:
        self.released.append((leased.name, reason, retire))

    def begin_handover(self, leased: LeasedEngine) -> bool:
        if self.away:
            raise FleetDatabaseError
        self.handed_on.append(leased.name)
        return True

    def why_lost(self, leased: LeasedEngine) -> str:
        return self.why.get(leased.name, "")

    def look(self, leased: LeasedEngine) -> LeaseSignals:
        if self.away:
            raise FleetDatabaseError
        name = leased.name
        return LeaseSignals(self.notices.get(name), name in self.succeeded, self.retired.get(name))


@contextmanager
def engines(count: int, *, speed: str = "6") -> Iterator[list[SimulatedEngine]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(simulated_engine("--speed", speed, "--max-num-seqs", "8", model=MODEL))
            for _ in range(count)
        ]
