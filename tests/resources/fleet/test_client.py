"""A run's dealings with the fleet, on a small simulated cloud with real engine processes."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.machines import H100, ended_machines, part, processes, simulated_cloud
from support.processes import command_line
from support.timing import PATIENCE

from gpu_runner.fleet_database.capacity_plan import Assignment, CapacityPlan, Pause, PauseKind
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError, Lease
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import WaitKind
from gpu_runner.offers.offer import OfferFilter
from gpu_runner.offers.selection import FailureKind
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Workload
from gpu_runner.providers.base import EngineAccess, Machine, Provider, ProviderUnclear
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import FaultRule
from resources.engine_options import EngineOptions
from resources.fleet.client import FAILED_STARTS, FleetClient, NoInstanceStarted, ProvisioningFailed
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.leased_engine import LeasedEngine, LeaseSignals
from resources.fleet.resource import GpuFleet, Requirement
from resources.fleet.warm_instances import RETRY_SECONDS
from resources.pricing.market import Market
from resources.pricing.model_catalog import DeclaredModel

TTL = 10.0
WORK = Workload(100_000, 100_000, LengthMix(200, 200), 2_000, "measured", "measured")
NEED = Requirement("d", "tiny", "chat", work=lambda: WORK)
CHEAP = {"instance_type": "cheap", "gpu": "H100", "price_per_hour": 1.8}


class GaveUp(Exception):
    """Somebody canceled."""


@dataclass
class FleetRuns:
    """A cloud, the fleet's database, and the hands of some runs."""

    home: Path
    cloud: SimulatedCloud
    fleet_db: FleetDatabase
    said: list[str] = field(default_factory=list)

    def client(self, run_id: str = "run", heartbeat: Heartbeat | None = None) -> FleetClient:
        """A run that the fleet's database knows; its heartbeat does not run, the leases last long enough."""
        heartbeat = heartbeat or Heartbeat(self.fleet_db, run_id, ttl=60)
        self.fleet_db.begin_run(run_id, "d", "00000", "00009")
        providers = dict(self.cloud.providers)
        config = FleetConfig(simulated=self.cloud.config, start_seconds=600)
        market = Market(tuple(providers.values()), simulated=list(providers))
        return FleetClient(
            config, providers, market, self.fleet_db, heartbeat, lambda *_: pytest.fail("nothing stands")
        )

    def acquire(self, client: FleetClient, need: Requirement = NEED, **more: Any) -> LeasedEngine:
        """Wait at most 30 s for an engine."""
        deadline = time.monotonic() + 30 * PATIENCE

        def pause(seconds: float) -> None:
            if time.monotonic() > deadline:
                raise GaveUp
            time.sleep(min(seconds, 0.05))

        return client.acquire(need, say=self.said.append, pause=pause, **more)

    def waits(self, client: FleetClient, kind: WaitKind, need: Requirement = NEED) -> str:
        """It asks once, must wait for this, and says why."""

        def give_up(_: float) -> None:
            raise GaveUp

        with pytest.raises(GaveUp):
            client.acquire(need, say=self.said.append, pause=give_up)
        assert client.heartbeat.activity.wait is not None
        assert client.heartbeat.activity.wait.kind is kind
        return client.heartbeat.activity.note

    def running(self) -> list[str]:
        """Names of machines that bill."""
        machines = [one for provider in self.cloud.providers.values() for one in provider.list("")]
        return [one.name for one in machines if one.state != "ended"]


@contextlib.contextmanager
def a_site(home: Path, **provider: Any) -> Iterator[FleetRuns]:
    with ended_machines(home), contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        yield FleetRuns(home, simulated_cloud(home, **provider), fleet_db)


