"""A run's dealings with the fleet, on a small simulated cloud with real engine processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from machines import H100, ended_machines, processes, simulated_cloud
from pace import PATIENCE

from gpu_runner.fleet import FleetBook
from gpu_runner.heart import Heart
from gpu_runner.offers import OfferFilter
from gpu_runner.providers.local import EngineStartError
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import FaultRule
from gpu_runner.speed import LengthMix
from gpu_runner.workload import Workload
from resources.fleet import GpuFleet, Requirement
from resources.fleet_config import FleetConfig
from resources.leased import LeasedEngine, Look
from resources.market import Market
from resources.renting import NotRented, Renter

TTL = 10.0
WORK = Workload(100_000, 100_000, LengthMix(200, 200), 2_000, "measured", "measured")
NEED = Requirement("d", "tiny", "chat", work=lambda: WORK)
CHEAP = {"instance_type": "cheap", "gpu": "H100", "price_per_hour": 1.8}


class GaveUp(Exception):
    """Somebody canceled."""


@dataclass
class Site:
    """A cloud, the fleet's book, and the hands of some runs."""

    home: Path
    cloud: SimulatedCloud
    book: FleetBook
    said: list[str] = field(default_factory=list)

    def renter(self, run_id: str = "run", heart: Heart | None = None) -> Renter:
        """A run with a beating heart's book entry; its heart does not beat, the leases last long enough."""
        heart = heart or Heart(self.book, run_id, ttl=60)
        self.book.begin_run(run_id, "d", "00000", "00009")
        providers = dict(self.cloud.providers)
        config = FleetConfig(simulated=self.cloud.config, start_seconds=600)
        market = Market(tuple(providers.values()), simulated=list(providers))
        return Renter(config, providers, market, self.book, heart, lambda *_: pytest.fail("nothing stands"))

    def acquire(self, renter: Renter, need: Requirement = NEED, **more: Any) -> LeasedEngine:
        """Wait at most 30 s for an engine."""
        deadline = time.monotonic() + 30 * PATIENCE

        def pause(seconds: float) -> None:
            if time.monotonic() > deadline:
                raise GaveUp
            time.sleep(min(seconds, 0.05))

        return renter.acquire(need, say=self.said.append, pause=pause, **more)

    def waits(self, renter: Renter, need: Requirement = NEED) -> str:
        """It asks once, must wait, and says why."""

        def give_up(_: float) -> None:
            raise GaveUp

        with pytest.raises(GaveUp):
            renter.acquire(need, say=self.said.append, pause=give_up)
        return renter.heart.note

    def running(self) -> list[str]:
        """Names of machines that bill."""
        machines = [one for provider in self.cloud.providers.values() for one in provider.list("")]
        return [one.name for one in machines if one.state != "ended"]


@contextlib.contextmanager
def a_site(home: Path, **provider: Any) -> Iterator[Site]:
    with ended_machines(home), contextlib.closing(FleetBook(f"sqlite:///{home}/fleet.db")) as book:
        yield Site(home, simulated_cloud(home, **provider), book)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with a_site(tmp_path, offers=[H100, CHEAP]) as found:
        yield found


def test_the_cheapest_offer_is_rented_and_the_next_run_gets_it_warm_without_a_second_boot(site: Site):
    first = site.renter("one")
    leased = site.acquire(first)
    assert (leased.instance_type, leased.epoch) == ("cheap", 1)
    first.release(leased)
    again = site.acquire(site.renter("two"))
    assert (again.name, again.epoch) == (leased.name, 2)
    assert len(site.book.fleet(ended=True)) == 1
    assert len(site.cloud.calls("create")) == 1


def test_another_model_never_gets_a_warm_instance_of_this_one(site: Site):
    renter = site.renter()
    leased = site.acquire(renter)
    renter.release(leased)
    other = site.acquire(site.renter("two"), replace(NEED, model="another"))
    assert other.name != leased.name
    assert {one.model for one in site.book.fleet()} == {"tiny", "another"}


