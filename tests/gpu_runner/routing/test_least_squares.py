"""Least squares, one observation after the other, and a quantile that follows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpu_runner.routing.least_squares import LeastSquares, RunningQuantile

WIDE = [(-100.0, 100.0)] * 3


def test_without_forgetting_it_is_the_least_squares_solution() -> None:
    rng = random.Random(1)
    rows = [(1.0, rng.random(), rng.random()) for _ in range(300)]
    values = [0.5 + 2 * x - 3 * y + rng.gauss(0, 0.1) for _, x, y in rows]
    model = LeastSquares([0.0] * 3, WIDE, forgetting=1.0, confidence=1e6)
    for row, value in zip(rows, values, strict=True):
        model.learn(row, value)
    solution = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    assert model.theta == pytest.approx(list(solution), abs=1e-3)


def test_with_forgetting_it_follows_a_change() -> None:
    rng, model = random.Random(2), LeastSquares([0.0, 0.0], WIDE[:2], forgetting=0.98)
    for slope in (1.0, 4.0):
        for _ in range(300):
            x = rng.random()
            model.learn((1.0, x), slope * x)
        assert model.predict((1.0, 0.5)) == pytest.approx(slope / 2, abs=0.02)


def test_a_weight_stays_within_its_bounds() -> None:
    model = LeastSquares([1.0], [(0.5, 2.0)])
    for value in (-10.0, 10.0):
        for _ in range(50):
            model.learn((1.0,), value)
        assert model.theta == [0.5 if value < 0 else 2.0]


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_a_quantile_is_found_and_followed(quantile: float) -> None:
    rng, found = random.Random(3), RunningQuantile(quantile)
    for shift in (0.0, 5.0):
        values = [rng.random() + shift for _ in range(4000)]
        for value in values:
            found.see(value)
        assert found.value == pytest.approx(quantile + shift, abs=0.08)
