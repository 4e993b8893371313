"""Work left and an offer that the budget pays for: then something is rented, or a pause says by which rule not."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.fleet_database.capacity_plan import PauseKind
from gpu_runner.offers.offer import HOUR, Objective
from gpu_runner.planner.budget import affordable, entry_usd
from gpu_runner.planner.controller import Command, ControllerState, decide
from gpu_runner.planner.types import TIMING, ControlTiming, HeldInstance, Plan, PlannedOffer, Target, Work

EIGHT = PlannedOffer("8×H100", 24.0, 60_000.0, 480.0, capacity=4)
ONE = PlannedOffer("1×A100", 1.5, 5_000.0, 480.0, capacity=4)
WORK = Work(6e6, 6e6, 0.0, 24)
OBJECTIVES = get_args(Objective)


def tick(
    options: list[PlannedOffer],
    target: Target,
    *,
    held: tuple[HeldInstance, ...] = (),
    work: Work = WORK,
    memory: ControllerState | None = None,
    measured: bool = True,
    pilots: int = 3,
    timing: ControlTiming = TIMING,
) -> tuple[Command, Plan]:
    memory = memory or ControllerState()
    command, _, plan = decide(
        work, options, held, target, memory, measured=measured, pilots=pilots, detail=False, timing=timing
    )
    return command, plan


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("deadline", [None, -100.0, 0.0, 600.0, HOUR, 20_000.0])
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_what_cannot_be_booted_for_the_money_gives_way_to_what_can(
    objective: Objective, deadline: float, spread: float
):
    """Eight H100 would do it for 3.87 of 4 $, but could not be ended in time; one A100 needs 0.70 $."""
    options = [replace(one, spread=spread) for one in (EIGHT, ONE)]
    for measured in (False, True):
        command, plan = tick(options, Target(deadline, 4.0, 8, objective), measured=measured)
        assert dict(command.offers).keys() == {ONE.name} and command.instances >= 1, command
        assert plan.chosen is not None and {one.name for one, _ in plan.chosen.fleet} == {ONE.name}


def test_what_is_held_goes_on_where_the_budget_pays_for_nothing_else():
    """Its like is not offered any more, and what would be sooner is too dear to be booted."""
    old = replace(ONE, name="old")
    for deadline in (None, -100.0, 600.0, HOUR):
        for objective in OBJECTIVES:
            command, _ = tick([EIGHT], Target(deadline, 4.0, 1, objective), held=(HeldInstance("i0", old),))
            assert (command.instances, command.retire) == (1, ()), (deadline, objective, command)


def test_a_pause_says_its_rule_with_numbers_that_explain_it():
    """0.21 $ are left, the work needs 0.05 $ more, and yet nothing is rented: why?"""
    little = replace(WORK, tokens=5_000.0 * 60)
    command, _ = tick([replace(ONE, boot_seconds=240.0)], Target(None, 0.21), work=little)
    assert (command.kind, command.instances) == ("paused", 0)
    assert command.pause is not None and command.pause.kind is PauseKind.BUDGET_REACHED
    assert command.pause.describe().startswith(
        "budget reached: 0.21 $ are left, and the next instance needs 0.26 $ (1×A100: 0.10 $ to boot, 0.10 $ to work "
        "at least as long, 0.062 $ held back for the 150 s until it is drained and ended); the work needs 0.27 $ "
        "from now on"
    )
    held = (HeldInstance("i0", ONE),)
    command, _ = tick([ONE], Target(None, 0.05), work=little, held=held)
    assert (command.kind, command.retire) == ("paused", ("i0",))
    assert (
        "0.05 $ are left, and 0.062 $ are held back for the 150 s until an instance that goes on"
        in command.pause.describe()
    )


options = st.builds(
    PlannedOffer,
    name=st.just(""),
    usd_per_hour=st.floats(0.1, 40),
    tokens_per_second=st.floats(500, 100_000),
    boot_seconds=st.floats(0, 1500),
    capacity=st.none() | st.integers(0, 8),
    spot=st.booleans(),
    interruptions_per_hour=st.floats(0, 0.3),
    spread=st.sampled_from([0.05, 0.2, 0.5]),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    market=st.lists(options, min_size=1, max_size=5),
    waits=st.lists(st.sampled_from([0.0, 30.0, 400.0]), max_size=4),
    tokens=st.floats(1e5, 1e9),
    deadline=st.none() | st.floats(-1000, 1e5),
    share=st.floats(0.2, 6),
    limit=st.integers(1, 20),
    units=st.integers(1, 30),
    objective=st.sampled_from(OBJECTIVES),
    measured=st.booleans(),
    tried=st.integers(0, 3),
    seconds=st.sampled_from([2.0, 30.0]),
)
def test_work_left_and_an_affordable_offer_never_give_no_instance_without_a_stated_pause(
    market, waits, tokens, deadline, share, limit, units, objective, measured, tried, seconds
):
    """`share`: of what the dearest-to-enter offer needs, so that budgets are near the rule."""
    timing = ControlTiming.of_sensor(seconds)
    named = [replace(one, name=f"o{i}{' spot' if one.spot else ''}") for i, one in enumerate(market)]
    held = tuple(HeldInstance(f"i{i}", named[i % len(named)], wait) for i, wait in enumerate(waits))
    budget = share * min(entry_usd(one, timing.reserve) for one in named)
    memory = ControllerState(tried=tuple(one.name for one in named[:tried]))
    target = Target(deadline, budget, limit, objective)
    command, _ = tick(
        named,
        target,
        held=held,
        work=Work(tokens, 1e9, 0.0, units, 0.1),
        memory=memory,
        measured=measured,
        timing=timing,
    )
    if command.instances == 0:
        assert command.pause or not affordable(named, budget, timing), command
        assert held == () or command.pause
        assert not command.pause or "are left, and" in command.pause.describe()  # the rule
    else:
        assert not command.pause
        assert command.offers
    for name, number in command.offers:
        option = next(one for one in named if one.name == name)
        staying = sum(one.option.name == name and one.instance not in command.retire for one in held)
        assert number <= staying or entry_usd(option, timing.reserve) <= budget * (1 + 1e-9)
