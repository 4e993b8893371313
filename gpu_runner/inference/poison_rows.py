"""Finds the rows that kill an engine, by trying rows in groups with nothing else in flight.

Rows that were in flight at several engine deaths are suspects. A group that dies is split into four parts;
a part that survives is innocent; when all parts but the last survived, the last one must hold the cause and
is split without being run. Four and not two, because a death costs an engine start and a group run only one
row's latency: 1,024 rows come down to one in five deaths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

PARTS = 4


@dataclass(slots=True)
class SplitGroup:
    """The parts of one group that died."""

    open_parts: int
    guilty: bool = False


@dataclass(slots=True, eq=False)
class Group(Generic[T]):
    """Rows to be tried together and alone. `waiting` are not submitted yet; `left` have no outcome yet."""

    waiting: deque[T]
    left: int
    family: SplitGroup | None = field(default=None, repr=False)

    def take(self) -> T | None:
        """The next row to submit, if any."""
        return self.waiting.popleft() if self.waiting else None

    def put_first(self, row: T) -> None:
        """A row of this group is to be submitted again, before the others."""
        self.waiting.appendleft(row)

    def take_all(self) -> list[T]:
        """All rows that are not submitted."""
        rows = list(self.waiting)
        self.waiting.clear()
        return rows

    def remove(self, is_gone: Callable[[T], bool]) -> list[T]:
        """Takes out the rows that are not submitted and are to be tried no more; `left` counts them still."""
        gone = [row for row in self.waiting if is_gone(row)]
        self.waiting = deque(row for row in self.waiting if not is_gone(row))
        return gone


class PoisonBisector(Generic[T]):
    """The groups still to be tried, the next one last."""

    def __init__(self) -> None:
        self._stack: list[Group[T]] = []
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._stack)

    def add(self, rows: Sequence[T]) -> None:
        """New suspects, as one group."""
        if rows:
            self._push(Group(deque(rows), len(rows)))

    def next(self) -> Group[T]:
        """The group to try now; the caller ends it with `survived`, `died` or `put_back`."""
        while True:
            group = self._stack.pop()
            self.size -= len(group.waiting)
            family = group.family
            if family is None or family.guilty or family.open_parts > 1 or len(group.waiting) == 1:
                return group
            self._close(group, guilty=True)
            self._split(list(group.waiting))

    def remove(self, is_gone: Callable[[T], bool]) -> list[T]:
        """Takes out rows of groups that are still to be tried."""
        found: list[T] = []
        for group in self._stack:
            gone = group.remove(is_gone)
            found += gone
            for _ in gone:
                self.row_left(group)
        self.size -= len(found)
        self._stack = [group for group in self._stack if group.left]
        return found

    def row_left(self, group: Group[T]) -> None:
        """A row of the group is tried no more: of what its family holds, nothing can be told by the others."""
        if group.family is not None:
            group.family.guilty = True
        self.row_ended(group)

    def row_ended(self, group: Group[T]) -> bool:
        """A row of the group has its outcome; True when all have, and the trial is over."""
        group.left -= 1
        if group.left == 0:
            self.survived(group)
        return group.left == 0

    def survived(self, group: Group[T]) -> None:
        """Every row of the group has its outcome."""
        self._close(group, guilty=False)

    def died(self, group: Group[T], in_flight: Sequence[T], rest: Iterable[T]) -> None:
        """The engine died: the rows in flight are split, those not submitted are tried on their own."""
        self._close(group, guilty=True)
        self.add(list(rest))
        self._split(list(in_flight))

    def put_back(self, group: Group[T], rows: Iterable[T]) -> None:
        """The trial was broken off for another reason: the same group is tried again."""
        group.waiting = deque(rows)
        group.left = len(group.waiting)
        if group.left:
            self._push(group)
        else:
            self._close(group, guilty=False)

    def _split(self, rows: list[T]) -> None:
        count = min(PARTS, len(rows))
        if count == 0:
            return
        family = SplitGroup(count)
        bounds = [len(rows) * i // count for i in range(count + 1)]
        for start, end in reversed(list(pairwise(bounds))):
            self._push(Group(deque(rows[start:end]), end - start, family))

    def _push(self, group: Group[T]) -> None:
        self._stack.append(group)
        self.size += len(group.waiting)

    def _close(self, group: Group[T], *, guilty: bool) -> None:
        if group.family is not None:
            group.family.open_parts -= 1
            group.family.guilty |= guilty
            group.family = None
