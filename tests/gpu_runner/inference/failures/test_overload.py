"""Stepping back from a server that refuses rows, and who is to blame for a refusal."""

from __future__ import annotations

import random

from gpu_runner.inference.failures.overload import OverloadBackoff, RefusalPolicy

POLICY = RefusalPolicy()


def test_a_few_rows_that_are_always_refused_do_not_throttle() -> None:
    refusals = OverloadBackoff(POLICY)
    for _ in range(30):
        for _ in range(99):
            refusals.on_served()
        refusals.on_refused(1024, 1000, 256, first=True)
        assert not refusals.on_refused(1024, 1000, 256, first=False)
        refusals.on_tick(1024)
    assert refusals.cap is None


def test_a_full_server_is_sent_a_little_less_than_it_took() -> None:
    refusals = OverloadBackoff(POLICY)
    for _ in range(900):
        refusals.on_refused(1024, 100, 0, first=True)
    assert refusals.cap == 85


def test_what_runs_is_never_cut() -> None:
    refusals = OverloadBackoff(POLICY)
    for _ in range(900):
        refusals.on_refused(1024, 100, 96, first=True)
    assert refusals.cap == 96


def test_the_window_grows_again_slowly_at_first() -> None:
    refusals = OverloadBackoff(POLICY)
    for _ in range(100):
        refusals.on_refused(1024, 20, 0, first=True)
    sizes = []
    while refusals.cap is not None:
        sizes.append(refusals.cap)
        refusals.on_tick(1024)
    assert sizes[0] == 17 and sizes[5] < 25
    assert 30 <= len(sizes) <= 60


def settle(limit: int, ticks: int = 300) -> tuple[float, float]:
    """(share of requests refused, share of the limit used) with rows of one tick and a window of 256."""
    refusals = OverloadBackoff(POLICY)
    refused = served = 0
    for _ in range(ticks):
        size = int(refusals.cap or 256)
        let_in = min(size, limit)
        for _ in range(let_in, size):
            refused += 1
            refusals.on_refused(size, let_in, 0, first=True)
        for _ in range(let_in):
            served += 1
            refusals.on_served()
        refusals.on_tick(256)
    return refused / (refused + served), served / (ticks * limit)


def test_a_limit_is_met_closely_without_a_storm_of_retries() -> None:
    for limit in (20, 30, 100, 200):
        refused, used = settle(limit)
        assert refused <= 0.1
        assert used >= 0.85


def test_where_few_rows_are_refused_three_refusals_are_no_chance() -> None:
    for rows in (15, 200, 5000):
        refusals = OverloadBackoff(POLICY)
        refusals.on_refused(64, 64, 0, first=True)
        for _ in range(rows):
            refusals.on_served()
        assert refusals.by_chance(0) <= 2


def test_where_many_rows_are_refused_more_refusals_may_be_chance() -> None:
    by_chance = {}
    for share in (0.05, 0.3):
        refusals, dice = OverloadBackoff(POLICY), random.Random(0)
        for _ in range(3000):
            if dice.random() < share:
                refusals.on_refused(256, 200, 0, first=True)
            else:
                refusals.on_served()
        by_chance[share] = refusals.by_chance(0)
    assert 3 <= by_chance[0.05] <= 5
    assert 8 <= by_chance[0.3] <= 13
