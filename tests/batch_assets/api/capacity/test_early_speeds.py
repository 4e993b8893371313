"""When a speed is known, and what is asked where that is too late."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import pytest

from batch_assets.api.capacity.early_speeds import (
    at_slow_speed,
    is_too_late_to_measure,
    slots_of,
    until_measured,
)
from batch_assets.capacity_planning.planner_input import PlannerInput
from gpu_runner.offers.offer import Ranking
from gpu_runner.planner.command import Command
from gpu_runner.planner.search import P95
from gpu_runner.planner.speed_model import HardwareType
from gpu_runner.planner.types import ControlTiming, HeldInstance, PlannedOffer, Target, Work

L40S, H100 = HardwareType("L40S", 48, 1), HardwareType("H100", 80, 1)
TOKENS = 1_000.0  # of a line
UNKNOWN = PlannedOffer("one", 1.0, 5_000.0, 60.0, 10, spread=0.5, hardware=L40S)
MEASURED = replace(UNKNOWN, spread=0.05)


def asked(option: PlannedOffer, *, held: int = 0, lines: int = 10_000, deadline: float = 1_000) -> PlannerInput:
    return PlannerInput(
        Work(lines * TOKENS, lines * TOKENS, 0.0, lines),
        (option,),
        tuple(HeldInstance(str(number), option) for number in range(held)),
        Target(deadline, None, 20),
        False,
        cast(Ranking, None),
    )


def test_the_first_answers_come_when_a_slow_engine_has_done_all_its_slots() -> None:
    slow = 5_000 * math.exp(-P95 * 0.5)
    assert until_measured(asked(UNKNOWN), TOKENS) == pytest.approx(slots_of(L40S) * TOKENS / slow)
    assert until_measured(asked(UNKNOWN, lines=10), TOKENS) == pytest.approx(10 * TOKENS / slow), "no more lines"


def test_nothing_is_waited_for_where_all_speeds_are_known() -> None:
    assert until_measured(asked(MEASURED), TOKENS) == 0
    assert until_measured(asked(replace(UNKNOWN, capacity=0)), TOKENS) == 0


def test_cards_with_much_memory_have_more_slots() -> None:
    assert (slots_of(L40S), slots_of(H100), slots_of(HardwareType("CPU", 0, 1))) == (256, 1024, 256)


@pytest.mark.parametrize(("engines", "deadline", "too_late"), [(1, 20_000, False), (2, 1_000, True), (9, 1_000, False)])
def test_it_is_too_late_where_no_more_could_be_added_when_a_fleet_is_slow(
    engines: int, deadline: float, too_late: bool
) -> None:
    timing = ControlTiming(measuring=500)
    command = Command(engines, (("one", engines),))
    assert is_too_late_to_measure(asked(UNKNOWN, deadline=deadline), command, timing) is too_late
    assert not is_too_late_to_measure(asked(MEASURED, deadline=deadline), command, timing), "there is nothing to learn"


def test_slow_speeds_are_those_at_p95_and_count_as_known() -> None:
    found = at_slow_speed(asked(UNKNOWN, held=1))
    assert found.measured and found.options[0].spread == 0 and not found.options[0].is_unmeasured
    assert found.held[0].option.tokens_per_second == pytest.approx(5_000 * math.exp(-P95 * 0.5))
    assert at_slow_speed(asked(MEASURED)).options == (MEASURED,)
