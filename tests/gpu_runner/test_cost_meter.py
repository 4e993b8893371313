"""The shares of rows in an engine's time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.cost_meter import CostMeter, LeaseUsage, TokenMeter
from gpu_runner.token_price import TokenPrice


def test_a_row_alone_costs_its_whole_time() -> None:
    spending = CostMeter(2.0)
    spending.begin(10)
    assert spending.settle(5, 5, 0, 13) == pytest.approx(6.0)
    assert spending.spent() == LeaseUsage(3.0, 0.0, 1, 5, 5)


def test_time_without_rows_is_not_charged() -> None:
    spending = CostMeter(1.0)
    spending.begin(0)
    spending.settle(1, 1, 0, 1)
    spending.begin(100)
    assert spending.settle(1, 1, 0, 102) == pytest.approx(2.0)


def test_without_a_price_seconds_are_counted_and_dollars_unknown() -> None:
    spending = CostMeter()
    spending.begin(0)
    assert spending.settle(1, 1, 0, 4) is None
    assert spending.spent().useful_seconds == 4


def test_what_no_row_took_when_the_engine_is_lost_is_wasted() -> None:
    spending = CostMeter(1.0)
    spending.begin(0)
    spending.settle(10, 10, 3, 2)
    spending.lose(5)
    spent = spending.spent()
    assert spent.useful_seconds + spent.wasted_seconds == pytest.approx(5)
    assert spent.wasted_seconds > 3


def test_who_is_succeeded_pays_no_more_and_its_last_rows_share_what_there_is():
    first, second = CostMeter(1.0), CostMeter(1.0)
    for _ in range(2):
        first.begin(0)
    first.settle(0, 10, 1, 4)
    first.succeed(5)
    second.begin(5)
    first.begin(6)
    first.settle(0, 10, 0, 9)
    second.settle(0, 10, 0, 9)
    assert first.spent().useful_seconds + second.spent().useful_seconds == pytest.approx(9)


@given(st.integers(1, 400), st.integers(1, 64), st.integers(0, 1000))
def test_shares_add_up_to_the_busy_time(rows: int, slots: int, seed: int) -> None:
    rng = random.Random(seed)
    spending = CostMeter(1.0)
    ends: list[float] = []
    now, total, left = 0.0, 0.0, rows
    while left or ends:
        while left and len(ends) < slots:
            spending.begin(now)
            ends.append(now + rng.uniform(0.5, 5))
            left -= 1
        now = min(ends)
        ends.remove(now)
        if not ends and not left:
            busy = now
        share = spending.settle(rng.randint(0, 50), rng.randint(1, 500), len(ends), now)
        assert share is not None
        assert share >= 0
        total += share
    assert total == pytest.approx(busy)


def test_in_a_long_run_shares_follow_tokens() -> None:
    """Rows of ten times the tokens pay about ten times as much, though all end at even distances."""
    spending = CostMeter(1.0)
    paid = {100: 0.0, 1000: 0.0}
    for i in range(64):
        spending.begin(float(i) * 0)
    for i in range(4000):
        tokens = 1000 if i % 2 else 100
        share = spending.settle(0, tokens, 64, float(i))
        assert share is not None
        if i > 200:
            paid[tokens] += share
    assert paid[1000] / paid[100] == pytest.approx(10, rel=0.15)


def test_an_engine_that_is_paid_by_the_token_costs_its_answers_whatever_time_they_took() -> None:
    meter = TokenMeter(TokenPrice(1.0, 10.0), row_usd=0.01)
    meter.begin(0)
    meter.fly(2)
    meter.count(1000, 100)  # an answer that is to be repaired
    meter.count(2000, 200)
    assert meter.settle(3000, 300, 1, 50) == pytest.approx(0.006)
    meter.count(1000, 0)
    meter.fly(0)
    meter.lose(60)
    spent = meter.spent()
    assert (spent.useful_usd, spent.wasted_usd) == (pytest.approx(0.006), pytest.approx(0.001))


def test_tokens_from_the_cache_cost_what_is_said_of_them() -> None:
    meter = TokenMeter(TokenPrice(1.0, 10.0, 0.25), row_usd=0.01)
    meter.begin(0)
    meter.count(1000, 100, 800)
    assert meter.settle(1000, 100, 0, 50, cached_tokens=800) == pytest.approx(0.0014)
    meter.count(1000, 0, 5000)  # more than the prompt has
    meter.lose(60)
    spent = meter.spent()
    assert (spent.useful_usd, spent.wasted_usd) == (pytest.approx(0.0014), pytest.approx(0.00025))
    assert TokenPrice(1.0, 10.0).usd(1000, 100, 800) == pytest.approx(0.002), "without a price of its own"


def test_no_row_is_sent_that_could_pass_what_is_granted() -> None:
    meter = TokenMeter(TokenPrice(1.0, 1.0), row_usd=0.5)
    assert meter.room > 1000 and not meter.exhausted
    meter.grant(2.0)
    assert meter.room == 4
    meter.fly(3)
    assert meter.room == 1 and meter.hold() == 1.5 and meter.room == 0  # while more is asked for
    meter.grant(None)
    meter.count(400_000, 0)
    assert meter.room == 0 and not meter.exhausted  # rows are under way
    meter.fly(0)
    meter.count(1_200_000, 0)
    assert meter.exhausted
