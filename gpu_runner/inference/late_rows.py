"""Which requests of an engine are late, and for which of them an engine is to be asked once more. Pure.

second_requests.py asks. Rows of a trial of suspects are never late: nothing else may be in flight beside them.

Durations are counted in histograms, one for each power of two of the prompts' bytes: a long prompt takes longer than a
short one. How long an answer will be is not known before, so the limit is a multiple of a high quantile, and what is
late is asked once more and not given up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_runner.inference.row_state import Item, Request, RowState

BUCKETS = 128  # four to each power of two, from a millisecond to 49 days
FORGET_AT = 4000  # durations in one histogram: beyond it each counts half, so that it follows the engine


@dataclass(frozen=True, slots=True)
class HedgePolicy:
    """A request is late after `factor` times the `quantile` of the durations of answered ones, and `floor_seconds`.

    There must be `samples` of them, and as many as there are rows in flight: those that are answered first are short.
    One engine has at most a part `share` of its window of second requests at once, one in any case. A second request
    that failed is repeated, `most` requests for a late row in all.
    """

    quantile: float = 0.99
    factor: float = 3.0
    floor_seconds: float = 60.0
    samples: int = 20
    share: float = 1 / 8
    most: int = 3


class RequestDurations:
    """Those of one engine. `answered` is called for every request, `limit` rarely."""

    def __init__(self, policy: HedgePolicy) -> None:
        self._policy = policy
        self._of_size: dict[int, _Histogram] = {}
        self._answered = 0

    def answered(self, size: int, seconds: float, rows: int = 1) -> None:
        """A request of so many rows, whose prompts have so many bytes, was answered after so many seconds."""
        self._answered += rows
        found = self._of_size.get(size.bit_length())
        if found is None:
            found = self._of_size[size.bit_length()] = _Histogram()
        found.add(seconds)

    def limit(self, size: int, in_flight: int) -> float | None:
        """Seconds after which a request of this size is late; None while too few were answered to tell.

        Where few of its size were answered, those of all sizes count.
        """
        policy = self._policy
        own = self._of_size.get(size.bit_length())
        counts = own.counts if own is not None and own.total >= policy.samples else self._all()
        if self._answered < in_flight or sum(counts) < policy.samples:
            return None
        return max(policy.floor_seconds, policy.factor * _quantile(counts, policy.quantile))

    def _all(self) -> list[int]:
        return [sum(counts) for counts in zip(*(one.counts for one in self._of_size.values()), strict=True)]


class _Histogram:
    """Durations by quarters of powers of two of a millisecond."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.total = 0

    def add(self, seconds: float) -> None:
        bucket = int(4 * math.log2(1000 * seconds)) if seconds > 0.001 else 0
        self.counts[min(bucket, BUCKETS - 1)] += 1
        self.total += 1
        if self.total >= FORGET_AT:
            self.counts = [(count + 1) // 2 for count in self.counts]
            self.total = sum(self.counts)


def _quantile(counts: list[int], quantile: float) -> float:
    """The upper end of the bucket in which the quantile lies, in seconds."""
    wanted, seen, bucket = quantile * sum(counts), counts[0], 0
    while seen < wanted:
        bucket += 1
        seen += counts[bucket]
    return float(2 ** ((bucket + 1) / 4) / 1000)


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request whose answer is late. `asks`: its rows are to be asked for once more."""

    request: Request
    rows: tuple[Item, ...]
    asks: bool


def late_requests(
    in_flight: Mapping[Item, Request], durations: RequestDurations, policy: HedgePolicy, now: float
) -> list[LateRequest]:
    """The late ones of an engine. `in_flight`: its rows, in the order in which they were sent."""
    limits: dict[int, float | None] = {}
    found = []
    for request, rows in _old(in_flight, policy, now).items():
        size = sum(len(item.prompt) for item in rows)
        if size.bit_length() not in limits:
            limits[size.bit_length()] = durations.limit(size, len(in_flight))
        limit, repeats = limits[size.bit_length()], rows[0].repeats
        age = now - rows[0].sent
        if limit is not None and age >= limit:
            again = repeats < policy.most and age >= limit * 2**repeats
            found.append(LateRequest(request, tuple(rows), again and request.second is None))
    return found


def _old(in_flight: Mapping[Item, Request], policy: HedgePolicy, now: float) -> dict[Request, list[Item]]:
    """Rows that wait for their answer for the shortest time after which one may be late, by request."""
    found: dict[Request, list[Item]] = {}
    for item, request in in_flight.items():
        if now - item.sent < policy.floor_seconds:
            break
        if item.state is RowState.IN_FLIGHT and item.group is None:
            found.setdefault(request, []).append(item)
    return found
