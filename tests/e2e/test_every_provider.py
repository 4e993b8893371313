"""All providers in one fleet under seeded faults: every row once, a true bill at each, and nothing rented left over."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support.ssh_hosts import missing
from support.timing import PATIENCE

from e2e.customer import Customer
from e2e.every_provider import HOUR, EveryProvider, every_provider
from e2e.harness import eventually, platform
from e2e.nemesis import KINDS, Fault, Nemesis
from e2e.test_nemesis import SLACK_SECONDS, SPEC, SWEEP_SECONDS, published
from e2e.witness import ANSWERED, check_rows, fence_broken, watch_fence
from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.fleet_database.reaper import sweep
from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import EngineOrder, Provider, ProviderUnclear, open_access
from gpu_runner.providers.engine_process import answers
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import FaultRule, SimulatedCloudConfig
from gpu_runner.reachability import Reachability
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.resource import GpuFleet

pytestmark = pytest.mark.soak("providers")

# The same seed commits the same faults in the same order: BATCH_ASSETS_TEST_SEED=…
SEED = int(os.environ.get("BATCH_ASSETS_TEST_SEED") or random.randrange(1_000_000))
# At most; a quiet machine has committed all of them after some 90 s, and is done soon after.
PAUSE, RAGE_SECONDS, REST_SECONDS = 2.5, 180 * PATIENCE, 240 * PATIENCE
LEAST_FAULTS = 8  # a machine that does much else gets to fewer within the time
NOTHING_SECONDS = 90  # for so long nothing of what is planned could be committed: machines of a kind may not come again
IDLE_SECONDS = 8.0
INSTANCES = 6  # as many as all providers have room for
BATCH_ROWS, BATCHES_PER_RUN = 20, 12
RUN_ROWS = BATCH_ROWS * BATCHES_PER_RUN
NOTICE_SECONDS = 10.0
CUT_SECONDS = 10.0
JOURNAL_SECONDS = 4 * PATIENCE  # two between writes of the journal, and longer on a machine that does much else

LIES = {
    "RunPod: reply lost": ("lost_reply", "create"),
    "RunPod: API error": ("error", "list"),
    "RunPod: empty list": ("empty_list", "list"),
    "RunPod: deaf terminate": ("deaf_terminate", "terminate"),
}
EC2_FAULTS = {
    "EC2: reply lost": "create: lost",
    "EC2: list unavailable": "list: unavailable",
}
MACHINES = (
    *("EC2: VM taken", "EC2: VM taken with notice", "RunPod: engine killed", "ssh: engine killed", "ssh: host cut off"),
    *("local: host killed", "simulated: host killed"),
)
OURS = ("run worker killed", "daemon killed", "code server killed", "reaper killed")
SIMULATED = ("create: reply lost", "API error", "empty list", "deaf terminate")
EVERY = dict.fromkeys((*MACHINES, *LIES, *EC2_FAULTS, *OURS, *SIMULATED), 1)


@dataclass(eq=False)
class FleetNemesis(Nemesis):
    """Hits the machines of every provider, and their APIs."""

    sites: EveryProvider | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.sites is not None
        self._there = self.sites
        self._later: list[tuple[float, Callable[[], None]]] = []

    def look(self, *, grow: bool = True) -> None:
        self._there.look()
        for due, act in [one for one in self._later if time.time() >= one[0]]:
            self._later.remove((due, act))
            act()
        super().look(grow=grow)

    def rage(self, seconds: float) -> None:
        """Commit what is planned, as far as there is something to be hit within so long."""
        deadline = time.time() + seconds
        next_at, last = time.time() + 5, time.time()
        while self._plan and time.time() < deadline:
            self.look()
            if time.time() >= next_at:
                planned = len(self._plan)
                self._commit(self._plan.pop())
                next_at = time.time() + self.rng.uniform(0.3, 1.7) * self.pause
                last = time.time() if len(self._plan) < planned else last
            if len(self.faults) >= LEAST_FAULTS and time.time() > last + NOTHING_SECONDS:
                break
            time.sleep(0.1)
        print(f"not committed: {self._plan}", flush=True)

    def rest(self, done: Callable[[], bool], seconds: float) -> None:
        self._there.ec2.faults.clear()
        self._there.runpod.rules.clear()
        super().rest(lambda: not self._later and done(), seconds)

    def hits(self) -> dict[str, Callable[[], Fault | None]]:
        """Kinds of the other nemesis, and those of each provider."""
        own: dict[str, Callable[[], Fault | None]] = {
            "EC2: VM taken": lambda: self._take_vm(notice=False),
            "EC2: VM taken with notice": lambda: self._take_vm(notice=True),
            "RunPod: engine killed": self._kill_pod_engine,
            "ssh: engine killed": self._kill_host_engine,
            "ssh: host cut off": self._cut_host,
            "local: host killed": lambda: self._kill_host_of("local"),
            "simulated: host killed": lambda: self._kill_host_of("sim-a"),
        }
        lies = {kind: lambda kind=kind: self._runpod_lies(kind) for kind in LIES}
        ec2 = {kind: lambda kind=kind: self._ec2_fails(kind) for kind in EC2_FAULTS}
        return super().hits() | own | lies | ec2

    def _on(self, provider: str) -> Instance | None:
        """An instance of this provider that a run holds and whose engine has answered."""
        found = [one for one in self.fleet_db.fleet() if one.provider == provider and one.state == "ready"]
        found = [one for one in found if one.lease is not None and not one.retiring and one.notice_seconds is None]
        return self.rng.choice(found) if found else None

    def _lost(self, kind: str, one: Instance) -> Fault:
        """A machine that its run leaves: its range goes on, and in the fleet's database it ends."""
        beats = [beat for beat in self.fleet_db.runs() if one.lease is not None and beat.run_id == one.lease.run_id]
        continued = self.recovery.continued(beats)

        def over() -> bool:
            found = self.fleet_db.instance(one.name)
            return found is not None and found.state == "ended" and continued()

        return Fault(kind, one.name, time.time(), over, instances=frozenset([one.name]))

    def _take_vm(self, *, notice: bool) -> Fault | None:
        if (one := self._on("aws")) is None or (notice and not one.spot):
            return None
        if not notice:
            self._there.ec2.take(one.name)
            return self._lost("EC2: VM taken", one)
        site = self._there.ec2
        site.interrupt(one.name, time.time() - 120 + NOTICE_SECONDS)
        self._later.append((time.time() + NOTICE_SECONDS, lambda: site.take_if_running(one.name)))
        return self._lost("EC2: VM taken with notice", one)

    def _kill_pod_engine(self) -> Fault | None:
        """Its container is gone, and the pod is billed on until the fleet ends it."""
        if (one := self._on("runpod")) is None:
            return None
        for pod in self._there.runpod.named(one.name):
            pod.engine.close()
        return self._lost("RunPod: engine killed", one)

    def _kill_host_engine(self) -> Fault | None:
        if (one := self._on("lab")) is None or one.machine_id is None:
            return None
        for process in self._there.hosts.processes(one.machine_id):
            with contextlib.suppress(psutil.Error):
                process.kill()
        return self._lost("ssh: engine killed", one)

    def _cut_host(self) -> Fault | None:
        if (one := self._on("lab")) is None:
            return None
        self._there.hosts.do("cut", 1)
        self._later.append((time.time() + CUT_SECONDS, lambda: self._there.hosts.do("heal", 1)))
        return self._lost("ssh: host cut off", one)

    def _kill_host_of(self, provider: str) -> Fault | None:
        if (one := self._on(provider)) is None:
            return None
        record = next((record for record in self.register.machines() if record.name == one.name), None)
        return None if record is None else self._kill_record(f"{provider}: host killed", record)

    def _runpod_lies(self, kind: str) -> Fault:
        site, (fault, call) = self._there.runpod, LIES[kind]
        site.fault(fault, call)
        number = len(site.rules) - 1
        return Fault(kind, call, time.time(), lambda: bool(site.hits.get(number)) or number >= len(site.rules))

    def _ec2_fails(self, kind: str) -> Fault:
        site, fault = self._there.ec2, EC2_FAULTS[kind]
        site.faults.append(fault)
        return Fault(kind, fault, time.time(), lambda: fault not in site.faults)


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_all_providers_at_once_under_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"\nnemesis: BATCH_ASSETS_TEST_SEED={SEED}, {len(EVERY)} faults", flush=True)
    monkeypatch.setattr("batch_assets.local_dagster.stack.RESTARTS", 1000)
    monkeypatch.setenv("BATCH_ASSETS_CAPACITY_SECONDS", "3")
    source = tmp_path / "source.jsonl"
    source.touch()
    rows = {"batch_rows": BATCH_ROWS, "batches_per_run": BATCHES_PER_RUN, "max_instances": INSTANCES}
    spec = {**SPEC, **rows, "source": {"path": str(source)}}
    with every_provider(tmp_path) as sites:
        home, config = sites.home, sites.fleet(SEED, IDLE_SECONDS)
        watch_fence(home / "fleet.db")
        cloud = SimulatedCloud(home, SimulatedCloudConfig.model_validate(config["simulated"]))
        with platform(tmp_path, monkeypatch, spec, simulator=None, fleet=config) as site:
            customer = Customer(site, source, 5 * RUN_ROWS, 2 * RUN_ROWS)
            demon = FleetNemesis(site, cloud, customer, SEED, len(EVERY), PAUSE, kinds=EVERY, sites=sites)
            with contextlib.closing(demon):
                customer.grow()
                demon.rage(RAGE_SECONDS)
                demon.rest(lambda: published(site, customer.rows), REST_SECONDS)
            assert len(demon.faults) >= LEAST_FAULTS
            table = site.published_rows()
            assert sorted(line["row_id"] for line in table) == sorted(f"r{one:06d}" for one in range(customer.rows))
            found = check_rows(site.store, home)
            assert found.rows == customer.rows and found.dead == []
            eventually(lambda: sites.look() or not standing(home), 60, "the end of all instances")
        print(demon.table())
        eventually(lambda: sites.look() or not sites.left(), 30, "the end of all machines")
        assert demon.objects.wrong == [] and fence_broken(home / "fleet.db") == []
        compare_meters_after_faults(sites, demon.faults)
        early, again = asked_again(home, demon.faults)
        print(f"{customer.rows} rows, {again} asked again, {found.asked_again} answered again")
        assert early == []


