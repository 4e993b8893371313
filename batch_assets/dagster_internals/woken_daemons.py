"""Dagster's daemons that take their next turn at once when a run was queued or has ended.

Dagster looks at its queue at an interval of dagster.yaml, and for due sensors and runs to retry every five seconds
(dagster/_daemon/sensor.py). A request is several runs in a row, each of which would wait for such a turn. One thread
asks several times a second which runs are under way, by the index on their status, and wakes whoever waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import dagster as dg
from dagster._core.workspace.context import IWorkspaceProcessContext
from dagster._daemon import sensor
from dagster._daemon.auto_run_reexecution.event_log_consumer import EventLogConsumerDaemon
from dagster._daemon.daemon import DaemonIterator, SensorDaemon, SpanMarker
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

LOOK_SECONDS = 0.2
LEAST_SECONDS = 1.1  # from one turn of the sensors to the next: their shortest interval is one second
UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
log = logging.getLogger(__name__)


class RunsWatch:
    """Wakes `queue`, `sensors` and `retries`: the first when a run is new, all when one is not under way any more.

    `under_way`: ids of the runs that have not ended.
    """

    def __init__(self, under_way: Callable[[], set[str]]) -> None:
        self._under_way, self._known = under_way, set[str]()
        self._thread: threading.Thread | None = None
        self.queue, self.sensors, self.retries = threading.Event(), threading.Event(), threading.Event()

    def look(self) -> None:
        """One look."""
        found = self._under_way()
        before, self._known = self._known, found
        if found != before:
            self.queue.set()
        if before - found:
            self.sensors.set()
            self.retries.set()

    def watch(self, shutdown: threading.Event) -> None:
        """Look until `shutdown` is set, in a thread of its own; then wake all, so that they end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(shutdown,), name="runs-watch", daemon=True)
            self._thread.start()

    def _watch(self, shutdown: threading.Event) -> None:
        said = ""
        while not shutdown.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:  # the database is away: turns are taken at their intervals until it is back
                if said != (said := type(error).__name__):
                    log.warning("runs under way cannot be read: %s", said)
        for one in (self.queue, self.sensors, self.retries):
            one.set()


def turns(
    loop: DaemonIterator, woken: threading.Event, shutdown: threading.Event, *, most: float, least: float = 0.0
) -> DaemonIterator:
    """A daemon's loop that has no pauses of its own, with one of `most` seconds from turn to turn, less when woken.

    Turns are at least `least` seconds apart. One that was woken takes the next after so many, too: it may have come
    before what woke it can be seen everywhere.
    """
    began, pause = time.monotonic(), most
    for step in loop:
        yield step
        if step is not SpanMarker.END_SPAN:
            continue
        found = woken.wait(max(0.0, began + pause - time.monotonic()))
        if found:
            shutdown.wait(max(0.0, began + least - time.monotonic()))
        woken.clear()
        began, pause = time.monotonic(), least if found and least else most


class WokenSensors(SensorDaemon):
    """The sensors, looked at when a run has ended, too. Each keeps its interval."""

    def __init__(self, settings: Any, watch: RunsWatch) -> None:
        super().__init__(settings)
        self._watch = watch

    def core_loop(
        self, workspace_process_context: IWorkspaceProcessContext[Any], shutdown_event: threading.Event
    ) -> DaemonIterator:
        self._watch.watch(shutdown_event)
        loop = super().core_loop(workspace_process_context, cast("threading.Event", NoPause()))
        seconds = sensor.MIN_INTERVAL_LOOP_TIME
        return turns(loop, self._watch.sensors, shutdown_event, most=seconds, least=LEAST_SECONDS)


class NoPause:
    """Stands in for the event that a loop waits for in its pauses."""

    def wait(self, _: float) -> bool:
        """Returns at once."""
        return False


class WokenQueue(QueuedRunCoordinatorDaemon):
    """The queue of runs, looked at when a run was queued or has made room, too."""

    def __init__(self, interval_seconds: float, watch: RunsWatch) -> None:
        super().__init__(0)
        self._watch, self._seconds = watch, interval_seconds

    def core_loop(
        self, workspace_process_context: IWorkspaceProcessContext[Any], shutdown_event: threading.Event
    ) -> DaemonIterator:
        loop = super().core_loop(workspace_process_context, shutdown_event)
        return turns(loop, self._watch.queue, shutdown_event, most=self._seconds)


class WokenRetries(EventLogConsumerDaemon):
    """Retries of runs, looked for when a run has ended, too."""

    def __init__(self, interval_seconds: float, watch: RunsWatch) -> None:
        super().__init__(interval_seconds=0)
        self._watch, self._seconds = watch, interval_seconds

    def core_loop(
        self, workspace_process_context: IWorkspaceProcessContext[Any], shutdown_event: threading.Event
    ) -> DaemonIterator:
        loop = super().core_loop(workspace_process_context, shutdown_event)
        return turns(loop, self._watch.retries, shutdown_event, most=self._seconds, least=LEAST_SECONDS)


def runs_watch(instance: dg.DagsterInstance) -> RunsWatch:
    """A watch over the runs of an instance."""
    return RunsWatch(lambda: set(instance.get_run_ids(dg.RunsFilter(statuses=UNDER_WAY))))
