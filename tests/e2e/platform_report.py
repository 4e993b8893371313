"""What a platform was doing when a test on it failed, for its output: load, instances, runs, the ends of the logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import dagster as dg

from batch_assets.local_dagster.home import LOGS
from gpu_runner.fleet_database.database import FleetDatabase

RUNS, EVENTS, LOG_BYTES = 10, 8, 1500
TEXT = 400  # of one event
_LEFT_OUT = {"engine_key", "lease", "draining"}  # a secret, and what is told shorter


@contextlib.contextmanager
def reported(home: Path, instance: dg.DagsterInstance) -> Iterator[None]:
    """Print the report when the body fails, while everything still runs."""
    try:
        yield
    except BaseException:
        try:
            print(report(home, instance), flush=True)
        except Exception as error:  # the body's own failure is the one to be seen
            print(f"no report of the platform: {type(error).__name__}: {error}", flush=True)
        raise


def report(home: Path, instance: dg.DagsterInstance) -> str:
    """The report, of bounded length."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return "\n".join([f"load {load}", *_instances(home), *_runs(instance), *_logs(home / LOGS)])


def _instances(home: Path) -> Iterator[str]:
    if not (home / "fleet.db").exists():
        return
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        for one in fleet_db.fleet(ended=True):
            held = [lease.run_id[:8] for lease in (one.lease, *one.draining) if lease is not None]
            named = [field.name for field in fields(one) if field.name not in _LEFT_OUT]
            said = {name: value for name in named if (value := getattr(one, name)) not in (None, "", False)}
            yield f"instance held by {held}: {said}"
        for beat in fleet_db.runs():
            yield f"heartbeat {beat}"


def _runs(instance: dg.DagsterInstance) -> Iterator[str]:
    for run in instance.get_runs(limit=RUNS):
        yield f"run {run.run_id[:8]} {run.job_name} {run.status.value}"
        newest = instance.get_records_for_run(run.run_id, limit=EVENTS, ascending=False).records
        for record in reversed(newest):
            entry = record.event_log_entry
            yield f"  {record.timestamp:.1f} {entry.level} {entry.user_message[:TEXT]}"


def _logs(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.log")):
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - LOG_BYTES))
            yield f"the end of {file.name}:\n{log.read(LOG_BYTES).decode(errors='replace')}"
