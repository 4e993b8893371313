"""Runs whose worker died together with its code server while it had no heartbeat: before its first or after its last.

Dagster's default launcher starts workers as processes of the code server's host and cannot ask for their health. The
code server reports a worker that dies alone. When both die, a run in STARTING holds its slot until
`start_timeout_seconds`, and one in STARTED for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator

import dagster as dg

from batch_assets.dagster_internals import REPOSITORY_LABEL_TAG

UNDER_WAY = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
BORN = time.time()  # of this process: the code server, where sensors are evaluated


def lost_workers(
    instance: dg.DagsterInstance, label: str | None, beating: Collection[str], born: float = BORN
) -> Iterator[tuple[dg.DagsterRun, int]]:
    """Runs under way of the repository `label` without a heartbeat, and the process that is there no more.

    Only those whose worker began before this process did: of younger ones this code server reports the end itself.
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