@pytest.fixture(autouse=True)
def offers_are_always_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the market keeps an answer for two seconds."""
    monkeypatch.setattr("resources.pricing.market.OFFERS_SECONDS", 0.0)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FleetRuns]:
    with a_site(tmp_path, offers=[H100, CHEAP]) as found:
        yield found


@pytest.mark.slow
def test_an_instance_is_handed_on_only_to_who_needs_an_engine_that_was_started_so(site: FleetRuns):
    a, b = ({"name": name, "path": f"/{name}"} for name in "ab")
    plain = {"reasoning_parser": "qwen3", "max_num_seqs": 4}
    one = EngineOptions.model_validate({**plain, "lora": a, "lora_modules": [b]})
    other = EngineOptions.model_validate({**plain, "lora": b, "lora_modules": [a]})
    need = replace(NEED, engine=one, declared=DeclaredModel(None, served=one.served))
    first = site.client("one")
    leased = site.acquire(first, need)
    (machine,) = site.cloud.providers["sim-a"].list("")
    line = part(machine.id, "gpu_runner.simulator").cmdline()
    assert tuple(line[-len(one.arguments()) :]) == one.arguments() and leased.max_num_seqs == 4
    first.release(leased)
    second = site.client("two")
    again = site.acquire(second, replace(need, engine=other))
    assert again.name == leased.name, "the adapter that is asked is in it"
    second.release(again)
    assert site.acquire(site.client("three")).name != leased.name


def test_the_cheapest_offer_is_rented_and_the_next_run_gets_it_warm_without_a_second_boot(site: FleetRuns):
    first = site.client("one")
    leased = site.acquire(first)
    assert (leased.instance_type, leased.epoch) == ("cheap", 1)
    first.release(leased)
    again = site.acquire(site.client("two"))
    assert (again.name, again.epoch) == (leased.name, 2)
    assert len(site.fleet_db.fleet(ended=True)) == 1
    assert len(site.cloud.calls("create")) == 1


class Tunnels:
    """The provider's calls, and a way of its own to each engine: counted, with a key; none where `broken`."""

    def __init__(self, provider: Provider) -> None:
        self._provider, self.opened, self.closed, self.broken = provider, 0, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def access(self, name: str, endpoint: str) -> EngineAccess:
        if self.broken:
            raise ProviderUnclear("no way through")
        self.opened += 1
        return EngineAccess(endpoint.replace("127.0.0.1", "localhost"), f"key of {name}", self._close)

    def _close(self) -> None:
        self.closed += 1


def test_an_engine_is_reached_the_way_its_provider_opens_and_the_way_is_closed_with_the_lease(site: FleetRuns):
    tunnels = {name: Tunnels(provider) for name, provider in site.cloud.providers.items()}
    site.cloud.providers = tunnels  # type: ignore[assignment]
    (way,) = tunnels.values()
    for number, run_id in enumerate(["one", "two"]):  # rented, then warm
        client = site.client(run_id)
        leased = site.acquire(client)
        assert leased.endpoint.startswith("http://localhost:")
        assert leased.api_key == f"key of {leased.name}"
        assert leased.api_key not in repr(leased)
        assert (way.opened, way.closed) == (way.opened, way.opened - 1)
        client.release(leased)
        assert way.closed == way.opened > number
    assert len(site.cloud.calls("create")) == 1


def test_what_became_of_a_lost_engine_is_in_the_books_or_asked_of_its_provider(site: FleetRuns):
    class Diagnosing(Tunnels):
        def diagnose(self, name: str) -> str:
            return f"{name} is on a node without power"

    site.cloud.providers = {name: Diagnosing(one) for name, one in site.cloud.providers.items()}  # type: ignore[misc]
    client = site.client()
    leased = site.acquire(client)
    assert client.why_lost(leased) == f"{leased.name} is on a node without power"
    site.fleet_db.ended(leased.name, 0.0, "out of memory")
    assert client.why_lost(leased) == "out of memory"


@pytest.mark.slow
def test_an_instance_that_cannot_be_reached_is_ended(tmp_path: Path):
    offers = [H100, CHEAP, {**CHEAP, "instance_type": "third"}]  # one that failed is not tried again for a minute
    with a_site(tmp_path, offers=offers) as site:
        tunnels = {name: Tunnels(provider) for name, provider in site.cloud.providers.items()}
        site.cloud.providers = tunnels  # type: ignore[assignment]
        (way,) = tunnels.values()
        way.broken = True
        with pytest.raises(NoInstanceStarted, match="cannot be reached from here: no way through"):
            site.acquire(site.client())
        assert site.running() == []


