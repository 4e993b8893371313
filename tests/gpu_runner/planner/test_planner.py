"""The planner: more time, money or offers never hurt, no cap is passed, small cases agree with trying everything."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timing import SOAK

from gpu_runner.planner.knapsack import KnapsackItem, solve_covering_knapsack
from gpu_runner.planner.planner import in_detail, make_plan
from gpu_runner.planner.search import NEARLY
from gpu_runner.planner.types import HeldInstance, Plan, PlannedOffer, Target, Work

HOUR = 3600.0
A100 = PlannedOffer("cloud/a100", 2.0, 10_000.0, 480.0)
L4 = PlannedOffer("cloud/l4", 0.6, 2_000.0, 300.0)
SPOT = PlannedOffer("cloud/a100 spot", 0.7, 10_000.0, 480.0, spot=True, interruptions_per_hour=0.1)
WORK = Work(tokens=360e6, total_tokens=360e6, started_ago=0.0, units=1000)  # 10 hours of an A100

options = st.builds(
    PlannedOffer,
    name=st.just("an offer"),
    usd_per_hour=st.floats(0.1, 40),
    tokens_per_second=st.floats(500, 50_000),
    boot_seconds=st.floats(0, 2000),
    capacity=st.none() | st.integers(0, 8),
    spot=st.booleans(),
    interruptions_per_hour=st.floats(0, 0.5),
    spread=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
)
markets = st.lists(options, min_size=1, max_size=6).map(lambda found: [named(one, i) for i, one in enumerate(found)])
works = st.builds(
    Work,
    tokens=st.floats(1e6, 1e10),
    total_tokens=st.just(1e10),
    started_ago=st.just(0.0),
    units=st.integers(1, 200),
    spread=st.sampled_from([0.0, 0.02, 0.3]),
)
deadlines = st.floats(300, 1e6)
most = st.integers(1, 30)


def named(option: PlannedOffer, number: int) -> PlannedOffer:
    return replace(option, name=f"cloud/{number}{' spot' if option.spot else ''}")


def held_of(market: list[PlannedOffer], waits: list[float]) -> list[HeldInstance]:
    return [HeldInstance(f"i{i}", market[i % len(market)], wait) for i, wait in enumerate(waits)]


def plan_of(work: Work, market: list[PlannedOffer], held: list[HeldInstance], target: Target) -> Plan:
    return make_plan(work, market, held, target)


waits = st.lists(st.sampled_from([0.0, 60.0, 400.0]), max_size=4)


@settings(deadline=None)
@given(works, markets, waits, most, deadlines, st.floats(1, 10))
def test_more_time_never_costs_more(work, market, booting, limit, deadline, factor):
    held = held_of(market, booting)
    less = plan_of(work, market, held, Target(deadline, None, limit))
    more = plan_of(work, market, held, Target(deadline * factor, None, limit))
    assert more.feasible or not less.feasible
    if less.feasible:
        assert more.chosen.usd.p50 <= less.chosen.usd.p50 * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(works, markets, waits, most, deadlines, st.floats(0.1, 1000), st.floats(1, 10), st.booleans())
def test_more_budget_never_finishes_later(work, market, booting, limit, deadline, budget, factor, fastest):
    """With a deadline: never later than the deadline by more; before it, what is cheaper comes first."""
    held = held_of(market, booting)
    objective = "fastest" if fastest else "cheapest"
    less = plan_of(work, market, held, Target(deadline, budget, limit, objective))
    more = plan_of(work, market, held, Target(deadline, budget * factor, limit, objective))
    if less.chosen is not None:
        before, after = less.chosen.finish.p95, more.chosen.finish.p95
        if not fastest:
            before, after = max(deadline, before), max(deadline, after)
        assert after <= before * NEARLY * (1 + 1e-9)


@settings(deadline=None)
@given(works, markets, waits, most, deadlines, options)
def test_a_further_offer_never_makes_the_plan_worse(work, market, booting, limit, deadline, further):
    held = held_of(market, booting)
    target = Target(deadline, None, limit)
    before = plan_of(work, market, held, target)
    after = plan_of(work, [*market, named(further, 99)], held, target)
    assert after.feasible or not before.feasible
    if before.feasible:
        assert after.chosen.usd.p50 <= before.chosen.usd.p50 * (1 + 1e-9)
    if before.earliest is not None:
        assert after.earliest.finish.p95 <= before.earliest.finish.p95 * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    works,
    markets,
    waits,
    most,
    deadlines,
    st.none() | st.floats(0.1, 1000),
    st.sampled_from(["cheapest", "fastest", "efficient"]),
)
def test_no_plan_passes_a_cap(work, market, booting, limit, deadline, budget, objective):
    held, target = held_of(market, booting), Target(deadline, budget, limit, objective)
    plan = in_detail(plan_of(work, market, held, target), work, market, held, target)
    had = Counter(one.option.name for one in held)
    if plan.chosen is not None and budget is not None:
        assert plan.chosen.usd.p50 <= budget * (1 + 1e-9)
    for one in (plan.chosen, plan.earliest, *plan.next_best, *plan.curve):
        if one is None:
            continue
        assert one.instances <= min(limit, work.units)
        for option, number in one.fleet:
            assert option.capacity is None or number <= option.capacity + had[option.name]
    if plan.feasible:
        assert objective == "fastest" or plan.chosen.finish.p95 <= deadline * (1 + 1e-6)
    assert plan.instances == (plan.chosen.instances if plan.chosen else 0)


@pytest.mark.slow
@settings(deadline=None)
@given(works, markets, waits, most)
def test_the_curve_falls_from_the_fastest_to_the_cheapest(work, market, booting, limit):
    held, target = held_of(market, booting), Target(None, None, limit)
    plan = in_detail(plan_of(work, market, held, target), work, market, held, target)
    costs = [one.usd.p50 for one in plan.curve]
    assert costs == sorted(costs, reverse=True)
    if plan.earliest is not None:
        assert plan.curve[0] == plan.earliest


def by_trying(kinds: list[KnapsackItem], limit: int, quanta: int) -> float | None:
    """Every set of instances; the work goes to the cheapest per quantum first."""
    costs = []
    for counts in itertools.product(*(range(min(kind.count, limit) + 1) for kind in kinds)):
        used = [(number, kind) for number, kind in zip(counts, kinds, strict=True)]
        if sum(counts) > limit or sum(number * kind.room for number, kind in used) < quanta:
            continue
        cost, left = sum(number * kind.start for number, kind in used), quanta
        for number, kind in sorted(used, key=lambda pair: pair[1].each):
            share = min(left, number * kind.room)
            cost, left = cost + share * kind.each, left - share
        costs.append(cost)
    return min(costs, default=None)


@pytest.mark.parametrize("part", range(4))
def test_the_cheapest_cover_is_that_of_trying_everything(part):
    for seed in range(part, 300 if SOAK else 100, 4):
        check_cheapest_cover(random.Random(seed))


def check_cheapest_cover(dice: random.Random) -> None:
    kinds = [
        KnapsackItem(dice.randint(0, 4), dice.randint(0, 25), dice.choice([0.0, dice.random() * 5]), dice.random())
        for _ in range(dice.randint(1, 4))
    ]
    limit, quanta = dice.randint(1, 6), dice.choice([20, 40])
    tried, found = by_trying(kinds, limit, quanta), solve_covering_knapsack(kinds, limit, quanta)
    if tried is None or found is None:
        assert tried is None and found is None
        return
    cost, counts = found
    assert cost == pytest.approx(tried)
    assert sum(counts) <= limit and all(n <= kind.count for n, kind in zip(counts, kinds, strict=True))
    assert sum(n * kind.room for n, kind in zip(counts, kinds, strict=True)) >= quanta


def test_with_time_enough_one_instance_of_the_cheapest_offer_does_it():
    plan = make_plan(WORK, [A100, L4], [], Target(24 * HOUR))
    assert [(option.name, number) for option, number in plan.chosen.fleet] == [("cloud/a100", 1)]
    assert plan.chosen.usd.p50 == pytest.approx(2.0 * (10 + 480 / HOUR))
    assert plan.feasible and plan.chosen.finish.p50 == pytest.approx(10 * HOUR + 480)


def test_a_deadline_takes_as_many_instances_as_it_needs_and_each_pays_its_boot():
    plan = make_plan(WORK, [A100], [], Target(2.5 * HOUR))
    assert plan.instances == 5  # four would take 2.5 h and the boot
    assert plan.chosen.usd.p50 == pytest.approx(2.0 * (10 + 5 * 480 / HOUR))


def test_uncertain_speeds_take_more_instances():
    sure, is_unmeasured = (make_plan(WORK, [replace(A100, spread=one)], [], Target(2.5 * HOUR)) for one in (0.05, 0.5))
    assert sure.instances < is_unmeasured.instances
    assert is_unmeasured.chosen.finish.p50 < is_unmeasured.chosen.finish.p95 <= 2.5 * HOUR


def test_spot_is_worth_its_interruptions_until_they_cost_more_than_it_saves():
    often = replace(SPOT, interruptions_per_hour=20.0)
    assert make_plan(WORK, [A100, SPOT], [], Target(24 * HOUR)).chosen.fleet[0][0] == SPOT
    assert make_plan(WORK, [A100, often], [], Target(24 * HOUR)).chosen.fleet[0][0] == A100


def test_with_a_ramp_spot_is_done_that_much_before_the_deadline():
    plan = make_plan(WORK, [A100, SPOT], [], Target(4 * HOUR), spot_cutoff=1800.0)
    assert plan.chosen.fleet[0][0] == SPOT and plan.feasible
    assert plan.chosen.instances > make_plan(WORK, [A100, SPOT], [], Target(4 * HOUR)).chosen.instances


def test_a_held_instance_stays_where_the_boot_of_a_cheaper_one_costs_more_than_it_saves():
    held = [HeldInstance("here", A100)]
    little = replace(WORK, tokens=10e6)
    cheaper = replace(A100, name="cloud/other", usd_per_hour=1.8)
    assert make_plan(little, [cheaper], held, Target(24 * HOUR)).keep == ("here",)
    assert make_plan(WORK, [cheaper], held, Target(24 * HOUR)).keep == ()


def test_what_cannot_be_done_in_time_says_when_it_can_be_done_and_for_how_much():
    plan = make_plan(WORK, [A100], [], Target(HOUR, None, 5))
    assert not plan.feasible
    assert plan.chosen.finish.p95 <= NEARLY * plan.earliest.finish.p95
    assert plan.instances == 5
    assert "too late" in plan.reason and "earliest possible finish" in plan.reason and "$" in plan.reason


def test_a_budget_that_pays_only_for_the_slow_way_takes_the_slow_way():
    plan = make_plan(WORK, [A100, replace(L4, tokens_per_second=4000.0, capacity=4)], [], Target(3 * HOUR, 16.0))
    assert not plan.feasible
    assert plan.chosen.usd.p50 <= 16.0
    assert plan.chosen.finish.p95 > 3 * HOUR


def test_a_budget_that_does_not_pay_for_the_work_allows_no_plan():
    plan = make_plan(WORK, [A100], [], Target(24 * HOUR, 5.0))
    assert plan.chosen is None and not plan.feasible and plan.instances == 0
    assert "5.00 $ does not pay" in plan.reason


def test_without_offers_there_is_no_plan_and_without_work_nothing_is_to_do():
    assert make_plan(WORK, [], [], Target(HOUR)).chosen is None
    done = make_plan(replace(WORK, tokens=0.0), [A100], [], Target(HOUR))
    assert done.feasible and done.instances == 0
