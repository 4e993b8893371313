"""A fleet's database that comes from a backup trusts nothing that it says of machines, and forgets none."""

from __future__ import annotations

import pytest
from support.fake_provider import FakeProvider
from support.fleet_databases import OFFER, Clock, ready

from gpu_runner.fleet_database.database import FleetDatabase, RunEnded
from gpu_runner.fleet_database.reaper import sweep
from gpu_runner.providers.base import EngineOrder

ORDER = EngineOrder("m", "chat")


def settled(fleet_db: FleetDatabase, provider: FakeProvider, clock: Clock, backup_at: float) -> tuple[int, int]:
    """As a restore does: the list of the provider first, then sweeps."""
    listed = {one.name for one in provider.list("ba-") if one.state != "ended"}
    found = fleet_db.distrust(backup_at, {provider.name: listed})
    for _ in range(3):
        sweep(fleet_db, [provider], tag="ba-", idle_seconds=60)
        clock.forward(1)
    return found


def test_no_machine_of_the_backup_is_used_and_none_after_it_is_forgotten(fleet_db: FleetDatabase, clock: Clock) -> None:
    provider = FakeProvider(clock)
    fleet_db.begin_run("run", "d", "00000", "00001")
    for name in ("ba-1", "ba-2"):
        provider.create(OFFER, name, ORDER)
        lease = ready(fleet_db, name, ttl=1e9)
    backup_at = clock.now
    clock.forward(3600)
    provider.lose("ba-2")
    provider.kept = 60
    clock.forward(3600)  # ba-2 is not listed any more
    provider.create(OFFER, "ba-3", ORDER)  # after the backup
    assert settled(fleet_db, provider, clock, backup_at) == (1, 1)
    assert provider.alive() == []
    assert fleet_db.fleet() == []
    assert not fleet_db.renew(lease, 10)
    with pytest.raises(RunEnded):
        fleet_db.try_lease("engine", "run", "d", 10)
    costs = {one.name: one for one in fleet_db.costs()}
    assert costs["ba-1"].seconds.total == pytest.approx(provider.billed("ba-1"), abs=3)
    assert costs["ba-2"].seconds.total == pytest.approx(0.0)  # nobody knows more of it than the backup


def test_instances_of_a_provider_that_does_not_answer_are_ended_when_it_does(
    fleet_db: FleetDatabase, clock: Clock
) -> None:
    provider = FakeProvider(clock)
    provider.create(OFFER, "ba-1", ORDER)
    ready(fleet_db, ttl=1e9)
    assert fleet_db.distrust(clock.now, {}) == (1, 0)
    provider.fault = lambda call: "error"
    sweep(fleet_db, [provider], tag="ba-", idle_seconds=60)
    assert provider.alive() == ["ba-1"]
    provider.fault = lambda call: None
    sweep(fleet_db, [provider], tag="ba-", idle_seconds=60)
    assert provider.alive() == []


def test_a_restore_may_be_repeated(fleet_db: FleetDatabase, clock: Clock) -> None:
    ready(fleet_db, ttl=1e9)
    assert fleet_db.distrust(clock.now, {"sim-north": set()}) == (0, 1)
    assert fleet_db.distrust(clock.now, {"sim-north": set()}) == (0, 0)


def test_what_was_spent_after_the_backup_counts_for_the_request(fleet_db: FleetDatabase, clock: Clock) -> None:
    fleet_db.begin_request("d", "asked", budget_usd=1.0)
    fleet_db.charge_restored("d", 0.75, 300)
    assert fleet_db.spend("d").usd == pytest.approx(0.75)
    fleet_db.charge_restored("d", 0.5, 200)
    assert fleet_db.spend("d").usd == pytest.approx(1.25)
    fleet_db.begin_request("d", "the next", budget_usd=1.0)
    assert fleet_db.spend("d").usd == pytest.approx(0.0)
