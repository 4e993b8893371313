"""A run's heartbeat: a thread that says "I live" and keeps its leases, whatever the rest of the run does."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from gpu_runner.boot_clock import boot_seconds
from gpu_runner.cost_meter import LeaseUsage, TokenMeter
from gpu_runner.fleet_database.database import FleetDatabase, Lease, RunState
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitReason
from gpu_runner.repeated_task import RepeatedTask

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    lease: Lease
    renewed_at: float
    spent: Callable[[], LeaseUsage]
    lost: bool = False
    meter: TokenMeter | None = None


class Heartbeat:
    """Beats for one run from its first second to its last; renews the leases that it holds.

    A lease counts as lost when the fleet's database refuses to renew it, or when no renewal succeeded for `ttl -
    margin` seconds on our own steady clock: after that somebody else may hold the instance (a stopped process that
    wakes up is one). `ended` is set when the run was declared dead while it was silent: it has lost its leases, and
    gets no other. `drain_seconds` says how long the rows in flight take: an instance is left that long before a budget
    is reached. `signs_of_life` is called at every beat that reached the fleet's database: machines that hear of none
    for long end themselves.
    """

    def __init__(
        self,
        fleet_db: FleetDatabase,
        run_id: str,
        *,
        ttl: float = 10.0,
        interval: float = 2.0,
        clock: Callable[[], float] = boot_seconds,
        signs_of_life: Callable[[], None] = lambda: None,
    ) -> None:
        self.fleet_db, self.run_id, self.ttl, self.interval = fleet_db, run_id, ttl, interval
        self.activity = RunActivity()
        self.rows_done: Callable[[], int] = lambda: 0
        self.drain_seconds: Callable[[], float] = lambda: 0.0
        self.ended = threading.Event()
        self._clock = clock
        self._signs_of_life = signs_of_life
        self._held: dict[Lease, _Held] = {}
        self._guard = threading.Lock()
        self._task = RepeatedTask("heartbeat", self._beat_again, interval)

    @contextlib.contextmanager
    def beating(self, dataset: str, first_key: str, last_key: str) -> Iterator[Heartbeat]:
        """Beat while the body runs; afterwards the run is marked as ended. Raises RunEnded if it was declared dead."""
        self.fleet_db.begin_run(self.run_id, dataset, first_key, last_key)
        self._task.start()
        try:
            yield self
        finally:
            self._task.end(5)
            self.fleet_db.end_run(self.run_id)

    def tell(self, note: str, wait: WaitReason | None = None) -> None:
        """What the run does from now on, in words for people, and what it waits for, if it waits."""
        self.activity = RunActivity(note, wait)

    def now(self) -> float:
        """Our own clock, by which a lease is counted."""
        return self._clock()

    @property
    def state(self) -> RunState:
        """What the fleet's database shows of the run."""
        return "leased" if self._held else "waiting"

    def hold(self, lease: Lease, asked_at: float, spent: Callable[[], LeaseUsage] = LeaseUsage) -> None:
        """Keep this lease alive. Its time runs from when it was asked for: we may have been stopped since.

        `spent` says how the instance was used so far; every renewal writes it down, so that a killed run's is known.
        """
        with self._guard:
            self._held[lease] = _Held(lease, asked_at, spent)

    def account(self, lease: Lease, spent: Callable[[], LeaseUsage]) -> None:
        """From now on write down what this says of a lease that is held already; its time is not touched."""
        with self._guard:
            if (held := self._held.get(lease)) is not None:
                held.spent = spent

    def bound(self, lease: Lease, meter: TokenMeter) -> None:
        """As `account`, for an engine that is paid by the token: it is told what it may spend, now and at each beat."""
        self.account(lease, meter.spent)
        self._grant(lease, meter)
        with self._guard:
            if (held := self._held.get(lease)) is not None:
                held.meter = meter

    def _grant(self, lease: Lease, meter: TokenMeter) -> None:
        committed, granted = meter.hold(), None
        try:
            found = self.fleet_db.grant(lease, committed, meter.row_usd)
            granted = math.inf if found is None else found
        finally:
            meter.grant(granted)

    def stop_renewing(self, lease: Lease) -> None:
        """Stop renewing: the lease is given back or lost."""
        with self._guard:
            self._held.pop(lease, None)

    def check(self, lease: Lease) -> bool:
        """True while the lease may be relied on, by our own clock."""
        with self._guard:
            held = self._held.get(lease)
            return held is not None and self._fresh(held)

    def _fresh(self, held: _Held) -> bool:
        if self.ended.is_set() or self._clock() - held.renewed_at > self.ttl - self.interval:
            held.lost = True
        return not held.lost

    def _beat_again(self) -> None:
        if self.ended.is_set():
            return
        try:
            self._beat()
        except (sa.exc.SQLAlchemyError, OSError) as error:
            log.warning("heartbeat of run %s not written: %s", self.run_id, type(error).__name__)
        with self._guard:
            for held in self._held.values():
                self._fresh(held)

    def _beat(self) -> None:
        with self._guard:
            leases = [held for held in self._held.values() if not held.lost]
        for held in leases:
            asked_at = self._clock()
            renewed = self.fleet_db.renew(held.lease, self.ttl, held.spent(), self.drain_seconds())
            if renewed and held.meter is not None:
                self._grant(held.lease, held.meter)
            with self._guard:
                if renewed:
                    held.renewed_at = asked_at
                else:
                    held.lost = True
        if self.fleet_db.beat(self.run_id, self.state, self.activity, self.rows_done()):
            self._signs_of_life()
        else:
            self.ended.set()
