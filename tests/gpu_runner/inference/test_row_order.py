"""Rows of several batches wait in the order of their urgency, and none is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.inference.row_order import ROWS_IN_TURN, in_turns, passes
from gpu_runner.rows import ALIKE, Urgency


@dataclass(frozen=True)
class Waiting:
    """A row of a batch."""

    urgency: Urgency
    number: int


def waiting(count: int, owner: str = "a", due: float = 0.0, priority: int = 0) -> list[Waiting]:
    return [Waiting(Urgency(priority, owner, due), number) for number in range(count)]


def ordered(*batches: list[Waiting]) -> list[Waiting]:
    return in_turns([row for batch in batches for row in batch], lambda row: row.urgency)


def test_of_one_owner_the_rows_that_are_due_first_go_first_and_equals_keep_their_order() -> None:
    late, early, equal = waiting(300, due=9.0), waiting(20, due=5.0), waiting(10, due=5.0)
    assert ordered(late, early, equal) == [*early, *equal, *late]


def test_a_higher_priority_goes_before_all_owners() -> None:
    first = waiting(100, "a", due=1.0)
    high = waiting(100, "b", due=9.0, priority=1)
    assert ordered(first, high) == [*high, *first]


def test_owners_take_turns_whatever_each_has_waiting() -> None:
    many, few = waiting(1000, "a", due=1.0), waiting(ROWS_IN_TURN + 10, "b", due=9.0)
    found = ordered(many, few)
    assert found[:ROWS_IN_TURN] == many[:ROWS_IN_TURN]
    assert found[ROWS_IN_TURN : 2 * ROWS_IN_TURN] == few[:ROWS_IN_TURN]
    assert found[3 * ROWS_IN_TURN : 3 * ROWS_IN_TURN + 10] == few[ROWS_IN_TURN:]
    assert [row for row in found if row.urgency.owner == "a"] == many


URGENCIES = st.builds(
    Urgency, st.integers(-2, 2), st.sampled_from(["", "a", "b"]), st.sampled_from([0.0, 1.0, float("inf")])
)


@given(st.lists(URGENCIES, max_size=400))
def test_no_row_is_lost_or_doubled_and_what_is_in_order_stays(urgencies: list[Urgency]) -> None:
    rows = [Waiting(urgency, number) for number, urgency in enumerate(urgencies)]
    found = in_turns(rows, lambda row: row.urgency)
    assert Counter(found) == Counter(rows)
    assert in_turns(found, lambda row: row.urgency) == found
    for priority, owner in {(one.priority, one.owner) for one in urgencies}:
        own = [row for row in found if (row.urgency.priority, row.urgency.owner) == (priority, owner)]
        assert own == sorted(own, key=lambda row: (row.urgency.due, row.number))
    assert [row.urgency.priority for row in found] == sorted((one.priority for one in urgencies), reverse=True)


@given(URGENCIES, URGENCIES)
def test_rows_pass_others_where_their_order_says_so(urgency: Urgency, other: Urgency) -> None:
    """Rows that pass none of those that wait are put behind them, without an order being made."""
    before = [Waiting(other, number) for number in range(ROWS_IN_TURN + 1)]
    mine = [Waiting(urgency, number) for number in range(1)]
    found = in_turns([*before, *mine], lambda row: row.urgency)
    if not passes(urgency, other):
        assert found == [*before, *mine]
    else:
        assert found != [*before, *mine]


def test_rows_that_are_alike_pass_nobody() -> None:
    assert not passes(ALIKE, ALIKE) and not passes(Urgency(0, "a", 2.0), Urgency(0, "a", 2.0))
