"""What a measured speed says about speeds that were not measured. Pure.

Estimates err together: a wrong length mix moves all of them, a card that its power limit slows down moves every
instance with that card, and the rest is each instance type's own. The logarithm of true ÷ estimated speed is taken as
the sum of three normal parts, so the speeds that were measured correct the others and narrow them by conditioning
(Gaussian process regression; Rasmussen and Williams, 2006, eq. 2.25 and 2.26).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KNOWN = 0.1  # up to this relative standard deviation a speed counts as measured
SURE = 0.05  # of a speed that was measured
# Shares of the variance of an estimate: what all have in common, what a card has, the rest is an instance type's own.
COMMON, CARD = 0.3, 0.5


class Machine(NamedTuple):
    """What has one speed: so many GPUs of one card."""

    gpu: str
    memory_gib: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Belief:
    """A speed in tokens per second and its relative standard deviation."""

    tokens_per_second: float
    spread: float


def sharpen(beliefs: Mapping[Machine, Belief], measured: Mapping[Machine, float]) -> dict[Machine, Belief]:
    """All beliefs after some speeds were measured (tokens per second).

    A measured speed replaces its belief; what is not sure (spread above `KNOWN`) follows the measured ones. What was
    sure before and is not measured stays as it is.
    """
    found = dict(beliefs)
    unsure = [machine for machine, one in beliefs.items() if one.spread > KNOWN and one.tokens_per_second > 0]
    seen = [machine for machine in unsure if measured.get(machine, 0.0) > 0]
    for machine, speed in measured.items():
        if machine in beliefs and speed > 0:
            found[machine] = Belief(speed, SURE)
    others = [machine for machine in unsure if machine not in seen]
    if not seen or not others:
        return found
    errors = np.array([math.log(measured[machine] / beliefs[machine].tokens_per_second) for machine in seen])
    among = _covariance(seen, seen, beliefs) + SURE**2 * np.eye(len(seen))
    across = _covariance(others, seen, beliefs)
    weights = np.linalg.solve(among, across.T).T
    for machine, moved, explained in zip(others, weights @ errors, (weights * across).sum(axis=1), strict=True):
        before = beliefs[machine]
        left = math.sqrt(max(before.spread**2 - float(explained), SURE**2))
        found[machine] = Belief(before.tokens_per_second * math.exp(float(moved)), left)
    return found


def _covariance(
    these: Sequence[Machine], those: Sequence[Machine], beliefs: Mapping[Machine, Belief]
) -> NDArray[np.float64]:
    return np.array([[_shared(a, b) * beliefs[a].spread * beliefs[b].spread for b in those] for a in these])


def _shared(a: Machine, b: Machine) -> float:
    """Correlation of two errors."""
    if a == b:
        return 1.0
    return COMMON + (CARD if (a.gpu, a.memory_gib) == (b.gpu, b.memory_gib) else 0.0)
