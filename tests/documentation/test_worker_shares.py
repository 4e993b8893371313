"""Each worker begins with its share of the long tests."""

from __future__ import annotations

import pytest
from support.worker_shares import in_shares


def test_each_piece_begins_with_its_share_of_the_long_modules() -> None:
    long = [["cluster"], ["browser 1", "browser 2"], ["deadline"], ["refresh"]]
    short = [f"s{number}" for number in range(10)]
    assert in_shares(long, short, 3) == [
        *("cluster", "refresh", "s0", "s1", "s2"),
        *("browser 1", "browser 2", "s3", "s4", "s5"),
        *("deadline", "s6", "s7", "s8", "s9"),
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("short", [0, 1, 5, 100])
def test_every_test_is_there_once(workers: int, short: int) -> None:
    long = [[(module, test) for test in range(module)] for module in range(8)]
    found = in_shares(long, [("short", test) for test in range(short)], workers)
    assert len(found) == len(set(found)) == sum(range(8)) + short
