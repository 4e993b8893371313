"""When a list is sent: full, or waited for long enough, as the arrival rate says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.micro_batches.list_buffer import ListBuffer, WaitPolicy
from gpu_runner.micro_batches.list_limits import ListLimits, ListSize

POLICY = WaitPolicy()


def buffer(**limits: int) -> ListBuffer[int]:
    return ListBuffer(ListSize(ListLimits(**limits)))


def steady(rate: float, seconds: float = 3.0) -> ListBuffer[int]:
    """A buffer after arrivals at a steady rate."""
    made = buffer()
    for number in range(int(rate * seconds)):
        made.add(number, 10, number / rate)
        made.take()
    return made


def test_the_64th_input_makes_a_list_full() -> None:
    made = buffer()
    assert [list(made.add(number, 1, 0.0)) for number in range(63)] == [[]] * 63
    assert list(made.add(63, 1, 0.0)) == [list(range(64))]
    assert len(made) == 0 and made.due is None


def test_an_input_that_does_not_fit_sends_what_is_there_and_begins_the_next_list() -> None:
    made = buffer(bytes=100)
    assert list(made.add(1, 60, 0.0)) == []
    assert list(made.add(2, 60, 0.01)) == [[1]]
    assert len(made) == 1 and made.due is not None and made.due > 0.01
    single = buffer(inputs=1)
    assert list(single.add(1, 1, 0.0)) == [[1]] and single.due is None


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(10, 0.0, 0.005), (100, 0.015, 0.035), (1000, 0.045, 0.045), (5000, 0.045, 0.045)]
)
def test_the_wait_follows_the_arrival_rate(rate: float, least: float, most: float) -> None:
    assert least <= steady(rate).wait(3.0) <= most


def test_a_burst_after_silence_comes_together_within_the_quiet_wait() -> None:
    made = buffer()
    made.add(0, 1, 100.0)
    assert made.due == pytest.approx(100.0 + POLICY.quiet)
    assert not list(made.add(1, 1, 100.001)) and len(made) == 2


def test_the_rate_is_forgotten_in_silence() -> None:
    made = steady(1000)
    assert made.wait(3.0) == POLICY.longest and made.wait(5.0) == POLICY.quiet


def test_who_leaves_is_not_in_the_list() -> None:
    made = buffer(bytes=100)
    made.add(1, 60, 0.0)
    assert made.discard(1) and not made.discard(1)
    assert made.due is None
    assert list(made.add(2, 60, 0.0)) == [] and made.take() == [2]


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 0.1)), max_size=200))
def test_nothing_is_lost_nothing_waits_too_long_and_the_order_stays(arrivals: list[tuple[int, float]]) -> None:
    made, now, seen = ListBuffer[int](ListSize(ListLimits(inputs=8, bytes=500))), 0.0, []
    came: dict[int, float] = {}
    for number, (size, pause) in enumerate(arrivals):
        if made.due is not None and made.due <= now + pause:
            seen += (taken := made.take())
            assert all(now + pause - came[one] <= POLICY.longest + pause for one in taken)
        now += pause
        came[number] = now
        for full in made.add(number, size, now):
            assert len(full) <= 8
            seen += full
        assert made.due is None or made.due <= now + POLICY.longest
    assert seen + made.take() == list(range(len(arrivals)))
