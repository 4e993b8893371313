"""The budget is a hard stop: whoever dies or dawdles, what was rented ends before it costs more than was allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fleet_databases import OFFER, Clock, intended, ready
from support.timing import SOAK

from gpu_runner.fleet_database.accounting.request_budget import END_SECONDS
from gpu_runner.fleet_database.database import BudgetReached, FleetDatabase, Lease, LeaseUsage

TTL = 10.0
IDLE = 60
PRICE = 60 * 3.6 / 3600  # of a real second of OFFER on a provider whose clock runs 60 times faster
BOOT = 90 * 3.6 / 3600


def seconds(real: float, instances: int = 1) -> float:
    """What so many seconds of so many instances cost."""
    return real * instances * PRICE


def retiring(fleet_db: FleetDatabase, name: str = "ba-1") -> str:
    instance = fleet_db.instance(name)
    assert instance is not None
    return instance.reason if instance.retiring else ""


@pytest.mark.slow
def test_an_instance_is_ordered_only_if_the_budget_pays_for_its_end_twice_its_boot_and_a_drain(fleet_db: FleetDatabase):
    least = seconds(TTL + END_SECONDS + 5) + 2 * BOOT
    fleet_db.begin_request("d", "r", budget_usd=least - 0.001)
    with pytest.raises(BudgetReached) as refused:
        intended(fleet_db, drain_seconds=5)
    assert str(refused.value) == (
        "budget of 1.98 $ leaves no room for another instance: 0.00 $ are spent, and with it 1.80 $ until it could be "
        "ended (5 s to drain, its lease, 15 s until a sweep has ended it) and 0.18 $ for twice its boot would be held "
        "back"
    )
    assert fleet_db.fleet(ended=True) == []
    assert fleet_db.spend("d").bound() == 0
    fleet_db.override("d", budget_usd=least + 0.001)
    assert intended(fleet_db, drain_seconds=5)
    with pytest.raises(BudgetReached):
        intended(fleet_db, "ba-2", drain_seconds=5)
    assert intended(fleet_db, "ba-3", dataset="another", drain_seconds=5)


def test_a_warm_instance_is_leased_only_if_the_budget_pays_for_its_end(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.release(ready(fleet_db, dataset="e"))
    fleet_db.begin_request("d", "r", budget_usd=seconds(TTL + END_SECONDS) - 0.001)
    with pytest.raises(BudgetReached):
        fleet_db.try_lease("ba-1", "run", "d", TTL)
    assert fleet_db.instance("ba-1").lease is None
    assert fleet_db.try_lease("an engine of our own", "run", "d", TTL)  # it costs nothing
    fleet_db.override("d", budget_usd=seconds(TTL + END_SECONDS) + 0.001)
    assert fleet_db.try_lease("ba-1", "run", "d", TTL)


def test_a_holder_is_told_to_leave_while_there_is_time_to_drain(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db)
    fleet_db.begin_request("d", "r", budget_usd=seconds(100))
    drained_from = 100 - TTL - END_SECONDS - 20
    clock.forward(5)
    assert fleet_db.renew(lease, TTL, drain_seconds=20)
    for _ in range(6):
        clock.forward((drained_from - 5.1) / 6)
        assert fleet_db.renew(lease, TTL, drain_seconds=20)
    assert not retiring(fleet_db)
    clock.forward(0.2)
    assert fleet_db.renew(lease, TTL, drain_seconds=20)
    assert retiring(fleet_db).startswith("budget of 6.00 $ is nearly reached (3.3")
    clock.forward(9)
    assert fleet_db.renew(lease, TTL, drain_seconds=20)
    assert fleet_db.release(lease, retire=True)
    assert fleet_db.instance("ba-1").state == "ending"


def test_who_does_not_leave_is_refused_keeps_what_it_said_and_its_instance_ends_within_the_budget(
    fleet_db: FleetDatabase, clock: Clock
):
    lease = ready(fleet_db)
    fleet_db.begin_request("d", "r", budget_usd=seconds(60))
    for _ in range(7):
        clock.forward(4.99)
        assert fleet_db.renew(lease, TTL, drain_seconds=20)
    clock.forward(0.2)
    assert not fleet_db.renew(lease, TTL, LeaseUsage(30.0, rows=7))
    assert retiring(fleet_db).startswith("budget of 3.60 $ is nearly reached")
    assert fleet_db.costs()[0].rows == 7
    clock.forward(TTL - 0.1)
    assert fleet_db.end_overdue(600) != []  # it lived on for as long as its last renewal had said
    fleet_db.ended("ba-1", 0.0)
    assert fleet_db.spend("d").usd <= seconds(60)


def test_a_refused_renewal_leaves_the_lease_as_long_as_it_was(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db)
    fleet_db.begin_request("d", "r", budget_usd=seconds(TTL + END_SECONDS) - 0.001)
    clock.forward(4)
    assert not fleet_db.renew(lease, TTL)
    rule = "what is rented costs 1.50 $ until it could be ended (its lease, 15 s until a sweep has ended it)"
    assert retiring(fleet_db) == f"budget of 1.50 $ reached (0.24 $ spent, {rule})"
    clock.forward(5.9)
    assert fleet_db.release(lease)


def test_who_drains_an_instance_that_another_dataset_pays_for_is_stopped_by_that_ones_budget(
    fleet_db: FleetDatabase, clock: Clock
):
    first = ready(fleet_db, dataset="e")
    fleet_db.drain(first)
    fleet_db.begin_request("d", "r", budget_usd=seconds(TTL + END_SECONDS) + 0.001)
    assert fleet_db.try_lease("ba-1", "next", "d", TTL)
    clock.forward(1)
    assert not fleet_db.renew(first, TTL)


def test_idle_instances_end_when_the_budget_does_not_pay_for_them_until_the_next_sweep(
    fleet_db: FleetDatabase, clock: Clock
):
    fleet_db.release(ready(fleet_db))
    fleet_db.release(ready(fleet_db, "ba-2", dataset="e"))
    fleet_db.begin_request("d", "r", budget_usd=seconds(END_SECONDS + 30))
    clock.forward(29.9)
    assert fleet_db.end_overdue(600) == []
    clock.forward(0.2)
    (said,) = fleet_db.end_overdue(600)
    assert said.startswith("ba-1 ends: budget of 2.70 $ reached (1.81 $ spent, ")


@pytest.mark.slow
def test_a_request_goes_on_when_its_budget_is_raised_and_without_one_nothing_is_stopped(
    fleet_db: FleetDatabase, clock: Clock
):
    lease = ready(fleet_db)
    fleet_db.begin_request("d", "r", budget_usd=seconds(30))
    clock.forward(8)
    assert not fleet_db.renew(lease, TTL)
    fleet_db.release(lease)
    fleet_db.end_overdue(600)
    fleet_db.ended("ba-1", 0.0)
    with pytest.raises(BudgetReached):
        intended(fleet_db, "ba-2")
    fleet_db.override("d", budget_usd=seconds(1000))
    again = intended(fleet_db, "ba-2")
    assert again
    assert fleet_db.renew(again, TTL)
    fleet_db.end_request("d", "r")
    for _ in range(200):
        clock.forward(9)
        assert fleet_db.renew(again, TTL)


def test_a_budget_that_is_lowered_holds_from_the_next_heartbeat_on(fleet_db: FleetDatabase, clock: Clock):
    lease = ready(fleet_db)
    fleet_db.begin_request("d", "r", budget_usd=1000)
    clock.forward(5)
    assert fleet_db.renew(lease, TTL)
    fleet_db.begin_request("d", "r", budget_usd=seconds(10))
    assert not fleet_db.renew(lease, TTL)


def test_a_machine_that_comes_back_after_it_was_written_off_counts_again(fleet_db: FleetDatabase, clock: Clock):
    lost, lease = ready(fleet_db, "ba-1", ttl=100), ready(fleet_db, "ba-2", ttl=100)
    fleet_db.seen("ba-1")
    fleet_db.begin_request("d", "r", budget_usd=seconds(300))
    fleet_db.release(lost, retire=True)
    fleet_db.missing("ba-1")
    fleet_db.ended("ba-1", None)
    clock.forward(90)
    assert fleet_db.renew(lease, 100)
    clock.forward(90)
    assert fleet_db.renew(lease, 100, drain_seconds=1)  # 180 s spent, 115 s to its end
    assert not retiring(fleet_db, "ba-2")
    fleet_db.seen("ba-1")  # it was there all the time: 360 s spent
    assert not fleet_db.renew(lease, 100)


@pytest.mark.slow
def test_however_many_race_no_more_is_ordered_than_the_budget_pays_for(url: str):
    racers, each = 12, seconds(TTL + END_SECONDS) + 2 * BOOT
    start = Barrier(racers)
    with contextlib.closing(FleetDatabase(url)) as fleet_db:
        fleet_db.begin_request("d", "r", budget_usd=3 * seconds(TTL + END_SECONDS) + 2 * BOOT + each / 4)

    def race(number: int) -> Lease | None:
        with contextlib.closing(FleetDatabase(url)) as own:
            start.wait()
            with contextlib.suppress(BudgetReached):
                return intended(own, f"ba-{number}", run_id=f"run-{number}")
        return None

    with ThreadPoolExecutor(racers) as pool:
        won = [lease for lease in pool.map(race, range(racers)) if lease is not None]
    assert len(won) == 3


def test_however_many_renew_at_once_no_more_is_held_than_the_budget_pays_for(url: str, clock: Clock):
    """Renewals wait for each other only where they have to: near a budget."""
    racers = 12
    with contextlib.closing(FleetDatabase(url, now=clock)) as fleet_db:
        leases = [ready(fleet_db, f"ba-{number}", run_id=f"run-{number}") for number in range(racers)]
        fleet_db.begin_request("d", "r", budget_usd=1000.0)
        assert all(fleet_db.renew(lease, TTL) for lease in leases)
        clock.forward(TTL - 1)
        spent = fleet_db.spend("d")
        fleet_db.override("d", budget_usd=spent.bound() + seconds(TTL - 1) * 3.5)
        start = Barrier(racers)

        def race(lease: Lease) -> bool:
            with contextlib.closing(FleetDatabase(url, now=clock)) as own:
                start.wait()
                return own.renew(lease, TTL)

        with ThreadPoolExecutor(racers) as pool:
            assert sum(pool.map(race, leases)) == 3
        assert fleet_db.spend("d").bound() <= spent.bound() + seconds(TTL - 1) * 3.5


@dataclass
class Worker:
    """A run as it behaves: it leases, renews every two seconds, leaves when told to; it may be killed or stopped."""

    run_id: str
    dataset: str
    lease: Lease | None = None
    asleep_until: float = 0.0
    leaves_at: float | None = None
    renewed_at: float = 0.0
    asks_at: float = 0.0


class Beside(FleetDatabase):
    """SQLite, with renewals as Postgres makes them."""

    @contextlib.contextmanager
    def _beside_its_like(self) -> Iterator[tuple[sa.Connection, float, bool]]:
        with self._transaction(durable=False) as (connection, now):
            yield connection, now, False


@dataclass
class World:
    """Workers of two datasets, of which one has a budget, a reaper that is never late, and seconds that pass.

    `fate`: what happens to all workers when two seconds of the budget are left: they are "killed", go "idle", or "".
    "deaf" ones never leave an instance that is to be left. `beside`: renewals are made as in
    Postgres, where they do not see those that are made at the same time.
    """

    budget: float
    sweeps: int
    drain: float
    fate: str = ""
    beside: bool = False
    clock: Clock = field(default_factory=Clock)
    names: int = 0
    swept_at: float = 0.0

    def __post_init__(self) -> None:
        self.fleet_db = (Beside if self.beside else FleetDatabase)("sqlite://", now=self.clock)
        self.workers = [Worker(f"run-{number}", "d" if number < 4 else "e") for number in range(6)]
        for worker in self.workers:
            self.fleet_db.begin_run(worker.run_id, worker.dataset, "00000", "00001")
        self.fleet_db.begin_request("d", "r", budget_usd=self.budget)

    def second(self, event: int) -> None:
        self.clock.forward(1)
        self._happens(event)
        for worker in self.workers:
            if self.clock.now >= worker.asleep_until:
                self._works(worker, event)
        spend = self.fleet_db.spend("d")
        assert spend.usd <= self.budget + 1e-9
        if self.fate in ("killed", "idle") and spend.usd_per_second and spend.bound(2) > self.budget:
            self.meets(self.fate)
        if self.clock.now - self.swept_at >= self.sweeps:
            self.swept_at = self.clock.now
            self.fleet_db.end_overdue(IDLE)
            for one in self.fleet_db.fleet():
                if one.state == "ending":
                    self.fleet_db.ended(one.name, 0.0)

    def meets(self, fate: str) -> None:
        for worker in self.workers:
            worker.asleep_until = 1e12
            if fate == "idle" and worker.lease is not None:
                self.fleet_db.release(worker.lease)

    def _happens(self, event: int) -> None:
        worker = self.workers[event % 6]
        kind = event // 6 % 16
        if kind == 0:
            worker.asleep_until = self.clock.now + (3, 7, 12, 30, 1e9, 5)[event // 96 % 6]
        elif kind == 1 and worker.lease is not None:  # with its last rows, and then with none
            self.fleet_db.drain(worker.lease)
            worker.leaves_at = self.clock.now + event // 96 % 9
        elif kind == 2 and worker.lease is not None:
            self.fleet_db.release(worker.lease)
            worker.lease = None
        elif kind == 3 and worker.asleep_until == 1e9:  # a new worker for a killed one
            worker.asleep_until, worker.lease, worker.leaves_at = 0.0, None, None

    def _works(self, worker: Worker, event: int) -> None:
        if worker.lease is None:
            self._asks(worker, event)
        elif self.clock.now - worker.renewed_at >= 2:
            worker.renewed_at = self.clock.now
            drain = self.drain if worker.dataset == "d" else 0.0
            if not self.fleet_db.renew(worker.lease, TTL, drain_seconds=drain):
                self.fleet_db.release(worker.lease)
                worker.lease = worker.leaves_at = None
            elif (
                self.fate != "deaf"
                and worker.leaves_at is None
                and self.fleet_db.instance(worker.lease.instance).retiring
            ):
                worker.leaves_at = self.clock.now + self.drain
        if worker.lease is not None and worker.leaves_at is not None and self.clock.now >= worker.leaves_at:
            self.fleet_db.release(worker.lease, retire=event % 2 == 0)
            worker.lease = worker.leaves_at = None

    def _asks(self, worker: Worker, event: int) -> None:
        words: dict[str, Any] = {"run_id": worker.run_id, "dataset": worker.dataset, "drain_seconds": self.drain}
        if self.clock.now < worker.asks_at:
            return
        worker.asks_at = self.clock.now + 3
        with contextlib.suppress(BudgetReached):
            for one in self.fleet_db.warm("key"):
                worker.lease = worker.lease or self.fleet_db.try_lease(one.name, worker.run_id, worker.dataset, TTL)
            if worker.lease is None and event % 3 == 0 and len(self.fleet_db.fleet()) < 5:
                self.names += 1
                offer = replace(OFFER, price_per_hour=1.8 + event % 4, boot_seconds=event % 400)
                worker.lease = intended(self.fleet_db, f"ba-{self.names}", offer=offer, **words)
                if worker.lease is not None:
                    self.fleet_db.created(worker.lease, "i")
                    self.fleet_db.ready(worker.lease, "http://127.0.0.1:1", 8)
        worker.renewed_at, worker.leaves_at = self.clock.now, None


events = st.lists(st.integers(0, 10_006).map(lambda n: n * 7919 % 10_007), min_size=50, max_size=120)


def live(events: list[int], *of_world: Any) -> None:
    """A world in which things happen, and then everybody is killed: at no moment was more spent than the budget."""
    world = World(*of_world)
    with contextlib.closing(world.fleet_db):
        for event in events:
            world.second(event)
        world.fate = "killed"
        world.meets(world.fate)
        for _ in range(IDLE + 20):
            world.second(47)
        assert world.fleet_db.fleet() == []
        bills = sum(cost.usd.total for cost in world.fleet_db.costs())
        assert sum(world.fleet_db.spend(dataset).usd for dataset in "de") == pytest.approx(bills)


worlds = given(
    events=events,
    budget=st.floats(2, 12),
    sweeps=st.integers(2, 10),
    drain=st.floats(0, 12),
    fate=st.sampled_from(["killed", "idle", "deaf", ""]),
    beside=st.booleans(),
)
calm = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@settings(calm, max_examples=6)
@worlds
def test_whatever_dies_or_dawdles_no_more_is_spent_than_the_budget(
    events: list[int], budget: float, sweeps: int, drain: float, fate: str, beside: bool
):
    live(events, budget, sweeps, drain, fate, beside)


@pytest.mark.soak("fleet")
@pytest.mark.timeout(600)
@settings(calm, max_examples=300 if SOAK else 20)
@worlds
def test_the_same_holds_in_many_more_worlds(
    events: list[int], budget: float, sweeps: int, drain: float, fate: str, beside: bool
):
    live(events, budget, sweeps, drain, fate, beside)


@pytest.mark.slow
def test_a_budget_is_used_up_to_what_it_takes_to_end_what_it_paid_for():
    world = World(budget=10.0, sweeps=5, drain=4.0)
    with contextlib.closing(world.fleet_db):
        for _ in range(200):
            world.second(27)  # an event that asks for instances of 4.80 $/h
        assert all(one.dataset == "e" for one in world.fleet_db.fleet())
        assert 8.0 < world.fleet_db.spend("d").usd <= 10.0
