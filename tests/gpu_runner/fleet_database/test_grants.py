"""What engines that are paid by the token may spend of a budget, and what they have spent."""

from __future__ import annotations

import pytest
from support.fleet_databases import Clock, ready

from gpu_runner.fleet_database.database import BudgetReached, FleetDatabase, Lease, LeaseUsage

TTL = 10.0


def hosted(fleet_db: FleetDatabase, name: str = "api", run: str = "run") -> Lease:
    lease = fleet_db.try_lease(name, run, "d", TTL)
    assert lease is not None
    return lease


def used(usd: float, wasted: float = 0.0) -> LeaseUsage:
    return LeaseUsage(2.0, 0.0, 10, 600, 400, usd, wasted)


def test_all_that_is_left_of_a_budget_is_granted_to_who_spends_alone(fleet_db: FleetDatabase, clock: Clock):
    lease = hosted(fleet_db)
    assert fleet_db.grant(lease, 0.0, 0.1) is None  # without a budget
    fleet_db.begin_request("d", "r", budget_usd=5.0)
    clock.forward(1)
    assert fleet_db.grant(lease, 0.0, 0.1) == pytest.approx(5.0)
    assert fleet_db.spend("d").usd == 0 and fleet_db.spend("d").bound() == pytest.approx(5.0)


