"""Submit and poll as processes: kills of services, consumers and Redis under load; none of the accepted is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.redis_server import needs_redis

from benchmarks.online_kills import Plan, play

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "queue", [pytest.param("embedded", marks=pytest.mark.soak("online")), pytest.param("redis", marks=needs_redis)]
)
def test_kills_under_load_lose_nothing_that_was_accepted(tmp_path: Path, queue: str) -> None:
    plan = Plan(queue, rate=20, seconds=11, kill_every=4, seed=30)
    report = asyncio.run(play(plan, tmp_path))
    assert set(report.kills) == ({"service"} if queue == "embedded" else {"redis", "service", "consumer"})
    assert report.lost == {} and report.accepted > 0
    assert report.answered + report.dead_letters == report.accepted
    assert report.other_failures == {} and report.dead_letters == 0, "the engine never failed"
    assert report.duplicates <= 256 * sum(report.kills.values())
