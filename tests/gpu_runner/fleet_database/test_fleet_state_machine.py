"""The fleet as a state machine: book, reaper and three clouds under everything that can happen, in any order.

Runs are handles that may act at any moment, also long after their lease lapsed: a handle that is not used for a while
is a run that was killed, one that is used again later is a run that was stopped. A sweep is cut at every call: there it
may be killed, or any other action may happen, another sweep too. What must hold is compared with a plain model of the
leases and with the clouds' own meters. One dataset has a budget now and then: what it spent, and whether it may lease
or keep more, is reckoned anew from the rows, in plain words.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER, Clock, intended
from support.timing import SOAK

from gpu_runner.fleet_database.accounting.request_budget import END_SECONDS
from gpu_runner.fleet_database.connection import INSTANCES, LEASES
from gpu_runner.fleet_database.database import (
    BudgetReached,
    FleetDatabase,
    FleetFull,
    Instance,
    Lease,
    LeaseUsage,
    RunEnded,
)
from gpu_runner.fleet_database.leases import STANDING
from gpu_runner.fleet_database.reaper import sweep
from gpu_runner.providers.base import EngineOrder, Machine, ProviderError, ProviderUnclear
from gpu_runner.providers.engine_process import EngineStartError

TTL, IDLE, MISSING = 10.0, 20.0, 15.0
ORDER = EngineOrder("m", "chat")
BOOT = OFFER.price_per_hour / 3600 * OFFER.boot_seconds
RUNS = ("run-1", "run-2", "run-3", "run-4")
# Hypothesis prefers small integers: spread them, because each is taken apart into several choices.
numbers = st.integers(0, 10_006).map(lambda n: n * 7919 % 10_007)


class Killed(BaseException):
    """The sweep was killed here."""


@dataclass
class Handle:
    """A lease as its run remembers it, and what it may expect of it."""

    lease: Lease
    expires_at: float
    over: bool = False
    draining: bool = False
    rows: int = 0
    creates: int = 0
    refused: bool = False

    def live(self, now: float) -> bool:
        return not self.over and now < self.expires_at


class Cut:
    """Passes every call on, after `before` has had its moment."""

    def __init__(self, target: Any, before: Callable[[], None]) -> None:
        self._target, self._before = target, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*words: Any, **named: Any) -> Any:
            self._before()
            return found(*words, **named)

        return call


class Cloud(FakeProvider):
    """A provider whose list may leave machines out, and shows those of others too."""

    hidden: frozenset[str] = frozenset()

    def list(self, tag: str) -> list[Machine]:
        return [one for one in super().list("") if one.name not in self.hidden]


class FleetMachine(RuleBasedStateMachine):
    steps: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.swept_for = 0.0
        self.clock = Clock()
        self.fleet_db = FleetDatabase("sqlite://", now=self.clock)
        self.clouds = [
            Cloud(self.clock, name="north", capacity=3),
            Cloud(self.clock, name="east", lag=4.0),
            Cloud(self.clock, name="forgetful", lag=2.0, kept=3.0),
        ]
        self.handles: list[Handle] = []
        self.dead: set[str] = set()
        self.intended_at: dict[str, float] = {}
        self.request, self.budget_usd, self.since = "", None, 0.0
        for run_id in RUNS:
            self.fleet_db.begin_run(run_id, "d", "00000", "00001")

    # what happens

    @rule(n=numbers)
    def order(self, n: int) -> None:
        """A run orders an instance, perhaps to move there from the one it holds."""
        run_id, dataset, cloud = RUNS[n % 4], "de"[n // 4 % 2], self.clouds[n // 8 % 3]
        limit, cap, name = 1 + n // 24 % 3, 6, f"ba-{len(self.intended_at):04d}"
        old = next((one for one in self._live(dataset=dataset) if one.lease.run_id == run_id), None)
        replaces = old.lease if old is not None and n // 72 % 2 else None
        held = [one for one in self._live(dataset=dataset) if not one.draining and one.lease != replaces]
        rows = self.fleet_db.fleet()
        left = [one for one in rows if one.works_for == dataset and one.lease is None and one.state in STANDING]
        left = [one for one in left if not one.retiring and one.notice_seconds is None]
        left = [one for one in left if replaces is None or one.name != replaces.instance]
        allowed = len(held) + len(left) < limit
        offer = replace(OFFER, provider=cloud.name)
        words = {"run_id": run_id, "dataset": dataset, "limit": limit, "cap": cap, "replaces": replaces, "ttl": TTL}
        if run_id in self.dead:
            with pytest.raises(RunEnded):
                intended(self.fleet_db, name, offer=offer, **words)
            return
        if allowed and len(rows) >= cap:
            with pytest.raises(FleetFull):
                intended(self.fleet_db, name, offer=offer, **words)
            return
        if allowed and not self._fits(dataset, Lease(name, 1, run_id, dataset), 2 * BOOT):
            with pytest.raises(BudgetReached):
                intended(self.fleet_db, name, offer=offer, **words)
            return
        lease = intended(self.fleet_db, name, offer=offer, **words)
        assert (lease is not None) == allowed
        if lease is not None:
            self.intended_at[name] = self.clock.now
            self._granted(lease)

    @rule(n=numbers)
    def rent_another(self, n: int) -> None:
        self.rent(n)

    @initialize(n=numbers)
    def rent(self, n: int) -> None:
        """A run orders, creates and boots an instance without a hitch."""
        before = len(self.handles)
        self.order(n)
        if len(self.handles) > before:
            self._create(self.handles[-1], None)
            self._boot(self.handles[-1])

    @rule(n=numbers)
    def create(self, n: int) -> None:
        """The provider is called, or called again; the call fails, its reply is lost, or the run dies after it."""
        fresh = [one for one in self.handles if one.lease.epoch == 1 and not one.refused]
        fates = (None, None, None, "error", "unclear", "lost", "killed")
        if fresh:  # mostly the latest order, sometimes one that was written off long ago
            self._create(fresh[-1 if n % 3 else n // 3 % len(fresh)], fates[n // 100 % 7])

    @rule(n=numbers)
    def order_and_sleep(self, n: int) -> None:
        """A run is stopped somewhere on its way from order to engine for longer than its lease lives, and goes on."""
        before = len(self.handles)
        self.order(n)
        if len(self.handles) == before:
            return
        handle, sleeps = self.handles[-1], n // 9 % 3
        for stage, act in enumerate((lambda: self._create(handle, None), lambda: self._boot(handle))):
            if stage == sleeps:
                self.clock.forward(TTL + n % 8)
                if n % 2:
                    self.calm_sweep()
            act()

    def _create(self, handle: Handle, fate: str | None) -> None:
        offer = replace(OFFER, provider=self._row(handle).provider)
        handle.creates += 1
        try:
            with self._fault(handle, fate):
                machine_id = self._cloud(handle).create(offer, handle.lease.instance, ORDER)
        except ProviderUnclear:
            return
        except ProviderError as error:
            if handle.creates == 1:
                expected = self._fenced(handle) and self._row(handle).state == "intent"
                assert self.fleet_db.refused(handle.lease, str(error)) == expected
                handle.over |= expected
                handle.refused = True
            else:
                self._release(handle, retire=True)
            return
        if fate != "killed":
            expected = self._fenced(handle) and self._row(handle).state in ("intent", "booting")
            first = handle.creates == 1
            assert self.fleet_db.created(handle.lease, machine_id, just_now=first) == expected

    @rule(n=numbers)
    def boot(self, n: int) -> None:
        """A run sees its engine answer, or gives it up."""
        if handle := self._pick(n):
            self._boot(handle)

    def _boot(self, handle: Handle) -> None:
        try:
            machine = self._cloud(handle).wait_ready(handle.lease.instance, 1, lambda seconds: None)
        except (EngineStartError, ProviderError, ProviderUnclear):
            self._release(handle, retire=True)
            return
        expected = self._fenced(handle) and self._row(handle).state in ("intent", "booting")
        assert self.fleet_db.ready(handle.lease, machine.endpoint, machine.max_num_seqs) == expected

    @rule(n=numbers)
    def lease_warm(self, n: int) -> None:
        """A run takes a warm instance, or tries any other."""
        found = self.fleet_db.warm("key") if n % 3 else self.fleet_db.fleet(ended=True)
        if found:
            self._lease(found[n // 3 % len(found)], n // 30)

    @rule(n=numbers)
    def hand_over(self, n: int) -> None:
        """A run drains, or gives back, and the next one is there at once."""
        if handle := self._pick(n):
            if n // 4 % 3:
                self._drain(handle)
            else:
                self._release(handle, retire=False)
            self._lease(self._row(handle), n // 12)

    def _lease(self, row: Instance, n: int) -> None:
        run_id, dataset, limit = RUNS[n % 4], "de"[n // 4 % 2], 1 + n // 8 % 3
        held = [one for one in self._live(dataset=dataset) if not one.draining]
        taken = [one for one in self._live(instance=row.name) if not one.draining]
        usable = row.state == "ready" and row.notice_seconds is None and not row.retiring
        if run_id in self.dead:
            with pytest.raises(RunEnded):
                self.fleet_db.try_lease(row.name, run_id, dataset, TTL, limit=limit)
            return
        allowed = usable and not taken and len(held) < limit
        if allowed and not self._fits(dataset, Lease(row.name, row.epoch + 1, run_id, dataset)):
            with pytest.raises(BudgetReached):
                self.fleet_db.try_lease(row.name, run_id, dataset, TTL, limit=limit)
            return
        lease = self.fleet_db.try_lease(row.name, run_id, dataset, TTL, limit=limit)
        assert (lease is not None) == allowed
        if lease is not None:
            self._granted(lease)

    @rule(n=numbers)
    def renew(self, n: int) -> None:
        if handle := self._pick(n):
            self._renew(handle, handle.rows + n % 5, n % 9 * 8.0)

    def _renew(self, handle: Handle, rows: int, drain_seconds: float) -> None:
        expected, before = self._fenced(handle), self._row(handle)
        pays = self._payer(handle.lease.instance)
        fits = not expected or self._fits(pays, handle.lease)
        drains = not fits or (expected and not self._fits(pays, handle.lease, drain_seconds=drain_seconds))
        spent = LeaseUsage(useful_seconds=rows * 0.4, wasted_seconds=rows * 0.1, rows=rows)
        assert self.fleet_db.renew(handle.lease, TTL, spent, drain_seconds) == (expected and fits)
        assert self._row(handle).retiring == (before.retiring or drains)
        FleetMachine.steps["stopped" if not fits else "drained" if drains else "renewed"] += 1
        if expected:
            handle.rows = rows
        if expected and fits:
            handle.expires_at = self.clock.now + TTL

    @rule(n=numbers)
    def drain(self, n: int) -> None:
        if handle := self._pick(n):
            self._drain(handle)

    def _drain(self, handle: Handle) -> None:
        expected = self._fenced(handle)
        assert self.fleet_db.drain(handle.lease) == expected
        handle.draining |= expected

    @rule(n=numbers)
    def release(self, n: int) -> None:
        """A run gives its instance back, for good or for the next; it ends the machine itself if it can."""
        if (handle := self._pick(n)) is None:
            return
        self._release(handle, retire=n // 1000 % 2 == 1)
        if self._row(handle).state == "ending" and n // 2000 % 2:
            with contextlib.suppress(ProviderError, ProviderUnclear):
                self._cloud(handle).terminate(handle.lease.instance)

    @rule(n=numbers)
    def declare_dead(self, n: int) -> None:
        """The watchdog ends a silent run; now and then its successor begins under the same name."""
        run_id = RUNS[n % 4]
        if self.dead:
            revived = self.dead.pop()
            self.fleet_db.begin_run(revived, "d", "00000", "00001")
            return
        self.fleet_db.end_run(run_id)
        self.dead.add(run_id)
        for handle in self.handles:
            handle.over |= handle.lease.run_id == run_id

    @rule(n=numbers)
    def fleet_down(self, n: int) -> None:
        if (rows := self.fleet_db.fleet(ended=True)) and n % 3 == 0:
            row = rows[n % len(rows)]
            expected = row.state != "ended" and not self._live(instance=row.name)
            assert self.fleet_db.begin_ending(row.name, "fleet down") == expected

    @rule(n=numbers)
    def time_passes(self, n: int) -> None:
        """Runs whose bit is set renew all the while, the others are stopped or dead."""
        seconds = (1, 1, 3, 3, 5, 9, 16, 25)[n % 8]
        for _ in range(seconds):
            self.clock.forward(1)
            for number, handle in enumerate(self._live()):
                if (n // 8 | n // 64) >> number % 4 & 1:
                    self._renew(handle, handle.rows, n % 5 * 8.0)

    @initialize(n=numbers)
    def begin(self, n: int) -> None:
        """Every second story begins with a request that has some budget."""
        if n % 2:
            self.budget(300 + n % 100)

    @rule(n=numbers)
    def budget(self, n: int) -> None:
        """A request begins, its budget is raised or lowered, or it is over."""
        usd = self._spent("d", self.since) + 0.0137 + n % 97 / 25
        if n // 100 % 4 == 0:
            if self.fleet_db.end_request("d", self.request):
                self.request, self.budget_usd, self.since = "", None, self.clock.now
        elif n // 100 % 4 == 1 and self.request:
            assert self.fleet_db.override("d", budget_usd=usd)
            self.budget_usd = usd
        else:
            if not self.request or n % 2:
                self.request, self.since = f"request {n} at {self.clock.now}", self.clock.now
                self.budget_usd = usd
            self.fleet_db.begin_request("d", self.request, budget_usd=usd)
            if (target := self.fleet_db.target("d")) is not None:
                self.budget_usd = target.budget_usd

    @rule(n=numbers)
    def a_moment_passes(self, n: int) -> None:
        self.clock.forward(n % 30 / 10)

    @rule(n=numbers)
    def trouble(self, n: int) -> None:
        """A machine is taken away at once or after a notice, will not obey, does not boot, or is left out of lists.

        Now and then there is one of our tag that the fleet's database does not know, and one of a neighbour.
        """
        cloud = self.clouds[n % 3]
        if n % 7 == 0:
            with contextlib.suppress(ProviderError, ProviderUnclear):
                cloud.create(OFFER, f"{'ba-stranger' if n % 2 else 'neighbour'}-{n}", ORDER)
        if not (alive := cloud.alive()):
            return
        machine = cloud.machines[alive[n // 3 % len(alive)]]
        kind = n // 300 % 6
        if kind == 0:
            cloud.lose(machine.name)
        elif kind == 1:
            machine.taken_at = self.clock.now + 30
        elif kind == 2:
            machine.stubborn = 1 + n % 2
        elif kind == 3:
            machine.boots = False
        elif cloud.kept > 100:
            cloud.hidden = frozenset({machine.name}) if kind == 4 else frozenset()

    @rule(events=st.lists(st.tuples(st.sampled_from(["go", "go", "killed", "act", "fault"]), numbers), max_size=14))
    def sweep_cut(self, events: list[tuple[str, int]]) -> None:
        """A sweep between whose calls things happen."""
        pending = iter(events)
        nested = (
            self.order,
            self.rent,
            self.create,
            self.boot,
            self.lease_warm,
            self.renew,
            self.release,
            self.trouble,
        )
        nested += (self.declare_dead, self.fleet_down, self.time_passes, lambda n: self.calm_sweep())

        def moment() -> None:
            kind, n = next(pending, ("go", 0))
            if kind == "killed":
                raise Killed
            if kind == "act":
                nested[n % len(nested)](n // 10)
            if kind == "fault":
                for cloud in self.clouds:
                    cloud.fault = lambda call: ("error", "unclear", "lost", None)[n % 4]

        began = self.clock.now
        with contextlib.suppress(Killed):
            clouds = [Cut(cloud, moment) for cloud in self.clouds]
            sweep(Cut(self.fleet_db, moment), clouds, tag="ba-", idle_seconds=IDLE, missing_seconds=MISSING)
        self.swept_for += self.clock.now - began
        for cloud in self.clouds:
            cloud.fault = lambda call: None
        self._believe_the_book()

    @rule()
    def calm_sweep(self) -> None:
        """An undisturbed sweep leaves nothing alive that nobody needs, apart from what could not be known or ended."""
        excused = {
            name
            for cloud in self.clouds
            for name, machine in cloud.machines.items()
            if machine.stubborn or name in cloud.hidden or self.clock.now - machine.created_at < cloud.lag
        }
        faults = [cloud.fault for cloud in self.clouds]
        for cloud in self.clouds:
            cloud.fault = lambda call: None
        sweep(self.fleet_db, self.clouds, tag="ba-", idle_seconds=IDLE, missing_seconds=MISSING)
        for cloud, fault in zip(self.clouds, faults, strict=True):
            cloud.fault = fault
        self._believe_the_book()
        for cloud in self.clouds:
            for name in {name for name in cloud.alive() if name.startswith("ba-")} - excused:
                row = self.fleet_db.instance(name)
                assert row is not None, "what the fleet's database does not know is ended"
                assert row.state in ("intent", "booting", "ready"), "what is to end is ended by the next sweep"
                assert row.leased or (row.idle_seconds is not None and row.idle_seconds < IDLE)

    # what must hold

    @invariant()
    def leases_are_what_the_model_says(self) -> None:
        FleetMachine.steps["steps"] += 1
        expected = {(one.lease.instance, one.lease.epoch): one.draining for one in self._live()}
        query = sa.select(LEASES.c.instance, LEASES.c.epoch, LEASES.c.draining_at).where(
            LEASES.c.released_at.is_(None) & (LEASES.c.expires_at > self.clock.now)
        )
        with self.fleet_db.engine.connect() as connection:
            found = {(line[0], line[1]): line[2] is not None for line in connection.execute(query)}
        assert found == expected
        holders = Counter(instance for (instance, _), draining in found.items() if not draining)
        assert max(holders.values(), default=0) <= 1, "one run holds an instance, besides those that drain"

    @invariant()
    def nothing_is_ended_under_a_lease_and_nothing_exists_without_an_intent(self) -> None:
        rows = {row.name: row for row in self.fleet_db.fleet(ended=True)}
        for row in rows.values():
            assert not (row.leased and row.state in ("ending", "ended"))
        for cloud in self.clouds:
            assert {name for name in cloud.machines if name.startswith("ba-0")} <= rows.keys()

    @invariant()
    def each_dataset_spent_what_the_rows_say(self) -> None:
        assert abs(self.fleet_db.spend("d").usd - self._spent("d", self.since)) < 1e-6
        everything = sum(self._spent(dataset, 0.0) for dataset in "de")
        assert abs(everything - sum(cost.usd.total for cost in self.fleet_db.costs())) < 1e-6

    def teardown(self) -> None:
        """Everybody dies and the clouds recover: within a few sweeps nothing is rented, and books and meters agree."""
        for cloud in self.clouds:
            cloud.hidden = frozenset()
        self.clock.forward(TTL)
        for _ in range(4):
            self.calm_sweep()
            self.clock.forward(6)
        self.clock.forward(IDLE)
        for _ in range(8):
            self.calm_sweep()
            self.clock.forward(6)
        assert self.fleet_db.fleet() == []
        for cloud in self.clouds:
            assert all(name.startswith("neighbour") for name in cloud.alive())
            assert all(one.reason != "terminated" for one in cloud.machines.values() if one.name.startswith("neigh"))
        rows = {row.name: row for row in self.fleet_db.fleet(ended=True)}
        for cost in self.fleet_db.costs():
            self._settled(rows[cost.name], cost.seconds.total)
            assert cost.rows == sum(one.rows for one in self.handles if one.lease.instance == cost.name)
        self.fleet_db.close()

    def _settled(self, row: Instance, billed: float) -> None:
        cloud = next(one for one in self.clouds if one.name == row.provider)
        machine = cloud.machines.get(row.name)
        if machine is None:
            assert billed == 0 or row.end_unproven is False
            assert billed == 0
            return
        meter = cloud.billed(row.name)
        ordered_after = machine.created_at - self.intended_at[row.name]
        if cloud.kept > 100:
            # A list is as old as the sweep that works on it: "ended so long ago" is said before it is written down.
            assert meter - cloud.lag - 1e-6 <= billed <= meter + ordered_after + self.swept_for + 1e-6
        elif row.seen:
            assert billed >= meter - cloud.lag - 1e-6

    # the model

    def _bills(self, ahead: Lease | None = None) -> Iterator[tuple[Any, list[Any]]]:
        """Every instance's row with its leases, oldest first; `ahead` is written, or renewed, for a TTL from now."""
        with self.fleet_db.engine.connect() as connection:
            rows = {row["name"]: dict(row) for row in connection.execute(sa.select(INSTANCES)).mappings()}
            query = sa.select(LEASES).order_by(LEASES.c.instance, LEASES.c.epoch)
            leases = [dict(lease) for lease in connection.execute(query).mappings()]
        if ahead is not None:
            new = {"created_at": self.clock.now, "ended_at": None, "machine_id": None, "seen_at": None, "clock": 60}
            rows.setdefault(ahead.instance, {**new, "name": ahead.instance, "price_per_hour": OFFER.price_per_hour})
            known = [one for one in leases if (one["instance"], one["epoch"]) == (ahead.instance, ahead.epoch)]
            if not known:
                known = [{"instance": ahead.instance, "dataset": ahead.dataset, "acquired_at": self.clock.now}]
                leases += known
            known[0] |= {"expires_at": self.clock.now + TTL, "released_at": None}
        for row in rows.values():
            yield row, [lease for lease in leases if lease["instance"] == row["name"]]

    def _spent(self, dataset: str, since: float, *, ahead: Lease | None = None, reserve: float | None = None) -> float:
        """US dollars; with `reserve`, until everything could have ended that many seconds after its leases."""
        total = 0.0
        for row, leases in self._bills(ahead):
            end = self.clock.now if row["ended_at"] is None else row["ended_at"]
            if row["ended_at"] is not None and row["machine_id"] is None and row["seen_at"] is None:
                end = row["created_at"]
            begins = [lease["acquired_at"] for lease in leases[1:]] + [end]
            rate = row["price_per_hour"] / 3600 * row["clock"]
            for lease, until in zip(leases, begins, strict=True):
                if lease["dataset"] == dataset:
                    began = max(lease["acquired_at"], row["created_at"], since)
                    total += rate * max(0.0, min(until, end) - began)
            if reserve is not None and row["ended_at"] is None and leases[-1]["dataset"] == dataset:
                ends = [one["expires_at"] for one in leases if one["released_at"] is None]
                total += rate * (reserve + max(0.0, max(ends, default=0.0) - self.clock.now))
        return total

    def _fits(self, dataset: str | None, ahead: Lease, more_usd: float = 0.0, drain_seconds: float = 0.0) -> bool:
        """Whether the dataset's budget pays for this lease, too."""
        if dataset != "d" or not self.request or self.budget_usd is None:
            return True
        bound = self._spent("d", self.since, ahead=ahead, reserve=END_SECONDS + drain_seconds)
        FleetMachine.steps["over budget"] += bound + more_usd > self.budget_usd
        return bound + more_usd <= self.budget_usd

    def _payer(self, instance: str) -> str | None:
        leases = next((leases for row, leases in self._bills() if row["name"] == instance), [])
        return leases[-1]["dataset"] if leases else None

    def _granted(self, lease: Lease) -> None:
        before = [one.lease.epoch for one in self.handles if one.lease.instance == lease.instance]
        assert lease.epoch == max(before, default=0) + 1, "epochs grow"
        self.handles.append(Handle(lease, self.clock.now + TTL))

    def _live(self, *, instance: str | None = None, dataset: str | None = None) -> list[Handle]:
        return [
            one
            for one in self.handles
            if one.live(self.clock.now)
            and instance in (None, one.lease.instance)
            and dataset in (None, one.lease.dataset)
        ]

    def _pick(self, n: int) -> Handle | None:
        """A handle; mostly a live one, sometimes a zombie."""
        candidates = (n % 4 and self._live()) or self.handles
        return candidates[n // 4 % len(candidates)] if candidates else None

    def _row(self, handle: Handle) -> Instance:
        row = self.fleet_db.instance(handle.lease.instance)
        assert row is not None
        return row

    def _cloud(self, handle: Handle) -> Cloud:
        provider = self._row(handle).provider
        return next(cloud for cloud in self.clouds if cloud.name == provider)

    def _fenced(self, handle: Handle) -> bool:
        """The fleet's database must accept this holder's writes now, and only now."""
        return handle.live(self.clock.now)

    def _release(self, handle: Handle, *, retire: bool) -> None:
        expected = self._fenced(handle)
        assert self.fleet_db.release(handle.lease, reason="given back", retire=retire) == expected
        handle.over |= expected
        if expected and retire and not self._live(instance=handle.lease.instance):
            assert self._row(handle).state in ("ending", "ended")

    @contextlib.contextmanager
    def _fault(self, handle: Handle, fate: str | None) -> Iterator[None]:
        cloud = self._cloud(handle)
        before, cloud.fault = cloud.fault, lambda call: fate
        try:
            yield
        finally:
            cloud.fault = before

    def _believe_the_book(self) -> None:
        """A sweep may take a lease away for one reason only: its machine is no more."""
        for handle in self._live():
            row = self._row(handle)
            if handle.lease in (row.lease, *row.draining):
                continue
            assert row.state == "ended"
            assert not self._cloud(handle).machines[row.name].alive
            handle.over = True


@pytest.mark.slow
def test_whatever_happens_in_any_order_one_holds_an_instance_nothing_is_forgotten_and_the_books_are_right():
    run_state_machine_as_test(FleetMachine, settings=_settings(6, 30))


@pytest.mark.soak("fleet")
@pytest.mark.timeout(600)
def test_the_same_holds_over_many_more_steps():
    FleetMachine.steps.clear()
    examples = 220 if SOAK else 70
    run_state_machine_as_test(FleetMachine, settings=_settings(examples, 50))
    assert FleetMachine.steps["steps"] > 40 * examples
    # Which examples are tried depends on the modules that are imported, too: Hypothesis takes constants from them.
    # Drains before a budget ends are few, or none; test_budget.py has them by themselves.
    assert FleetMachine.steps["stopped"] + FleetMachine.steps["drained"] > 5
    assert FleetMachine.steps["over budget"] > 5


def _settings(examples: int, steps: int) -> settings:
    """The same steps each time, so that a failure is a change's; `BATCH_ASSETS_SOAK=1` looks for new ones."""
    return settings(
        derandomize=not SOAK,
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
