"""Rows that are ready to be sent, in the order in which they are taken. No clock, no I/O.

Higher priority first. Owners of one priority take turns of ROWS_IN_TURN rows, so that rows which go in one request stay
together. Of one owner the rows that are due first go first, and of those that are due together the ones that were read
first: rows that come back from an engine or from a failed try have their old place.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpu_runner.inference.row_state import Item
from gpu_runner.rows import Urgency

ROWS_IN_TURN = 64

Entry = tuple[float, int, Item]  # when it is due, in which order it was read


@dataclass(slots=True)
class _Owners:
    """The owners of one priority: a heap of rows for each owner, the owner whose turn it is at the front, which has
    `had` rows.
    """

    rows: OrderedDict[str, list[Entry]] = field(default_factory=OrderedDict)
    had: int = 0


class ReadyRows:
    """`unsent` of its rows were never asked of an engine. `prompt_bytes`: of all its rows."""

    def __init__(self) -> None:
        self.unsent = 0
        self.prompt_bytes = 0
        self._priorities: dict[int, _Owners] = {}
        self._size = 0
        self._had: int | None = 0  # by the owner of the row that `take` gave last, in its turn before it

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """In no order."""
        for owners in self._priorities.values():
            for rows in owners.rows.values():
                yield from (item for _, _, item in rows)

    def add(self, item: Item) -> None:
        """One more."""
        urgency = item.batch.urgency
        owners = self._priorities.setdefault(urgency.priority, _Owners())
        heapq.heappush(owners.rows.setdefault(urgency.owner, []), self._entry(item))
        self._count(item, 1)

    def take(self) -> Item | None:
        """The first one; None: there is none."""
        if not self._priorities:
            return None
        priority = max(self._priorities)
        owners = self._priorities[priority]
        owner, rows = next(iter(owners.rows.items()))
        item = heapq.heappop(rows)[2]
        self._had = owners.had
        owners.had += 1
        if owners.had == ROWS_IN_TURN:
            owners.rows.move_to_end(owner)
            owners.had = 0
        self._took(priority, owner, item)
        return item

    def take_of(self, is_wanted: Callable[[Item], bool]) -> Item | None:
        """The wanted one that is due first, out of turn; None: there is none."""
        found = min((self._entry(item) for item in self if is_wanted(item)), default=None)
        if found is None:
            return None
        item, urgency = found[2], found[2].batch.urgency
        rows = self._priorities[urgency.priority].rows[urgency.owner]
        rows.remove(found)
        heapq.heapify(rows)
        self._had = None
        self._took(urgency.priority, urgency.owner, item)
        return item

    def put_first(self, item: Item) -> None:
        """The one that was taken last is ready again; unless it was taken out of turn, it is the first one, and its
        owner's turn is where it was.
        """
        self.add(item)
        if self._had is not None:
            owners = self._priorities[item.batch.urgency.priority]
            owners.rows.move_to_end(item.batch.urgency.owner, last=False)
            owners.had = self._had

    def remove(self, is_gone: Callable[[Item], bool]) -> list[Item]:
        """Takes out every row for which this is true, whoever's turn it is."""
        gone = [item for item in self if is_gone(item)]
        for priority, owner in {(item.batch.urgency.priority, item.batch.urgency.owner) for item in gone}:
            rows = self._priorities[priority].rows
            rows[owner] = [entry for entry in rows[owner] if not is_gone(entry[2])]
            heapq.heapify(rows[owner])
            self._leave_if_empty(priority, owner)
        for item in gone:
            self._count(item, -1)
        return gone

    def before(self, urgency: Urgency) -> int:
        """About how many of these would be taken before further rows of this urgency."""
        found = sum(
            len(rows)
            for priority, owners in self._priorities.items()
            if priority > urgency.priority
            for rows in owners.rows.values()
        )
        if (owners := self._priorities.get(urgency.priority)) is None:
            return found
        own = sum(due <= urgency.due for due, _, _ in owners.rows.get(urgency.owner, ()))
        most = (own // ROWS_IN_TURN + 1) * ROWS_IN_TURN
        return found + own + sum(min(len(rows), most) for owner, rows in owners.rows.items() if owner != urgency.owner)

    @staticmethod
    def _entry(item: Item) -> Entry:
        return item.batch.urgency.due, item.order, item

    def _took(self, priority: int, owner: str, item: Item) -> None:
        self._leave_if_empty(priority, owner)
        self._count(item, -1)

    def _leave_if_empty(self, priority: int, owner: str) -> None:
        owners = self._priorities[priority]
        if not owners.rows[owner]:
            if next(iter(owners.rows)) == owner:
                owners.had = 0
            del owners.rows[owner]
        if not owners.rows:
            del self._priorities[priority]

    def _count(self, item: Item, rows: int) -> None:
        self._size += rows
        self.unsent += rows if item.started_at == 0.0 else 0
        self.prompt_bytes += rows * len(item.row.prompt)
