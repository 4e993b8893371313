"""What the capacity sensor says of a decision and of the end of a request: a check, an observation, alerts."""

from __future__ import annotations

import dagster as dg

from batch_assets.capacity_planning.decision import Decision
from batch_assets.catalog import ledger
from batch_assets.durations import duration
from batch_assets.orchestration.asset_checks import NOT_PAUSED, ON_TIME, to_go_on
from gpu_runner.fleet_database.capacity_plan import Pause, PauseKind, RequestSummary
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.fleet_database.wait_reason import WaitReason
from gpu_runner.money import format_usd
from resources.alerts import Alert, AlertKind


def check_event(report: Decision) -> dg.AssetCheckEvaluation:
    """The check `on_time` of the table, by what is expected of the deadline."""
    assert report.on_time is not None
    return dg.AssetCheckEvaluation(
        asset_key=ledger.table_key(report.dataset),
        check_name=ON_TIME,
        passed=report.on_time,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"expected: {report.command.reason}"[:500],
        metadata={
            "deadline": dg.MetadataValue.timestamp(report.now + (report.wanted.deadline or 0.0)),
            **_expected(report),
        },
    )


def pause_event(dataset: str, pause: Pause | None) -> dg.AssetCheckEvaluation:
    """The check `not_paused` of the table: why nothing is made, and what goes on; None: it goes on, or has ended."""
    said = "Nothing is paused."
    if pause is not None:
        said = f"paused: {pause.describe()}; {_goes_on(dataset, pause)}"
    return dg.AssetCheckEvaluation(
        asset_key=ledger.table_key(dataset),
        check_name=NOT_PAUSED,
        passed=pause is None,
        severity=dg.AssetCheckSeverity.WARN,
        description=said,
    )


def _goes_on(dataset: str, pause: Pause) -> str:
    if pause.kind is not PauseKind.QUALITY:
        return f"`batch-assets adjust {dataset} --budget-usd …` goes on, when it is enough"
    accepted = " ".join(f"--accept {gate}" for gate, _ in pause.gates)
    return (
        f"mend the prompt or the sampling and start the job `{dataset}_refresh`, or `batch-assets adjust {dataset} "
        f"{accepted}` goes on as it is"
    )


def done_event(target: DatasetTarget, ended: RequestSummary, now: float) -> dg.AssetObservation:
    """The end of a request: when, for how much, and whether that was what was wanted."""
    spent = f"{format_usd(ended.usd_spent, fine=True)} $"
    said = f"done in {duration(target.age)} for {spent}"
    if ended.missing:
        said = f"given up after {duration(target.age)} and {spent} with {ended.missing} batches missing"
    elif target.deadline_at is not None:
        margin = target.deadline_at - now
        said += f", {duration(abs(margin))} {'before' if margin >= 0 else 'after'} the deadline"
    if target.budget_usd is not None:
        said += f", of a budget of {format_usd(target.budget_usd)} $"
    if ended.missing:
        said += f": {to_go_on(target.dataset)} goes on from there"
    numbers = {
        "request_seconds": target.age,
        "request_usd": ended.usd_spent,
        "request_wasted_usd": ended.usd_wasted,
    }
    return dg.AssetObservation(
        asset_key=ledger.rows_key(target.dataset),
        description=said,
        metadata={
            "reason": dg.MetadataValue.text(said),
            "decision": dg.MetadataValue.text("capacity"),
            "kind": dg.MetadataValue.text("done"),
            "request": dg.MetadataValue.text(target.request),
            "instances": dg.MetadataValue.int(1),
            **{name: dg.MetadataValue.float(round(float(value), 6)) for name, value in numbers.items()},
            "missing_batches": dg.MetadataValue.int(ended.missing),
            **({} if ended.on_time is None else {"on_time": dg.MetadataValue.bool(ended.on_time)}),
        },
    )


def _expected(report: Decision) -> dict[str, dg.MetadataValue]:
    chosen = report.plan.chosen
    if chosen is None:
        return {}
    return {
        "finish_p50": dg.MetadataValue.timestamp(report.now + chosen.finish.p50),
        "finish_p95": dg.MetadataValue.timestamp(report.now + chosen.finish.p95),
    }


def requests_fail(dataset: str, wait: WaitReason) -> Alert:
    """Every request of a run fails."""
    assert wait.failure is not None
    met = wait.failure
    status = "" if met.status is None or str(met.status) in met.code else f" (status {met.status})"
    said = f": {met.sentence}" if met.sentence else ""
    text = (
        f"{dataset}: every request has failed for {duration(wait.seconds)}, the last one with {met.code}{status}{said}"
    )
    numbers = {"code": met.code, "status": met.status, "sentence": met.sentence, "seconds": round(wait.seconds, 1)}
    return Alert("requests_fail", dataset, text, numbers)


def alerts_of(report: Decision) -> list[Alert]:
    """What operators should hear of: late, infeasible, budget reached, no capacity; else that all is well."""
    command, plan, deadline = report.command, report.plan, report.wanted.deadline
    numbers = {"instances": command.instances, "spent_usd": round(report.spend.usd, 4)}
    found: list[Alert] = []
    if command.pause:
        kind: AlertKind = "quality" if command.pause.kind is PauseKind.QUALITY else "budget"
        found.append(Alert(kind, report.dataset, f"{report.dataset} is paused: {command.pause.describe()}", numbers))
    elif plan.chosen is None and not report.held:
        text = f"{report.dataset}: nothing suitable can be rented: {plan.reason}"
        found.append(Alert("no_capacity", report.dataset, text, numbers))
    if deadline is not None and not command.pause:
        earliest = plan.earliest
        if deadline > 0 and (earliest is None or earliest.finish.p50 > deadline):
            found.append(Alert("infeasible", report.dataset, f"{report.dataset}: {plan.reason}", numbers))
        elif not report.on_time:
            text = f"{report.dataset} is late: {command.reason}"
            found.append(Alert("late", report.dataset, text, numbers))
    return found or [Alert("on_time", report.dataset, f"{report.dataset}: {command.reason}", numbers)]
