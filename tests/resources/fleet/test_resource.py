"""How the whole fleet is ended: what is booked is what the provider bills, and what never was costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER, Clock

from gpu_runner.fleet_database.database import FleetDatabase, Lease
from gpu_runner.providers.base import EngineOrder, Provider
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.resource import SETTLE_SECONDS, GpuFleet, Requirement

ORDER = EngineOrder("m", "chat")
PROVIDERS: list[FakeProvider] = []


class FleetOfOneProvider(GpuFleet):
    """A fleet whose only provider is the test's."""

    def providers(self, config: FleetConfig, need: Requirement | None = None) -> dict[str, Provider]:
        return {one.name: one for one in PROVIDERS}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def provider(clock: Clock) -> Iterator[FakeProvider]:
    PROVIDERS.append(FakeProvider(clock, lag=1.0))
    yield PROVIDERS[0]
    PROVIDERS.clear()


@pytest.fixture
def fleet_db(tmp_path: Path, clock: Clock) -> Iterator[FleetDatabase]:
    with contextlib.closing(FleetDatabase(f"sqlite:///{tmp_path}/fleet.db", now=clock)) as found:
        yield found


@pytest.fixture
def fleet(tmp_path: Path, provider: FakeProvider) -> GpuFleet:
    return FleetOfOneProvider(database="", home=str(tmp_path), config_path=str(tmp_path / "fleet.yaml"))


def intend(fleet_db: FleetDatabase) -> Lease:
    lease = fleet_db.intend(
        fleet_db.new_name(),
        OFFER,
        clock=60.0,
        engine_key="key",
        model="m",
        run_id="run",
        dataset="d",
        ttl=10,
        limit=None,
    )
    assert lease is not None
    return lease


def rented(fleet_db: FleetDatabase, provider: FakeProvider) -> str:
    lease = intend(fleet_db)
    assert fleet_db.created(lease, provider.create(OFFER, lease.instance, ORDER), just_now=True)
    assert fleet_db.ready(lease, "http://127.0.0.1:1", 8)
    return lease.instance


def test_what_is_booked_of_an_ended_fleet_is_what_its_provider_bills(
    fleet: GpuFleet, fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    names = [rented(fleet_db, provider)]
    clock.forward(0.5)
    names.append(rented(fleet_db, provider))  # not listed yet when the fleet is ended
    _, left = fleet.down(fleet_db, pause=clock.forward)
    assert (left, provider.alive()) == ([], [])
    clock.forward(3600)
    booked = {cost.name: cost.seconds.total for cost in fleet_db.costs()}
    assert booked == pytest.approx({name: provider.billed(name) for name in names}, abs=0.001)


def test_what_was_never_ordered_costs_nothing_once_the_fleet_is_ended(
    fleet: GpuFleet, fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    """Its run was killed between the intent and the order. Nobody sweeps after the end of the fleet."""
    name, never = rented(fleet_db, provider), intend(fleet_db).instance
    clock.forward(20)
    said, left = fleet.down(fleet_db, pause=clock.forward)
    assert left == [] and f"{never} is gone: not listed for" in "; ".join(said)
    clock.forward(3600)
    booked = {cost.name: cost.seconds.total for cost in fleet_db.costs()}
    assert booked == pytest.approx({name: provider.billed(name), never: 0.0}, abs=0.001)
    assert fleet_db.instance(never).state == "ended"


def test_an_order_on_its_way_while_the_fleet_is_ended_is_ended_too(
    fleet: GpuFleet, fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    late = intend(fleet_db).instance

    def pause(seconds: float) -> None:
        clock.forward(seconds)
        if late not in provider.machines and clock.now > 1_000_008:
            provider.create(OFFER, late, ORDER)

    _, left = fleet.down(fleet_db, pause=pause)
    assert late in provider.machines and (left, provider.alive()) == ([], [])
    clock.forward(3600)
    assert 20 > fleet_db.costs()[0].seconds.total >= provider.billed(late)  # booked from the intent on


def test_a_machine_that_does_not_end_is_named_and_not_waited_for_for_ever(
    fleet: GpuFleet, fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    name, never = rented(fleet_db, provider), intend(fleet_db).instance
    provider.machines[name].stubborn = 1000
    began = clock.now
    _, left = fleet.down(fleet_db, pause=clock.forward)
    assert left == [name] and fleet_db.instance(never).state == "ended"
    assert clock.now - began <= SETTLE_SECONDS + 2


def test_a_provider_that_does_not_answer_is_not_waited_for(
    fleet: GpuFleet, fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock
):
    name = rented(fleet_db, provider)
    provider.fault = lambda call: "unclear"
    began = clock.now
    _, left = fleet.down(fleet_db, pause=clock.forward)
    assert left == [name] and clock.now - began < 10
