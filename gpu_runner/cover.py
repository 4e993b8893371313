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
    useful = [i for i, kind in enumerate(kinds) if kind.count > 0 and kind.room > 0]
    rooms = sorted((room for i in useful for room in [kinds[i].room] * min(kinds[i].count, most)), reverse=True)
    if most < 1 or sum(rooms[:most]) < quanta:
        return None
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
    steps: list[tuple[int, int, Floats]] = []  # kind, how many at once (0: one that may be used in part), table before
    for index, (kind, limit) in enumerate(zip(kinds, limits, strict=True)):
        for number in [0, *_split(limit - 1)]:
            steps.append((index, number, table))
            table = _part(table, kind, quanta) if number == 0 else _whole(table, kind, number, quanta)
    ends = table[..., quanta]
    at = np.unravel_index(int(np.argmin(ends)), ends.shape)
    return float(ends[at]), _trace(steps, kinds, [int(i) for i in at], quanta)


def _split(number: int) -> list[int]:
    """Parts whose sums are all numbers from 0 to `number`."""
    parts, part = [], 1
    while number > 0:
        parts.append(min(part, number))
        number -= parts[-1]
        part *= 2
    return parts


def _whole(table: Floats, kind: Kind, number: int, quanta: int) -> Floats:
    """So many instances of a kind used to the end, or none."""
    room, cost = number * kind.room, number * kind.full()
    if room > quanta or (table.ndim == 3 and number >= table.shape[1]):
        return table
    new = table.copy()
    to, since = (new[..., room:], table[..., : quanta + 1 - room])
    if table.ndim == 3:
        to, since = to[:, number:], since[:, :-number]
    np.minimum(to, since + cost, out=to)
    return new


def _part(table: Floats, kind: Kind, quanta: int) -> Floats:
    """One instance of a kind: not at all, to the end, or (if none is yet) in part."""
    new = _whole(table, kind, 1, quanta).copy()
    if kind.room > 1:
        steps = np.arange(quanta + 1) * kind.each
        least = _window_minimum(table[0] - steps, kind.room - 1)
        since = least[..., :-1] + steps[1:] + kind.start
        to = new[1, ..., 1:]
        if table.ndim == 3:
            to, since = to[1:], since[:-1]
        np.minimum(to, since, out=to)
    return new


def _window_minimum(values: Floats, width: int) -> Floats:
    """At each index the least of the `width` values that end there. By doubling."""
    least, span = values, 1
    while span < width:
        step = min(span, width - span)
        wider = least.copy()
        np.minimum(wider[..., step:], least[..., :-step], out=wider[..., step:])
        least, span = wider, span + step
    return least


def _trace(steps: list[tuple[int, int, Floats]], kinds: Sequence[Kind], at: list[int], quanta: int) -> list[int]:
    """How many of each kind: the way back through the tables."""
    counts = [0] * len(kinds)
    state, covered = at, quanta
    tables = [table for _, _, table in steps]
    for place in range(len(steps) - 1, -1, -1):
        index, number, before = steps[place]
        kind = kinds[index]
        after = tables[place + 1] if place + 1 < len(steps) else _after(before, kind, number, quanta)
        value = after[(*state, covered)]
        if before[(*state, covered)] == value:
            continue
        counts[index] += max(1, number)
        flag, used = state[0], state[1:]
        used = [one - max(1, number) for one in used]
        room = max(1, number) * kind.room
        if covered >= room and before[(flag, *used, covered - room)] + max(1, number) * kind.full() == value:
            state, covered = [flag, *used], covered - room
            continue
        sizes = np.arange(1, min(kind.room - 1, covered) + 1)
        costs = before[(0, *used)][covered - sizes] + kind.start + sizes * kind.each
        state, covered = [0, *used], covered - int(sizes[int(np.argmin(costs))])
    return counts


def _after(before: Floats, kind: Kind, number: int, quanta: int) -> Floats:
    return _part(before, kind, quanta) if number == 0 else _whole(before, kind, number, quanta)
