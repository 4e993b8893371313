"""What the capacity sensor's command puts first among the offers that can be had."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gpu_runner.fleet_database.capacity_plan import Assignment, Pause, PauseKind
from resources.fleet.allocation import CapacityAllocation, order_by_plan


@dataclass
class Ranked:
    """As much of a ranked offer as a preference looks at."""

    name: str

    @property
    def offer(self) -> Any:
        return SimpleNamespace(name=self.name)


def preferred(order: str, named: list[tuple[str, int]], **standing: int) -> str:
    found = order_by_plan([Ranked(name) for name in order], named, standing)
    return "".join(one.offer.name for one in found)


def test_without_a_command_the_order_stays():
    assert preferred("abc", []) == "abc"
    assert CapacityAllocation().names is None


def test_named_offers_come_first_while_fewer_stand_than_were_named():
    assert preferred("abc", [("c", 2), ("b", 1)]) == "cb"
    assert preferred("abc", [("c", 2), ("b", 1)], c=1) == "cb"
    assert preferred("abc", [("c", 2), ("b", 1)], c=2) == "bc"
    assert preferred("abc", [("c", 2), ("b", 1)], c=2, b=1) == "cb"


def test_offers_without_a_name_are_for_when_no_named_one_is_to_be_had():
    assert preferred("ab", [("c", 2), ("b", 1)], b=5) == "b"
    assert preferred("ab", [("c", 2)]) == "ab"
    assert preferred("ab", [("b", 0)]) == "ab"


def test_what_is_named_zero_times_is_no_place_to_move_to():
    assert CapacityAllocation(2, (("a", 1), ("b", 0))).names == {"a"}
    assert CapacityAllocation(2, (("b", 0),)).names is None


def test_a_pause_says_why():
    pause = Pause(PauseKind.BUDGET_REACHED, "budget reached")
    assert CapacityAllocation(0, (), pause).why_none() == "paused: budget reached"
    assert CapacityAllocation(0).why_none() == "capacity 0"


def test_a_run_is_told_the_successor_of_its_own_instance():
    moves = (Assignment("ba-1"), Assignment("ba-2", "sure"), Assignment("ba-3", "spot", beside=True))
    allowed = CapacityAllocation(4, planned=True, assignments=moves)
    assert [allowed.assignment(name) for name in ("ba-1", "ba-2", "ba-3", "ba-4")] == [None, *moves[1:], None]
    assert [allowed.move_limit(name) for name in ("ba-1", "ba-2", "ba-3", "ba-4")] == [4, 4, 3, 4]
