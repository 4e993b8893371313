"""Requests that arrive one by one, collected into lists: when one is full, and how long one may wait. Pure.

The wait follows the arrival rate: an exponentially weighted count of arrivals (time constant `memory`), divided by it.
With n arrivals to be expected within the longest wait,

    wait = longest * (n - 1) / (busy - 1)      between `quiet` and `longest`

so that a request which has little company to hope for goes almost at once, and one of many waits for a full list. What
the rate says is never needed for a list that gets full: it goes at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpu_runner.micro_batches.list_limits import ListSize

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """Seconds, and arrivals. `longest`: with what a timer is late, 50 ms are not passed. `quiet`: what a burst after
    silence needs to come together. `busy`: arrivals within `longest` from which on that long is waited.
    """

    longest: float = 0.045
    quiet: float = 0.001
    busy: float = 8.0
    memory: float = 0.25


class ArrivalRate:
    """Arrivals a second, of late."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._count = 0.0
        self._at = 0.0

    def arrived(self, now: float) -> None:
        """One more."""
        self._count = 1.0 + self._decayed(now)
        self._at = now

    def per_second(self, now: float) -> float:
        """The rate as of `now`."""
        return self._decayed(now) / self._memory

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._at) / self._memory)


class ListBuffer(Generic[T]):
    """The list that is being collected. Times are seconds of one monotonic clock."""

    def __init__(self, size: ListSize, policy: WaitPolicy = WaitPolicy()) -> None:
        self._size, self._policy = size, policy
        self._rate = ArrivalRate(policy.memory)
        self._items: dict[T, int] = {}
        self._bytes = 0
        self.due: float | None = None  # when what is here is to go

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, size: int, now: float) -> Iterable[list[T]]:
        """Takes an item of so many bytes in; returns the lists that are full by it. An item is added once."""
        self._rate.arrived(now)
        full = []
        if self._items and not self._size.fits(len(self._items) + 1, self._bytes + size):
            full.append(self.take())
        self._items[item] = size
        self._bytes += size
        if self.due is None:
            self.due = now + self.wait(now)
        if len(self._items) >= self._size.most:
            full.append(self.take())
        return full

    def take(self) -> list[T]:
        """What is here, in order of arrival; the buffer is empty then."""
        items = list(self._items)
        self._items.clear()
        self._bytes, self.due = 0, None
        return items

    def discard(self, item: T) -> bool:
        """Nobody waits for this one any more. False where it is not here."""
        size = self._items.pop(item, None)
        if size is None:
            return False
        self._bytes -= size
        if not self._items:
            self.due = None
        return True

    def wait(self, now: float) -> float:
        """Seconds that the first item of a list waits for others."""
        policy = self._policy
        expected = self._rate.per_second(now) * policy.longest
        share = (expected - 1) / (policy.busy - 1)
        return min(policy.longest, max(policy.quiet, policy.longest * share))