HELD_SECONDS = 40.0
# An order's or an end's way on a busy machine. RunPod lists no pod that has ended, so that its end is what sweeps see.
WAY_SECONDS = 4 * PATIENCE
USED_PROVIDERS = 4
LOOK_SECONDS = 0.5 * PATIENCE  # per machine: the way of an order to a busy host
WHOLE_SECONDS = {"aws": 1.0}  # EC2 says the times of a VM without their fractions


@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_the_books_of_a_fleet_of_every_provider_agree_with_each_meter(tmp_path: Path) -> None:
    """One instance of each, with a lost or refused call on the way; without Dagster."""
    with every_provider(tmp_path) as sites, contextlib.ExitStack() as ends:
        config = FleetConfig.model_validate(sites.fleet(1, IDLE_SECONDS))
        providers = GpuFleet(database="", home=str(sites.home), config_path="").providers(config)
        fleet_db = ends.enter_context(contextlib.closing(FleetDatabase(f"sqlite:///{sites.home}/fleet.db")))
        tag, leases = fleet_db.tag(), []
        sites.ec2.faults.append("list: unavailable")
        sites.runpod.fault("empty_list", "list")
        for provider in providers.values():
            offer = min(provider.offers(), key=lambda one: one.price_per_hour)
            lease = fleet_db.intend(
                fleet_db.new_name(), offer, clock=1, engine_key="key", model="m", run_id="run", dataset="d", ttl=900,
                limit=None,
            )  # fmt: skip
            assert lease is not None
            machine_id = eventually(lambda p=provider, o=offer, le=lease: _created(p, o, le.instance), 30, offer.name)
            assert fleet_db.created(lease, machine_id, just_now=True)
            machine = provider.wait_ready(lease.instance, 60, lambda seconds: (time.sleep(seconds), sites.look())[0])
            access = open_access(provider, lease.instance, machine.endpoint or "")
            assert answers(access.endpoint) and access.reachability() is Reachability.OPEN
            access.close()
            assert fleet_db.ready(lease, machine.endpoint or "", machine.max_num_seqs)
            leases.append(lease)
        until = time.time() + HELD_SECONDS
        eventually(lambda: sites.look() or time.time() > until, 60, "the time to pass", every=0.1)
        assert all(fleet_db.release(lease, retire=True) for lease in leases)

        def swept() -> bool:
            sites.look()
            sweep(fleet_db, list(providers.values()), tag=tag, idle_seconds=0)
            return not fleet_db.fleet()

        eventually(swept, 60, "the end of all instances")
        eventually(lambda: sites.look() or not sites.left(), 30, "the end of all machines", every=0.05)
        assert len(providers) == len(leases) == 5
        compare_meters(sites)


