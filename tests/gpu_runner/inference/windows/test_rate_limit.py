"""Requests and tokens a minute: never more, and never a request that waits for ever."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.inference.windows.rate_limit import RateLimit
from gpu_runner.request_limits import RequestLimits


def sent(limit: RateLimit, seconds: float, prompt_bytes: int = 400, answer: int = 0, late: float = 0.0) -> list[float]:
    """When requests are sent by somebody who always has one. `late`: timers come so much too late at most."""
    now, found, random_ = 100.0, [], random.Random(1)
    for number in count():
        while wait := limit.wait(now):
            now += wait + random_.uniform(0, late)
        if now > 100 + seconds:
            return found
        limit.on_sent(number, prompt_bytes, now)
        limit.on_answer(number, prompt_bytes // 4, answer, now)
        found.append(now)
    raise AssertionError


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3_000), st.sampled_from([0.0, 0.002, 0.05]))
def test_no_minute_has_more_requests_than_the_limit(per_minute: int, late: float) -> None:
    times = sent(RateLimit(RequestLimits(requests_per_minute=per_minute), None), 150, late=late)
    first = 0
    for last, at in enumerate(times):
        while at - times[first] >= 60 - 1e-6:
            first += 1
        assert last - first + 1 <= per_minute


@pytest.mark.parametrize("per_minute", [1, 60, 1000, 10_000])
def test_nearly_as_many_are_sent_as_the_limit_allows(per_minute: int) -> None:
    times = sent(RateLimit(RequestLimits(requests_per_minute=per_minute), None), 120, late=0.0005)
    assert 1.95 * per_minute <= len(times) <= 2 * per_minute + 1


def test_tokens_a_minute_count_prompts_and_answers() -> None:
    times = sent(RateLimit(RequestLimits(tokens_per_minute=6000), 2000), 600, prompt_bytes=400, answer=50)
    assert 10 * 6000 / 150 * 0.95 <= len(times) <= 10 * 6000 / 150 + 2  # 100 of the prompt, 50 of the answer


def test_a_request_of_more_tokens_than_a_minute_has_is_sent_and_the_next_one_waits_a_minute() -> None:
    limit = RateLimit(RequestLimits(tokens_per_minute=100), 10)
    assert limit.wait(0.0) == 0
    limit.on_sent("long", 1_000_000, 0.0)
    assert 55 < limit.wait(0.0) <= 61
    limit.on_answer("long", 250_000, 10, 1.0)
    assert 55 < limit.wait(1.0) <= 61


def test_what_was_charged_too_much_is_given_back_at_the_answer() -> None:
    limit = RateLimit(RequestLimits(tokens_per_minute=6000), 4000)
    limit.on_sent("row", 400, 0.0)
    assert limit.wait(0.0) > 30
    limit.on_answer("row", 100, 10, 0.0)
    assert limit.wait(0.0) < 2


def test_a_request_that_failed_stays_charged_and_leaves_nothing_behind() -> None:
    limit = RateLimit(RequestLimits(tokens_per_minute=6000), 100)
    limit.on_sent("row", 400, 0.0)
    wait = limit.wait(0.0)
    limit.on_end("row")
    limit.on_answer("row", 1, 1, 0.0)
    assert limit.wait(0.0) == wait > 0 and not limit._charged


def test_without_limits_nothing_waits() -> None:
    limit = RateLimit(RequestLimits(), None)
    for number in range(1000):
        limit.on_sent(number, 10**6, 0.0)
        assert limit.wait(0.0) == 0


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**9), st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**6))))
def test_a_request_may_be_sent_within_two_minutes_whatever_was_sent_before(
    requests: int, tokens: int, before: list[tuple[int, int]]
) -> None:
    limit = RateLimit(RequestLimits(requests_per_minute=requests, tokens_per_minute=tokens), None)
    for number, (size, answer) in enumerate(before):
        limit.on_sent(number, size, 0.0)
        limit.on_answer(number, size, answer, 0.0)
    wait = limit.wait(0.0)
    if len(before) <= requests:
        assert wait <= 121 and limit.wait(wait + 0.01) <= 0.01
