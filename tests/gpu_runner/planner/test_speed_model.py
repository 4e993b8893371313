"""What a measured speed says about the others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpu_runner.planner.speed_model import CARD, COMMON, MEASURED_STD, HardwareType, SpeedEstimate, condition_on

ONE, EIGHT, OTHER = HardwareType("A100", 80, 1), HardwareType("A100", 80, 8), HardwareType("L4", 24, 1)
GUESSES = {ONE: SpeedEstimate(1000.0, 0.5), EIGHT: SpeedEstimate(8000.0, 0.5), OTHER: SpeedEstimate(200.0, 0.5)}


def test_a_measured_speed_replaces_its_belief():
    assert condition_on(GUESSES, {ONE: 500.0})[ONE] == SpeedEstimate(500.0, MEASURED_STD)


def test_the_same_card_follows_most_and_other_cards_a_little():
    after = condition_on(GUESSES, {ONE: 500.0})
    moved = {hardware: after[hardware].tokens_per_second / GUESSES[hardware].tokens_per_second for hardware in GUESSES}
    assert 0.5 < moved[EIGHT] < moved[OTHER] < 1.0
    assert MEASURED_STD < after[EIGHT].spread < after[OTHER].spread < 0.5


def test_what_was_known_before_neither_follows_nor_teaches():
    beliefs = {**GUESSES, ONE: SpeedEstimate(1000.0, 0.05)}
    after = condition_on(beliefs, {ONE: 500.0})
    assert after[EIGHT] == GUESSES[EIGHT]
    assert condition_on(beliefs, {EIGHT: 4000.0})[ONE] == beliefs[ONE]


def test_nothing_measured_changes_nothing():
    assert condition_on(GUESSES, {}) == GUESSES
    assert condition_on(GUESSES, {HardwareType("H100", 80, 1): 1.0}) == GUESSES


def test_it_is_the_conditional_distribution_of_what_is_drawn():
    """200,000 worlds drawn from the model; those whose measured error is near the given one tell the answer."""
    dice = np.random.default_rng(1)
    common, card, own = dice.normal(size=200_000), dice.normal(size=200_000), dice.normal(size=(2, 200_000))
    errors = 0.5 * (math.sqrt(COMMON) * common + math.sqrt(CARD) * card + math.sqrt(1 - COMMON - CARD) * own)
    near = errors[1][np.abs(errors[0] - math.log(0.7)) < 0.02]
    after = condition_on(GUESSES, {ONE: 700.0})[EIGHT]
    assert math.log(after.tokens_per_second / 8000.0) == pytest.approx(float(near.mean()), abs=0.02)
    assert after.spread == pytest.approx(float(near.std()), abs=0.02)
