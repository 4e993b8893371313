"""The sensor that ends runs whose worker is gone, and lets their retries go first."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator

import dagster as dg

from batch_assets.dagster_internals import REPOSITORY_LABEL_TAG
from batch_assets.sensors.instance import SECONDS, fleet_database_of, instance_of
from batch_assets.tags import PRIORITY_TAG, RETRY_NUMBER_TAG
from gpu_runner.fleet_database.database import RunBeat
from resources.fleet.resource import GpuFleet

RETRY_PRIORITY = "10"
QUEUE_LOOK = 100
LATE_BEATS = 3  # a heartbeat that is so many intervals late: then it is looked whether the worker's process is there
ALIVE = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
UNDER_WAY = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
BORN = time.time()  # of this process: the code server, where sensors are evaluated


def lost_workers(
    instance: dg.DagsterInstance, label: str | None, beating: Collection[str], born: float = BORN
) -> Iterator[tuple[dg.DagsterRun, int]]:
    """Runs under way of the repository `label` whose worker died with its code server, and the process that is gone.

    `beating` are the runs whose heartbeat is in time. Dagster's default launcher starts workers
    as processes of the code server's host and cannot ask for their health. The code server reports a worker that dies
    alone. When both die, a run in STARTING holds its slot until `start_timeout_seconds`, and one in STARTED for ever.

    Only those are found whose worker began before this process did: of younger ones this code server reports the end
    itself.
    """
    if label is None or instance.run_launcher.supports_check_run_worker_health:
        return
    for run in instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY, tags={REPOSITORY_LABEL_TAG: label})):
        if run.run_id not in beating:
            began, pid = _worker(instance, run.run_id)
            if pid is not None and began < born and not _is_there(pid):
                yield run, pid


def _worker(instance: dg.DagsterInstance, run_id: str) -> tuple[float, int | None]:
    """When the run's newest worker began, and its process id: its first word in the run's log.

    There may be several: the daemon queues a run again when the code server dies while it is asked to start it.
    """
    began, pid = 0.0, None
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        if event is not None and _is_start_of_worker(event):
            found = event.engine_event_data.metadata.get("pid")
            if found is not None and str(found.value).isdigit():
                began, pid = entry.timestamp, int(str(found.value))
    return began, pid


def _is_start_of_worker(event: dg.DagsterEvent) -> bool:
    """Dagster's own text: its event has no type for this (dagster/_cli/api.py)."""
    return (event.message or "").startswith("Started process for run")


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def repository_label(context: dg.SensorEvaluationContext) -> str | None:
    """How runs of the sensor's own repository are tagged in the storage; None outside of a code server."""
    origin = context.code_location_origin
    return None if origin is None else f"{context.repository_name}@{origin.location_name}"


def watchdog_sensor(fleet: GpuFleet) -> dg.SensorDefinition:
    """Dagster itself never notices a worker that died together with its code server."""

    @dg.sensor(
        name="watchdog",
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Fails runs whose heartbeat stopped, so that they are retried and their slots and leases are free.",
    )
    def watchdog(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        found: list[str] = []
        instance = instance_of(context)
        with fleet_database_of(context, fleet) as fleet_db:
            for beat in fleet_db.runs():
                if beat.age > 2 * fleet.ttl:
                    found += _end_silent_run(instance, beat)
                    fleet_db.release_run(beat.run_id)
                    fleet_db.declare_dead(beat.run_id)
            beats = fleet_db.runs()
            in_time = {beat.run_id for beat in beats if beat.age <= LATE_BEATS * fleet.beat}
            for run, pid in lost_workers(instance, repository_label(context), in_time):
                found += _end_run(instance, run, f"process {pid} is gone, and its code server with it")
                fleet_db.release_run(run.run_id)
                fleet_db.declare_dead(run.run_id)
        found += _let_retries_go_first(instance)
        return dg.SkipReason("; ".join(found) or f"{len(beats)} runs, all of them alive")

    return watchdog


def _let_retries_go_first(instance: dg.DagsterInstance) -> Iterator[str]:
    """A retry continues work that is half done; Dagster gives it the priority of the run that was lost."""
    for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]), limit=QUEUE_LOOK):
        if RETRY_NUMBER_TAG in run.tags and PRIORITY_TAG not in run.tags and _is_ours(run):
            instance.add_run_tags(run.run_id, {PRIORITY_TAG: RETRY_PRIORITY})
            yield f"retry {run.run_id[:8]} goes first"


def _is_ours(run: dg.DagsterRun) -> bool:
    return any(key.path[-1] == "rows" for key in run.asset_selection or ())


def _end_silent_run(instance: dg.DagsterInstance, beat: RunBeat) -> Iterator[str]:
    run = instance.get_run_by_id(beat.run_id)
    if run is None or run.status not in ALIVE:
        return
    seen = f"no heartbeat for {beat.age:.0f} s (last: {beat.state}, {beat.rows_done} rows)"
    if instance.run_launcher.supports_check_run_worker_health:
        # It knows whether the worker is gone, and fails the run then: a retry must not begin beside it. What the worker
        # held is taken from it all the same.
        yield f"run {run.run_id[:8]}: {seen}; the run launcher looks for its worker"
    else:
        yield from _end_run(instance, run, f"{seen}; the worker is gone")


def _end_run(instance: dg.DagsterInstance, run: dg.DagsterRun, message: str) -> Iterator[str]:
    if run.status == dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, message)
    else:
        instance.report_run_failed(run, message)
    yield f"run {run.run_id[:8]}: {message}"
