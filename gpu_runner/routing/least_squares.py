"""Recursive least squares with forgetting, and a running quantile: models of a few numbers, learned one by one.

Plain Python: with six features an update takes some 15 us and a prediction less than one, which is less than what
numpy needs to be called. Haykin, Adaptive Filter Theory, chapter 10 (RLS); Robbins and Monro (1951) for the quantile.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

# The covariance may not grow without end while the features say nothing new.
MOST_COVARIANCE = 1e4


class LeastSquares:
    """y = theta . x, each observation weighing `forgetting` times the one after it.

    `prior`: what theta is before the first observation; `confidence`: how little it is believed (variance). `bounds`:
    within which each weight stays: features that rise and fall together would else get weights of opposite signs, which
    predict nonsense for an engine that is loaded in another way.
    """

    def __init__(
        self,
        prior: Sequence[float],
        bounds: Sequence[tuple[float, float]],
        forgetting: float = 0.99,
        confidence: float = 1.0,
    ) -> None:
        self.theta = list(prior)
        self._bounds, self._forgetting = bounds, forgetting
        size = len(self.theta)
        self._covariance = [[confidence if i == j else 0.0 for j in range(size)] for i in range(size)]

    def predict(self, x: Sequence[float]) -> float:
        """The expected value."""
        return float(sum(map(mul, self.theta, x)))

    def learn(self, x: Sequence[float], y: float, weight: float = 1.0) -> None:
        """One observation. `weight`: one over its variance, as a factor."""
        rows = self._covariance
        gain = [sum([a * b for a, b in zip(row, x, strict=True)]) for row in rows]
        scale = self._forgetting / weight + sum([a * b for a, b in zip(gain, x, strict=True)])
        error = y - self.predict(x)
        moved = [theta + g / scale * error for theta, g in zip(self.theta, gain, strict=True)]
        self.theta = [min(max(theta, low), high) for theta, (low, high) in zip(moved, self._bounds, strict=True)]
        grown = 1.0 / self._forgetting if max(rows[i][i] for i in range(len(x))) < MOST_COVARIANCE else 1.0
        for i, row in enumerate(rows):
            factor = gain[i] / scale
            rows[i] = [grown * (value - factor * other) for value, other in zip(row, gain, strict=True)]


class RunningQuantile:
    """A quantile of what is seen, which follows slow changes. `step`: how fast, in units of the spread."""

    def __init__(self, quantile: float, start: float = 0.0, step: float = 0.05) -> None:
        self.value = start
        self._quantile, self._step, self._spread = quantile, step, abs(start)

    def see(self, value: float) -> None:
        """One more."""
        self._spread += 0.02 * (abs(value - self.value) - self._spread)
        move = self._step * max(self._spread, 1e-6)
        self.value += move * (self._quantile if value > self.value else self._quantile - 1)
