"""Which worker of `--dist worksteal` begins with which tests: the long ones first, on all workers alike.

pytest-xdist cuts the list of tests into one piece for each worker, and gives who is done half of what another one has
left, from its end. A worker that had all the long tests would run them one after the other, the last of them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_shares(long: Sequence[Sequence[T]], short: Sequence[T], workers: int) -> list[T]:
    """All tests, in an order whose pieces have long ones at their beginning. `long`: by module, the longest first."""
    total, begun, shares = sum(map(len, long)) + len(short), 0, list[T]()
    for worker in range(workers):
        mine = [test for module in long[worker::workers] for test in module]
        last = worker == workers - 1
        size = (total - len(shares)) // (workers - worker)
        end = len(short) if last else begun + max(0, size - len(mine))
        shares += [*mine, *short[begun:end]]
        begun = end
    return shares