def test_warm_instances_that_cannot_be_reached_from_here_go_on_for_as_long_as_idle_ones_wait(site: FleetRuns):
    leased = site.acquire(first := site.client())
    first.release(leased)
    tunnels = {name: Tunnels(provider) for name, provider in site.cloud.providers.items()}
    site.cloud.providers = tunnels  # type: ignore[assignment]
    (way,) = tunnels.values()
    way.broken = True
    second = site.client("two")
    now = [0.0]
    second._warm_instances._clock = lambda: now[0]

    def tried() -> list[str]:
        with contextlib.closing(sqlite3.connect(site.home / "fleet.db")) as database:
            (before,) = database.execute("select max(epoch) from leases").fetchone()
            assert second._warm(NEED, 9, None) is None
            return [line[0] for line in database.execute("select reason from leases where epoch > ?", [before])]

    assert tried() == ["it cannot be reached from here"]
    assert site.running() == [leased.name] and site.fleet_db.instance(leased.name).state == "ready"
    assert tried() == []  # it is left alone for a while
    now[0] = RETRY_SECONDS
    way.broken = False
    again = second._warm(NEED, 9, None)
    assert again is not None and again.name == leased.name
    second.release(again)
    way.broken = True
    assert tried() == ["it cannot be reached from here"]
    now[0] += second.config.idle_minutes * 60
    assert tried() == ["it cannot be reached from here"]
    assert site.running() == []


@pytest.mark.slow
def test_another_model_never_gets_a_warm_instance_of_this_one(site: FleetRuns):
    client = site.client()
    leased = site.acquire(client)
    client.release(leased)
    other = site.acquire(site.client("two"), replace(NEED, model="another"))
    assert other.name != leased.name
    assert {one.model for one in site.fleet_db.fleet()} == {"tiny", "another"}


def test_a_dataset_waits_visibly_for_more_than_its_instances_and_takes_over_what_is_handed_on(site: FleetRuns):
    first, second = site.client("one"), site.client("two")
    leased = site.acquire(first)
    assert site.waits(second, WaitKind.DATASET_LIMIT) == "waiting: d already holds all instances it may lease"
    assert first.begin_handover(leased)
    taken = site.acquire(second)
    assert (taken.name, taken.epoch) == (leased.name, leased.epoch + 1)
    assert site.fleet_db.renew(leased.lease, TTL)  # its last rows are still being answered
    first.release(leased)
    assert site.fleet_db.instance(taken.name).lease == taken.lease


def test_who_holds_all_instances_is_named_the_fleet_or_the_dataset_itself(
    site: FleetRuns, monkeypatch: pytest.MonkeyPatch
):
    site.acquire(site.client("one"))
    second = site.client("two")
    second.config = second._orders.config = second.config.model_copy(update={"max_instances": 1})
    other = replace(NEED, dataset="e")
    assert site.waits(second, WaitKind.FLEET_LIMIT, other) == (
        "waiting: the fleet holds all 1 instances that it may have"
    )
    # Another run of the dataset was quicker, between the question and the order.
    monkeypatch.setattr(second._orders, "rent", lambda *_, **__: None)
    assert site.waits(second, WaitKind.DATASET_LIMIT, other) == "waiting: e already holds all instances it may lease"


@pytest.mark.slow
def test_runs_with_all_rows_in_flight_at_once_do_not_pile_up_while_the_fleet_may_grow(tmp_path: Path):
    with a_site(tmp_path, offers=[{**CHEAP, "capacity": 2}]) as site:
        site.fleet_db.begin_request("d", "r")
        site.fleet_db.command("d", "r", 3, [])
        held = []
        for number in range(4):  # ranges smaller than an engine's window: each hands on as soon as it has begun
            client = site.client(f"run-{number}")
            held.append(site.acquire(client))
            assert client.begin_handover(held[-1])
        first, second = held[0].name, held[1].name
        assert first != second
        # A third instance is not to be had: what stands is shared equally.
        assert sorted(one.name for one in held) == sorted([first, first, second, second])
        assert sorted(site.running()) == sorted([first, second])


def test_at_the_commanded_number_all_runs_share_what_stands(site: FleetRuns):
    names = set()
    for number in range(4):
        client = site.client(f"run-{number}")
        leased = site.acquire(client)
        names.add(leased.name)
        assert client.begin_handover(leased)
    assert len(names) == 1


def test_without_capacity_the_next_offer_is_taken_and_the_failure_is_remembered(tmp_path: Path):
    with a_site(tmp_path, offers=[H100, {**CHEAP, "capacity": 0}]) as site:
        leased = site.acquire(site.client())
        assert leased.instance_type == "h100"


def test_a_create_whose_answer_is_lost_is_found_again_and_billed_once(site: FleetRuns):
    site.cloud.inject(FaultRule(kind="lost_reply", calls=("create",), times=1))
    leased = site.acquire(site.client())
    assert site.running() == [leased.name]
    assert len(site.fleet_db.fleet(ended=True)) == 1


