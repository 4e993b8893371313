"""What the capacity sensor's command puts first among the offers that can be had."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from resources.preference import Allowance, prefer


@dataclass
class Ranked:
    """As much of a ranked offer as a preference looks at."""

    name: str

    @property
    def offer(self) -> Any:
        return SimpleNamespace(name=self.name)


def preferred(order: str, named: list[tuple[str, int]], **standing: int) -> str:
    found = prefer([Ranked(name) for name in order], named, standing)
    return "".join(one.offer.name for one in found)


def test_without_a_command_the_order_stays():
    assert preferred("abc", []) == "abc"
    assert Allowance().names is None


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
    assert Allowance(2, (("a", 1), ("b", 0))).names == {"a"}
    assert Allowance(2, (("b", 0),)).names is None


def test_a_pause_says_why():
    assert Allowance(0, (), "budget reached").why_none() == "paused: budget reached"
    assert Allowance(0).why_none() == "capacity 0"


def test_each_instance_that_is_to_be_left_has_one_successor_and_nobody_else_moves():
    allowed = Allowance(4, (("spot", 1), ("sure", 3)), leave=("ba-2", "ba-3"))
    standing = {"spot": 3, "sure": 1}
    assert allowed.missing(standing) == ["sure", "sure"]
    assert [allowed.successor(name, standing) for name in ("ba-1", "ba-2", "ba-3")] == [None, "sure", "sure"]
    assert allowed.successor("ba-3", {"spot": 2, "sure": 2}) is None  # one place is left, and ba-2 takes it
    assert Allowance(1, (("sure", 1),)).successor("ba-1", {}) is None
