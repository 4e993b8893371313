"""Rounds until so many rows are accepted: never too few rows, rarely too many, few rounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_assets.capacity_planning.acceptance import (
    Rate,
    Stratum,
    Stretch,
    estimated_rate,
    next_round,
    prior_of,
    rows_for,
)

PRIOR = prior_of(None)


def stretches(accepted: Sequence[bool], most: int = 64) -> tuple[Stretch, ...]:
    ends = [len(accepted) * part // most for part in range(most + 1)]
    return tuple(
        Stretch(end - begin, sum(accepted[begin:end])) for begin, end in itertools.pairwise(ends) if end > begin
    )


def rows(count: int, rates: tuple[float, float], seed: int = 7) -> list[bool]:
    """Rows whose rate goes from one value to another."""
    draws, (first, last) = random.Random(seed), rates
    return [draws.random() < first + (last - first) * number / count for number in range(count)]


def test_a_steady_rate_is_found_with_its_range_and_no_drift_is_seen_in_noise() -> None:
    for seed in range(20):
        found = estimated_rate(stretches(rows(5000, (0.3, 0.3), seed)), PRIOR)
        assert found.factor == 1.0
        assert found.bound(-3) < 0.3 < found.bound(3)
        assert found.bound(3) - found.bound(-3) < 0.05


def test_of_a_rate_that_moves_the_newest_rows_count_and_the_range_grows_with_the_rows_ahead() -> None:
    found = estimated_rate(stretches(rows(5000, (0.2, 0.8))), PRIOR)
    assert found.factor < 1.0
    assert 0.65 < found.mean < 0.9
    assert found.bound(1.64, 3000) - found.bound(-1.64, 3000) > 3 * (found.bound(1.64) - found.bound(-1.64))


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=0, max_size=64),
    st.integers(1, 5000),
    st.integers(1, 300),
    st.floats(0.01, 64),
)
def test_a_round_holds_what_is_missing_in_whole_batches_and_there_is_none_when_nothing_is(
    made: list[tuple[int, float]], wanted: int, batch: int, each: float
) -> None:
    history = tuple(Stretch(count, round(count * rate)) for count, rate in made)
    asked = sum(one.rows for one in history)
    one = Stratum(asked, asked, history)
    found = next_round({"": one}, wanted, each=each, batch=batch, prior=PRIOR)
    missing = max(0, wanted - one.accepted)
    assert found.missing == missing
    assert bool(found.limits) == bool(missing)
    if missing:
        more = (found.limits[""] - asked) * each
        assert missing <= more + 1e-6 and more < max(2 * missing, asked) * 1.1 + 2 * batch + 64
        low, middle, high = found.expected
        assert missing <= middle + 1e-6 and low <= high
    assert not next_round({"": Stratum(asked + 1, asked, history)}, wanted, each=each, batch=batch, prior=PRIOR).limits


def test_each_stratum_has_a_round_of_its_own_and_one_that_has_enough_or_has_ended_has_none() -> None:
    strata = {
        "often": Stratum(100, 100, stretches([True] * 90 + [False] * 10, 4)),
        "seldom": Stratum(100, 100, stretches([True, *[False] * 9] * 10, 4)),
        "done": Stratum(100, 100, stretches([True] * 100, 4)),
        "ended": Stratum(100, 40, stretches([True] * 40, 4)),
    }
    found = next_round(strata, 100, each=1, batch=10, prior=PRIOR)
    assert found.limits["done"] == found.limits["ended"] == 100
    assert 110 <= found.limits["often"] <= 120
    assert 190 <= found.limits["seldom"] <= 210  # no further than twice what was made
    assert found.missing == 10 + 90 + 60


def test_the_range_of_what_is_expected_is_wide_before_the_first_row_and_narrow_after_many() -> None:
    low, middle, high = rows_for(1000, prior_of(0.25))
    assert middle == pytest.approx(4000)
    assert 1000 <= low < 2000 and high > 10_000
    low, middle, high = rows_for(1000, Rate(2500, 7500))
    assert middle == pytest.approx(4000)
    assert 3600 < low < middle < high < 4400
