"""The arithmetic of limits a minute, and the buckets of one process and of several."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_assets.api.access.rate_limiter import BucketTable, LocalLimiter, SharedLimiter
from batch_assets.api.access.token_bucket import Level, refilled, settle, take
from batch_assets.api.database.service_database import Records


def test_a_bucket_holds_a_minutes_worth_and_refills() -> None:
    level: Level | None = None
    for number in range(60):
        decision = take(level, 60, 1, 0.0)
        assert decision.granted and decision.remaining == 59 - number
        level = decision.level
    refused = take(level, 60, 1, 0.0)
    assert not refused.granted and refused.wait_seconds == pytest.approx(1) and refused.reset_seconds == 60
    assert take(level, 60, 1, 1.0).granted
    assert take(level, 60, 61, 1e9).wait_seconds == math.inf


def test_a_refusal_costs_nothing() -> None:
    level = take(None, 10, 8, 0.0).level
    for _ in range(100):
        level = take(level, 10, 5, 0.0).level
    assert take(level, 10, 2, 0.0).granted


def test_a_clock_that_goes_back_gives_nothing() -> None:
    empty = take(None, 60, 60, 100.0).level
    assert refilled(empty, 60, 0.0).tokens == 0


def test_a_debt_is_at_most_one_minute() -> None:
    level = settle(None, 60, 1e9, 0.0)
    assert level.tokens == -60
    assert take(level, 60, 1, 0.0).wait_seconds == pytest.approx(61)
    assert settle(level, 60, -1e9, 0.0).tokens == 60


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100), st.floats(-50, 50)), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_no_minute_grants_more_than_two_minutes_worth(per_minute: int, steps: list[tuple[float, float, float]]) -> None:
    """A full bucket and what flows into it meanwhile: the bound of every token bucket."""
    level, now, granted = None, 0.0, 0.0
    for wait, amount, _ in steps:
        now += wait
        decision = take(level, per_minute, amount, now)
        level, granted = decision.level, granted + (amount if decision.granted else 0)
    assert granted <= per_minute + now * per_minute / 60 + 1e-6


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_process_forgets_the_bucket_that_was_used_longest_ago() -> None:
    async def scenario() -> None:
        limiter = LocalLimiter(Clock(), most=2)
        for tenant in ("a", "b", "a", "c"):
            await limiter.take((tenant, "requests"), 2, 1)
        assert not (await limiter.take(("a", "requests"), 2, 1)).granted
        assert (await limiter.take(("b", "requests"), 2, 2)).granted

    asyncio.run(scenario())


def replicas(tmp_path: Path, clock: Clock, count: int) -> list[SharedLimiter]:
    table = BucketTable(Records(f"sqlite:///{tmp_path / 'api.db'}"), clock)
    return [SharedLimiter(table, clock) for _ in range(count)]


def test_replicas_together_grant_the_limit_and_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        limiters = replicas(tmp_path, clock, 3)
        granted = 0
        for number in range(400):
            granted += (await limiters[number % 3].take(("acme", "requests"), 200, 1)).granted
        assert 200 * 0.85 <= granted <= 200, "shares that lie elsewhere may be missing for a moment"
        clock.now += 4  # what lies there is given back
        for number in range(100):
            granted += (await limiters[number % 3].take(("acme", "requests"), 200, 1)).granted
        assert granted <= 200 + 4 * 200 / 60

    asyncio.run(scenario())


def test_a_replica_asks_the_table_once_for_many_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        (limiter,) = replicas(tmp_path, Clock(), 1)
        draws = 0
        table_take = limiter._table.take

        def counted(*arguments: object) -> object:
            nonlocal draws
            draws += 1
            return table_take(*arguments)  # type: ignore[arg-type]

        limiter._table.take = counted  # type: ignore[method-assign,assignment]
        for _ in range(500):
            assert (await limiter.take(("acme", "requests"), 1000, 1)).granted
        assert draws <= 11

    asyncio.run(scenario())


def test_one_tenant_does_not_use_up_anothers(tmp_path: Path) -> None:
    async def scenario() -> None:
        (limiter,) = replicas(tmp_path, Clock(), 1)
        while (await limiter.take(("loud", "requests"), 10, 1)).granted:
            pass
        assert (await limiter.take(("quiet", "requests"), 10, 10)).granted

    asyncio.run(scenario())


def test_tokens_are_settled_in_the_table_when_the_share_does_not_cover_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        first, second = replicas(tmp_path, clock, 2)
        assert (await first.take(("acme", "tokens"), 1000, 10)).granted
        await first.settle(("acme", "tokens"), 1000, 900)
        assert not (await second.take(("acme", "tokens"), 1000, 100)).granted
        await first.settle(("acme", "tokens"), 1000, -900)
        clock.now += 1.1  # so long a refusal is repeated without a look
        assert (await second.take(("acme", "tokens"), 1000, 100)).granted

    asyncio.run(scenario())
