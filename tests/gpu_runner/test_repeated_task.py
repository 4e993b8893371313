"""A repeated task is called when it is due and when it is woken, and ends whenever it is told to."""

from __future__ import annotations

import threading
import time

import pytest
from support.timing import PATIENCE

from gpu_runner.repeated_task import RepeatedTask


class Work:
    """Notes when it was called."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.called = threading.Event()

    def __call__(self) -> None:
        self.at.append(time.monotonic())
        self.called.set()

    def await_call(self) -> None:
        assert self.called.wait(10 * PATIENCE)
        self.called.clear()


def test_it_is_called_every_so_often_and_not_at_the_end() -> None:
    work = Work()
    task = RepeatedTask("t", work, 0.01)
    task.start()
    for _ in range(3):
        work.await_call()
    task.end()
    count = len(work.at)
    time.sleep(0.05)
    assert len(work.at) == count and task.ended


@pytest.mark.parametrize("last", [False, True])
def test_it_waits_until_it_is_woken_and_is_called_once_more_where_asked(last: bool) -> None:
    work = Work()
    task = RepeatedTask("t", work, last=last)
    task.start()
    assert not work.called.wait(0.05)
    task.wake()
    work.await_call()
    task.end()
    assert len(work.at) == 1 + last


def test_calls_are_a_pause_apart_however_often_it_is_woken_and_the_end_waits_for_no_pause() -> None:
    work = Work()
    task = RepeatedTask("t", work, pause=0.05)
    task.start()
    for _ in range(3):
        task.wake()
        work.await_call()
        task.wake()
    assert all(after - before >= 0.05 for before, after in zip(work.at, work.at[1:], strict=False))
    slow = RepeatedTask("t", work, pause=600.0)
    slow.start()
    slow.wake()
    work.await_call()
    slow.end(10 * PATIENCE)
    assert not slow._thread.is_alive()
    task.end()


def test_the_time_between_two_calls_may_be_set_by_the_work() -> None:
    calls: list[float | None] = []

    def work() -> None:
        calls.append(task.seconds)
        task.seconds = None if len(calls) == 3 else 0.001

    task = RepeatedTask("t", work, 0.001)
    task.start()
    time.sleep(0.1)
    task.end()
    assert len(calls) == 3


class WokenInBetween(threading.Event):
    """Whoever ends the thread does so just before the thread forgets that it was woken."""

    def __init__(self, task: RepeatedTask) -> None:
        super().__init__()
        self._task = task

    def clear(self) -> None:
        self._task._ended.set()
        self.set()
        super().clear()


def test_the_thread_ends_whenever_it_is_told_to() -> None:
    task = RepeatedTask("t", lambda: None, 0.0)
    task._woken = WokenInBetween(task)
    task.start()
    task._thread.join(10 * PATIENCE)
    assert not task._thread.is_alive()


def test_what_was_never_started_can_be_ended() -> None:
    RepeatedTask("t", lambda: None).end()