def test_a_create_without_answer_and_without_effect_is_given_up_and_another_one_made(site: FleetRuns):
    site.cloud.inject(FaultRule(kind="time_out", calls=("create",), times=1))
    leased = site.acquire(site.client())
    assert site.running() == [leased.name]
    assert site.fleet_db.offer_failures(3600)


@pytest.mark.slow
def test_engines_that_never_come_up_end_the_search_and_leave_nothing_rented(tmp_path: Path):
    offers = [{**H100, "instance_type": f"type-{i}", "price_per_hour": 2 + i / 10} for i in range(4)]
    with a_site(tmp_path, offers=offers, faults=[{"kind": "boot_fails"}]) as site:
        with pytest.raises(EngineStartError, match="3 instances in a row did not start"):
            site.acquire(site.client())
        assert site.running() == []
        assert [one.state for one in site.fleet_db.fleet(ended=True)] == ["ended"] * 3


@pytest.mark.slow
def test_where_nothing_comes_up_what_stands_and_drains_is_shared(tmp_path: Path):
    offers = [{**H100, "instance_type": f"type-{i}", "price_per_hour": 2 + i / 10} for i in range(4)]
    with a_site(tmp_path, offers=offers) as site:
        site.fleet_db.begin_request("d", "r")
        site.fleet_db.command("d", "r", 2, [])
        first, second = site.client("one"), site.client("two")
        leased = site.acquire(first)
        assert first.begin_handover(leased)
        site.cloud.inject(FaultRule(kind="boot_fails"))
        assert site.acquire(second).name == leased.name
        assert site.running() == [leased.name]
        assert len(site.fleet_db.fleet(ended=True)) == 1 + FAILED_STARTS


@pytest.mark.slow
def test_where_nothing_comes_up_and_the_budget_does_not_pay_for_sharing_that_is_why_the_run_ends(tmp_path: Path):
    offers = [{**H100, "instance_type": f"type-{i}", "price_per_hour": 2 + i / 10} for i in range(4)]
    with a_site(tmp_path, offers=offers) as site:
        site.fleet_db.begin_request("d", "r", budget_usd=1000.0)
        site.fleet_db.command("d", "r", 2, [])
        first, second = site.client("one"), site.client("two")
        assert first.begin_handover(site.acquire(first))
        site.cloud.inject(FaultRule(kind="boot_fails"))

        def say(text: str) -> None:
            ended = [one for one in site.fleet_db.fleet(ended=True) if one.state == "ended"]
            if len(ended) == FAILED_STARTS and not text.startswith("renting"):
                site.fleet_db.override("d", budget_usd=0.01)

        with pytest.raises(NoInstanceStarted):
            second.acquire(NEED, say=say, pause=lambda seconds: time.sleep(min(seconds, 0.05)))


def test_giving_up_during_a_boot_ends_the_instance_at_once(tmp_path: Path):
    with a_site(tmp_path, boot_seconds=600_000) as site:
        client = site.client()

        def cancel(_: float) -> None:
            if site.running():
                raise GaveUp

        with pytest.raises(GaveUp):
            client.acquire(NEED, say=site.said.append, pause=cancel)
        assert site.running() == []
        assert site.fleet_db.fleet() == []
        assert site.fleet_db.leases_of("d") == 0


@pytest.mark.slow
def test_a_warm_instance_whose_engine_died_meanwhile_is_ended_and_a_new_one_rented(site: FleetRuns):
    client = site.client("one")
    leased = site.acquire(client)
    client.release(leased)
    machine = site.fleet_db.instance(leased.name)
    assert machine is not None
    assert machine.machine_id is not None
    engine = [process for process in processes(machine.machine_id) if "gpu_runner.simulator" in command_line(process)]
    for process in engine:
        process.kill()
    other = site.acquire(site.client("two"))
    assert other.name != leased.name
    assert site.running() == [other.name]


def test_a_machine_that_is_listed_as_ended_without_a_time_has_ended_for_good(site: FleetRuns):
    class Timeless(Tunnels):
        def list(self, tag: str) -> list[Machine]:
            return [replace(one, ended_seconds=None) for one in self._provider.list(tag)]

    site.cloud.providers = {name: Timeless(one) for name, one in site.cloud.providers.items()}  # type: ignore[misc]
    client = site.client()
    leased = site.acquire(client)
    site.fleet_db.missing(leased.name)  # a list that lagged behind
    client.release(leased, reason="moved", retire=True)
    (ended,) = site.fleet_db.fleet(ended=True)
    assert (ended.state, ended.end_unproven) == ("ended", False)


