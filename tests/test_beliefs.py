"""What a measured speed says about the others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpu_runner.beliefs import CARD, COMMON, SURE, Belief, Machine, sharpen

ONE, EIGHT, OTHER = Machine("A100", 80, 1), Machine("A100", 80, 8), Machine("L4", 24, 1)
GUESSES = {ONE: Belief(1000.0, 0.5), EIGHT: Belief(8000.0, 0.5), OTHER: Belief(200.0, 0.5)}


def test_a_measured_speed_replaces_its_belief():
    assert sharpen(GUESSES, {ONE: 500.0})[ONE] == Belief(500.0, SURE)


def test_the_same_card_follows_most_and_other_cards_a_little():
    after = sharpen(GUESSES, {ONE: 500.0})
    moved = {machine: after[machine].tokens_per_second / GUESSES[machine].tokens_per_second for machine in GUESSES}
    assert 0.5 < moved[EIGHT] < moved[OTHER] < 1.0
    assert SURE < after[EIGHT].spread < after[OTHER].spread < 0.5


def test_what_was_known_before_neither_follows_nor_teaches():
    beliefs = {**GUESSES, ONE: Belief(1000.0, 0.05)}
    after = sharpen(beliefs, {ONE: 500.0})
    assert after[EIGHT] == GUESSES[EIGHT]
    assert sharpen(beliefs, {EIGHT: 4000.0})[ONE] == beliefs[ONE]


def test_nothing_measured_changes_nothing():
    assert sharpen(GUESSES, {}) == GUESSES
    assert sharpen(GUESSES, {Machine("H100", 80, 1): 1.0}) == GUESSES


def test_it_is_the_conditional_distribution_of_what_is_drawn():
    """200,000 worlds drawn from the model; those whose measured error is near the given one tell the answer."""
    dice = np.random.default_rng(1)
    common, card, own = dice.normal(size=200_000), dice.normal(size=200_000), dice.normal(size=(2, 200_000))
    errors = 0.5 * (math.sqrt(COMMON) * common + math.sqrt(CARD) * card + math.sqrt(1 - COMMON - CARD) * own)
    near = errors[1][np.abs(errors[0] - math.log(0.7)) < 0.02]
    after = sharpen(GUESSES, {ONE: 700.0})[EIGHT]
    assert math.log(after.tokens_per_second / 8000.0) == pytest.approx(float(near.mean()), abs=0.02)
    assert after.spread == pytest.approx(float(near.std()), abs=0.02)
