"""Which offer is asked next after some have failed, and when it pays to move."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet_databases import OFFER

from gpu_runner.offers.offer import Objective, Offer, Ranking, rank
from gpu_runner.offers.selection import (
    FailureKind,
    Memory,
    OfferFailure,
    Pace,
    choose,
    consider_move,
    explain,
    in_backoff,
)
from gpu_runner.offers.speed import Speed

CHEAP = replace(OFFER, instance_type="cheap", price_per_hour=1.0)
DEAR = replace(OFFER, instance_type="dear", price_per_hour=1.5)
SPEEDS = {"cheap": 100.0, "dear": 400.0}


def ranking(*offers: Offer, objective: Objective = "cheapest", same_speed: bool = True) -> Ranking:
    return rank(
        offers or (CHEAP, DEAR),
        1e6,
        lambda offer: Speed(100.0 if same_speed else SPEEDS[offer.instance_type], "measured"),
        objective=objective,
    )


def failed(offer: Offer, age: float, kind: FailureKind = FailureKind.FAILED) -> OfferFailure:
    return OfferFailure(offer.provider, offer.name, age, kind, "it did not boot")


def chosen(ranked: Ranking, *failures: OfferFailure) -> list[str]:
    return [one.offer.instance_type for one in choose(ranked, failures)]


def test_without_failures_the_ranking_stands():
    assert chosen(ranking()) == ["cheap", "dear"]


def test_an_offer_that_failed_is_left_alone_then_avoided_then_forgiven():
    memory = Memory()
    assert chosen(ranking(), failed(CHEAP, 0)) == ["dear"]
    assert chosen(ranking(), failed(CHEAP, memory.other - 1)) == ["dear"]
    assert chosen(ranking(), failed(CHEAP, memory.other + 1)) == ["dear", "cheap"]
    assert chosen(ranking(), failed(CHEAP, memory.half_life + 1)) == ["cheap", "dear"]  # × 1.5 is the price of the dear


def test_no_capacity_is_asked_for_again_soon():
    memory = Memory()
    assert memory.no_capacity < memory.other
    assert chosen(ranking(CHEAP), failed(CHEAP, memory.no_capacity - 1, FailureKind.NO_CAPACITY)) == []
    assert chosen(ranking(CHEAP), failed(CHEAP, memory.no_capacity + 1, FailureKind.NO_CAPACITY)) == ["cheap"]


def test_a_refused_order_is_repeated_sooner_than_a_boot_that_was_paid():
    memory = Memory()
    assert memory.no_capacity < memory.refused < memory.other
    assert chosen(ranking(CHEAP), failed(CHEAP, memory.refused - 1, FailureKind.REFUSED)) == []
    assert chosen(ranking(CHEAP), failed(CHEAP, memory.refused + 1, FailureKind.REFUSED)) == ["cheap"]


def test_failures_of_another_offer_or_provider_do_not_count():
    others = [failed(replace(CHEAP, provider="other"), 0), failed(replace(CHEAP, region="north-2"), 0)]
    others.append(failed(replace(CHEAP, spot=True), 0))
    assert chosen(ranking(), *others) == ["cheap", "dear"]


def test_repeated_failures_add_up_and_halve():
    memory = Memory(half_life=600, weight=1.0)
    assert memory.penalty(CHEAP, []) == 1
    assert memory.penalty(CHEAP, [failed(CHEAP, 0)]) == 2
    assert memory.penalty(CHEAP, [failed(CHEAP, 600), failed(CHEAP, 600), failed(CHEAP, 1200)]) == 2.25
    assert memory.penalty(CHEAP, [failed(CHEAP, memory.horizon)]) < 1.01


def test_figures_of_a_penalised_offer_stay_what_they_are():
    (one,) = choose(ranking(CHEAP), [failed(CHEAP, 100)])
    assert one == ranking(CHEAP).ranked[0]


@pytest.mark.parametrize("objective", ["cheapest", "fastest", "efficient"])
def test_the_objective_of_the_ranking_decides(objective: Objective):
    fast_first = ranking(objective=objective, same_speed=False)
    assert chosen(fast_first)[0] == "dear"
    assert chosen(fast_first, *[failed(DEAR, 61)] * 20)[0] == "cheap"


def test_what_is_left_alone_is_said_with_the_time_and_the_failure():
    (refusal,) = in_backoff(ranking(), [failed(CHEAP, 20), failed(DEAR, 100)])
    assert (refusal.offer, refusal.reason) == (CHEAP, "left alone for 40 s more: it did not boot")


def test_the_sentence_of_reason_names_price_speed_and_failures():
    one = ranking().ranked[0]
    assert explain(one) == ("sim-north/north-1/cheap: 2.80 $ in 2.80 h (1.00 $/h, boot 90 s, 100 tokens/s, measured)")
    assert explain(one, [failed(CHEAP, 600)]).endswith("measured), counted × 1.50 because it failed lately")


@pytest.mark.parametrize(("boot", "saved"), [(0.4, 0.2), (0.5, 0.0), (0.6, -0.2)])
def test_moving_pays_exactly_when_the_price_difference_pays_the_boot(boot: float, saved: float):
    tokens = 100.0 * 3600 * (1 + boot)  # one hour is left when the new instance is ready
    move = consider_move(tokens, Pace(3.0, 100.0), Pace(2.0, 100.0, boot * 3600))
    assert (move.worth, move.saved_usd) == (saved > 0, pytest.approx(saved, abs=1e-9))


def test_with_equal_speeds_the_move_of_tokens_is_the_break_even_rule():
    boot = 360.0
    tokens = 100.0 * (3600 + boot)  # one hour is left when the new instance is ready
    move = consider_move(tokens, Pace(3.0, 100.0), Pace(2.0, 100.0, boot))
    assert (move.worth, move.saved_usd) == (True, pytest.approx(0.8))
    assert move.reason == (
        "move and save 0.80 $: 360,000 tokens cost 3.00 $ here (3.00 $/h) "
        "and 2.20 $ there (2.00 $/h, boot 0.20 $ included)"
    )


def test_a_dearer_instance_is_worth_moving_to_when_its_tokens_are_cheaper():
    assert consider_move(1e9, Pace(1.0, 100.0), Pace(2.0, 400.0, 300)).worth
    assert not consider_move(1e9, Pace(1.0, 100.0), Pace(0.5, 40.0, 300)).worth


def test_work_that_is_done_before_the_boot_stays():
    move = consider_move(1000.0, Pace(100.0, 100.0), Pace(0.01, 100.0, 60))
    assert not move.worth
    assert move.saved_usd < 0
    assert move.reason == "stay: the work is done in 10 s, before it boots"


@given(*[st.floats(0.01, 100) for _ in range(4)], st.floats(0, 3600), st.floats(0, 1e9))
def test_a_move_never_raises_the_whole_bill(
    price: float, speed: float, new_price: float, new_speed: float, boot: float, tokens: float
):
    move = consider_move(tokens, Pace(price, speed), Pace(new_price, new_speed, boot))
    if move.worth:
        left = tokens - speed * boot
        moved = (price + new_price) * boot / 3600 + new_price / 3600 * left / new_speed
        assert moved <= price / 3600 * tokens / speed + 1e-6
        assert math.isfinite(move.saved_usd) and move.saved_usd > 0


@pytest.mark.parametrize("wrong", [Pace(0, 100), Pace(1, 0), Pace(math.nan, 1), Pace(1, math.inf)])
def test_a_pace_without_price_or_speed_is_an_error(wrong: Pace):
    with pytest.raises(ValueError, match="expected a price and a speed above 0"):
        consider_move(1.0, wrong, Pace(1, 1))


def test_an_offer_that_was_lost_is_trusted_less_but_asked_at_once():
    memory, lost = Memory(), OfferFailure(OFFER.provider, OFFER.name, 1.0, FailureKind.LOST, "lost")
    assert memory.pause(OFFER, [lost]) is None
    assert memory.penalty(OFFER, [lost]) > 1.5
