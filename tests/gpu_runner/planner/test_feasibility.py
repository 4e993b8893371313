"""When a fleet of unknown speed leaves a fallback, and when an offer of unknown speed is worth a probe."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from gpu_runner.planner.exploration import best_probe
from gpu_runner.planner.feasibility import FeasibilityCheck
from gpu_runner.planner.planned_fleet import FleetCandidate
from gpu_runner.planner.types import HeldInstance, PlannedOffer, Target, Work

HOUR = 3600.0
KNOWN = PlannedOffer("cloud/known", 2.0, 10_000.0, 480.0, spread=0.05)
GUESS = PlannedOffer("cloud/guess", 2.0, 10_000.0, 480.0, spread=0.5)
WORK = Work(tokens=360e6, total_tokens=360e6, started_ago=0.0, units=1000)


def has_fallback(option: PlannedOffer, number: int, hours: float, confidence: float = 1.0) -> bool:
    check = FeasibilityCheck(WORK, (option,), (), Target(hours * HOUR))
    return check.has_fallback(FleetCandidate((), ((option, number),)).projected(), confidence)


def probe_beside(known: PlannedOffer, option: PlannedOffer, work: Work = WORK) -> tuple[PlannedOffer, str] | None:
    return best_probe(
        FeasibilityCheck(work, (option,), (), Target(20 * HOUR)), FleetCandidate((HeldInstance("here", known),))
    )


def test_a_guess_may_start_as_long_as_a_slow_one_leaves_a_way_out():
    assert has_fallback(GUESS, 5, 4)
    assert not has_fallback(GUESS, 5, 1.2)


def test_less_caution_lets_more_start():
    assert not has_fallback(GUESS, 5, 1.3)
    assert has_fallback(GUESS, 5, 1.3, 0.25)


def test_spot_is_no_way_out():
    assert not has_fallback(replace(GUESS, name="cloud/guess spot", spot=True), 1, 4)


def test_what_is_held_is_part_of_the_fleet_and_does_not_boot():
    fleet = FleetCandidate((HeldInstance("here", GUESS),), ((GUESS, 2),)).projected()
    assert [one.ready_in for one in fleet] == [0.0, 480.0, 480.0]


def test_an_offer_that_is_surely_dearer_is_not_tried():
    assert probe_beside(KNOWN, replace(GUESS, usd_per_hour=20.0)) is None
    assert probe_beside(KNOWN, replace(KNOWN, name="cloud/other")) is None


def test_a_little_work_is_not_worth_a_boot():
    assert probe_beside(KNOWN, GUESS) is not None
    assert probe_beside(KNOWN, GUESS, replace(WORK, tokens=10e6)) is None


def test_what_a_try_saves_is_the_mean_over_what_may_be_found():
    found = probe_beside(KNOWN, GUESS)
    assert found is not None
    price = 2.0 / HOUR / 10_000.0
    prices = price * np.exp(np.random.default_rng(1).normal(-0.125, 0.5, 400_000))
    left = WORK.tokens * (1 - (480.0 + 120.0) / (20 * HOUR))
    costs, saves = (float(one) for one in re.findall(r"([\d.]+) \$", found[1]))
    assert saves == pytest.approx(float(np.maximum(0.0, price - prices).mean() * left), rel=0.02)
    assert costs == pytest.approx(2.0 / HOUR * 480.0, abs=0.005)


def test_spot_and_not_spot_have_one_speed_so_one_is_not_tried_for_the_other():
    assert probe_beside(replace(KNOWN, name="cloud/guess spot", spot=True), GUESS) is None