def test_a_dataset_waits_visibly_for_more_than_its_instances_and_takes_over_what_is_handed_on(site: Site):
    first, second = site.renter("one"), site.renter("two")
    leased = site.acquire(first)
    assert site.waits(second) == "waiting: d already holds all instances it may lease"
    assert first.hand_on(leased)
    taken = site.acquire(second)
    assert (taken.name, taken.epoch) == (leased.name, leased.epoch + 1)
    assert site.book.renew(leased.lease, TTL)  # its last rows are still being answered
    first.release(leased)
    assert site.book.instance(taken.name).lease == taken.lease


def test_without_capacity_the_next_offer_is_taken_and_the_failure_is_remembered(tmp_path: Path):
    with a_site(tmp_path, offers=[H100, {**CHEAP, "capacity": 0}]) as site:
        leased = site.acquire(site.renter())
        assert leased.instance_type == "h100"


def test_a_create_whose_answer_is_lost_is_found_again_and_billed_once(site: Site):
    site.cloud.inject(FaultRule(kind="lost_reply", calls=("create",), times=1))
    leased = site.acquire(site.renter())
    assert site.running() == [leased.name]
    assert len(site.book.fleet(ended=True)) == 1


def test_a_create_without_answer_and_without_effect_is_given_up_and_another_one_made(site: Site):
    site.cloud.inject(FaultRule(kind="time_out", calls=("create",), times=1))
    leased = site.acquire(site.renter())
    assert site.running() == [leased.name]
    assert site.book.offer_failures(3600)


def test_engines_that_never_come_up_end_the_search_and_leave_nothing_rented(tmp_path: Path):
    offers = [{**H100, "instance_type": f"type-{i}", "price_per_hour": 2 + i / 10} for i in range(4)]
    with a_site(tmp_path, offers=offers, faults=[{"kind": "boot_fails"}]) as site:
        with pytest.raises(EngineStartError, match="3 instances in a row did not start"):
            site.acquire(site.renter())
        assert site.running() == []
        assert [one.state for one in site.book.fleet(ended=True)] == ["ended"] * 3


def test_giving_up_during_a_boot_ends_the_instance_at_once(tmp_path: Path):
    with a_site(tmp_path, boot_seconds=600_000) as site:
        renter = site.renter()

        def cancel(_: float) -> None:
            if site.running():
                raise GaveUp

        with pytest.raises(GaveUp):
            renter.acquire(NEED, say=site.said.append, pause=cancel)
        assert site.running() == []
        assert site.book.fleet() == []
        assert site.book.leases_of("d") == 0


def test_a_warm_instance_whose_engine_died_meanwhile_is_ended_and_a_new_one_rented(site: Site):
    renter = site.renter("one")
    leased = site.acquire(renter)
    renter.release(leased)
    machine = site.book.instance(leased.name)
    assert machine is not None
    assert machine.machine_id is not None
    for process in processes(machine.machine_id):
        if "gpu_runner.simulator" in process.cmdline():
            process.kill()
    other = site.acquire(site.renter("two"))
    assert other.name != leased.name
    assert site.running() == [other.name]


def test_a_retired_instance_is_ended_when_it_is_given_back_and_an_idle_one_by_the_reaper(site: Site):
    renter = site.renter()
    leased = site.acquire(renter)
    renter.release(leased, reason="moved", retire=True)
    assert site.running() == []
    again = site.acquire(renter)
    renter.release(again)
    fleet = GpuFleet(database=str(site.book.engine.url), home=str(site.home), config_path=str(site.home / "fleet.yaml"))
    (site.home / "fleet.yaml").write_text(
        f"idle_minutes: 0\nsimulated: {site.cloud.config.model_dump_json(exclude_none=True)}\n"
    )
    fleet.sweep(site.book)
    assert site.running() == []
    bills = {bill.name: bill.usd for bill in site.cloud.meter().bills()}
    for cost in site.book.costs():
        assert cost.usd.total == pytest.approx(bills[cost.name], rel=0.05, abs=0.03)  # 0.1 s of ours


