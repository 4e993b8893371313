"""When a fleet of unknown speed may start, and when an unknown offer is worth a try."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpu_runner.pilots import best_try, booted, recoverable
from gpu_runner.planner import Held, Option, Target, Work

HOUR = 3600.0
KNOWN = Option("cloud/known", 2.0, 10_000.0, 480.0, spread=0.05)
GUESS = Option("cloud/guess", 2.0, 10_000.0, 480.0, spread=0.5)
WORK = Work(tokens=360e6, total_tokens=360e6, started_ago=0.0, units=1000)


def test_a_guess_may_start_as_long_as_a_slow_one_leaves_a_way_out():
    fleet = booted([(GUESS, 5)], ())
    assert recoverable(WORK, [GUESS], fleet, Target(4 * HOUR))
    assert not recoverable(WORK, [GUESS], fleet, Target(1.2 * HOUR))


def test_less_caution_lets_more_start():
    fleet, target = booted([(GUESS, 5)], ()), Target(1.3 * HOUR)
    assert not recoverable(WORK, [GUESS], fleet, target)
    assert recoverable(WORK, [GUESS], fleet, target, 0.25)


def test_spot_is_no_way_out():
    spot = replace(GUESS, name="cloud/guess spot", spot=True)
    assert not recoverable(WORK, [spot], booted([(spot, 1)], ()), Target(4 * HOUR))


def test_what_is_held_is_part_of_the_fleet_and_does_not_boot():
    fleet = booted([(GUESS, 3)], [Held("here", GUESS)])
    assert [one.ready_in for one in fleet] == [0.0, 480.0, 480.0]


def test_an_offer_that_is_surely_dearer_is_not_tried():
    assert best_try(WORK, [replace(GUESS, usd_per_hour=20.0)], [(KNOWN, 1)], 20 * HOUR) is None
    assert best_try(WORK, [replace(KNOWN, name="cloud/other")], [(KNOWN, 1)], 20 * HOUR) is None


def test_a_little_work_is_not_worth_a_boot():
    assert best_try(WORK, [GUESS], [(KNOWN, 1)], 20 * HOUR) is not None
    assert best_try(replace(WORK, tokens=10e6), [GUESS], [(KNOWN, 1)], 20 * HOUR) is None


def test_what_a_try_saves_is_the_mean_over_what_may_be_found():
    found = best_try(WORK, [GUESS], [(KNOWN, 1)], 20 * HOUR)
    assert found is not None
    price = 2.0 / HOUR / 10_000.0
    prices = price * np.exp(np.random.default_rng(1).normal(-0.125, 0.5, 400_000))
    left = WORK.tokens * (1 - (480.0 + 120.0) / (20 * HOUR))
    assert found.saves_usd == pytest.approx(float(np.maximum(0.0, price - prices).mean() * left), rel=0.02)
    assert found.costs_usd == pytest.approx(2.0 / HOUR * 480.0)


def test_spot_and_not_spot_have_one_speed_so_one_is_not_tried_for_the_other():
    fleet = [(replace(KNOWN, name="cloud/guess spot", spot=True), 1)]
    assert best_try(WORK, [GUESS], fleet, 20 * HOUR) is None
