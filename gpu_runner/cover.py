"""The cheapest set of instances that does a given amount of work within a given time: an exact bounded knapsack. Pure.

Each kind of instance has room for so much work, a price of being started (its boot) and a price per unit of work,
because an instance is ended when its share is done. That is a covering knapsack with fixed charges. Filling the open
instances in order of price per unit is optimal, so at most one instance is partly used: the dynamic program carries
one bit for it. Work is counted in whole quanta, room rounded down, so that what is found always fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

QUANTA = 512


@dataclass(frozen=True, slots=True)
class Kind:
    """Instances that are alike: how many there are, how many quanta each has room for, and what it costs.

    `start`: US dollars for one of them to begin; `each`: US dollars per quantum.
    """

    count: int
    room: int
    start: float
    each: float

    def full(self) -> float:
        """US dollars of one instance that is used to the end."""
        return self.start + self.each * self.room


def cheapest_cover(kinds: Sequence[Kind], most: int, quanta: int = QUANTA) -> tuple[float, list[int]] | None:
    """Least US dollars for all quanta with at most `most` instances, and how many of each kind; None: not possible.

    Exact. The limit on the number is a second dimension, taken up only where the cheapest set without it breaks it.
    """
    if not can_cover(kinds, most, quanta):
        return None
    useful = [i for i, kind in enumerate(kinds) if kind.count > 0 and kind.room > 0]
    kept = _undominated([kinds[i] for i in useful], most)
    chosen = [useful[i] for i in kept]
    some = [kinds[i] for i in chosen]
    found = _solve(some, [min(kind.count, most, -(-quanta // kind.room)) for kind in some], quanta, None)
    if sum(found[1]) > most:
        found = _solve(some, [min(kind.count, most) for kind in some], quanta, most)
    counts = [0] * len(kinds)
    for i, number in zip(chosen, found[1], strict=True):
        counts[i] = number
    return found[0], counts


def can_cover(kinds: Sequence[Kind], most: int, quanta: int = QUANTA) -> bool:
    """Whether at most `most` instances have room for all quanta."""
    left = quanta
    for kind in sorted(kinds, key=lambda kind: -kind.room):
        number = min(max(0, kind.count), most)
        left, most = left - number * kind.room, most - number
    return left <= 0


def _undominated(kinds: Sequence[Kind], most: int) -> list[int]:
    """Indices of the kinds that no other kind replaces at no more cost whatever it is used for."""
    order = sorted(range(len(kinds)), key=lambda i: (-kinds[i].room, kinds[i].full(), kinds[i].start))
    kept: list[int] = []
    for i in order:
        one = kinds[i]
        if not any(_replaces(kinds[j], one, most) for j in kept):
            kept.append(i)
    return sorted(kept)


def _replaces(other: Kind, one: Kind, most: int) -> bool:
    """Cost is linear in use, so the ends decide; there must be enough of the other."""
    return (
        other.count >= most
        and other.room >= one.room
        and other.start <= one.start
        and other.start + other.each * one.room <= one.full()
    )


def _solve(kinds: Sequence[Kind], limits: Sequence[int], quanta: int, most: int | None) -> tuple[float, list[int]]:
    """The dynamic program. States: [part used or not][instances, if they are limited][quanta covered]."""
    shape = (2, quanta + 1) if most is None else (2, most + 1, quanta + 1)
    table = np.full(shape, np.inf)
    table[0, ..., 0] = 0.0
    spare = np.empty(shape)
    steps: list[_Step] = []
    for index, (kind, limit) in enumerate(zip(kinds, limits, strict=True)):
        steps.append(_part(table, spare, index, kind, quanta))
        for number in _split(limit - 1):
            taken = _whole(table, spare, kind, number, quanta)
            if taken is not None:
                steps.append(_Step(index, number, taken, None, None))
    ends = table[..., quanta]
    at = np.unravel_index(int(np.argmin(ends)), ends.shape)
    return float(ends[at]), _trace(steps, kinds, [int(i) for i in at], quanta)


@dataclass(frozen=True, slots=True)
class _Step:
    """Where so many instances of a kind (1: one that may be used in part) are better than none, and what was before.

    The arrays have the shape of the part of the table that they speak of: the last entries of each dimension.
    """

    index: int
    number: int
    whole: Bools | None
    part: Bools | None
    before: Floats | None


def _split(number: int) -> list[int]:
    """Parts whose sums are all numbers from 0 to `number`."""
    parts, part = [], 1
    while number > 0:
        parts.append(min(part, number))
        number -= parts[-1]
        part *= 2
    return parts


def _whole(table: Floats, spare: Floats, kind: Kind, number: int, quanta: int) -> Bools | None:
    """So many instances of a kind used to the end, where that is better; None: there is no room for so many."""
    room, cost = number * kind.room, number * kind.full()
    if room > quanta or (table.ndim == 3 and number >= table.shape[1]):
        return None
    to, since, new = table[..., room:], table[..., : quanta + 1 - room], spare[..., room:]
    if table.ndim == 3:
        to, since, new = to[:, number:], since[:, :-number], new[:, number:]
    np.add(since, cost, out=new)
    better = np.less(new, to)
    np.minimum(to, new, out=to)
    return better


def _part(table: Floats, spare: Floats, index: int, kind: Kind, quanta: int) -> _Step:
    """One instance of a kind: not at all, to the end, or (if none is yet) in part."""
    before = table[0].copy()
    whole = _whole(table, spare, kind, 1, quanta)
    if kind.room < 2:
        return _Step(index, 1, whole, None, before)
    steps = np.arange(quanta + 1) * kind.each
    least = _window_minimum(before - steps, kind.room - 1)
    new = least[..., :-1] + (steps[1:] + kind.start)
    to = table[1, ..., 1:]
    if table.ndim == 3:
        to, new = to[1:], new[:-1]
    better = np.less(new, to)
    np.minimum(to, new, out=to)
    return _Step(index, 1, whole, better, before)


def _window_minimum(values: Floats, width: int) -> Floats:
    """At each index the least of the `width` values that end there. By doubling."""
    least, span = values, 1
    while span < width:
        step = min(span, width - span)
        wider = least.copy()
        np.minimum(wider[..., step:], least[..., :-step], out=wider[..., step:])
        least, span = wider, span + step
    return least


def _trace(steps: list[_Step], kinds: Sequence[Kind], at: list[int], quanta: int) -> list[int]:
    """How many of each kind: the way back through the steps."""
    counts = [0] * len(kinds)
    flag, used, covered = at[0], at[1:], quanta
    for step in reversed(steps):
        kind, number = kinds[step.index], step.number
        room = number * kind.room
        if any(one < number for one in used):
            continue
        fewer = [one - number for one in used]
        if flag and step.part is not None and covered > 0 and step.part[(*fewer, covered - 1)]:
            assert step.before is not None
            sizes = np.arange(1, min(kind.room - 1, covered) + 1)
            costs = step.before[tuple(fewer)][covered - sizes] + sizes * kind.each
            flag, covered = 0, covered - int(sizes[int(np.argmin(costs))])
        elif step.whole is not None and covered >= room and step.whole[(flag, *fewer, covered - room)]:
            covered -= room
        else:
            continue
        used = fewer
        counts[step.index] += number
    return counts
