"""What a first fleet is expected to cost before speeds are known, and which one is begun with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.planner.controller import ControllerState, decide
from gpu_runner.planner.exploration import SCENARIOS, FleetSimulation, choose_initial_fleet
from gpu_runner.planner.feasibility import FeasibilityCheck
from gpu_runner.planner.knapsack import KnapsackItem, is_coverable, solve_covering_knapsack
from gpu_runner.planner.planned_fleet import FleetCandidate
from gpu_runner.planner.planner import make_plan
from gpu_runner.planner.search import PlanSearch
from gpu_runner.planner.speed_model import HardwareType
from gpu_runner.planner.types import TIMING, HeldInstance, PlannedOffer, Target, Work

HOUR = 3600.0
WORK = Work(tokens=360e6, total_tokens=360e6, started_ago=0.0, units=1000)
KNOWN = PlannedOffer("cloud/l40s", 4.0, 10_000.0, 480.0, spread=0.05, hardware=HardwareType("L40S", 48, 1))
ONE = PlannedOffer("cloud/1x a100", 1.0, 5_000.0, 240.0, spread=0.5, hardware=HardwareType("A100", 80, 1))
EIGHT = PlannedOffer("cloud/8x a100", 16.0, 40_000.0, 900.0, spread=0.5, hardware=HardwareType("A100", 80, 8))
OTHER = PlannedOffer("cloud/1x h100", 1.0, 5_000.0, 240.0, spread=0.5, hardware=HardwareType("H100", 80, 1))


def check(
    *options: PlannedOffer, target: Target, held: tuple[HeldInstance, ...] = (), work: Work = WORK
) -> FeasibilityCheck:
    return FeasibilityCheck(work, options, held, target, TIMING)


def simulation(
    *options: PlannedOffer, target: Target | None = None, work: Work = WORK, held: tuple[HeldInstance, ...] = ()
) -> FleetSimulation:
    return FleetSimulation(check(*options, target=target or Target(4 * HOUR), held=held, work=work))


def new(option: PlannedOffer, number: int = 1) -> FleetCandidate:
    return FleetCandidate((), ((option, number),))


def test_with_known_speeds_it_costs_what_the_plan_says():
    sure = replace(KNOWN, spread=1e-6)
    plan = make_plan(WORK, [sure], [], Target(4 * HOUR))
    assert plan.chosen is not None
    found = simulation(sure).expected_cost(FleetCandidate((), plan.chosen.fleet))
    assert found.usd == pytest.approx(plan.chosen.usd.p50, rel=0.03) and found.late == 0


def test_it_is_the_mean_over_speeds():
    """One instance of unknown speed that works to the end costs its boot and a lognormal time."""
    alone = simulation(ONE, target=Target(None, max_instances=1))
    found = alone.expected_cost(new(ONE))
    z = np.random.default_rng(0).standard_normal((SCENARIOS // 2, 4))
    error = 0.3**0.5 * z[:, 1] + 0.5**0.5 * z[:, 2] + 0.2**0.5 * z[:, 3]
    hours = WORK.tokens / 5_000.0 / HOUR * np.exp(-0.5 * np.concatenate([error, -error]))
    assert found.usd == pytest.approx(1.0 * (240.0 / HOUR + hours.mean()), rel=0.01)
    assert hours.mean() == pytest.approx(WORK.tokens / 5_000.0 / HOUR * math.exp(0.125), rel=0.1)


def test_the_same_question_has_the_same_answer():
    assert simulation(ONE, KNOWN).expected_cost(new(ONE, 2)) == simulation(ONE, KNOWN).expected_cost(new(ONE, 2))


def test_a_card_tells_more_of_its_like_than_of_others():
    """The work is for eight-card machines: one card of that kind is the better one to try."""
    like, unlike = (replace(one, tokens_per_second=10.0, capacity=1) for one in (ONE, OTHER))
    both = simulation(EIGHT, like, unlike, KNOWN, target=Target(5 * HOUR))
    assert both.expected_cost(new(like)).usd < 0.97 * both.expected_cost(new(unlike)).usd


def test_too_little_time_or_money_is_late():
    assert simulation(KNOWN, target=Target(0.2 * HOUR)).expected_cost(new(KNOWN)).late == 1
    assert simulation(KNOWN, target=Target(4 * HOUR, budget_usd=20.0)).expected_cost(new(KNOWN, 4)).late == 1
    assert simulation(KNOWN, target=Target(4 * HOUR, budget_usd=80.0)).expected_cost(new(KNOWN, 4)).late == 0


def test_work_that_ends_before_anything_is_known_is_paid_to_its_end():
    little = replace(WORK, tokens=600_000.0)
    found = simulation(replace(KNOWN, spread=1e-9), work=little).expected_cost(new(KNOWN))
    assert found.usd == pytest.approx(4.0 / HOUR * (480.0 + 60.0), rel=1e-3) and found.late == 0


@pytest.mark.parametrize("turn", [1, -1])
def test_a_provider_with_a_faster_clock_keeps_it(turn):
    """The same machine, five times as fast where the provider's clock is."""
    here = replace(KNOWN, spread=1e-9)
    there = replace(here, name="sim/l40s", tokens_per_second=50_000.0)
    found = simulation(*[here, there][::turn], work=replace(WORK, tokens=600_000.0))
    assert found.expected_cost(new(here)).usd == pytest.approx(4.0 / HOUR * (480.0 + 60.0), rel=1e-3)
    assert found.expected_cost(new(there)).usd == pytest.approx(4.0 / HOUR * (480.0 + 12.0), rel=1e-3)