def test_a_move_is_decided_by_break_even_and_the_old_engine_is_kept_when_it_fails(site: Site):
    site.cloud.change("sim-a", "cheap", price_per_hour=9.0)
    renter = site.renter()
    leased = site.acquire(renter)
    assert leased.instance_type == "h100"
    assert renter.better(NEED, leased, 100_000) is None
    site.cloud.change("sim-a", "cheap", price_per_hour=0.9)
    time.sleep(2.1)  # the market keeps an answer for two seconds
    decision = renter.better(NEED, leased, 100_000)
    assert decision is not None
    assert decision.new.instance_type == "cheap"
    assert decision.saved_usd > 0
    assert "move and save" in decision.sentence
    assert renter.better(replace(NEED, work=lambda: replace(WORK, rows=0)), leased, 100_000) is None
    new = renter.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    assert len(site.running()) == 2
    renter.release(leased, retire=True)
    assert site.running() == [new.name]
    site.cloud.inject(FaultRule(kind="no_capacity", calls=("create",)))
    with pytest.raises(NotRented, match="sim-a"):
        renter.move(NEED, new, decision, say=site.said.append, pause=time.sleep)


def test_offers_that_the_dataset_refuses_are_not_rented_and_it_says_why_it_waits(site: Site):
    said = site.waits(site.renter(), replace(NEED, accept=OfferFilter(max_price_per_hour=0.5)))
    assert said.startswith("waiting: no suitable offer; ")
    assert "above 0.50" in said


def test_a_lease_is_good_after_a_boot_that_took_longer_than_its_ttl(tmp_path: Path):
    with a_site(tmp_path, boot_seconds=1500) as site:  # 2.5 s of ours
        heart = Heart(site.book, "long", ttl=1.5, interval=0.2)
        renter = site.renter("long", heart)
        with heart.beating("d", "00000", "00009"):
            leased = site.acquire(renter)
            assert heart.check(leased.lease)
            assert leased.epoch == 1
            renter.release(leased)


def test_the_resource_leases_for_a_block_and_gives_back_what_it_rented(site: Site):
    (site.home / "fleet.yaml").write_text(f"simulated: {site.cloud.config.model_dump_json(exclude_none=True)}\n")
    fleet = GpuFleet(database=str(site.book.engine.url), home=str(site.home), config_path=str(site.home / "fleet.yaml"))
    heart = fleet.heart(site.book, "run")
    with heart.beating("d", "00000", "00009"), fleet.lease(NEED, site.book, heart) as leased:
        assert site.book.holder(leased.name) == "run"
        assert heart.check(leased.lease)
    assert site.book.holder(leased.name) is None
    assert site.book.instance(leased.name).state == "ready"


def test_with_a_capacity_of_zero_nothing_is_leased_and_the_run_says_why_it_is_paused(site: Site):
    renter = site.renter()
    site.book.begin_request("d", "r")
    site.book.command("d", "r", 0)
    assert site.waits(renter) == "waiting: capacity 0"
    site.book.command("d", "r", 0, pause="budget of 12.00 $ reached (11.97 $ spent)")
    assert site.waits(renter) == "waiting: paused: budget of 12.00 $ reached (11.97 $ spent)"
    assert site.book.fleet(ended=True) == []
    site.book.command("d", "r", 1)
    assert site.acquire(renter).instance_type == "cheap"


def test_what_the_budget_does_not_pay_for_is_not_rented_until_it_is_raised(site: Site):
    renter = site.renter()
    site.book.begin_request("d", "r", budget_usd=1.0)  # 75 s at 600 × 1.8 $/h would be 22.50 $
    assert site.waits(renter).startswith(
        "waiting: paused: budget of 1.00 $ leaves no room for another instance: 0.00 $ "
    )
    assert site.running() == []
    site.book.override("d", budget_usd=100)
    leased = site.acquire(renter)
    assert not site.book.instance(leased.name).retiring


def test_a_holder_that_the_budget_stops_ends_its_instance_at_once_when_it_gives_it_back(site: Site):
    renter = site.renter()
    leased = site.acquire(renter)
    assert renter.look(leased) == Look()
    site.book.begin_request("d", "r", budget_usd=1.0)
    assert not site.book.renew(leased.lease, 60)
    assert renter.look(leased).leave.startswith("budget of 1.00 $ reached (0.00 $ spent, what is rented costs ")
    renter.release(leased, reason="lease lost")
    assert site.running() == []


