"""Rows refused with 429 or 503: how far to step back, and whether the row may be to blame. Pure.

A server that refuses is normally full, and then another row would have been refused just as well. So the window
follows what the server lets in (multiplicative decrease, then an increase that starts at one row a second and
grows with the square of the calm seconds, as CUBIC does, RFC 9438), and a refused row is charged only when so
many refusals in a row cannot be chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log


@dataclass(frozen=True, slots=True)
class RefusalPolicy:
    """`share` of rows refused of those lately submitted, and `least` of them, begin throttling. `shrink`: what is
    left of the rows that were let in. `smallest` window. `growth`: rows per tick and calm tick squared.
    `chance`: a row is charged when its refusals are less likely than this for any row.
    """

    share: float = 0.1
    least: int = 5
    shrink: float = 0.85
    smallest: int = 16
    growth: float = 0.02
    chance: float = 1e-6


class OverloadBackoff:
    """What one server refused. `cap` is the window that it bears, None while it takes everything."""

    def __init__(self, policy: RefusalPolicy) -> None:
        self._policy = policy
        self.cap: float | None = None
        self._lately_refused = self._lately_served = 0.0  # over some 5 ticks
        self._first = self._refused = self._served = 0.0  # over some 1,000 rows; `first` refusals of rows
        self._calm_ticks = 1

    def on_served(self) -> None:
        """A row was answered."""
        self._lately_served += 1
        self._served += 1
        if self._served >= 1000:
            self._served /= 2
            self._refused /= 2
            self._first /= 2

    def on_refused(self, size: int, in_flight: int, running: int, *, first: bool) -> bool:
        """A row was refused; True while throttled. `in_flight` rows were let in and are not answered yet.

        Only the first refusal of a row can begin throttling, so that a few rows which are refused each time
        cannot; every refusal prolongs it.
        """
        policy = self._policy
        new_tick, self._calm_ticks = self._calm_ticks > 0, 0
        self._lately_refused += first
        self._first += first
        self._refused += 1
        share = self._lately_refused / max(1.0, in_flight + self._lately_served)
        many = self._lately_refused >= policy.least and share > policy.share
        if (many and self.cap is None) or (self.cap is not None and new_tick):
            held = max(policy.shrink * min(size, in_flight), running, policy.smallest)
            self.cap = min(float(size), held)
        return self.cap is not None

    def on_tick(self, wanted: int) -> None:
        """Once a second or so: lets the window grow again towards what is wanted."""
        self._lately_refused *= 0.8
        self._lately_served *= 0.8
        self._calm_ticks += 1
        if self.cap is not None:
            self.cap += 1 + self._policy.growth * self._calm_ticks**2
            if self.cap >= wanted:
                self.cap = None

    def by_chance(self, in_flight: int) -> int:
        """How many refusals in a row any row may meet here, judging by the share of rows that are refused.

        A throttled server refuses whoever comes; else rows that are refused each time count once.
        """
        refused = self._first if self.cap is None else self._refused
        share = (refused + 0.5) / (refused + self._served + in_flight + 150)
        return ceil(log(self._policy.chance) / log(min(share, 0.99))) - 1