def test_a_rented_engine_is_given_back_when_the_one_beside_it_cannot_be(
    site: FleetRuns, monkeypatch: pytest.MonkeyPatch
):
    client = site.client()
    leased = site.acquire(client)
    beside = Lease("api/d", 1, "run", "d")
    leased.user = LeasedEngine("http://127.0.0.1:9", None, None, "vendor", "hosted", lease=beside)
    given_back = site.fleet_db.release

    def release(lease: Lease, *rest: Any, **more: Any) -> bool:
        if lease == beside:
            raise FleetDatabaseError("the database is silent")
        return given_back(lease, *rest, **more)

    monkeypatch.setattr(site.fleet_db, "release", release)
    with pytest.raises(FleetDatabaseError, match="silent"):
        client.release(leased)
    assert site.fleet_db.leases_of("d") == 0
    assert leased.user is None


@pytest.mark.slow
def test_a_retired_instance_is_ended_when_it_is_given_back_and_an_idle_one_by_the_reaper(site: FleetRuns):
    client = site.client()
    leased = site.acquire(client)
    client.release(leased, reason="moved", retire=True)
    assert site.running() == []
    again = site.acquire(client)
    client.release(again)
    fleet = GpuFleet(
        database=str(site.fleet_db.engine.url), home=str(site.home), config_path=str(site.home / "fleet.yaml")
    )
    (site.home / "fleet.yaml").write_text(
        f"idle_minutes: 0\nsimulated: {site.cloud.config.model_dump_json(exclude_none=True)}\n"
    )
    fleet.sweep(site.fleet_db)
    assert site.running() == []
    bills = {bill.name: bill.usd for bill in site.cloud.meter().bills()}
    for cost in site.fleet_db.costs():
        assert cost.usd.total == pytest.approx(bills[cost.name], rel=0.05, abs=0.03)  # 0.1 s of ours


@pytest.mark.slow
def test_a_move_is_decided_by_break_even_and_the_old_engine_is_kept_when_it_fails(site: FleetRuns):
    site.cloud.change("sim-a", "cheap", price_per_hour=9.0)
    client = site.client()
    leased = site.acquire(client)
    assert leased.instance_type == "h100"
    assert client.better(NEED, leased, 100_000) is None
    site.cloud.change("sim-a", "cheap", price_per_hour=0.9)
    decision = client.better(NEED, leased, 100_000)
    assert decision is not None
    assert decision.new.instance_type == "cheap"
    assert decision.saved_usd > 0
    assert "move and save" in decision.sentence
    assert client.better(replace(NEED, work=lambda: replace(WORK, rows=0)), leased, 100_000) is None
    new = client.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    assert len(site.running()) == 2
    client.release(leased, retire=True)
    assert site.running() == [new.name]
    site.cloud.inject(FaultRule(kind="no_capacity", calls=("create",)))
    with pytest.raises(ProvisioningFailed, match="sim-a"):
        client.move(NEED, new, decision, say=site.said.append, pause=time.sleep)


def test_offers_that_the_dataset_refuses_are_not_rented_and_it_says_why_it_waits(site: FleetRuns):
    said = site.waits(site.client(), WaitKind.NO_OFFER, replace(NEED, accept=OfferFilter(max_price_per_hour=0.5)))
    assert said.startswith("waiting: no suitable offer; ")
    assert "above 0.50" in said


@pytest.mark.slow
def test_a_lease_is_good_after_a_boot_that_took_longer_than_its_ttl(tmp_path: Path):
    with a_site(tmp_path, boot_seconds=1500) as site:  # 2.5 s of ours
        heartbeat = Heartbeat(site.fleet_db, "long", ttl=1.5, interval=0.2)
        client = site.client("long", heartbeat)
        with heartbeat.beating("d", "00000", "00009"):
            leased = site.acquire(client)
            assert heartbeat.check(leased.lease)
            assert leased.epoch == 1
            client.release(leased)