def test_offers_that_the_command_names_are_rented_first_and_not_more_of_each_than_it_says(tmp_path: Path):
    offers = [H100, CHEAP, {**CHEAP, "instance_type": "middle", "price_per_hour": 2.4}]
    with a_site(tmp_path, offers=offers) as site:
        names = {one.instance_type: one.name for one in site.cloud.providers["sim-a"].offers()}
        site.book.begin_request("d", "r")
        site.book.command("d", "r", 4, [(names["h100"], 1), (names["middle"], 1)])
        rented = [site.acquire(site.renter(f"run-{number}")) for number in range(3)]
        assert [one.instance_type for one in rented] == ["h100", "middle", "h100"]
        assert "the capacity plan names it" in rented[0].why
        site.book.offer_failed("sim-a", names["h100"], "no capacity")
        site.book.offer_failed("sim-a", names["middle"], "no capacity")
        assert site.acquire(site.renter("run-3")).instance_type == "cheap"


def dearer_than_the_other(site: Site) -> tuple[Renter, LeasedEngine, dict[str, str]]:
    """An h100 is leased when the other offer's price falls; with the names of the offers by type."""
    site.cloud.change("sim-a", "cheap", price_per_hour=9.0)
    renter = site.renter()
    leased = site.acquire(renter)
    site.cloud.change("sim-a", "cheap", price_per_hour=0.9)
    time.sleep(2.1)  # the market keeps an answer for two seconds
    names = {one.instance_type: one.name for one in site.cloud.providers["sim-a"].offers()}
    return renter, leased, names


def test_a_move_goes_only_to_an_offer_that_the_command_names(site: Site):
    renter, leased, names = dearer_than_the_other(site)
    site.book.begin_request("d", "r")
    site.book.command("d", "r", 1, [(names["h100"], 1)])
    assert renter.better(NEED, leased, 100_000) is None
    site.book.command("d", "r", 1, [(names["cheap"], 1)])
    decision = renter.better(NEED, leased, 100_000)
    assert decision is not None
    site.book.begin_request("d", "another", budget_usd=1.0)
    with pytest.raises(NotRented, match="leaves no room"):
        renter.move(NEED, leased, decision, say=site.said.append, pause=time.sleep)
    assert site.running() == [leased.name]


def test_a_run_that_has_all_the_work_changes_to_what_the_command_wants_beside_its_instance(site: Site):
    renter, leased, names = dearer_than_the_other(site)
    both = [(names["h100"], 1), (names["cheap"], 1)]
    site.book.begin_request("d", "r")
    site.book.command("d", "r", 2, both)
    assert renter.better(NEED, leased, 100_000) is None  # it does not know its own speed yet
    leased.spending.begin(0.0)
    for second in range(8 * 1024):
        leased.spending.settle(200, 200, 256, second / 10)
    site.book.begin_run("next", "d", "00010", "00019")
    assert renter.better(NEED, leased, 100_000) is None  # the run that waits will take it
    site.book.end_run("next")
    decision = renter.better(NEED, leased, 100_000)
    assert decision is not None and decision.new.instance_type == "cheap"
    site.book.begin_request("d", "in time", deadline_at=site.book.now() + 3600)
    site.book.command("d", "in time", 2, both)
    assert renter.better(NEED, leased, 100_000) is None  # with a deadline runs are small: the next one takes it
    site.book.begin_request("d", "soon", objective="fastest")
    site.book.command("d", "soon", 2, both)
    assert renter.better(NEED, leased, 100_000) is None


def test_a_boot_that_is_not_wanted_any_more_is_given_up(tmp_path: Path):
    with a_site(tmp_path, boot_seconds=600_000) as site:

        def retire(_: float) -> None:
            if found := site.book.fleet():
                if found[0].retiring and len(site.book.fleet(ended=True)) > 1:
                    raise GaveUp
                site.book.retire(found[0].name, "the fleet shrinks to 0")
            time.sleep(0.05)

        with pytest.raises(GaveUp):
            site.renter().acquire(NEED, say=site.said.append, pause=retire)
        assert any("was to end while it booted: the fleet shrinks to 0" in text for text in site.said)
        assert site.running() == []
        assert site.book.offer_failures(60) == []
