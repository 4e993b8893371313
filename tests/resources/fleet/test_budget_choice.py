"""A run pauses for its budget only where that pays for nothing that could be had: a dearer offer is no reason."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from support.examples import property_test
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER

from gpu_runner.fleet_database.accounting.request_budget import END_SECONDS
from gpu_runner.fleet_database.capacity_plan import ControllerState
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitKind
from gpu_runner.offers.offer import HOUR, Offer
from gpu_runner.offers.selection import FailureKind
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.controller import decide
from gpu_runner.planner.types import ControlTiming, PlannedOffer, Target, Work
from resources.fleet import client as module
from resources.fleet.client import FleetClient
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.leased_engine import LeasedEngine, Requirement, StaticEngine
from resources.pricing.market import Market

WORK = Workload(100_000, 100_000, LengthMix(200, 200), 2_000, "measured", "measured")
NEED = Requirement("d", "nobody/knows", "chat", work=lambda: WORK)
CLOCK, TTL = 60.0, 60.0
TIMING = ControlTiming()  # its reserve is more than what the fleet's database holds back
GPUS = (("L40S", 48.0), ("H100", 80.0), ("A100", 80.0))


class GaveUp(Exception):
    """The run would wait."""


class Cloud(FakeProvider):
    """A provider of these offers."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        super().__init__(time.time, name=OFFER.provider, clock=CLOCK)
        self.listed = list(offers)

    def offers(self) -> list[Offer]:
        return self.listed


def offer(number: int, price: float, boot: float, gpu: tuple[str, float]) -> Offer:
    described = {"gpu": gpu[0], "gpu_memory_gib": gpu[1], "price_per_hour": price, "boot_seconds": boot}
    return replace(OFFER, instance_type=f"type-{number}", observed_at=time.time(), **described)


def rule(price: float, boot: float) -> float:
    """US dollars that the fleet's database asks for before it gives a lease: docs/deadlines.md."""
    return price / HOUR * (CLOCK * (TTL + END_SECONDS) + 2 * boot)


@contextlib.contextmanager
def fleet_of(warm: Sequence[float], budget: float) -> Iterator[FleetDatabase]:
    """Idle instances at these prices, and a budget."""
    with tempfile.TemporaryDirectory() as home, contextlib.closing(FleetDatabase(f"sqlite:///{home}/f.db")) as found:
        for number, price in enumerate(warm):
            of = replace(OFFER, instance_type=f"warm-{number}", price_per_hour=price)
            key = {"engine_key": NEED.engine_key, "model": NEED.model, "run_id": "before", "dataset": "before"}
            lease = found.intend(f"ba-{number}", of, clock=CLOCK, ttl=TTL, limit=None, **key)
            assert lease is not None and found.created(lease, "machine")
            assert found.ready(lease, "http://127.0.0.1:1", 64) and found.release(lease)
        found.begin_request("d", "r", budget_usd=budget)
        yield found


def believed(offers: Sequence[Offer]) -> list[Offer]:
    """Those that the market ranks: a price far below all others of its hardware is taken for an error."""
    cloud = Cloud(offers)
    accept, longest = NEED.accept, WORK.longest
    found = Market((cloud,), simulated=[cloud.name]).ranking(
        NEED.model, NEED.task, WORK.mix, WORK.tokens, accept=accept, objective=NEED.objective, longest=longest
    )
    names = {one.offer.name for one in found.ranked}
    return [one for one in offers if one.name in names]


def run(fleet_db: FleetDatabase, offers: Sequence[Offer], max_instances: int = 8) -> LeasedEngine | RunActivity:
    """What a run leases at once, or what it waits for."""
    cloud, heartbeat = Cloud(offers), Heartbeat(fleet_db, "run", ttl=TTL)
    fleet_db.begin_run("run", "d", "00000", "00009")
    config = FleetConfig.model_validate(
        {"engines": [{"name": "e", "kind": "process", "models": ["another"]}], "simulated": "default"}
    ).model_copy(update={"max_instances": max_instances})
    market = Market((cloud,), simulated=[cloud.name])
    client = FleetClient(config, {cloud.name: cloud}, market, fleet_db, heartbeat, lambda *_: StaticEngine(""))

    def give_up(_: float) -> None:
        raise GaveUp

    try:
        return client.acquire(NEED, say=lambda _: None, pause=give_up)
    except GaveUp:
        return heartbeat.activity


