"""Targets of callers, and how long answers are expected to be."""

from __future__ import annotations

import pytest

from gpu_runner.routing.latency_target import InvalidTarget, LatencyTarget, read_target
from gpu_runner.routing.output_length import GUESS, MOST_CALLERS, OutputLengths


def test_targets_are_seconds_in_two_headers() -> None:
    assert read_target({}) == LatencyTarget()
    assert read_target({"x-target-ttft-seconds": "0.5", "x-target-tpot-seconds": "0.03"}) == LatencyTarget(0.5, 0.03)


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "0", "-1", "3601"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidTarget, match="x-target-ttft-seconds: expected seconds"):
        read_target({"x-target-ttft-seconds": text})


def test_answers_are_expected_as_long_as_the_callers_were_of_late() -> None:
    lengths = OutputLengths()
    assert lengths.expected("caller", "m") == GUESS and lengths.expected("caller", "m", 10) == 10
    for _ in range(50):
        lengths.ended("caller", "m", 1000)
        lengths.ended("other", "m", 10)
    assert lengths.expected("caller", "m") == pytest.approx(1000)
    assert 10 < lengths.expected("third", "m") < 1000


def test_callers_are_forgotten_beyond_a_bound() -> None:
    lengths = OutputLengths()
    for number in range(MOST_CALLERS + 10):
        lengths.ended(str(number), "m", 5)
    assert len(lengths._means) <= MOST_CALLERS
    assert lengths.expected("0", "other model") == GUESS
