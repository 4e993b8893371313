"""When it pays to move a run, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_runner.offers.offer import Offer, RankedOffer, Ranking
from gpu_runner.offers.selection import FailureKind, OfferFailure
from gpu_runner.offers.speed import Basis, Speed
from resources.fleet.migration import CurrentPlacement, Migration, assigned_move, find_move

OLD = Offer("a", "r", "h100", "H100", 1, 80, False, 4.0, 0.0, 1.0, 0.0, "test")
CHEAP = replace(OLD, provider="b", price_per_hour=2.0, boot_seconds=100.0)
OTHER = replace(CHEAP, gpu="L40S", gpu_memory_gib=48, price_per_hour=1.0)
PRESENT = CurrentPlacement("i1", OLD, 1000.0, 3.6e6, 1.8e6)


def ranking(*offers: Offer, speed: float = 1000.0, basis: Basis = "measured") -> Ranking:
    ranked = [RankedOffer(offer, Speed(speed, basis), 1.0, 1.0) for offer in offers]
    return Ranking("cheapest", tuple(ranked), ())


def move(present: CurrentPlacement = PRESENT, offers: Ranking | None = None, estimates: Ranking | None = None, **more):
    offers = offers or ranking(OLD, CHEAP)
    found: Migration | None = find_move(
        present, offers, estimates or offers, more.get("warm", ()), more.get("failures", ())
    )
    return found


def test_the_same_gpu_at_half_the_price_is_moved_to_and_the_saving_is_that_of_the_rule():
    decision = move()
    assert decision is not None
    assert decision.new == CHEAP
    # 3.6M tokens take an hour, less the boot, in which the old one works on; the new one's boot is paid.
    assert decision.saved_usd == pytest.approx((4 - 2) * (3600 - 100) / 3600 - 2 * 100 / 3600)
    assert decision.sentence.startswith("i1: from a/r/h100 to b/r/h100: move and save")


def test_a_run_that_ends_before_it_could_use_the_new_one_stays():
    assert move(replace(PRESENT, run_tokens=120_000)) is None


def test_a_saving_within_what_is_known_of_speeds_is_none():
    assert move(offers=ranking(OLD, replace(CHEAP, price_per_hour=3.9, boot_seconds=1.0))) is None


def test_an_estimate_counts_for_as_much_as_that_of_our_own_hardware_was_worth():
    """Both were estimated at 4000; ours does 1000. At face value the other one would do the work for a 16th."""
    estimates = ranking(OLD, OTHER, speed=4000.0, basis="estimate")
    decision = move(offers=estimates, estimates=estimates)
    assert decision is not None
    assert decision.new_tokens_per_second == pytest.approx(1000.0)
    dear = ranking(OLD, replace(OTHER, price_per_hour=3.9), speed=4000.0, basis="estimate")
    assert move(offers=dear, estimates=dear) is None


def test_a_measured_speed_counts_as_it_is():
    slow = Ranking("cheapest", (*ranking(OLD).ranked, *ranking(OTHER, speed=100.0).ranked), ())
    assert move(offers=slow) is None


def test_a_warm_instance_needs_no_boot_and_may_be_moved_to_late_in_a_run():
    warm = replace(CHEAP, boot_seconds=0.0, source="fleet")
    decision = move(replace(PRESENT, run_tokens=120_000), warm=[warm])
    assert decision is not None
    assert decision.new == warm


def test_what_failed_lately_is_no_reason_to_leave_an_engine_that_works():
    assert move(failures=[OfferFailure("b", CHEAP.name, 100.0, FailureKind.FAILED, "boot failed")]) is None


def test_without_any_known_speed_nothing_is_decided():
    assert move(replace(PRESENT, tokens_per_second=None), offers=ranking(CHEAP, basis="estimate")) is not None
    assert find_move(replace(PRESENT, tokens_per_second=None), ranking(), ranking(), (), ()) is None


def assigned(name: str = CHEAP.name, present: CurrentPlacement = PRESENT, offers: Ranking | None = None, **more):
    there = offers or ranking(OLD, CHEAP)
    return assigned_move(present, name, there, more.get("warm", ()), more.get("failures", ()), "the deadline")


def test_an_assigned_move_is_made_whether_it_pays_or_not_and_says_what_it_costs():
    dear = replace(CHEAP, price_per_hour=8.0)
    decision = assigned(offers=ranking(OLD, dear))
    assert decision is not None and decision.new == dear
    assert decision.saved_usd < 0 and "the plan: the deadline" in decision.sentence
    assert assigned(OLD.name + " spot") is None


def test_an_assigned_move_waits_for_an_offer_that_can_be_had_and_a_run_that_can_use_it():
    failed = OfferFailure("b", CHEAP.name, 1.0, FailureKind.NO_CAPACITY, "no capacity")
    assert assigned(failures=[failed]) is None
    short = replace(PRESENT, run_tokens=120_000)
    assert assigned(present=short) is None
    warm = replace(CHEAP, boot_seconds=0.0, source="fleet")
    decision = assigned(present=short, warm=[warm])
    assert decision is not None and decision.new == warm


def test_an_assigned_move_needs_no_speed_of_the_instance_that_is_left():
    decision = assigned(present=replace(PRESENT, tokens_per_second=None), offers=ranking(CHEAP))
    assert decision is not None and decision.old_tokens_per_second == decision.new_tokens_per_second
