"""A refused list: halves until those at fault are alone, and what it says of the server."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.micro_batches.bisection import RefusedList, halves


def bisect(items: list[int], bad: set[int], most: int = 10**9) -> tuple[set[int], int, RefusedList]:
    """(refused ones, requests, what was noted) against a server that refuses `bad` ones and lists beyond `most`."""
    noted, refused, requests, open_parts = RefusedList(len(items)), set(), 1, list(halves(items))
    while open_parts:
        part = open_parts.pop()
        requests += 1
        if not bad & set(part) and len(part) <= most:
            noted.answered(len(part))
        elif len(part) == 1:
            noted.refused_alone()
            refused |= set(part)
        else:
            open_parts += halves(part)
    return refused, requests, noted


@given(st.integers(2, 64), st.sets(st.integers(0, 63), min_size=1, max_size=5))
def test_exactly_those_at_fault_are_found_in_few_requests(size: int, bad: set[int]) -> None:
    bad = {item for item in bad if item < size} or {0}
    refused, requests, noted = bisect(list(range(size)), bad)
    assert refused == bad and noted.left == 0
    assert requests <= 1 + 2 * len(bad) * math.ceil(math.log2(size))
    assert noted.most_taken is None


@pytest.mark.parametrize(("most", "learned"), [(32, 32), (20, 16), (1, 1)])
def test_a_server_that_takes_shorter_lists_is_found_out(most: int, learned: int) -> None:
    refused, _, noted = bisect(list(range(64)), set(), most)
    assert not refused and noted.most_taken == learned


def test_a_part_that_failed_otherwise_says_nothing() -> None:
    noted = RefusedList(4)
    noted.answered(2)
    noted.failed(2)
    assert noted.left == 0 and noted.most_taken is None
