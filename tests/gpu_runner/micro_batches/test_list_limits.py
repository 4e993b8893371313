"""What goes into one list: bounds, order, and rows that may not have company."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.micro_batches.list_limits import ListLimits, ListSize, take_list


def take(
    texts: list[str],
    limits: ListLimits,
    most: int = 1000,
    alone: set[str] | None = None,
    kind_of: Callable[[str], object] = lambda text: "any",
) -> list[list[str]]:
    """All lists that a queue is cut into."""
    queue, size, lists = deque(texts), ListSize(limits), []
    while queue:
        lists.append(
            take_list(
                queue.popleft if queue else lambda: None,
                queue.appendleft,
                size,
                most=min(most, len(queue)),
                bytes_of=len,
                companions=lambda text: 1 if text in (alone or ()) else size.most,
                kind_of=kind_of,
            )
        )
    return lists


@given(st.lists(st.text("ab", max_size=30), max_size=50), st.integers(1, 10), st.integers(0, 60))
def test_all_are_taken_once_in_order_and_within_the_bounds(texts: list[str], inputs: int, size: int) -> None:
    lists = take(texts, ListLimits(inputs, 10**6, size))
    assert [text for each in lists for text in each] == texts
    assert all(len(each) <= inputs and (len(each) == 1 or len("".join(each)) <= size) for each in lists)


def test_one_that_is_to_be_alone_is_alone() -> None:
    assert take(["a", "b", "c", "d"], ListLimits(), alone={"b"}) == [["a"], ["b"], ["c", "d"]]


def test_only_what_is_of_one_kind_goes_together_and_what_has_none_goes_alone() -> None:
    def kind(text: str) -> object:
        return None if text == "none" else text[0]

    texts = ["a1", "a2", "b1", "none", "none", "a3", "a4"]
    assert take(texts, ListLimits(), kind_of=kind) == [["a1", "a2"], ["b1"], ["none"], ["none"], ["a3", "a4"]]


def test_the_window_bounds_a_list() -> None:
    assert take(["a"] * 5, ListLimits(), most=2) == [["a", "a"], ["a", "a"], ["a"]]


def test_tokens_are_learned_from_what_the_server_counts() -> None:
    size = ListSize(ListLimits(64, 100, 10**6))
    assert size.fits(2, 400) and not size.fits(2, 404)
    for _ in range(100):
        size.counted(tokens=100, size=100)
    assert not size.fits(2, 200) and size.fits(2, 99)
    assert size.fits(1, 10**9)


def test_company_shrinks_with_failures_and_the_last_try_is_alone() -> None:
    size = ListSize(ListLimits())
    assert [size.with_tries_left(failures, 3) for failures in range(4)] == [64, 8, 1, 1]
    assert size.with_tries_left(0, 1) == 1
    size.refuses_more_than(16)
    assert [size.with_tries_left(failures, 3) for failures in range(3)] == [16, 2, 1]
    size.refuses_more_than(60)
    assert size.most == 16
