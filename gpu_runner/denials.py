"""Rows that a server answered with 401, 403, 404, 405 or a redirect: is it this row, or the engine?

Evidence decides. A request that was sent after the denial and got an answer shows that key, model and address are
right: then the denial was meant for the row, which becomes a dead letter. Where other rows give no such answer, a
canary is sent; one that is denied too is the engine's denial, and no row is charged. A denied row keeps its slot until
then, so an engine that denies everything costs one window of requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpu_runner.wire import RequestDenied
from gpu_runner.work import Item

# A canary is sent for so many denials as a share of the window, or for one that waited so long: other rows may prove
# the same for nothing, and a dataset in which a third of the rows is denied must not ask for much more than its rows.
CANARY_SHARE = 1 / 8
CANARY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Denial:
    """A denied row that waits for evidence."""

    item: Item
    error: RequestDenied
    at: float


class Denials:
    """The denied rows of one engine, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Denial] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> float | None:
        """Since when a denied row waits."""
        return self._waiting[0].at if self._waiting else None

    def add(self, denial: Denial) -> None:
        """One more."""
        self._waiting.append(denial)

    def due(self, now: float, window: int, in_flight: int) -> bool:
        """Whether a canary is to bring the evidence."""
        if not self._waiting:
            return False
        many = len(self._waiting) >= max(1.0, window * CANARY_SHARE)
        return many or not in_flight or now - self._waiting[0].at >= CANARY_SECONDS

    def proved(self, admitted: float) -> list[Denial]:
        """Takes out those that came before a request was sent that was admitted: they are the rows' own."""
        found: list[Denial] = []
        while self._waiting and self._waiting[0].at < admitted:
            found.append(self._waiting.popleft())
        return found

    def give_up(self) -> list[Item]:
        """Takes out all rows: nothing was proved."""
        items = [denial.item for denial in self._waiting]
        self._waiting.clear()
        return items
