"""What is tried when nothing that is known will do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from support.examples import property_test

from gpu_runner.planner.controller import Command, ControllerState, decide
from gpu_runner.planner.speed_model import HardwareType
from gpu_runner.planner.types import HeldInstance, PlannedOffer, Target, Work

HOUR = 3600.0
KNOWN = PlannedOffer("cloud/l40s", 1.0, 10_000.0, 240.0, spread=0.05, hardware=HardwareType("L40S", 48, 1))
FAST = PlannedOffer("cloud/h100", 6.0, 9_000.0, 240.0, spread=0.5, hardware=HardwareType("H100", 80, 1))
SLOW = PlannedOffer("cloud/t4", 0.2, 500.0, 240.0, spread=0.5, hardware=HardwareType("T4", 16, 1))
WORK = Work(tokens=720e6, total_tokens=720e6, started_ago=0.0, units=1000, spread=0.02)  # 20 hours of a KNOWN
NEW = ControllerState()


def tick(
    options: list[PlannedOffer],
    held: list[HeldInstance],
    target: Target,
    *,
    memory: ControllerState = NEW,
    measured: bool = True,
    pilots: int = 3,
    work: Work = WORK,
) -> Command:
    return decide(work, options, held, target, memory, measured=measured, pilots=pilots, detail=False)[0]


LATE = Target(1.6 * HOUR, max_instances=10)  # ten of KNOWN take two hours


def test_a_machine_that_would_make_it_if_it_is_fast_is_tried_in_the_place_of_another():
    command = tick([KNOWN, FAST, SLOW], [], LATE)
    assert dict(command.offers) == {KNOWN.name: 9, FAST.name: 1} and command.instances == 10
    assert "cloud/h100 may be faster" in command.reason and "in time" in command.reason and "too late" in command.reason


def test_at_the_limit_one_that_is_held_makes_room():
    held = [HeldInstance(f"i{i}", KNOWN) for i in range(10)]
    command = tick([KNOWN, FAST, SLOW], held, LATE)
    assert dict(command.offers) == {KNOWN.name: 9, FAST.name: 1}
    assert len(command.retire) == 1 and command.retire[0] in {one.instance for one in held}


def test_what_is_being_tried_is_left_to_work():
    held = [*(HeldInstance(f"i{i}", KNOWN) for i in range(9)), HeldInstance("try", FAST, 100.0)]
    command = tick(
        [KNOWN, FAST, SLOW], held, LATE, memory=ControllerState(tried=(FAST.name,), offers=((FAST.name, 1),))
    )
    assert dict(command.offers) == {KNOWN.name: 9, FAST.name: 1} and command.retire == ()


def test_once_it_is_known_to_be_fast_the_fleet_changes_over_to_it():
    fast = replace(FAST, tokens_per_second=20_000.0, spread=0.05)
    held = [*(HeldInstance(f"i{i}", KNOWN) for i in range(9)), HeldInstance("try", fast)]
    command = tick([KNOWN, fast, SLOW], held, LATE)
    assert dict(command.offers)[FAST.name] >= 5 and "deadline" in command.reason


def test_once_it_is_known_to_be_slow_it_is_not_tried_again():
    slow = replace(FAST, tokens_per_second=9_000.0, spread=0.05)
    command = tick([KNOWN, slow, SLOW], [HeldInstance(f"i{i}", KNOWN) for i in range(10)], LATE)
    assert (dict(command.offers), command.retire) == ({KNOWN.name: 10}, ())


def test_what_was_lost_before_it_was_measured_is_not_tried_again():
    lost = ControllerState(tried=(FAST.name,), offers=((KNOWN.name, 10),))
    command = tick([KNOWN, FAST, SLOW], [HeldInstance(f"i{i}", KNOWN) for i in range(10)], LATE, memory=lost)
    assert FAST.name not in dict(command.offers)


@pytest.mark.parametrize("target", [Target(3 * HOUR, max_instances=10), Target(0.5 * HOUR, max_instances=10)])
def test_nothing_is_tried_for_luck_where_it_is_not_needed_or_cannot_help(target):
    assert "faster than estimated" not in tick([KNOWN, FAST, SLOW], [], target).reason


def test_nothing_is_tried_where_speeds_may_be_learned_on_one_offer_only():
    assert FAST.name not in dict(tick([KNOWN, FAST, SLOW], [], LATE, pilots=1).offers)


CHEAP = PlannedOffer("cloud/4090", 1.0, 9_500.0, 240.0, spread=0.5, hardware=HardwareType("RTX 4090", 24, 1))


def test_for_want_of_money_what_is_too_dear_for_it_ends_while_another_is_tried():
    """16 $ are left. KNOWN takes 20, CHEAP 21 as believed, and 13 if it is a standard deviation faster."""
    poor = Target(40 * HOUR, budget_usd=16.0, max_instances=10)
    command = tick([KNOWN, CHEAP], [HeldInstance("i0", KNOWN)], poor)
    assert (dict(command.offers), command.retire, command.kind) == ({CHEAP.name: 1}, ("i0",), "infeasible")
    assert "for this money" in command.reason
    then = tick([KNOWN, CHEAP], [HeldInstance("i1", CHEAP, 200.0)], poor, memory=ControllerState(tried=(CHEAP.name,)))
    assert (dict(then.offers), then.retire) == ({CHEAP.name: 1}, ())


def test_money_that_no_luck_makes_enough_is_spent_where_a_token_is_cheapest():
    command = tick([KNOWN, CHEAP], [HeldInstance("i0", KNOWN)], Target(40 * HOUR, budget_usd=5.0, max_instances=10))
    assert command.retire == () and "faster than estimated" not in command.reason


def named(option: PlannedOffer, name: str, **changes: Any) -> PlannedOffer:
    return replace(option, name=name, hardware=HardwareType(name, 80, 1), **changes)


def test_a_fleet_that_is_expected_to_make_it_gives_up_nothing_for_luck():
    """Ten take two hours, the deadline is a minute later: not safe, but likelier than luck with one of them."""
    held = [HeldInstance(f"i{i}", KNOWN) for i in range(10)]
    command = tick([KNOWN, FAST], held, Target(2.02 * HOUR, max_instances=10))
    assert (dict(command.offers), command.retire) == ({KNOWN.name: 10}, ())


def test_what_makes_room_is_the_slowest_and_no_more_than_a_fifth_of_the_speed():
    big = PlannedOffer("cloud/big", 5.0, 40_000.0, 240.0, capacity=0, spread=0.05)
    slow = PlannedOffer("cloud/slow", 0.5, 2_000.0, 240.0, capacity=0, spread=0.05)
    unknown = named(FAST, "cloud/f", tokens_per_second=2_500.0, usd_per_hour=1.0, capacity=2)
    held = [*(HeldInstance(f"b{i}", big) for i in range(3)), HeldInstance("slow", slow)]
    work = replace(WORK, tokens=500e6)
    command = tick([big, slow, unknown], held, Target(1.13 * HOUR, max_instances=4), work=work)
    assert set(command.retire) <= {"slow"} and dict(command.offers)[big.name] == 3
    alone = tick([KNOWN, FAST], [HeldInstance("i0", KNOWN)], Target(15 * HOUR, max_instances=1))
    assert (dict(alone.offers), alone.retire) == ({KNOWN.name: 1}, ())


def test_the_cheapest_tokens_are_tried_first_and_no_more_kinds_than_allowed():
    kinds = [named(FAST, f"cloud/u{i}", usd_per_hour=6.0 + 0.1 * i, capacity=1) for i in range(8)]
    held = [HeldInstance(f"i{i}", KNOWN) for i in range(20)]
    target, memory = Target(0.85 * HOUR, max_instances=20), ControllerState()
    first, memory, _ = decide(WORK, [KNOWN, *kinds], held, target, memory, measured=True, pilots=2, detail=False)
    assert dict(first.offers) == {KNOWN.name: 18, "cloud/u0": 1, "cloud/u1": 1}
    booting = [one for one in held if one.instance not in first.retire]
    booting += [HeldInstance(f"u{i}", kinds[i], 200.0) for i in range(2)]
    options = [KNOWN, *(replace(one, capacity=0) for one in kinds[:2]), *kinds[2:]]
    then, _, _ = decide(WORK, options, booting, target, memory, measured=True, pilots=2, detail=False)
    assert (dict(then.offers), then.retire) == (dict(first.offers), ())


def test_a_try_that_the_budget_cannot_boot_takes_nobodys_place():
    """It would be cut from the command, and what it took the place of would be gone."""
    held = [HeldInstance("h0", PlannedOffer("c/2", 1.0, 10_000.0, 900.0, capacity=3, spread=0.05))]
    dear = PlannedOffer("c/3", 6.0, 30_000.0, 120.0, capacity=1, spread=0.5)
    work = Work(1e7, 1e9, 0.0, 1000, 0.2)
    command = tick([held[0].option, dear], held, Target(672.0, 0.665, 1), work=work)
    assert (command.instances, command.retire) == (1, ())


def test_where_money_may_yet_be_enough_tries_are_added_and_nothing_ends():
    """Five cents are missing at the median. Giving up one of ten would miss the deadline."""
    held = [HeldInstance(f"i{i}", KNOWN) for i in range(10)]
    other = named(FAST, "cloud/f", usd_per_hour=1.0, tokens_per_second=9_500.0, boot_seconds=1200.0)
    command = tick([KNOWN, other], held, Target(2.2 * HOUR, 19.95, 10))
    assert command.retire == () and dict(command.offers)[KNOWN.name] == 10


@pytest.mark.parametrize("deadline", [None, 0.0, -100.0])
def test_without_a_deadline_or_after_it_the_work_goes_on(deadline):
    command = tick([KNOWN, FAST], [HeldInstance("i0", KNOWN)], Target(deadline, max_instances=4))
    assert command.instances >= 1 and command.retire == ()


@property_test(
    40,
    150,
    {"hours": 0.19, "budget": 0.665, "most": 1, "here": 1, "trying": False, "capacity": 1},
    {"hours": 1.0, "budget": 3.0, "most": 3, "here": 2, "trying": True, "capacity": 0},
    hours=st.floats(0.1, 3.0),
    budget=st.none() | st.floats(0.5, 40.0),
    most=st.integers(1, 12),
    here=st.integers(0, 14),
    trying=st.booleans(),
    capacity=st.sampled_from([None, 0, 1, 3]),
)
def test_no_command_passes_a_cap_or_ends_what_is_not_held(hours, budget, most, here, trying, capacity):
    held = [HeldInstance(f"i{i}", KNOWN) for i in range(here)] + ([HeldInstance("try", FAST, 60.0)] if trying else [])
    options = [KNOWN, replace(FAST, capacity=capacity), SLOW]
    command = tick(options, held, Target(hours * HOUR, budget, most))
    names = {one.instance for one in held}
    kept = [one for one in held if one.instance not in command.retire]
    assert command.instances > 0 or command.pause
    assert set(command.retire) <= names and len(set(command.retire)) == len(command.retire)
    assert command.instances == sum(number for _, number in command.offers) <= max(most, 0)
    if not command.pause:
        assert len(kept) <= command.instances
    fleet = dict(command.offers)
    new = fleet.get(FAST.name, 0) - sum(one.option.name == FAST.name for one in kept)
    assert capacity is None or new <= capacity
