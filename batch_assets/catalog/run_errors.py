"""What a run's own events say: why it failed, and which checks did not pass."""

from __future__ import annotations

from typing import Any

import dagster as dg

NO_REASON = "no reason is recorded; see the run's page"


def failure_text(instance: dg.DagsterInstance, run_id: str) -> str:
    """Why a run failed, in the words of what failed: the step's error without its stack, else the run's."""
    steps = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    for entry in steps:
        event = entry.dagster_event
        if event is not None and event.is_step_failure:
            data = event.step_failure_data
            if data.user_failure_data is not None and data.user_failure_data.description:
                return data.user_failure_data.description
            if data.error is not None:
                return _root(data.error)
    for entry in reversed(instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_FAILURE)):
        event = entry.dagster_event
        error = getattr(event.event_specific_data, "error", None) if event is not None else None
        if text := (_root(error) if error is not None else (event.message if event is not None else None)):
            return str(text)
    return NO_REASON


def _root(error: Any) -> str:
    """`ValueError: what it said`, from the innermost cause; of an error without a message also where it was raised."""
    while error.cause is not None:
        error = error.cause
    said = str(error.message).strip().rpartition("dagster._core.definitions.events.")[2] or NO_REASON
    frames = list(error.stack or ())
    if said.rstrip(":").rpartition(".")[2] != error.cls_name or not frames:
        return said
    return f"{error.cls_name}, an error without a message, raised at {_place(frames[-1])}"


def _place(frame: str) -> str:
    """`snapshot/row_index.py, line 61, in close`: the first line of a frame of a stack, with the last folder."""
    first = frame.strip().splitlines()[0].removeprefix("File ").replace('"', "")
    return "/".join(first.split("/")[-2:])


def failed_checks(instance: dg.DagsterInstance, run_id: str) -> tuple[list[str], list[str]]:
    """Checks that did not pass in a run: those of severity ERROR, and the warnings, each with what it says."""
    errors: list[str] = []
    warnings: list[str] = []
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION):
        event = entry.dagster_event
        if event is None:
            continue
        result = event.asset_check_evaluation_data
        if not result.passed:
            text = f"{result.check_name}: {result.description}" if result.description else result.check_name
            (errors if result.severity == dg.AssetCheckSeverity.ERROR else warnings).append(text)
    return errors, warnings
