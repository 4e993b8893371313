"""What `plan` says of a budget is what the controller does with it, over random fleets and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.fleet_database.capacity_plan import ControllerState
from gpu_runner.offers.offer import HOUR, Objective
from gpu_runner.planner.budget import entry_usd
from gpu_runner.planner.controller import decide
from gpu_runner.planner.planner import make_plan
from gpu_runner.planner.types import TIMING, HeldInstance, Plan, PlannedOffer, Target, Work

RESERVE = TIMING.reserve
STEP = TIMING.tick

offers = st.builds(
    PlannedOffer,
    name=st.just(""),
    usd_per_hour=st.floats(0.1, 40),
    tokens_per_second=st.floats(500, 100_000),
    boot_seconds=st.floats(1, 1500),
    capacity=st.none() | st.integers(0, 8),
    spread=st.just(0.05),
)
markets = st.lists(offers, min_size=1, max_size=4).map(
    lambda found: [replace(o, name=f"o{i}") for i, o in enumerate(found)]
)
questions = {
    "market": markets,
    "tokens": st.floats(1e5, 1e9),
    "deadline": st.none() | st.floats(600, 1e5),
    "share": st.floats(0.2, 6),
    "limit": st.integers(1, 8),
    "objective": st.sampled_from(get_args(Objective)),
}


def planned(market: list[PlannedOffer], work: Work, target: Target) -> Plan:
    return make_plan(work, market, [], replace(target, reserve_seconds=RESERVE))


def carried_out(market: list[PlannedOffer], work: Work, target: Target) -> tuple[str, float]:
    """The kind of the last command, and what was spent, when speeds are as expected and decisions come in time."""
    held: list[HeldInstance] = []
    left, spent, memory, now = work.tokens, 0.0, ControllerState(), 0.0
    for _ in range(120):
        deadline = None if target.deadline is None else target.deadline - now
        wanted = replace(target, deadline=deadline, budget_usd=(target.budget_usd or 0.0) - spent)
        command, memory, _ = decide(
            replace(work, tokens=left), market, held, wanted, memory, measured=True, pilots=1, detail=False
        )
        if command.kind in ("paused", "done"):
            return command.kind, spent
        held = [one for one in held if one.instance not in command.retire]
        for name, number in command.new:
            option = next(one for one in market if one.name == name)
            held += [HeldInstance(f"{name}-{now}-{i}", option, option.boot_seconds) for i in range(number)]
        rate = sum(one.option.usd_per_hour for one in held) / HOUR
        done = sum(one.option.tokens_per_second * max(0.0, STEP - one.ready_in) for one in held)
        if done >= left:
            return "done", spent + rate * STEP * left / done
        left, spent, now = left - done, spent + rate * STEP, now + STEP
        held = [replace(one, ready_in=max(0.0, one.ready_in - STEP)) for one in held]
    return "endless", spent


@settings(max_examples=40, deadline=None)
@given(**questions)
def test_a_plan_says_no_instance_where_the_controller_pauses_and_the_sum_it_names_is_enough(
    market, tokens, deadline, share, limit, objective
):
    budget = share * min(entry_usd(one, RESERVE) for one in market)
    work, target = Work(tokens, tokens, 0.0, 30), Target(deadline, budget, limit, objective)
    plan = planned(market, work, target)
    command, _, _ = decide(work, market, [], target, ControllerState(), measured=True, pilots=1, detail=False)
    if command.kind == "paused":
        assert plan.chosen is None
        assert command.pause is not None and command.pause.enough_usd == plan.least_usd
    if plan.chosen is not None:
        assert command.instances > 0 and plan.least_usd is None
    elif plan.least_usd is not None:
        assert plan.least_usd > budget
        assert planned(market, work, replace(target, budget_usd=plan.least_usd)).chosen is not None


@settings(max_examples=15, deadline=None)
@given(market=markets, minutes=st.floats(1, 30), share=st.floats(0.5, 6), limit=st.integers(1, 3))
def test_what_the_plan_can_pay_for_is_carried_out_without_a_pause(market, minutes, share, limit):
    """`plan` ended with 0 for a budget with which `run` waited for ever."""
    tokens = 60 * minutes * max(one.tokens_per_second for one in market)
    budget = share * min(entry_usd(one, RESERVE) for one in market)
    work, target = Work(tokens, tokens, 0.0, 30), Target(None, budget, limit)
    plan = planned(market, work, target)
    if plan.chosen is None and plan.least_usd is not None:
        target = replace(target, budget_usd=plan.least_usd)
        plan = planned(market, work, target)
    if plan.chosen is not None and plan.chosen.finish.p50 < 5_000:
        allowed = 1.001 * target.budget_usd
        kind, spent = carried_out(market, work, replace(target, budget_usd=allowed))
        assert kind == "done" and spent <= allowed


def test_the_least_sum_is_not_that_of_the_dearest_fleet():
    slow, fast = PlannedOffer("slow", 1.0, 5_000.0, 240.0), PlannedOffer("fast", 30.0, 60_000.0, 480.0)
    work = Work(5_000.0 * HOUR, 5_000.0 * HOUR, 0.0, 20)
    plan = planned([slow, fast], work, Target(None, 0.5))
    assert plan.chosen is None and plan.earliest is not None
    assert plan.least_usd is not None and round(plan.least_usd, 2) == 1.11  # boot, an hour, 150 s held back
    assert plan.earliest.usd.p50 > 2 * plan.least_usd
    assert plan.reason.startswith("the budget of 0.50 $ does not pay for all the work: 1.11 $ do, with 1 × slow, done")


def test_the_idle_tail_is_part_of_the_cost():
    offer = PlannedOffer("one", 6.0, 5_000.0, 60.0)
    work = Work(5_000.0 * 600, 5_000.0 * 600, 0.0, 20)
    usd = [make_plan(work, [offer], [], Target(idle_seconds=idle)).usd for idle in (0.0, 600.0)]
    assert [round(one, 4) for one in usd] == [1.1, 2.1]
