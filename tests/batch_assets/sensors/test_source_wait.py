"""The launcher's tick waits for a source that is being read, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from batch_assets.sensors.launcher_sensor import LOOK_SECONDS, WAIT_SECONDS, SourceWait
from batch_assets.tags import REFRESH_TAG

NOTHING = dg.SensorResult(skip_reason="nothing was requested")
FOUND = dg.SensorResult(run_requests=[dg.RunRequest(run_key="one")])


class Clock:
    """Time passes in pauses only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def refresh(instance: dg.DagsterInstance, dataset: str) -> dg.DagsterRun:
    return create_run_for_test(instance, status=dg.DagsterRunStatus.STARTED, tags={REFRESH_TAG: dataset})


def waiting(clock: Clock, instance: dg.DagsterInstance) -> SourceWait:
    """One whose first tick is over."""
    found = SourceWait(["letters"], clock, clock.pause)
    found.tick(instance, lambda: FOUND)
    return found


def test_what_a_source_asks_for_is_started_in_the_tick_in_which_it_was_read(instance: dg.DagsterInstance):
    clock = Clock()
    wait, run = waiting(clock, instance), refresh(instance, "letters")

    def look() -> dg.SensorResult:
        if clock.now == 4 * LOOK_SECONDS:  # between the look for runs and the look for batches
            instance.report_run_failed(run)
            return NOTHING
        return FOUND if clock.now > 4 * LOOK_SECONDS else NOTHING

    assert wait.tick(instance, look) is FOUND
    assert clock.now == 5 * LOOK_SECONDS


def test_a_tick_waits_no_longer_than_to_the_next(instance: dg.DagsterInstance):
    clock = Clock()
    wait = waiting(clock, instance)
    refresh(instance, "letters")
    assert wait.tick(instance, lambda: NOTHING) is NOTHING
    assert clock.now == WAIT_SECONDS


def test_a_tick_waits_for_nothing_when_no_source_of_its_datasets_is_read(instance: dg.DagsterInstance):
    clock = Clock()
    wait = waiting(clock, instance)
    refresh(instance, "numbers")
    assert wait.tick(instance, lambda: NOTHING) is NOTHING
    assert clock.now == 0.0


def test_the_first_tick_of_a_process_waits_for_a_request_to_begin(instance: dg.DagsterInstance):
    clock = Clock()
    wait = SourceWait(["letters"], clock, clock.pause)
    assert wait.tick(instance, lambda: FOUND if clock.now >= 2.0 else NOTHING) is FOUND
    assert clock.now == 2.0