@dataclass(frozen=True)
class Booking:
    """A machine. Seconds: `billed` by its provider's meter, `booked` by the fleet's database."""

    provider: str
    name: str
    billed: float
    booked: float

    @property
    def off(self) -> float:
        return self.booked - self.billed


def _created(provider: Provider, offer: Offer, name: str) -> str | None:
    """The machine's id; None where the order has to be repeated."""
    with contextlib.suppress(ProviderUnclear):
        return provider.create(offer, name, EngineOrder("m", "chat", 8))
    return None


def standing(home: Path) -> list[str]:
    """Instances that have not ended, by the fleet's database."""
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        return [one.name for one in fleet_db.fleet()]


def bookings(sites: EveryProvider) -> list[Booking]:
    """Each machine that its provider billed, beside what the fleet's database says of it."""
    with contextlib.closing(FleetDatabase(f"sqlite:///{sites.home}/fleet.db")) as fleet_db:
        known = {one.name: one for one in fleet_db.fleet(ended=True)}
        usd = {cost.name: cost.usd.total for cost in fleet_db.costs() if cost.usd.total}
    names = sites.names() | {one.machine_id: one.name for one in known.values() if one.machine_id is not None}
    billed: dict[tuple[str, str], float] = defaultdict(float)
    for provider, machines in sites.seconds().items():
        for machine_id, seconds in machines.items():
            billed[provider, names[machine_id]] += seconds
    found = []
    for (provider, name), seconds in billed.items():
        one = known[name]
        found.append(Booking(provider, name, seconds, usd.pop(name, 0.0) * HOUR / one.price_per_hour))
        print(f"  {provider} {name}: {seconds:.2f} s, booked {found[-1].off:+.2f} s; {one.reason}")
    assert not usd, f"booked, and billed by nobody: {usd}"
    return found