def test_what_goes_on_counts_from_now():
    held = (HeldInstance("i0", ONE),)
    now = simulation(ONE, KNOWN, held=held).expected_cost(FleetCandidate(held))
    later = simulation(ONE, KNOWN).expected_cost(new(ONE))
    assert now.usd < later.usd


def test_nothing_is_better_than_the_cheapest_known_offer():
    target = Target(6 * HOUR)
    plan = make_plan(WORK, [KNOWN], [], target)
    usual = check(KNOWN, target=target).fleet_of(plan)
    assert choose_initial_fleet(check(KNOWN, target=target), usual, 3) is None


def test_a_cheap_try_comes_before_a_dear_guess():
    """Three times eight cards of unknown speed, or first one of them: a dollar instead of a dear boot."""
    options = (EIGHT, ONE, KNOWN)
    here = check(*options, target=Target(5 * HOUR))
    usual = new(EIGHT, 3)
    found = choose_initial_fleet(here, usual, 3)
    assert found is not None
    chosen, cost = found
    assert cost.usd < FleetSimulation(here).expected_cost(usual).usd
    assert sum(one.usd_per_hour * number for one, number in chosen.new) < 3 * 16.0


def test_an_opening_leaves_a_way_out():
    """The way out is 12 known machines. With ten minutes to spare there is no time to try anything alone."""
    way_out = replace(KNOWN, capacity=12)
    tight = Target(480.0 + 600.0 + WORK.tokens / (12 * 10_000.0), max_instances=12)
    here = check(ONE, way_out, target=tight)
    usual = new(way_out, 12)
    found = choose_initial_fleet(here, usual, 3)
    begun = usual if found is None else found[0]
    assert dict(begun.new).get(way_out, 0) >= 10


def test_an_opening_keeps_to_the_limit_on_instances():
    target = Target(9 * HOUR, max_instances=2)
    here = check(EIGHT, ONE, OTHER, KNOWN, target=target)
    found = choose_initial_fleet(here, new(EIGHT), 3)
    assert found is None or len(found[0].options) <= 2


def test_what_was_begun_is_left_to_work_while_it_boots():
    """The same decision at each tick, or the fleet would be ordered and given up in turn."""
    options, target = [EIGHT, ONE, OTHER, KNOWN], Target(5 * HOUR)
    memory, held = ControllerState(), []
    known = {one.name: one for one in options}
    first, memory, _ = decide(WORK, options, held, target, memory, measured=False, pilots=3, detail=False)
    fleet = [(known[name], number) for name, number in first.offers]
    assert fleet
    for waited in range(0, 240, 30):
        booting = [replace(one, ready_in=one.ready_in - waited) for one in FleetCandidate((), tuple(fleet)).projected()]
        later = replace(target, deadline=5 * HOUR - waited)
        command, memory, _ = decide(WORK, options, booting, later, memory, measured=False, pilots=3, detail=False)
        assert (command.offers, command.retire) == (first.offers, ())