OFFERS = st.lists(st.tuples(st.floats(0.2, 30), st.floats(0, 900), st.sampled_from(GPUS)), min_size=1, max_size=5)


@pytest.mark.slow
@property_test(
    25,
    400,
    {
        "shapes": [(20.0, 0.0, GPUS[0]), (20.0, 0.0, GPUS[0]), (0.2, 0.0, GPUS[0])],
        "warm": [],
        "share": 2.0,
        "named": None,
    },
    shapes=OFFERS,
    warm=st.lists(st.floats(0.2, 30), max_size=2),
    share=st.floats(0.3, 6),
    named=st.none() | st.integers(0, 4),
)
def test_a_run_pauses_for_its_budget_only_where_that_pays_for_no_offer_and_no_warm_instance(
    shapes: list[tuple[float, float, tuple[str, float]]], warm: list[float], share: float, named: int | None
) -> None:
    """`share`: of what the offer needs that needs least. `named`: the offer that a command names."""
    offers = [offer(number, *shape) for number, shape in enumerate(shapes)]
    ranked = believed(offers)
    needs = [rule(one.price_per_hour, one.boot_seconds) for one in ranked]
    least = min(needs + [rule(price, 0.0) for price in warm])
    budget = share * min(needs)
    with pytest.MonkeyPatch.context() as patch, fleet_of(warm, budget) as fleet_db:
        patch.setattr(module, "answers", lambda endpoint: True)
        if named is not None:
            fleet_db.command("d", "r", 1, [(ranked[named % len(ranked)].name, 1)])
        found = run(fleet_db, offers)
    if least < 0.97 * budget:
        assert isinstance(found, LeasedEngine), found
    elif least > 1.03 * budget:
        assert isinstance(found, RunActivity) and found.wait is not None and found.wait.kind is WaitKind.BUDGET
        assert found.wait.refusal is not None
        assert found.wait.refusal.enough_usd == pytest.approx(least, rel=0.03), "the sum that would do is the least"


@pytest.mark.slow
@property_test(25, 400, shapes=OFFERS, share=st.floats(0.3, 6))
def test_where_the_plan_rents_within_the_budget_a_run_leases_at_once(
    shapes: list[tuple[float, float, tuple[str, float]]], share: float
) -> None:
    offers = [offer(number, *shape) for number, shape in enumerate(shapes)]
    ranked = believed(offers)
    options = [PlannedOffer(one.name, one.price_per_hour * CLOCK, 1000.0, one.boot_seconds / CLOCK) for one in ranked]
    budget = share * min(rule(one.price_per_hour, one.boot_seconds) for one in ranked)
    work = Work(6e6, 6e6, 0.0, 24)
    command, _, _ = decide(
        work, options, (), Target(None, budget, 1), ControllerState(), measured=False, detail=False, timing=TIMING
    )
    for commanded in (False, True):
        with fleet_of((), budget) as fleet_db:
            if commanded and command.instances:
                fleet_db.command("d", "r", command.instances, list(command.offers))
            found: Any = run(fleet_db, offers)
        assert not command.instances or isinstance(found, LeasedEngine), (command, found)


@pytest.mark.parametrize("away", ["failed", "full"])
def test_a_run_whose_warm_instance_is_too_dear_waits_for_an_offer_that_fits_and_cannot_be_had_just_now(
    away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for a pause, it would end the request though a cheap offer is there in a minute."""
    cheap = offer(0, 1.0, 60.0, GPUS[0])
    monkeypatch.setattr(module, "answers", lambda endpoint: True)
    with fleet_of([30.0], 2 * rule(1.0, 60.0)) as fleet_db:
        if away == "failed":
            fleet_db.offer_failed(cheap.provider, cheap.name, FailureKind.FAILED)
        found = run(fleet_db, [cheap], max_instances=1 if away == "full" else 8)
    assert isinstance(found, RunActivity) and found.wait is not None
    assert found.wait.kind is (WaitKind.OFFERS_FAILED if away == "failed" else WaitKind.FLEET_LIMIT)