def compare_meters(sites: EveryProvider) -> None:
    """Each provider's own meter against the fleet's database: within 1 %."""
    found = bookings(sites)
    for provider in sites.seconds():
        mine = [one for one in found if one.provider == provider]
        billed, off = sum(one.billed for one in mine), sum(one.off for one in mine)
        print(f"{provider}: billed {billed:.2f} s, booked {off:+.2f} s, {off / billed:+.2%}")
        near = LOOK_SECONDS + WHOLE_SECONDS.get(provider, 0.0)
        assert abs(off) <= 0.01 * billed + near * len(mine), provider


def compare_meters_after_faults(sites: EveryProvider, faults: list[Fault]) -> None:
    """Each machine's bill, as exactly as is known on a busy machine: what a fault hid of its end is booked, too."""
    took = {name: fault.took or 0.0 for fault in faults for name in fault.instances}
    found = bookings(sites)
    assert len({one.provider for one in found}) >= USED_PROVIDERS
    for one in found:
        hidden = took.get(one.name, 0.0) + (SWEEP_SECONDS + SLACK_SECONDS if one.provider == "runpod" else 0.0)
        near = 0.01 * one.billed + WAY_SECONDS
        assert -near <= one.off <= near + hidden, one


def asked_again(home: Path, faults: list[Fault]) -> tuple[list[str], int]:
    """Rows that an engine had answered, long before a fault hit it, and that were asked again; and all asked again.

    An engine that is cut off goes on: what it had been asked before, and answers then, nobody hears.
    """
    ports = {}
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        for one in fleet_db.fleet(ended=True):
            ports[urlsplit(one.endpoint or "").port] = one.name
    received: dict[str, list[tuple[float, str]]] = defaultdict(list)
    done: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for file in home.glob("*.requests"):
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed engine
                event: dict[str, Any] = json.loads(line)
                if event["event"] == "received":
                    received[event["prompt"]].append((event["t"], file.stem))
                elif event["outcome"] in ANSWERED:
                    done[event["prompt"]].append((event["t"], file.stem))
    early = []
    for prompt, ends in done.items():
        for at, engine in sorted(ends)[:-1]:
            asked = max(then for then, where in received[prompt] if where == engine and then <= at)
            if not any(asked - 1 < fault.at < at + JOURNAL_SECONDS for fault in faults if fault.instances):
                early.append(f"{prompt[:8]} was answered by {engine} at {at:.1f}, and asked again")
    return early, sum(len(asked) - 1 for asked in received.values())


def test_every_kind_is_one_that_the_nemesis_can_commit() -> None:
    assert set(SIMULATED) | set(OURS) <= set(KINDS)
    assert all(FaultRule(kind=kind, calls=(call,), times=1) for kind, call in LIES.values())  # type: ignore[arg-type]
