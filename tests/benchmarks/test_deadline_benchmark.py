"""The deadline benchmark on a few worlds over the invented prices that lie with the tests."""

from __future__ import annotations

import statistics
from functools import cache

import pytest

from benchmarks.deadline import INVENTED, Result, play, prepare, table
from benchmarks.deadline_oracle import bound_usd
from benchmarks.deadline_policies import POLICIES, ours
from benchmarks.deadline_replay import Replay, Wish
from benchmarks.deadline_world import Steps, draw

HOUR = 3600.0
ALL = tuple(range(10))
WORLDS = (1, 3, 5, 6, 7, 8, 9)  # the oracle of the others takes seconds: all are played among the soak tests
SOAK = pytest.mark.soak("deadline")
PLAYED = pytest.mark.parametrize("worlds", [WORLDS, pytest.param(ALL, marks=SOAK)], ids=["some", "all"])


@cache
def results(worlds: tuple[int, ...]) -> list[Result]:
    return [play(INVENTED, 1, number, HOUR, ("on demand", "ours")) for number in worlds]


@SOAK
@PLAYED
def test_no_deadline_is_missed_and_no_budget_passed(worlds: tuple[int, ...]):
    assert [one.number for one in results(worlds) if one.missed("ours")] == []
    assert [one.number for one in results(worlds) if one.over("ours") or one.over("on demand")] == []


@pytest.mark.slow
@PLAYED
def test_it_costs_little_more_than_with_all_knowledge_and_no_more_than_on_demand(worlds: tuple[int, ...]):
    ratios = [one.ratio("ours") for one in results(worlds)]
    assert statistics.median(ratios) <= 1.10 and statistics.mean(ratios) <= 1.25  # one of them has 3.4 times the speed
    assert [one.number for one in results(worlds) if one.dearer("ours", "on demand")] == []


@PLAYED
def test_who_is_told_the_speeds_pays_no_more_for_them(worlds: tuple[int, ...]):
    told = [play(INVENTED, 1, number, HOUR, ("ours",), knowing=True) for number in worlds[:4]]
    assert [one.number for one in told if one.missed("ours")] == []
    assert statistics.mean(one.ratio("ours") for one in told) <= 1.08


def test_the_table_has_a_line_for_each_policy():
    lines = table(results(WORLDS), ["on demand", "ours"]).splitlines()
    assert lines[1].startswith("on demand") and lines[2].startswith("ours")


@pytest.mark.parametrize("number", [number if number in WORLDS else pytest.param(number, marks=SOAK) for number in ALL])
def test_the_oracle_is_not_below_the_bound(number):
    scenario, usd = prepare(INVENTED, 1, number)
    assert 0 < bound_usd(scenario) <= usd * (1 + 1e-9)


def test_a_world_is_the_same_each_time_and_another_number_is_another_world():
    one, again, other = draw(INVENTED, 1, 3), draw(INVENTED, 1, 3), draw(INVENTED, 1, 4)
    assert (one.tokens, [t.speed for t in one.offers]) == (again.tokens, [t.speed for t in again.offers])
    assert one.tokens != other.tokens


def test_prices_are_paid_as_they_were():
    price = Steps((0.0, HOUR, 3 * HOUR), (1.0, 4.0, 2.0))
    assert price.paid(0.5 * HOUR, 3.5 * HOUR) == pytest.approx(0.5 * 1.0 + 2 * 4.0 + 0.5 * 2.0)


def test_the_bill_of_one_instance_is_its_price_times_its_life():
    scenario, _ = prepare(INVENTED, 1, 0)
    scenario.budget, scenario.deadline = None, scenario.horizon
    offer = next(truth for truth in scenario.offers if not truth.spot)
    offer.blackouts = ()
    outcome = Replay(scenario, lambda view: Wish(((offer.name, 1),))).run()
    assert outcome.launches == 1
    assert outcome.finish == pytest.approx(offer.boot + scenario.tokens / offer.speed)
    assert outcome.usd == pytest.approx(offer.usd.paid(0.0, outcome.finish))


def test_what_is_taken_loses_little_and_is_seen():
    number = next(n for n in range(50) if any(truth.spot for truth in draw(INVENTED, 1, n).offers))
    scenario, _ = prepare(INVENTED, 1, number)
    scenario.budget = None
    offer = next(truth for truth in scenario.offers if truth.spot)
    offer.taken, offer.blackouts = 2.0, ()  # twice an hour
    offer._kills.clear()
    outcome = Replay(scenario, lambda view: Wish(((offer.name, 1),))).run()
    assert outcome.taken > 0 and outcome.launches == outcome.taken + 1
    assert outcome.finish > offer.boot + scenario.tokens / offer.speed


@pytest.mark.slow
def test_every_policy_plays():
    scenario, _ = prepare(INVENTED, 1, 2)
    for make in POLICIES.values():
        assert Replay(scenario, make()).run().usd > 0


def test_our_policy_says_why():
    scenario, _ = prepare(INVENTED, 1, 2)
    replay = Replay(scenario, ours(), [])
    replay.run()
    assert replay.log and all("$" in line for line in replay.log)