def test_nothing_is_given_up_to_save_money_where_all_are_needed_until_the_other_has_booted():
    """Eight of eight are needed. A cheaper ninth may not be there, so one would have to go first."""
    cheap = replace(KNOWN, name="cloud/cheap", usd_per_hour=2.0)
    left = replace(WORK, tokens=8 * 10_000.0 * HOUR)
    held = [HeldInstance(f"i{i}", KNOWN) for i in range(8)]
    command, _, _ = decide(
        left,
        [KNOWN, cheap],
        held,
        Target(1.12 * HOUR, max_instances=8),
        ControllerState(),
        measured=True,
        detail=False,
    )
    assert command.retire == ()


offers = st.lists(
    st.builds(
        PlannedOffer,
        name=st.sampled_from("abcdef"),
        usd_per_hour=st.floats(0.2, 40),
        tokens_per_second=st.floats(500, 80_000),
        boot_seconds=st.floats(30, 1200),
        capacity=st.sampled_from([None, 0, 1, 4]),
        spread=st.sampled_from([0.0, 0.2, 0.5]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda one: one.name,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(offers, st.floats(600, 50_000), st.integers(1, 30), st.floats(0, 1), st.integers(0, 3))
def test_what_is_possible_is_what_a_plan_meets(options, deadline, most, confidence, here):
    held = [HeldInstance(str(i), options[0], 60.0 * i) for i in range(here)]
    target = Target(deadline, max_instances=most)
    plan = make_plan(WORK, options, held, target, confidence=confidence, allow_late=False)
    assert PlanSearch(WORK, options, held, target, confidence=confidence).possible(deadline) == plan.met


@settings(deadline=None)
@given(
    st.lists(
        st.builds(KnapsackItem, st.integers(0, 4), st.integers(0, 30), st.floats(0, 5), st.floats(0, 1)), max_size=4
    ),
    st.integers(0, 6),
)
def test_a_cover_is_found_where_there_is_room(kinds, most):
    assert is_coverable(kinds, most, 64) == (solve_covering_knapsack(kinds, most, 64) is not None)


def test_the_longest_decision_takes_less_than_the_time_between_two_looks():
    """13 offers of unknown speed, 50 instances; benchmarks/timing.py measures how long it takes."""
    options = [
        replace(
            ONE,
            name=f"cloud/{i}{' spot' if i % 2 else ''}",
            spot=bool(i % 2),
            usd_per_hour=1.0 + 0.3 * i,
            tokens_per_second=5_000.0 + 1_500.0 * i,
            boot_seconds=(240.0, 480.0, 900.0)[i % 3],
            hardware=HardwareType(f"card {i // 3}", 80, 1 + i % 3),
        )
        for i in range(13)
    ]
    work = replace(WORK, tokens=5e9, spread=0.15)
    command, _, _ = decide(
        work,
        options,
        [],
        Target(8 * HOUR, max_instances=50),
        ControllerState(),
        measured=False,
        pilots=3,
        detail=False,
    )
    assert "in the end" in command.reason


def test_what_is_being_tried_may_be_waited_for():
    """The dollar is spent already: a dear boot waits until the one card has told what eight of them are worth."""
    one, eight = replace(ONE, tokens_per_second=10.0, capacity=0), replace(EIGHT, boot_seconds=1800.0)
    held = (HeldInstance("i0", one, 60.0),)
    here = check(eight, one, KNOWN, target=Target(8 * HOUR), held=held)
    found = choose_initial_fleet(here, FleetCandidate(held, ((eight, 1),)), 1)
    assert found is not None and (found[0].kept, found[0].new) == (held, ())
