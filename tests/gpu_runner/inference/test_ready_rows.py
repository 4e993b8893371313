"""Rows of several batches are taken in the order of their urgency, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.inference.answer_memory import AnswerMemory
from gpu_runner.inference.row_queue import ROWS_IN_TURN, ReadyRows
from gpu_runner.inference.row_state import Item, OpenBatch
from gpu_runner.rows import ALIKE, Row, Urgency

MEMORY = AnswerMemory(1 << 20, 1 << 20)


def rows_of(count: int, owner: str = "a", due: float = 0.0, priority: int = 0, first: int = 0) -> list[Item]:
    """Rows of one batch; `first`: how many were read before them."""
    batch = OpenBatch("b", [None] * count, count, MEMORY.open(count), Urgency(priority, owner, due))
    return [Item(Row("b", str(number), "k", b"12"), batch, number, first + number) for number in range(count)]


def ready(*batches: list[Item]) -> ReadyRows:
    found = ReadyRows()
    for batch in batches:
        for item in batch:
            found.add(item)
    return found


def taken(rows: ReadyRows, most: int | None = None) -> list[Item]:
    found: list[Item] = []
    while len(found) != most and (item := rows.take()) is not None:
        found.append(item)
    return found


def of_order(order: int) -> Callable[[Item], bool]:
    return lambda item: item.order == order


def turns(items: list[Item]) -> list[tuple[str, int]]:
    return [(owner, len(list(run))) for owner, run in groupby(items, lambda item: item.batch.urgency.owner)]


def test_of_one_owner_the_rows_that_are_due_first_go_first_and_equals_as_they_were_read() -> None:
    late, early, equal = rows_of(300, due=9.0), rows_of(20, due=5.0, first=300), rows_of(10, due=5.0, first=320)
    assert taken(ready(late, early, equal)) == [*early, *equal, *late]


def test_a_higher_priority_goes_before_all_owners() -> None:
    first = rows_of(100, "a", due=1.0)
    high = rows_of(100, "b", due=9.0, priority=1, first=100)
    assert taken(ready(first, high)) == [*high, *first]


def test_rows_that_come_back_have_their_old_place() -> None:
    """Those of an engine that is lost do not go before what is more urgent."""
    late, early = rows_of(200, due=9.0), rows_of(20, due=5.0, first=200)
    rows = ready(late)
    sent = taken(rows, 100)
    for item in early:
        rows.add(item)
    for item in reversed(sent):
        rows.add(item)
    assert taken(rows) == [*early, *late]


def test_owners_take_turns_whatever_each_has_waiting() -> None:
    rows = ready(rows_of(1000, "a", due=1.0), rows_of(ROWS_IN_TURN + 10, "b", due=9.0, first=1000))
    assert turns(taken(rows)) == [("a", 64), ("b", 64), ("a", 64), ("b", 10), ("a", 1000 - 128)]


def test_a_turn_goes_on_where_it_was_whatever_comes_meanwhile() -> None:
    rows = ready(rows_of(300, "a"), rows_of(300, "b", first=300))
    found: list[Item] = []
    for number in range(40):
        found += taken(rows, 8)
        (one,) = rows_of(1, "c", first=1000 + number)
        rows.add(one)
    assert turns(found)[:2] == [("a", 64), ("b", 64)]
    assert max(count for _, count in turns(found)) == 64


def test_a_turn_goes_on_after_its_row_was_put_back() -> None:
    rows = ready(rows_of(100, "a"), rows_of(100, "b", first=100))
    there = taken(rows, 30)
    rows.put_first(there.pop())
    assert turns([*there, *taken(rows)]) == [("a", 64), ("b", 64), ("a", 36), ("b", 36)]


def test_a_turn_goes_on_after_a_row_was_taken_out_of_turn_and_put_back() -> None:
    rows = ready(rows_of(100, "a"), rows_of(100, "b", first=100))
    there = taken(rows, 30)
    other = rows.take_of(of_order(100))
    assert other is not None
    rows.put_first(other)
    assert turns([*there, *taken(rows)]) == [("a", 64), ("b", 64), ("a", 36), ("b", 36)]


def test_a_new_turn_begins_where_an_owner_has_no_more() -> None:
    rows = ready(rows_of(30, "a"), rows_of(100, "b", first=100), rows_of(100, "c", first=200))
    assert turns(taken(rows)) == [("a", 30), ("b", 64), ("c", 64), ("b", 36), ("c", 36)]


def test_a_turn_goes_on_where_another_owner_has_no_more() -> None:
    rows = ready(rows_of(100, "a"), rows_of(1, "b", first=100), rows_of(100, "c", first=200))
    there = taken(rows, 30)
    assert rows.take_of(of_order(100)) is not None
    assert turns([*there, *taken(rows)]) == [("a", 64), ("c", 64), ("a", 36), ("c", 36)]


def test_what_is_left_keeps_its_order_when_one_is_taken_from_the_midst() -> None:
    rows = ready(rows_of(200, due=9.0), rows_of(200, due=5.0, first=200), rows_of(200, due=1.0, first=400))
    for order in (3, 250, 401, 599, 0):
        found = rows.take_of(of_order(order))
        assert found is not None and found.order == order
    left = taken(rows)
    assert left == sorted(left, key=lambda item: (item.batch.urgency.due, item.order)) and len(left) == 595


def test_the_row_that_was_taken_last_is_put_first() -> None:
    rows = ready(rows_of(100, "a"), rows_of(100, "b", first=100), rows_of(1, "c", first=200))
    for count in (1, 63, 64, 65, 128, 129):
        there = taken(rows, count)
        rows.put_first(there[-1])
        assert rows.take() is there[-1]
        for item in there:
            rows.add(item)
        rest = taken(rows)
        assert len(rest) == 201
        for item in sorted(rest, key=lambda item: item.order):
            rows.add(item)


def test_one_of_a_kind_is_taken_out_of_turn() -> None:
    wanted, others = rows_of(2, "b", due=5.0, first=100), rows_of(100, "a")
    rows = ready(others, wanted)
    assert [rows.take_of(lambda item: item.batch is wanted[0].batch) for _ in range(3)] == [*wanted, None]
    assert taken(rows) == others and rows.take() is None and not rows


def test_how_many_go_before_further_rows() -> None:
    own, other = rows_of(200, "a", due=5.0), rows_of(300, "b", due=1.0)
    high, low = rows_of(7, "b", priority=1), rows_of(9, "b", priority=-1)
    rows = ready(own, other, high, low)
    assert rows.before(Urgency(2, "a", 9.0)) == 0
    assert rows.before(Urgency(1, "a", 9.0)) == 7
    assert rows.before(Urgency(0, "a", 5.0)) == 7 + 200 + 256
    assert rows.before(Urgency(0, "a", 4.0)) == 7 + 64
    assert rows.before(Urgency(0, "c", 0.0)) == 7 + 64 + 64
    assert rows.before(Urgency(-1, "b", 0.0)) == 516
    assert ready(rows_of(9, "")).before(ALIKE) == 9 and ReadyRows().before(ALIKE) == 0


@given(st.lists(st.tuples(st.integers(1, 150), st.sampled_from("abc"), st.sampled_from([1.0, 2.0])), max_size=6))
def test_so_many_do_go_before_them(batches: list[tuple[int, str, float]]) -> None:
    """To one turn, as an owner may be in the midst of its own."""
    rows = ready(*(rows_of(count, owner, due, first=1000 * place) for place, (count, owner, due) in enumerate(batches)))
    expected = rows.before(Urgency(0, "a", 1.0))
    (further,) = rows_of(1, "a", 1.0, first=10_000)
    rows.add(further)
    found = taken(rows).index(further)
    owners = len({owner for _, owner, _ in batches})
    assert abs(found - expected) <= ROWS_IN_TURN * owners


URGENCIES = st.builds(
    Urgency, st.integers(-1, 1), st.sampled_from(["", "a", "b"]), st.sampled_from([0.0, 1.0, float("inf")])
)
STEPS = st.one_of(URGENCIES, st.sampled_from(["take", "back", "first", "of"]))


@pytest.mark.slow
@given(st.lists(STEPS, max_size=300))
def test_whatever_comes_and_goes_no_row_is_lost_and_the_most_urgent_of_an_owner_is_taken(
    steps: list[Urgency | str],
) -> None:
    rows, there, away = ReadyRows(), dict[int, Item](), list[Item]()
    for order, step in enumerate(steps):
        if isinstance(step, Urgency):
            (item,) = rows_of(1, step.owner, step.due, step.priority, first=order)
            item.started_at = float(order % 2)
            rows.add(item)
            there[order] = item
        elif step == "back" and away:
            item = away.pop()
            rows.add(item)
            there[item.order] = item
        elif step == "of" and (found := rows.take_of(lambda item: item.order % 3 == 0)) is not None:
            assert found.order % 3 == 0 and there.pop(found.order) is found
            away.append(found)
        elif step in ("take", "first") and (item := rows.take()) is not None:
            most = max(one.batch.urgency.priority for one in there.values())
            own = [one for one in there.values() if one.batch.urgency.owner == item.batch.urgency.owner]
            own = [one for one in own if one.batch.urgency.priority == most]
            assert item is min(own, key=lambda one: (one.batch.urgency.due, one.order))
            if step == "first":
                rows.put_first(item)
                assert rows.take() is item
            away.append(there.pop(item.order))
        assert sorted(one.order for one in rows) == sorted(there)
        assert len(rows) == len(there) and rows.prompt_bytes == 2 * len(there)
        assert rows.unsent == sum(one.started_at == 0.0 for one in there.values())
    assert sorted(one.order for one in taken(rows)) == sorted(there)