def test_the_resource_leases_for_a_block_and_gives_back_what_it_rented(site: FleetRuns):
    (site.home / "fleet.yaml").write_text(f"simulated: {site.cloud.config.model_dump_json(exclude_none=True)}\n")
    fleet = GpuFleet(
        database=str(site.fleet_db.engine.url), home=str(site.home), config_path=str(site.home / "fleet.yaml")
    )
    heartbeat = fleet.heartbeat(site.fleet_db, "run")
    with heartbeat.beating("d", "00000", "00009"), fleet.lease(NEED, site.fleet_db, heartbeat) as leased:
        assert site.fleet_db.holder(leased.name) == "run"
        assert heartbeat.check(leased.lease)
    assert site.fleet_db.holder(leased.name) is None
    assert site.fleet_db.instance(leased.name).state == "ready"


def test_with_a_capacity_of_zero_nothing_is_leased_and_the_run_says_why_it_is_paused(site: FleetRuns):
    client = site.client()
    site.fleet_db.begin_request("d", "r")
    site.fleet_db.command("d", "r", 0)
    assert site.waits(client, WaitKind.CAPACITY) == "waiting: capacity 0"
    site.fleet_db.command(
        "d", "r", 0, pause=Pause(PauseKind.BUDGET_REACHED, "budget of 12.00 $ reached (11.97 $ spent)")
    )
    assert site.waits(client, WaitKind.PAUSED) == "waiting: paused: budget of 12.00 $ reached (11.97 $ spent)"
    assert site.fleet_db.fleet(ended=True) == []
    site.fleet_db.command("d", "r", 1)
    assert site.acquire(client).instance_type == "cheap"


def test_what_the_budget_does_not_pay_for_is_not_rented_until_it_is_raised(site: FleetRuns):
    client = site.client()
    site.fleet_db.begin_request("d", "r", budget_usd=1.0)  # 75 s at 600 × 1.8 $/h would be 22.50 $
    assert site.waits(client, WaitKind.BUDGET).startswith(
        "waiting: paused: budget of 1.00 $ leaves no room for another instance: 0.00 $ "
    )
    assert site.running() == []
    site.fleet_db.override("d", budget_usd=100)
    leased = site.acquire(client)
    assert not site.fleet_db.instance(leased.name).retiring


def test_where_the_budget_does_not_pay_for_another_boot_what_stands_is_shared(site: FleetRuns):
    site.fleet_db.begin_request("d", "r", budget_usd=35.0)  # one instance is held back for with 22.50 $, two with 45
    site.fleet_db.command("d", "r", 2, [])
    first, second = site.client("one"), site.client("two")
    leased = site.acquire(first)
    assert first.begin_handover(leased)
    assert site.acquire(second).name == leased.name
    assert site.running() == [leased.name]


def test_a_holder_that_the_budget_stops_ends_its_instance_at_once_when_it_gives_it_back(site: FleetRuns):
    client = site.client()
    leased = site.acquire(client)
    assert client.look(leased) == LeaseSignals()
    site.fleet_db.begin_request("d", "r", budget_usd=1.0)
    assert not site.fleet_db.renew(leased.lease, 60)
    said = client.look(leased).retired
    assert re.match(r"budget of 1\.00 \$ reached \(\d\.\d+ \$ spent, what is rented costs ", said), said
    client.release(leased, reason="lease lost")
    assert site.running() == []


@pytest.mark.slow
def test_offers_that_the_command_names_are_rented_first_and_not_more_of_each_than_it_says(tmp_path: Path):
    offers = [H100, CHEAP, {**CHEAP, "instance_type": "middle", "price_per_hour": 2.4}]
    with a_site(tmp_path, offers=offers) as site:
        names = {one.instance_type: one.name for one in site.cloud.providers["sim-a"].offers()}
        site.fleet_db.begin_request("d", "r")
        site.fleet_db.command("d", "r", 4, [(names["h100"], 1), (names["middle"], 1)])
        rented = [site.acquire(site.client(f"run-{number}")) for number in range(3)]
        assert [one.instance_type for one in rented] == ["h100", "middle", "h100"]
        assert "the capacity plan names it" in rented[0].why
        site.fleet_db.offer_failed("sim-a", names["h100"], FailureKind.NO_CAPACITY)
        site.fleet_db.offer_failed("sim-a", names["middle"], FailureKind.NO_CAPACITY)
        assert site.acquire(site.client("run-3")).instance_type == "cheap"


