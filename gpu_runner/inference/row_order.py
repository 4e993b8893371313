"""In which order rows of many batches wait for an engine. Pure.

Higher priority first. Owners of one priority take turns of ROWS_IN_TURN rows, so that rows which go in one request stay
together. Of one owner the rows that are due first go first; where nothing tells them apart they keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeVar

from gpu_runner.rows import Urgency

ROWS_IN_TURN = 64

T = TypeVar("T")


def passes(urgency: Urgency, other: Urgency) -> bool:
    """Whether rows of this urgency go before some of the other one that are there already."""
    if urgency.priority != other.priority:
        return urgency.priority > other.priority
    return urgency.owner != other.owner or urgency.due < other.due


def in_turns(rows: Iterable[T], urgency_of: Callable[[T], Urgency]) -> list[T]:
    """The same rows, in the order in which they are to be taken."""
    owners: dict[int, dict[str, list[T]]] = {}
    for row in rows:
        urgency = urgency_of(row)
        owners.setdefault(urgency.priority, {}).setdefault(urgency.owner, []).append(row)
    found: list[T] = []
    for priority in sorted(owners, reverse=True):
        queues = [sorted(own, key=lambda row: urgency_of(row).due) for own in owners[priority].values()]
        longest = max(map(len, queues))
        turns = (queue[at : at + ROWS_IN_TURN] for at in range(0, longest, ROWS_IN_TURN) for queue in queues)
        found += chain.from_iterable(turns)
    return found
