"""Sensors, queue and retries take their turn when a run is new or has ended, in the loops of Dagster's own daemons."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test
from dagster._daemon import sensor
from dagster._daemon.daemon import DagsterDaemon, SpanMarker
from support.timing import PATIENCE

from batch_assets.dagster_internals.woken_daemons import (
    RunsWatch,
    WokenQueue,
    WokenRetries,
    WokenSensors,
    runs_watch,
    turns,
)
from batch_assets.local_dagster.home import ensure_storage, prepare_home

HOUR = 3600


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    home = prepare_home()
    ensure_storage(home)
    with dg.DagsterInstance.from_config(str(home)) as found:
        yield found


def woken(watch: RunsWatch) -> set[str]:
    """Who was woken since the last time."""
    events = {"queue": watch.queue, "sensors": watch.sensors, "retries": watch.retries}
    found = {name for name, event in events.items() if event.is_set()}
    for event in events.values():
        event.clear()
    return found


def test_a_new_run_wakes_the_queue_and_one_that_has_ended_wakes_all(instance: dg.DagsterInstance) -> None:
    watch = runs_watch(instance)
    watch.look()
    assert woken(watch) == set()
    run = create_run_for_test(instance, status=dg.DagsterRunStatus.STARTING)
    watch.look()
    assert woken(watch) == {"queue"}
    instance.report_run_canceling(run)
    watch.look()
    assert woken(watch) == set()
    instance.report_run_canceled(run)
    watch.look()
    assert woken(watch) == {"queue", "sensors", "retries"}


def test_while_the_database_is_away_turns_are_taken_at_their_intervals() -> None:
    asked = threading.Event()
    shutdown = threading.Event()

    def away() -> set[str]:
        asked.set()
        raise ConnectionError

    watch = RunsWatch(away)
    watch.watch(shutdown)
    assert asked.wait(PATIENCE)
    assert woken(watch) == set()
    shutdown.set()
    assert watch.sensors.wait(PATIENCE), "who waits ends with the daemon"


SENSORS: Callable[[RunsWatch], DagsterDaemon[Any]] = lambda watch: WokenSensors({}, watch)  # noqa: E731
QUEUE: Callable[[RunsWatch], DagsterDaemon[Any]] = lambda watch: WokenQueue(HOUR, watch)  # noqa: E731
RETRIES: Callable[[RunsWatch], DagsterDaemon[Any]] = lambda watch: WokenRetries(HOUR, watch)  # noqa: E731


@pytest.mark.slow
@pytest.mark.parametrize(
    ("daemon", "event"), [(SENSORS, "sensors"), (QUEUE, "queue"), (RETRIES, "retries")], ids=["s", "q", "r"]
)
def test_the_loops_of_dagster_are_woken(
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    daemon: Callable[[RunsWatch], DagsterDaemon[Any]],
    event: str,
) -> None:
    monkeypatch.setattr(sensor, "MIN_INTERVAL_LOOP_TIME", HOUR)
    locations = SimpleNamespace(get_code_location_entries=dict)
    process = SimpleNamespace(instance=instance, create_request_context=lambda: locations)
    watch, shutdown = RunsWatch(set), threading.Event()
    begun, ended = threading.Semaphore(0), threading.Event()

    def loop() -> None:
        for step in daemon(watch).core_loop(process, shutdown):
            assert not isinstance(step, Exception)
            if step is SpanMarker.START_SPAN:
                begun.release()
            if shutdown.is_set():
                break
        ended.set()

    threading.Thread(target=loop, daemon=True).start()
    try:
        assert begun.acquire(timeout=PATIENCE)
        getattr(watch, event).set()
        assert begun.acquire(timeout=PATIENCE), "it takes its next turn in an hour"
    finally:
        shutdown.set()
        getattr(watch, event).set()
    assert ended.wait(PATIENCE)


def test_turns_are_apart_also_when_something_wakes_them_all_the_time() -> None:
    class Paused(threading.Event):
        waited = 0.0

        def wait(self, timeout: float | None = None) -> bool:
            self.waited += timeout or 0.0
            return False

    event, shutdown = threading.Event(), Paused()
    loop = turns((one for one in [SpanMarker.END_SPAN] * 3), event, shutdown, most=HOUR, least=10.0)
    for _ in range(3):
        event.set()
        next(loop)
    assert 19.0 < shutdown.waited <= 20.0
