"""Dagster's daemon: `python -m batch_assets.dagster_internals.daemon --workspace FILE`, for DAGSTER_HOME.

The stock daemons, started as `dagster-daemon run` starts them (dagster/_daemon/cli). What differs is what they cost
while nothing happens: connections to SQLite are kept, the code server is asked less often who it is, its definitions
are not read again every minute, and freshness is evaluated for the assets that have a policy, not for all of them.
And sensors, queue and retries take their turn when a run was queued or has ended (woken_daemons.py).
`dagster-daemon run` does the same work on the same home, later and for more processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import dagster as dg
import yaml
from dagster._core.workspace.context import IWorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster._daemon import controller
from dagster._daemon.auto_run_reexecution.event_log_consumer import EventLogConsumerDaemon
from dagster._daemon.daemon import DaemonIterator, DagsterDaemon, MonitoringDaemon, SensorDaemon
from dagster._daemon.freshness import FreshnessDaemon
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon
from dagster._utils.interrupts import capture_interrupts, setup_interrupt_handlers

from batch_assets import settings
from batch_assets.dagster_internals.code_server import answers
from batch_assets.dagster_internals.event_batches import write_together
from batch_assets.dagster_internals.kept_connections import keep_connections
from batch_assets.dagster_internals.process_end import run_process
from batch_assets.dagster_internals.server_ids import ask_seldom
from batch_assets.dagster_internals.woken_daemons import WokenQueue, WokenRetries, WokenSensors, runs_watch

# A server with other definitions has another id, which is seen within seconds. This is for what nobody thought of.
READ_AGAIN_SECONDS = 600
ALIVE_FILE = "daemon.alive"  # in the home; `healthy daemon` of the image looks how old it is
CODE_SECONDS = 60.0
STEP_SECONDS = 0.05


class PolicyFreshnessDaemon(FreshnessDaemon):
    """Looks at assets with a freshness policy. Of all others, Dagster's pages know that freshness does not apply."""

    async def _evaluate_assets(self, workspace_process_context: IWorkspaceProcessContext[Any]) -> list[bool]:
        context = workspace_process_context.create_request_context()
        nodes = [node for node in context.asset_graph.asset_nodes if node.freshness_policy_or_from_metadata]
        return await asyncio.gather(*(self._evaluate_asset(context=context, node=node) for node in nodes))


@runtime_checkable
class SweepingLauncher(Protocol):
    """A run launcher that removes what ended runs have left."""

    def sweep(self) -> None:
        """Look and remove, if it is time to. Raises nothing for a cluster that is away."""
        ...


class SweepingMonitoringDaemon(MonitoringDaemon):
    """Looks for leftovers of ended runs, too. Dagster's own asks the launcher only about runs that have started."""

    def run_iteration(self, workspace_process_context: IWorkspaceProcessContext[Any]) -> DaemonIterator:
        yield from super().run_iteration(workspace_process_context)
        launcher = workspace_process_context.instance.run_launcher
        if isinstance(launcher, SweepingLauncher):
            launcher.sweep()
        yield None


def daemons_of(instance: dg.DagsterInstance) -> Iterable[DagsterDaemon[Any]]:
    """What this instance needs, as Dagster lists it."""
    watch = runs_watch(instance)
    for daemon in controller.create_daemons_from_instance(instance):
        if type(daemon) is SensorDaemon:
            yield WokenSensors(instance.get_sensor_settings(), watch)
        elif type(daemon) is QueuedRunCoordinatorDaemon:
            yield WokenQueue(daemon.interval_seconds, watch)
        elif type(daemon) is EventLogConsumerDaemon:
            yield WokenRetries(daemon.interval_seconds, watch)
        elif type(daemon) is FreshnessDaemon:
            yield PolicyFreshnessDaemon()
        elif type(daemon) is MonitoringDaemon:
            yield SweepingMonitoringDaemon(interval_seconds=daemon.interval_seconds)
        else:
            yield daemon


def wait_for_code(workspace: Path, seconds: float) -> None:
    """Wait until the code servers of the workspace answer at their sockets, at most so long.

    Dagster would find no code location, put the first run back into the queue and wait some seconds. What is no socket,
    or no workspace that can be read, is left to Dagster.
    """
    try:
        entries = yaml.safe_load(workspace.read_text())["load_from"]
        sockets = [Path(entry["grpc_server"]["socket"]) for entry in entries]
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return
    deadline = time.monotonic() + seconds
    while not all(answers(socket) for socket in sockets) and time.monotonic() < deadline:
        time.sleep(STEP_SECONDS)


def show_life(running: controller.DagsterDaemonController, file: Path) -> None:
    """Have the daemon's main loop touch `file` every few seconds, while its threads live and give heartbeats.

    Dagster's own `dagster-daemon liveness-check` costs seconds of CPU for each look, which a busy machine does not have
    within a probe's time-out: the probe then ends a daemon that works.
    """
    check = running.check_daemon_threads

    def checked() -> None:
        check()
        file.touch()

    file.touch()
    running.check_daemon_threads = checked  # type: ignore[method-assign]


def serve(home: Path, workspace: Path) -> None:
    """Work until SIGTERM or SIGINT."""
    ask_seldom()
    controller.RELOAD_WORKSPACE_INTERVAL = READ_AGAIN_SECONDS
    setup_interrupt_handlers()
    try:
        with capture_interrupts(), dg.DagsterInstance.from_config(str(home)) as instance:
            keep_connections(instance)
            write_together(instance)
            wait_for_code(workspace, CODE_SECONDS)
            with controller.daemon_controller_from_instance(
                instance, WorkspaceFileTarget([str(workspace)]), gen_daemons=daemons_of
            ) as running:
                show_life(running, home / ALIVE_FILE)
                running.check_daemon_loop()
    except KeyboardInterrupt:
        return


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m batch_assets.dagster_internals.daemon")
    parser.add_argument("--workspace", type=Path, required=True)
    serve(settings.dagster_home(), parser.parse_args().workspace)


if __name__ == "__main__":
    run_process(main)
