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

KNOWN_STD = 0.1  # up to this relative standard deviation a speed counts as measured
MEASURED_STD = 0.05  # of a speed that was measured
# Shares of the variance of an estimate: what all have in common, what a card has, the rest is an instance type's own.
COMMON, CARD = 0.3, 0.5


class HardwareType(NamedTuple):
    """What has one speed: so many GPUs of one card."""

    gpu: str
    memory_gib: float
    gpus: int


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """A speed in tokens per second and its relative standard deviation."""

    tokens_per_second: float
    spread: float


def condition_on(
    estimates: Mapping[HardwareType, SpeedEstimate], measured: Mapping[HardwareType, float]
) -> dict[HardwareType, SpeedEstimate]:
    """All estimates after some speeds were measured (tokens per second).

    A measured speed replaces its estimate; what is unmeasured (spread above `KNOWN_STD`) follows the measured ones.
    What was known before and is not measured now stays as it is.
    """
    found = dict(estimates)
    unmeasured = [
        hardware for hardware, one in estimates.items() if one.spread > KNOWN_STD and one.tokens_per_second > 0
    ]
    seen = [hardware for hardware in unmeasured if measured.get(hardware, 0.0) > 0]
    for hardware, speed in measured.items():
        if hardware in estimates and speed > 0:
            found[hardware] = SpeedEstimate(speed, MEASURED_STD)
    others = [hardware for hardware in unmeasured if hardware not in seen]
    if not seen or not others:
        return found
    errors = np.array([math.log(measured[hardware] / estimates[hardware].tokens_per_second) for hardware in seen])
    among = _covariance(seen, seen, estimates) + MEASURED_STD**2 * np.eye(len(seen))
    across = _covariance(others, seen, estimates)
    weights = np.linalg.solve(among, across.T).T
    for hardware, moved, explained in zip(others, weights @ errors, (weights * across).sum(axis=1), strict=True):
        before = estimates[hardware]
        left = math.sqrt(max(before.spread**2 - float(explained), MEASURED_STD**2))
        found[hardware] = SpeedEstimate(before.tokens_per_second * math.exp(float(moved)), left)
    return found


def _covariance(
    these: Sequence[HardwareType], those: Sequence[HardwareType], estimates: Mapping[HardwareType, SpeedEstimate]
) -> NDArray[np.float64]:
    return np.array([[_shared(a, b) * estimates[a].spread * estimates[b].spread for b in those] for a in these])


def _shared(a: HardwareType, b: HardwareType) -> float:
    """Correlation of two errors."""
    if a == b:
        return 1.0
    return COMMON + (CARD if (a.gpu, a.memory_gib) == (b.gpu, b.memory_gib) else 0.0)