def dearer_than_the_other(site: FleetRuns) -> tuple[FleetClient, LeasedEngine, dict[str, str]]:
    """An h100 is leased when the other offer's price falls; with the names of the offers by type."""
    site.cloud.change("sim-a", "cheap", price_per_hour=9.0)
    client = site.client()
    leased = site.acquire(client)
    site.cloud.change("sim-a", "cheap", price_per_hour=0.9)
    names = {one.instance_type: one.name for one in site.cloud.providers["sim-a"].offers()}
    return client, leased, names


def command(site: FleetRuns, instances: int, offers: list[tuple[str, int]], *moves: Assignment) -> None:
    """What the capacity sensor writes."""
    plan = CapacityPlan(kind="switch", reason="saves 1 $", assignments=moves)
    assert site.fleet_db.command("d", "r", instances, offers, plan=plan)


def test_with_a_plan_a_run_moves_only_where_the_plan_says_so(site: FleetRuns):
    client, leased, names = dearer_than_the_other(site)
    site.fleet_db.begin_request("d", "r")
    assert client.better(NEED, leased, 100_000) is not None  # there is no plan yet
    command(site, 1, [(names["h100"], 1)])
    assert client.better(NEED, leased, 100_000) is None
    site.cloud.change("sim-a", "cheap", price_per_hour=9.0)
    command(site, 1, [(names["cheap"], 1)], Assignment(leased.name, names["cheap"]))
    decision = client.better(NEED, leased, 100_000)
    assert decision is not None and "saves 1 $" in decision.sentence and decision.saved_usd < 0
    command(site, 1, [(names["h100"], 1)])
    with pytest.raises(ProvisioningFailed, match="any more"):
        client.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    assert site.running() == [leased.name]


def test_an_instance_is_kept_when_its_successor_is_not_to_be_had(site: FleetRuns):
    client, leased, names = dearer_than_the_other(site)
    site.fleet_db.begin_request("d", "r")
    command(site, 1, [(names["cheap"], 1)], Assignment(leased.name, names["cheap"]))
    decision = client.better(NEED, leased, 100_000)
    assert decision is not None
    site.cloud.inject(FaultRule(kind="no_capacity", calls=("create",)))
    with pytest.raises(ProvisioningFailed, match="sim-a"):
        client.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    assert site.running() == [leased.name]
    assert [one.offer for one in site.fleet_db.offer_failures(60)] == [names["cheap"]]
    assert client.better(NEED, leased, 100_000) is None  # it failed a moment ago
    site.fleet_db.begin_request("d", "another", budget_usd=1.0)
    with pytest.raises(ProvisioningFailed, match="leaves no room"):
        client.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    assert site.running() == [leased.name]


@pytest.mark.slow
def test_a_successor_is_leased_once_by_the_run_that_moves_or_by_the_one_that_waits(site: FleetRuns):
    client, leased, names = dearer_than_the_other(site)
    both = [(names["cheap"], 1), (names["h100"], 1)]
    site.fleet_db.begin_request("d", "r", deadline_at=site.fleet_db.now() + 3600)
    command(site, 2, both, Assignment(leased.name, names["cheap"], beside=True))
    decision = client.better(NEED, leased, 100_000)
    assert decision is not None and decision.new.instance_type == "cheap"
    waiting = site.acquire(site.client("next"))
    assert waiting.instance_type == "cheap"
    with pytest.raises(ProvisioningFailed, match="all instances"):
        client.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    site.client("next").release(waiting, retire=True)
    moved = client.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    assert moved.instance_type == "cheap"
    assert "already holds all" in site.waits(site.client("third"), WaitKind.DATASET_LIMIT)
    assert sorted(site.running()) == sorted([leased.name, moved.name])


@pytest.mark.slow
def test_a_boot_that_is_not_wanted_any_more_is_given_up(tmp_path: Path):
    with a_site(tmp_path, boot_seconds=600_000) as site:

        def retire(_: float) -> None:
            if found := site.fleet_db.fleet():
                if found[0].retiring and len(site.fleet_db.fleet(ended=True)) > 1:
                    raise GaveUp
                site.fleet_db.retire(found[0].name, "the fleet shrinks to 0")
            time.sleep(0.05)

        with pytest.raises(GaveUp):
            site.client().acquire(NEED, say=site.said.append, pause=retire)
        assert any("was to end while it booted: the fleet shrinks to 0" in text for text in site.said)
        assert site.running() == []
        assert site.fleet_db.offer_failures(60) == []
