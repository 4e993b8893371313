"""Rows give way to interactive requests: less when first tokens are late, slowly more while they are early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.inference.windows.concurrency_window import Window, WindowPolicy
from gpu_runner.inference.windows.first_token_window import (
    FirstTokenBackoff,
    FirstTokenPolicy,
    FirstTokenSample,
    InteractiveShare,
)

POLICY = FirstTokenPolicy(target=0.5, standing=True, headroom=0, shrink=0.75, grow=0.02)
EARLY, LATE, NOTHING = FirstTokenSample((0.1,)), FirstTokenSample((0.9,)), FirstTokenSample()


def test_an_engine_without_interactive_requests_gets_as_many_rows_as_it_has_slots_and_none_wait() -> None:
    backoff = FirstTokenBackoff(POLICY, 256)
    for _ in range(100):
        backoff.on_tick(NOTHING, 256, 0)
    assert backoff.cap == 256


def test_rows_fill_the_queue_again_when_nobody_has_asked_for_long() -> None:
    backoff = FirstTokenBackoff(FirstTokenPolicy(quiet=3, headroom=0), 256)
    assert backoff.cap is None, "nobody has asked yet"
    backoff.on_tick(FirstTokenSample(waiting=0.01), 256, 700)
    assert backoff.cap == 256
    caps = []
    for _ in range(4):
        backoff.on_tick(NOTHING, 256, 0)
        caps.append(backoff.cap)
    assert caps == [256, 256, None, None]
    backoff.on_tick(EARLY, 256, 0)
    assert backoff.cap == 256


def test_rows_leave_the_queue_and_the_headroom_to_requests_that_other_processes_send() -> None:
    backoff = FirstTokenBackoff(FirstTokenPolicy(quiet=2), 100)
    for _ in range(4):
        backoff.on_tick(FirstTokenSample(unseen=True), 100, 300)
        assert backoff.cap == 90
    for _ in range(2):
        backoff.on_tick(NOTHING, 100, 0)
    assert backoff.cap is None


@pytest.mark.parametrize("standing", [False, True])
@pytest.mark.parametrize("then", [FirstTokenSample(unseen=True), NOTHING])
def test_a_window_that_late_first_tokens_have_made_small_grows_again_when_none_is_seen_any_more(
    standing: bool, then: FirstTokenSample
) -> None:
    policy = FirstTokenPolicy(standing=standing, forget=5, quiet=10**6)
    backoff = FirstTokenBackoff(policy, 100)
    for _ in range(30):
        backoff.on_tick(FirstTokenSample((2.0,)), 100, 0)
    small = backoff.cap
    assert small is not None and small < 50
    for _ in range(6):
        backoff.on_tick(FirstTokenSample((0.49,)), 100, 0)  # in time, and not early enough to grow
    caps = []
    for _ in range(150):
        backoff.on_tick(then, 100, 0)
        caps.append(backoff.cap)
    assert caps[2] == caps[3], "what was seen counts for a while"
    assert caps[-1] == 90


def test_late_first_tokens_shrink_the_window_at_once_and_then_once_per_hold() -> None:
    backoff = FirstTokenBackoff(POLICY, 100)
    caps = []
    for _ in range(7):
        backoff.on_tick(LATE, 100, 10)
        caps.append(backoff.cap)
    assert caps == [75, 75, 75, 56.25, 56.25, 56.25, 42.1875]


def test_a_window_whose_rows_have_not_ended_yet_is_not_shrunk_again() -> None:
    backoff = FirstTokenBackoff(POLICY, 100)
    for _ in range(20):
        backoff.on_tick(LATE, 100, 300, in_flight=400)
    assert backoff.cap == 100
    backoff.on_tick(LATE, 100, 0, in_flight=100)
    assert backoff.cap == 75


def test_rows_leave_slots_free_for_who_comes() -> None:
    backoff = FirstTokenBackoff(FirstTokenPolicy(standing=True, headroom=0.25), 100)
    for _ in range(5):
        backoff.on_tick(EARLY, 75, 0)
    assert backoff.cap == 75


def test_early_first_tokens_let_it_grow_by_a_fixed_number() -> None:
    backoff = FirstTokenBackoff(POLICY, 100)
    backoff.on_tick(LATE, 100, 0)
    caps = []
    for _ in range(20):
        backoff.on_tick(EARLY, 75, 0)
        caps.append(backoff.cap)
    assert caps[:4] == [75, 75, 77, 79] and caps[-1] == 100


def test_between_calm_and_target_it_stays() -> None:
    backoff = FirstTokenBackoff(POLICY, 100)
    backoff.on_tick(LATE, 100, 0)
    for _ in range(50):
        backoff.on_tick(FirstTokenSample((0.47,)), 75, 0)
    assert backoff.cap == 75


def test_a_request_that_still_waits_counts_before_its_token_comes() -> None:
    """An engine that is full gives no samples: that is no calm."""
    backoff = FirstTokenBackoff(POLICY, 100)
    backoff.on_tick(FirstTokenSample(waiting=0.6), 100, 300)
    assert backoff.cap == 75
    for _ in range(10):
        backoff.on_tick(FirstTokenSample(waiting=0.2), 75, 0)
    assert backoff.cap == 75, "one that waits for a moment says nothing"


def test_one_late_token_of_many_is_within_the_quantile() -> None:
    backoff = FirstTokenBackoff(POLICY, 100)
    for _ in range(4):
        backoff.on_tick(FirstTokenSample((0.1,) * 10), 100, 0)
    backoff.on_tick(FirstTokenSample((0.1,) * 9 + (2.0,)), 100, 0)
    assert backoff.cap == 100


def test_the_window_shrinks_from_what_runs_not_from_what_was_allowed() -> None:
    backoff = FirstTokenBackoff(POLICY, 256)
    backoff.on_tick(LATE, 40, 0)
    assert backoff.cap == 30


def test_slots_that_nobody_tells_are_learned_from_a_queue() -> None:
    backoff = FirstTokenBackoff(POLICY, None)
    backoff.on_tick(LATE, 50, 0)
    assert backoff.cap is None
    backoff.on_tick(NOTHING, 64, 20)
    assert backoff.cap == 64


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 100), max_size=5),
            st.none() | st.floats(0, 100),
            st.integers(0, 500),
            st.integers(0, 99),
        ),
        max_size=80,
    )
)
@settings(max_examples=200, deadline=None)
def test_the_window_is_between_the_smallest_and_the_slots_whatever_comes(
    ticks: list[tuple[list[float], float | None, int, int]],
) -> None:
    backoff = FirstTokenBackoff(FirstTokenPolicy(smallest=4, standing=True, headroom=0), 128)
    for seconds, waiting, running, queued in ticks:
        backoff.on_tick(FirstTokenSample(tuple(seconds), waiting), running, queued)
        assert backoff.cap is not None and 4 <= backoff.cap <= 128


@pytest.mark.parametrize(("share", "size"), [(None, 1024), (InteractiveShare(lambda: NOTHING, POLICY), 256)])
def test_the_feeds_window_is_held_to_the_slots_only_where_interactive_requests_may_come(
    share: InteractiveShare | None, size: int
) -> None:
    window = Window(WindowPolicy(), 256, share=share)
    assert window.size == size
    window.on_tick(EngineLoad(256, 0, 0.2, 1, 0), 256)
    assert window.size == size


def test_the_feeds_window_looks_once_a_tick_and_follows() -> None:
    looks = [EARLY, LATE, LATE]
    share = InteractiveShare(lambda: looks.pop(0), POLICY)
    window = Window(WindowPolicy(), 100, share=share)
    window.on_tick(EngineLoad(100, 0, 0.2, 1, 0), 100)
    assert window.size == 100
    window.on_tick(EngineLoad(100, 0, 0.2, 1, 0), 100)
    assert window.size == 75
    window.on_tick(None, 75)
    assert window.size == 75 and not looks


@pytest.mark.parametrize("slots", [4, 32, 256])
def test_rows_come_back_in_the_same_time_whatever_the_slots(slots: int) -> None:
    """A row a second would be a thirtieth of a small engine: it was full again before its first tokens were seen."""
    backoff = FirstTokenBackoff(POLICY, slots)
    for _ in range(100):
        backoff.on_tick(LATE, slots, 0, 0)
    caps = []
    for _ in range(60):
        caps.append(backoff.cap or 0)
        backoff.on_tick(EARLY, slots, 0)
    half = next(tick for tick, cap in enumerate(caps) if cap >= slots / 2)
    full = next(tick for tick, cap in enumerate(caps) if cap == slots)
    assert full - half == pytest.approx(0.5 / POLICY.grow, abs=2)
