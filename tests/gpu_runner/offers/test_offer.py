"""Offers: which prices are believed, which offers are accepted, and who stands first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.market_offers import speed_of

from gpu_runner.offers.offer import (
    DAY,
    HOUR,
    Objective,
    Offer,
    OfferFilter,
    Sanity,
    describe,
    objective_value,
    rank,
    screen,
)
from gpu_runner.offers.speed import LengthMix, Measurement, ModelFacts, NoSpeed, Speed, Throughput

NOW = 1_780_000_000.0
OBJECTIVES: tuple[Objective, ...] = ("cheapest", "fastest", "efficient")
PLAIN = Offer(
    provider="alpha",
    region="north",
    instance_type="a100.1x",
    gpu="A100",
    gpus=1,
    gpu_memory_gib=80,
    spot=False,
    price_per_hour=2.0,
    boot_seconds=300,
    reliability=0.99,
    observed_at=NOW,
    source="test",
)
SPEEDS = {"A100": 10_000.0, "H100": 30_000.0, "L4": 1_000.0}


def known_speed(offer: Offer) -> Speed | NoSpeed:
    if offer.gpu not in SPEEDS:
        return NoSpeed(f"no datasheet for {offer.gpu}")
    return Speed(SPEEDS[offer.gpu] * offer.gpus, "estimate")


offers = st.builds(
    Offer,
    provider=st.sampled_from(["alpha", "beta"]),
    region=st.sampled_from(["", "north", "south"]),
    instance_type=st.sampled_from(["", "small", "large"]),
    gpu=st.sampled_from(["A100", "H100", "L4", "K80"]),
    gpus=st.integers(0, 8),
    gpu_memory_gib=st.sampled_from([0.0, 24.0, 80.0]),
    spot=st.booleans(),
    price_per_hour=st.floats(-1, 1e6) | st.sampled_from([0.0, math.nan, math.inf, 1.0, 2.0]),
    boot_seconds=st.floats(0, 3600),
    reliability=st.floats(0, 1),
    observed_at=st.floats(NOW - 20 * DAY, NOW + 3 * DAY),
    source=st.sampled_from(["list", "history"]),
    capacity=st.none() | st.integers(0, 3),
)
filters = st.builds(
    OfferFilter,
    providers=st.none() | st.just(frozenset({"Alpha"})),
    regions=st.none() | st.just(frozenset({"north"})),
    gpus=st.none() | st.just(frozenset({"a100", "L4"})),
    spot=st.booleans(),
    max_price_per_hour=st.none() | st.floats(0.1, 100),
    min_reliability=st.floats(0, 1),
)
work = st.floats(0, 1e12)
objectives = st.sampled_from(OBJECTIVES)


def test_a_short_job_goes_where_booting_is_cheap_and_a_long_one_where_tokens_are() -> None:
    slow = replace(PLAIN, instance_type="slow", gpu="L4", price_per_hour=0.5, boot_seconds=60)
    fast = replace(PLAIN, instance_type="fast", gpu="H100", price_per_hour=4.0, boot_seconds=600)
    short = rank([slow, fast], 100_000, known_speed)
    long = rank([slow, fast], 1e9, known_speed)
    assert [one.offer for one in short.ranked] == [slow, fast]
    assert [one.offer for one in long.ranked] == [fast, slow]
    assert long.ranked[0].seconds == pytest.approx(600 + 1e9 / 30_000)
    assert long.ranked[0].usd == pytest.approx(4.0 / HOUR * (600 + 1e9 / 30_000))
    assert long.ranked[0].usd_per_million_tokens == pytest.approx(4.0 / HOUR / 30_000 * 1e6)


def test_a_warm_instance_beats_the_same_one_cold() -> None:
    warm = replace(PLAIN, instance_type="warm", boot_seconds=0)
    assert rank([PLAIN, warm], 1e6, known_speed).ranked[0].offer is warm


def test_each_objective_has_its_own_winner() -> None:
    cheap = replace(PLAIN, instance_type="cheap", gpu="L4", price_per_hour=0.10, boot_seconds=0)
    fast = replace(PLAIN, instance_type="fast", gpu="H100", gpus=8, price_per_hour=90.0, boot_seconds=0)
    middle = replace(PLAIN, instance_type="middle", gpu="H100", price_per_hour=3.3, boot_seconds=0)
    winners = {
        objective: rank([cheap, fast, middle], 1e9, known_speed, objective=objective).ranked[0].offer
        for objective in OBJECTIVES
    }
    assert winners == {"cheapest": cheap, "fastest": fast, "efficient": fast}
    dear = replace(fast, price_per_hour=300.0)
    assert rank([cheap, dear, middle], 1e9, known_speed, objective="efficient").ranked[0].offer == middle


@pytest.mark.parametrize(
    ("change", "accept", "reason"),
    [
        ({}, OfferFilter(providers=frozenset({"beta"})), "provider alpha is not among beta"),
        ({}, OfferFilter(regions=frozenset({"south"})), "region north is not among south"),
        ({"region": ""}, OfferFilter(regions=frozenset({"south"})), "region unknown is not among south"),
        ({}, OfferFilter(gpus=frozenset({"H100", "H200"})), "GPU A100 is not among H100, H200"),
        ({"spot": True}, OfferFilter(), "spot is not allowed"),
        ({}, OfferFilter(max_price_per_hour=1.5), "price 2.00 $/h is above 1.50"),
        ({}, OfferFilter(min_reliability=0.995), "reliability 0.990 is below 0.995"),
        ({"capacity": 0}, OfferFilter(), "no capacity left"),
        ({"gpu": "K80"}, OfferFilter(), "no datasheet for K80"),
        ({"price_per_hour": 0.0}, OfferFilter(), "absurd price: expected more than 0 $/h, found 0"),
    ],
)
def test_a_refusal_says_why(change: dict[str, object], accept: OfferFilter, reason: str) -> None:
    ranking = rank([replace(PLAIN, **change)], 1e6, known_speed, accept=accept)
    assert not ranking.ranked
    assert ranking.refused[0].reason == reason


def test_a_refusal_names_every_reason() -> None:
    ranking = rank([replace(PLAIN, spot=True, capacity=0)], 1e6, known_speed)
    assert ranking.refused[0].reasons == ("spot is not allowed", "no capacity left")


def test_names_are_accepted_however_they_are_written() -> None:
    accept = OfferFilter(providers=frozenset({"ALPHA"}), gpus=frozenset({"a 100"}))
    assert rank([PLAIN], 1e6, known_speed, accept=accept).ranked


def test_negative_work_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens: expected 0 or more"):
        rank([PLAIN], -1, known_speed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"observed_at": NOW - 8 * DAY}, "price is 8.0 days old, 7 allowed"),
        ({"observed_at": NOW + 2 * DAY}, "price is dated 2.0 days in the future"),
        ({"price_per_hour": 0.0}, "absurd price: expected more than 0 $/h, found 0"),
        ({"price_per_hour": -1.0}, "absurd price: expected more than 0 $/h, found -1"),
        ({"price_per_hour": math.nan}, "absurd price: expected more than 0 $/h, found nan"),
        ({"price_per_hour": 200.0}, "absurd price: 200 $/h per GPU, the median of A100 is 2"),
        ({"price_per_hour": 0.02}, "absurd price: 0.02 $/h per GPU, the median of A100 is 2"),
        ({"gpus": 0}, "number of GPUs unknown"),
        ({"gpu_memory_gib": 0.0}, "GPU memory unknown"),
    ],
)
def test_a_price_that_cannot_be_believed_is_refused_and_said(change: dict[str, object], reason: str) -> None:
    others = [replace(PLAIN, instance_type=f"other-{number}") for number in range(3)]
    strange = replace(PLAIN, **change)
    kept, refused = screen([*others, strange], NOW)
    assert kept == others
    assert [(one.offer, one.reason) for one in refused] == [(strange, reason)]


def test_prices_are_compared_per_gpu_and_only_among_the_same_card() -> None:
    eight = replace(PLAIN, gpus=8, price_per_hour=16.0)
    small = [replace(PLAIN, gpu="L4", gpu_memory_gib=24, price_per_hour=0.01)] * 3
    kept, refused = screen([PLAIN, PLAIN, PLAIN, eight, *small], NOW)
    assert len(kept) == 7 and not refused


def test_two_offers_make_no_median() -> None:
    kept, _ = screen([PLAIN, replace(PLAIN, price_per_hour=500.0)], NOW, Sanity())
    assert len(kept) == 2


def test_old_prices_do_not_shift_the_median() -> None:
    old = [replace(PLAIN, price_per_hour=1000.0, observed_at=NOW - 30 * DAY)] * 10
    kept, refused = screen([*[PLAIN] * 3, *old], NOW)
    assert kept == [PLAIN] * 3 and len(refused) == 10


def test_the_speed_of_an_offer_comes_from_the_throughput_catalog() -> None:
    facts, mix = ModelFacts("m", 16e9, 8e9, 131_072), LengthMix(200, 300)
    catalog = Throughput([Measurement("m", "A100", 80, 1, mix, 5e6, 1000)])
    first = rank([PLAIN], 1e6, speed_of(catalog, facts, mix)).ranked[0]
    assert first.speed == Speed(5000, "measured")
    assert describe(first) == ("alpha/north/a100.1x: 0.28 $ in 0.14 h (2.00 $/h, boot 300 s, 5,000 tokens/s, measured)")


@settings(deadline=None, max_examples=60)
@given(st.lists(offers, max_size=12), offers, work, filters, objectives)
def test_adding_an_offer_never_makes_the_best_worse(
    some: list[Offer], another: Offer, tokens: float, accept: OfferFilter, objective: Objective
) -> None:
    before = rank(some, tokens, known_speed, accept=accept, objective=objective).ranked
    after = rank([*some, another], tokens, known_speed, accept=accept, objective=objective).ranked
    if before:
        assert objective_value(after[0], objective) <= objective_value(before[0], objective)


@settings(deadline=None, max_examples=60)
@given(st.lists(offers, min_size=1, max_size=12), st.data(), work, objectives)
def test_a_higher_price_never_raises_the_rank(
    some: list[Offer], data: st.DataObject, tokens: float, objective: Objective
) -> None:
    some = [replace(offer, source=f"{number:02}") for number, offer in enumerate(some)]
    chosen = data.draw(st.integers(0, len(some) - 1))
    dearer = replace(some[chosen], price_per_hour=some[chosen].price_per_hour * data.draw(st.floats(1, 100)))
    changed = [*some[:chosen], dearer, *some[chosen + 1 :]]
    accept = OfferFilter(spot=True)

    def place(all_offers: list[Offer]) -> int | None:
        ranked = rank(all_offers, tokens, known_speed, accept=accept, objective=objective).ranked
        return next((at for at, one in enumerate(ranked) if one.offer.source == dearer.source), None)

    before, after = place(some), place(changed)
    if before is None:
        assert after is None
    else:
        assert after is None or after >= before


@settings(deadline=None, max_examples=60)
@given(st.lists(offers, max_size=15), work, filters, objectives)
def test_every_offer_is_either_ranked_or_refused_with_a_reason(
    some: list[Offer], tokens: float, accept: OfferFilter, objective: Objective
) -> None:
    kept, unbelieved = screen(some, NOW)
    ranking = rank(kept, tokens, known_speed, accept=accept, objective=objective)
    refused = [*unbelieved, *ranking.refused]
    assert all(one.reasons and all(one.reasons) for one in refused)
    met = [id(one.offer) for one in (*ranking.ranked, *refused)]
    assert sorted(met) == sorted(id(offer) for offer in some)
    assert all(math.isfinite(one.usd) and one.usd >= 0 for one in ranking.ranked)
