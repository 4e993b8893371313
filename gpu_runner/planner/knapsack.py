"""The cheapest set of instances that does a given amount of work within a given time: an exact bounded knapsack. Pure.

Each kind of instance has room for so much work, a price of being started (its boot) and a price per unit of work,
because an instance is ended when its share is done. That is a covering knapsack with fixed charges. Filling the open
instances in order of price per unit is optimal, so at most one instance is partly used, and its unit is the dearest of
all that are used. So the dynamic program takes the kinds in that order, fills whole instances, and looks after each
kind at what one more that is used in part would complete. Work is counted in whole quanta, room rounded down, so that
what is found always fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTA = 512


@dataclass(frozen=True, slots=True)
class KnapsackItem:
    """Instances that are alike: how many there are, how many quanta each has room for, and what it costs.

    `start`: US dollars for one of them to begin; `each`: US dollars per quantum.
    """

    count: int
    room: int
    start: float
    each: float


def solve_covering_knapsack(
    kinds: Sequence[KnapsackItem], most: int, quanta: int = QUANTA
) -> tuple[float, list[int]] | None:
    """Least US dollars for all quanta with at most `most` instances, and how many of each kind; None: not possible.

    Exact. The limit on the number is a second dimension, taken up only where the cheapest set without it breaks it.
    """
    if not is_coverable(kinds, most, quanta):
        return None
    usd, counts = _DynamicProgram(kinds, most, quanta, limited=False).solve()
    if sum(counts) > most:
        usd, counts = _DynamicProgram(kinds, most, quanta, limited=True).solve()
    return usd, counts


def is_coverable(kinds: Sequence[KnapsackItem], most: int, quanta: int = QUANTA) -> bool:
    """Whether at most `most` instances have room for all quanta."""
    left = quanta
    for kind in sorted(kinds, key=lambda kind: -kind.room):
        number = min(max(0, kind.count), most)
        left, most = left - number * kind.room, most - number
    return left <= 0


@dataclass(frozen=True, slots=True)
class _Step:
    """In which states so many more instances of a kind are better than none."""

    index: int
    number: int
    better: NDArray[np.bool_]


class _DynamicProgram:
    """Least cost of whole instances. States: instances, at most (one row where they are not `limited`) × quanta."""

    def __init__(self, kinds: Sequence[KnapsackItem], most: int, quanta: int, *, limited: bool) -> None:
        self.kinds, self.most, self.quanta, self.limited = kinds, most, quanta, limited
        self.table = np.full((most if limited else 1, quanta + 1), np.inf)
        self.table[:, 0] = 0.0
        self.steps: list[_Step] = []

    def solve(self) -> tuple[float, list[int]]:
        """The least cost, and how many of each kind."""
        least, counts = np.inf, [0] * len(self.kinds)
        for index in sorted(range(len(self.kinds)), key=lambda index: self.kinds[index].each):
            kind = self.kinds[index]
            limit = min(kind.count, self.most, -(-self.quanta // kind.room)) if kind.room > 0 else 0
            if limit < 1:
                continue
            for number in _split(limit - 1):
                self._take(index, number)
            used = np.arange(1, min(kind.room, self.quanta) + 1)
            costs = self.table[-1, self.quanta - used] + kind.start + kind.each * used
            best = int(np.argmin(costs))
            if costs[best] < least:
                least, counts = costs[best], self._trace(self.quanta - int(used[best]))
                counts[index] += 1
            self._take(index, 1)
        return float(least), counts

    def _take(self, index: int, number: int) -> None:
        """So many instances of a kind used to the end, where that is better."""
        kind, rows = self.kinds[index], number * self.limited
        room = number * kind.room
        if room > self.quanta or rows >= len(self.table):
            return
        usd = number * (kind.start + kind.each * kind.room)
        new = self.table[: len(self.table) - rows, : self.quanta + 1 - room] + usd
        old = self.table[rows:, room:]
        better = new < old
        np.minimum(old, new, out=old)
        self.steps.append(_Step(index, number, better))

    def _trace(self, covered: int) -> list[int]:
        """How many of each kind cover so much at the least cost: the way back through the steps."""
        counts, row = [0] * len(self.kinds), len(self.table) - 1
        for step in reversed(self.steps):
            before, rows = covered - step.number * self.kinds[step.index].room, step.number * self.limited
            if before >= 0 and row >= rows and step.better[row - rows, before]:
                covered, row = before, row - rows
                counts[step.index] += step.number
        return counts


def _split(number: int) -> list[int]:
    """Parts whose sums are all numbers from 0 to `number`."""
    parts, part = [], 1
    while number > 0:
        parts.append(min(part, number))
        number -= parts[-1]
        part *= 2
    return parts