def test_those_who_spend_together_never_pass_the_budget(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.begin_request("d", "r", budget_usd=4.0)
    first, second = hosted(fleet_db), hosted(fleet_db, "other", "run 2")
    assert fleet_db.grant(first, 0.0, 0.1) == pytest.approx(4.0)
    assert fleet_db.grant(second, 0.0, 0.1) == pytest.approx(0.0)  # all of it is promised
    assert fleet_db.grant(first, 1.0, 0.1) == pytest.approx(2.5)  # 1 is on its way, and half of the rest
    assert fleet_db.grant(second, 0.0, 0.1) == pytest.approx(0.75)
    assert fleet_db.spend("d").bound() == pytest.approx(3.25)
    assert fleet_db.renew(first, TTL, used(1.0)) and fleet_db.release(first, used(1.2, 0.1))
    assert fleet_db.grant(second, 0.0, 0.1) == pytest.approx(2.7)


def test_a_lease_from_before_the_request_spends_no_more_than_its_budget(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.begin_request("d", "r1", budget_usd=1.0)
    lease = hosted(fleet_db)
    fleet_db.grant(lease, 0.0, 0.01)
    fleet_db.renew(lease, TTL, used(0.9))
    clock.forward(1)
    fleet_db.begin_request("d", "r2", budget_usd=1.0)
    assert fleet_db.spend("d").usd == 0
    granted = fleet_db.grant(lease, 0.9, 0.01)
    assert granted is not None and granted == pytest.approx(1.9)  # 0.9 of them were the request's before
    fleet_db.renew(lease, TTL, used(granted))
    clock.forward(2)
    assert fleet_db.grant(lease, granted, 0.01) == pytest.approx(granted)
    with pytest.raises(BudgetReached, match=r"1\.00 \$ are spent"):
        fleet_db.check_row("d", 0.01)
    assert fleet_db.release(lease, used(granted, 0.2)) and fleet_db.spend("d").usd == pytest.approx(1.2)
    clock.forward(1)
    assert fleet_db.end_request("d", "r2") and fleet_db.spend("d").usd == 0


def test_what_a_lease_costs_after_its_request_ended_is_the_next_ones_only_from_its_start(
    fleet_db: FleetDatabase, clock: Clock
):
    fleet_db.begin_request("d", "r1", budget_usd=1.0)
    lease = hosted(fleet_db)
    fleet_db.renew(lease, TTL, used(0.4))
    clock.forward(1)
    fleet_db.end_request("d", "r1")
    assert fleet_db.spend("d").usd == 0
    fleet_db.renew(lease, TTL, used(0.6))
    clock.forward(1)
    fleet_db.begin_request("d", "r2", budget_usd=1.0)
    assert fleet_db.spend("d").usd == 0
    fleet_db.release(lease, used(0.7))
    assert fleet_db.spend("d").usd == pytest.approx(0.1)


def test_a_rented_machine_and_an_engine_by_the_token_share_one_budget(fleet_db: FleetDatabase, clock: Clock):
    ready(fleet_db)
    fleet_db.begin_request("d", "r", budget_usd=20.0)
    lease = hosted(fleet_db)
    left = 20.0 - fleet_db.spend("d").bound()
    granted = fleet_db.grant(lease, 0.0, 0.1)
    assert granted is not None and granted == pytest.approx(left / 2)
    assert fleet_db.spend("d").bound() == pytest.approx(20.0 - left / 2)


def test_a_machine_is_not_kept_with_what_is_granted_to_an_engine_by_the_token(fleet_db: FleetDatabase, clock: Clock):
    machine = ready(fleet_db)
    fleet_db.begin_request("d", "r", budget_usd=20.0)
    lease = hosted(fleet_db)
    granted = fleet_db.grant(lease, 0.0, 0.1)
    assert granted is not None and granted > 9
    renewals = 0
    while fleet_db.renew(machine, TTL):
        assert fleet_db.spend("d").bound() <= 20.0
        clock.forward(5)
        assert fleet_db.renew(lease, TTL)
        renewals += 1
    assert renewals > 20  # it was kept for long
    assert fleet_db.spend("d").usd + granted <= 20.0


def test_a_budget_that_pays_for_no_row_refuses_the_lease_with_the_sum_that_would_do(fleet_db: FleetDatabase):
    fleet_db.begin_request("d", "r", budget_usd=1.0)
    fleet_db.check_row("d", 1.0)
    lease = hosted(fleet_db)
    fleet_db.release(lease, used(0.95))
    with pytest.raises(BudgetReached) as refused:
        fleet_db.check_row("d", 0.1)
    assert str(refused.value) == (
        "budget of 1.00 $ leaves no room for another row: 0.95 $ are spent, and a row may cost 0.10 $"
    )
    assert refused.value.refusal.enough_usd == pytest.approx(1.05)
    fleet_db.override("d", budget_usd=refused.value.refusal.enough_usd)
    fleet_db.check_row("d", 0.1)


def test_what_was_paid_by_the_token_is_on_every_bill(fleet_db: FleetDatabase, clock: Clock):
    fleet_db.begin_request("d", "r")
    lease = hosted(fleet_db)
    clock.forward(5)
    fleet_db.release(lease, used(0.6, 0.2))
    (cost,), (charge,) = fleet_db.costs(), fleet_db.charges()
    assert cost.usd == charge.usd and (cost.usd.useful, cost.usd.wasted, cost.usd.total) == (0.6, 0.2, 0.8)
    assert (cost.provider, charge.dataset, charge.rows, charge.prompt_tokens) == ("api", "d", 10, 600)
    assert fleet_db.spend("d").usd == pytest.approx(0.8)
    assert fleet_db.figures().spent_usd == {"api": pytest.approx(0.8)}
    (speed,) = fleet_db.engine_speeds(["api", "unused"], "d").values()
    assert (speed.tokens_per_second, speed.basis, speed.rows) == (500.0, "measured", 10)
    assert fleet_db.billed().seconds == 2.0
    clock.forward(5)
    fleet_db.begin_request("d", "another")
    assert fleet_db.spend("d").usd == 0 and fleet_db.charges(fleet_db.now()) == []


def test_how_fast_an_engine_is_on_rows_of_the_dataset_counts_before_all_others(fleet_db: FleetDatabase):
    for dataset, rows, tokens in (("d", 200, 1000), ("d", 50, 3000), ("e", 400, 8000), ("trial", 5, 400)):
        lease = fleet_db.try_lease("lab", f"run of {dataset}", dataset, TTL)
        assert lease is not None
        fleet_db.release(lease, LeaseUsage(10.0, 0.0, rows, tokens, 0))
    speeds = {one: fleet_db.engine_speeds(["lab"], one)["lab"] for one in ("d", "e", "trial", "never asked")}
    assert {one: (found.tokens_per_second, found.rows) for one, found in speeds.items()} == {
        "d": (200.0, 250),
        "e": (800.0, 400),
        "trial": (310.0, 655),  # five rows do not fill an engine
        "never asked": (310.0, 655),
    }
    assert fleet_db.costs() == [] and fleet_db.charges() == [], "it costs nothing"
