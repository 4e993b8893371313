"""From when on a request is late."""

import random

import pytest

from gpu_runner.inference.late_rows import FORGET_AT, HedgePolicy, RequestDurations

POLICY = HedgePolicy()


def learned(seconds: list[float], size: int = 100) -> RequestDurations:
    durations = RequestDurations(POLICY)
    for one in seconds:
        durations.answered(size, one)
    return durations


def test_without_enough_answers_nothing_is_late() -> None:
    assert learned([1.0] * 19).limit(100, 0) is None
    assert learned([1.0] * 20).limit(100, 21) is None  # those in flight may be the long ones
    assert learned([1.0] * 20).limit(100, 20) == 60


@pytest.mark.parametrize("longest", [40.0, 100.0, 1000.0])
def test_the_limit_is_three_times_what_the_slowest_percent_took(longest: float) -> None:
    found = learned([1.0] * 95 + [longest] * 5).limit(100, 10)
    assert found is not None and 3 * longest <= found <= 3 * longest * 2**0.25


def test_one_slow_answer_in_two_hundred_does_not_move_the_limit() -> None:
    assert learned([1.0] * 199 + [900.0]).limit(100, 10) == 60


def test_long_prompts_have_a_limit_of_their_own_once_they_are_known() -> None:
    durations = learned([1.0] * 1000)
    assert durations.limit(100_000, 1) == 60
    for _ in range(20):
        durations.answered(100_000, 200.0)
    long, short = durations.limit(100_000, 1), durations.limit(100, 1)
    assert short == 60 and long is not None and long >= 600


def test_the_limit_follows_an_engine_that_becomes_slower() -> None:
    durations = learned([1.0] * 50_000)
    for _ in range(FORGET_AT):
        durations.answered(100, 50.0)
    found = durations.limit(100, 1)
    assert found is not None and found >= 150


def test_any_duration_can_be_counted() -> None:
    seconds = [0.0, -1.0, 1e-9, 1e9, *(random.Random(1).uniform(0, 1e5) for _ in range(100))]
    assert learned(seconds).limit(0, 1) is not None
