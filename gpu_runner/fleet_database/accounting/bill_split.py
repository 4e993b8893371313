"""What an instance's bill was spent on: booting, useful, idle, wasted. Pure: the time is an argument.

A bill runs from the order to the end of the machine. Until the engine is ready it is booting; if it never was ready,
all of it is wasted. Afterwards, each lease counts as useful and wasted what its holder said; what lies between a
holder's last word and the end of its lease (it died, or the machine did) is wasted; the rest is idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds or US dollars by what they went into."""

    booting: float = 0.0
    useful: float = 0.0
    idle: float = 0.0
    wasted: float = 0.0

    @property
    def total(self) -> float:
        """All four together."""
        return self.booting + self.useful + self.idle + self.wasted

    def __add__(self, other: Split) -> Split:
        """Part by part."""
        return Split(
            self.booting + other.booting, self.useful + other.useful, self.idle + other.idle, self.wasted + other.wasted
        )

    def times(self, factor: float) -> Split:
        """Each part multiplied."""
        return Split(self.booting * factor, self.useful * factor, self.idle * factor, self.wasted * factor)


@dataclass(frozen=True, slots=True)
class LeaseSpan:
    """A lease on an instance. `renewed_at`: its holder's last word, with these totals. `ended_at` None: it is live."""

    acquired_at: float
    renewed_at: float
    ended_at: float | None
    useful_seconds: float
    wasted_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When an instance was ordered, ready and ended; None: not yet, or never. `failed`: it will not be ready any more.

    `leases` in the order of their epochs. Only draining leases overlap with later ones.
    """

    created_at: float
    ready_at: float | None
    ended_at: float | None
    failed: bool
    leases: Sequence[LeaseSpan]


@dataclass(frozen=True, slots=True)
class InstanceCost:
    """One instance's bill. `seconds` are real ones, of which each costs `price_per_hour` / 3600 × `clock`.

    `by_tokens`: of an engine that is paid by the token, what that cost; None: time is paid.
    """

    name: str
    provider: str
    region: str
    instance_type: str
    gpu: str
    gpus: int
    spot: bool
    model: str
    dataset: str
    state: str
    price_per_hour: float
    clock: float
    seconds: Split
    rows: int
    prompt_tokens: int
    completion_tokens: int
    by_tokens: Split | None = None

    @property
    def usd(self) -> Split:
        """The bill in US dollars."""
        if self.by_tokens is not None:
            return self.by_tokens
        return self.seconds.times(usd_per_second(self.price_per_hour, self.clock))


def usd_per_second(price_per_hour: float, clock: float) -> float:
    """Price of a real second."""
    return price_per_hour / HOUR * clock


def split_bill(line: Timeline, now: float) -> tuple[Split, list[float]]:
    """Seconds of the bill by use, and the useful seconds of each lease as they were counted."""
    end = bill_end(line, now)
    if line.ready_at is None:
        whole = end - line.created_at
        return (Split(wasted=whole) if line.failed else Split(booting=whole)), [0.0] * len(line.leases)
    ready = min(max(line.ready_at, line.created_at), end)
    parts = lease_parts(line, now)
    useful = [part.useful for part in parts]
    busy, wasted = sum(useful), sum(part.wasted for part in parts)
    return Split(ready - line.created_at, busy, max(0.0, end - ready - busy - wasted), wasted), useful


def bill_end(line: Timeline, now: float) -> float:
    """When the bill ends; `now` while the instance stands."""
    return max(line.created_at, now if line.ended_at is None else line.ended_at)


def lease_parts(line: Timeline, now: float) -> list[Split]:
    """Useful and wasted seconds of each lease.

    Where leases overlap, a second is counted once, for the earlier one: together they never exceed the bill.
    """
    end = bill_end(line, now)
    if line.ready_at is None:
        return [Split()] * len(line.leases)
    ready = min(max(line.ready_at, line.created_at), end)
    parts: list[Split] = []
    counted = covered = 0.0
    frontier = ready  # the furthest that any lease so far reaches; `covered` is the length of their union
    for lease, next_begins in zip(line.leases, _next_begins(line.leases), strict=True):
        start = min(max(lease.acquired_at, ready), end)
        stop = max(start, min(end, now if lease.ended_at is None else lease.ended_at))
        covered += max(0.0, stop - max(start, frontier))
        frontier = max(frontier, stop)
        room = max(0.0, min(stop - start, covered - counted))
        lost = min(room, _lost(lease, start, min(stop, next_begins)))
        useful = min(lease.useful_seconds, room - lost)
        parts.append(Split(useful=useful, wasted=lost + min(lease.wasted_seconds, room - lost - useful)))
        counted += parts[-1].total
    return parts


def shared_seconds(line: Timeline, now: float) -> list[float]:
    """For each lease, seconds in which its last rows ran beside a later lease and which no later lease has counted yet.

    From the moment at which the next run begins, time is counted by that run alone, when its own rows end; the rows of
    the one before it are counted at once. A speed is rows by both: what was counted, and these seconds.
    """
    end = bill_end(line, now)
    begins = _next_begins(line.leases)
    handed_on = [index for index, lease in enumerate(line.leases) if begins[index] < _stop(lease, end, now)]
    if not handed_on:
        return [0.0] * len(line.leases)
    counted = sum(lease.useful_seconds + lease.wasted_seconds for lease in line.leases[handed_on[0] + 1 :])
    found = [0.0] * len(line.leases)
    frontier = -math.inf
    for index in handed_on:
        stop = _stop(line.leases[index], end, now)
        shared = max(0.0, stop - max(begins[index], frontier))
        frontier = max(frontier, stop)
        found[index] = max(0.0, shared - counted)
        counted = max(0.0, counted - shared)
    return found


def _stop(lease: LeaseSpan, end: float, now: float) -> float:
    return min(end, now if lease.ended_at is None else lease.ended_at)


def _next_begins(leases: Sequence[LeaseSpan]) -> list[float]:
    """For each lease, when the first of those after it was acquired."""
    found: list[float] = []
    first = math.inf
    for lease in reversed(leases):
        found.append(first)
        first = min(first, lease.acquired_at)
    return found[::-1]


def _lost(lease: LeaseSpan, start: float, stop: float) -> float:
    """Seconds from the holder's last word to the lease's end in which nobody else held the instance."""
    if lease.ended_at is None:
        return 0.0
    return max(0.0, stop - max(start, lease.renewed_at))
