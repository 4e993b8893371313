"""Reads of a slow store: some at once, in order, and no more than was asked for."""

from __future__ import annotations

import threading

import pytest
from support.timing import PATIENCE

from resources.objects.object_read_ahead import read_ahead


@pytest.mark.parametrize("number", [0, 1, 2, 3, 50])
def test_results_come_in_order(number: int) -> None:
    assert list(read_ahead(lambda item: 2 * item, range(number), 3)) == [2 * item for item in range(number)]


def test_as_many_reads_as_said_are_under_way_at_once() -> None:
    together = threading.Barrier(4, timeout=4 * PATIENCE)  # broken where fewer come

    def read(item: int) -> int:
        together.wait()
        return item

    assert list(read_ahead(read, range(8), 4)) == list(range(8))


def test_it_reads_no_further_than_that() -> None:
    begun: list[int] = []
    results = read_ahead(lambda item: begun.append(item) or item, range(100), 2)
    assert next(results) == 0
    results.close()
    assert len(begun) <= 5


def test_an_error_is_raised_in_its_place() -> None:
    results = read_ahead(lambda item: 1 // item, (1, 1, 0, 1), 4)
    assert [next(results), next(results)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
