"""Token buckets: so much a minute, with bursts of a minute's worth. Pure; seconds come in as an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    """What a bucket held at a moment. Below 0: more was used than was asked for, the next ones wait for it."""

    tokens: float
    at: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What came of asking. `reset_seconds`: until the bucket is full. `wait_seconds`: until the same amount would be
    granted; 0 when it was, infinite when it is more than the bucket ever holds.
    """

    granted: bool
    level: Level
    remaining: int
    reset_seconds: float
    wait_seconds: float


def refilled(level: Level | None, per_minute: int, now: float) -> Level:
    """The level at `now`; that of a bucket that nobody has used is full. A clock that went back adds nothing."""
    if level is None:
        return Level(float(per_minute), now)
    passed = max(0.0, now - level.at)
    return Level(min(float(per_minute), level.tokens + passed * per_minute / 60), now)


def take(level: Level | None, per_minute: int, amount: float, now: float) -> Decision:
    """Ask for `amount` at `now`."""
    held = refilled(level, per_minute, now)
    granted = amount <= held.tokens
    after = Level(held.tokens - amount, now) if granted else held
    wait = 0.0 if granted else math.inf if amount > per_minute else (amount - held.tokens) * 60 / per_minute
    return Decision(
        granted, after, max(0, math.floor(after.tokens)), (per_minute - after.tokens) * 60 / per_minute, wait
    )


def settle(level: Level | None, per_minute: int, more: float, now: float) -> Level:
    """Take what was used beyond what was asked for, or give back what was not used (`more` below 0).

    A debt is at most one minute's worth: nobody is locked out for longer than that.
    """
    held = refilled(level, per_minute, now)
    return Level(max(-float(per_minute), min(float(per_minute), held.tokens - more)), now)
