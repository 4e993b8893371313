"""What the capacity sensor says of a decision: figures for `status`, an observation, a check, alerts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from batch_assets import ledger
from batch_assets.checks import ON_TIME
from batch_assets.clock_scale import scale_words
from batch_assets.open_work import OpenWork
from batch_assets.progress import duration
from batch_assets.status import RequestStatus
from gpu_runner.budget import Spend
from gpu_runner.capacity import Command
from gpu_runner.planner import Candidate, Held, Plan, Target
from gpu_runner.targets import DatasetTarget
from resources.alerts import Alert


@dataclass(slots=True)
class Report:
    """One decision and what it rests on. `idle`: instances that wait for a lease and may be ended; `room`:
    how many more the fleet may have. `now`: Unix seconds
    by the database's clock."""

    dataset: str
    found: OpenWork
    target: DatasetTarget
    command: Command
    plan: Plan
    held: tuple[Held, ...]
    idle: tuple[str, ...]
    room: int
    wanted: Target
    spend: Spend
    now: float
    rows_total: int
    clocks: Mapping[str, float]  # simulated seconds per real second, by provider
    memory: dict[str, Any] = field(default_factory=dict)  # what the books keep for the next tick

    @property
    def surplus(self) -> tuple[str, ...]:
        """Instances that are drained and ended: of those that are given up, as many as there are too many, or as have
        no room in the fleet beside their successors. The others are left by their runs, which rent another one first.
        """
        given_up = self.command.retire
        return given_up[: max(0, len(self.held) - self.command.instances, len(given_up) - self.room)]

    @property
    def reason(self) -> str:
        """Why, in a sentence or two."""
        return self.command.reason

    @property
    def signature(self) -> str:
        """What is announced once: another one is another command."""
        command, request = self.command, self.target.request
        return json.dumps([request, command.kind, command.instances, bool(command.pause), sorted(command.offers)])

    @property
    def finish(self) -> Candidate | None:
        """What is expected: the plan that was chosen."""
        return self.plan.chosen

    @property
    def on_time(self) -> bool | None:
        """Whether the deadline is expected to be met (P50); None without a deadline. With no instance it is not."""
        deadline = self.wanted.deadline
        if deadline is None:
            return None
        works = self.command.instances > 0 and not self.command.pause
        return works and self.plan.chosen is not None and self.plan.chosen.finish.p50 <= deadline


def figures(report: Report) -> dict[str, Any]:
    """What the books keep of the plan: moments in Unix seconds by the database's clock, money in US dollars."""
    chosen, spent = report.plan.chosen, report.spend.usd
    return {
        "kind": report.command.kind,
        "reason": report.command.reason,
        "planned_at": report.now,
        "instances_wanted": max(report.plan.instances, report.command.instances),
        "feasible": report.plan.feasible,
        "on_time": report.on_time,
        "finish_p50": None if chosen is None else report.now + chosen.finish.p50,
        "finish_p95": None if chosen is None else report.now + chosen.finish.p95,
        "usd_p50": None if chosen is None else spent + chosen.usd.p50,
        "usd_p95": None if chosen is None else spent + chosen.usd.p95,
        "usd_spent": spent,
        "leave": list(report.command.retire[len(report.surplus) :]),
        "rows_left": report.found.work.rows if report.found.work else 0,
        "rows_total": report.rows_total,
        "next_best": [words(one) for one in report.plan.next_best],
    }


def observation(report: Report) -> dg.AssetObservation:
    """Why so many instances, with all numbers; an observation, because no batch changed."""
    command, target, plan = report.command, report.target, report.plan
    work = report.found.work
    assert work is not None
    numbers: dict[str, float | None] = {
        "deadline_hours_left": None if report.wanted.deadline is None else report.wanted.deadline / 3600,
        "budget_usd": target.budget_usd,
        "spent_usd": report.spend.usd,
        "finish_hours_p50": plan.chosen.finish.p50 / 3600 if plan.chosen else None,
        "finish_hours_p95": plan.chosen.finish.p95 / 3600 if plan.chosen else None,
        "forecast_usd_p50": report.spend.usd + plan.chosen.usd.p50 if plan.chosen else None,
        "forecast_usd_p95": report.spend.usd + plan.chosen.usd.p95 if plan.chosen else None,
        "earliest_hours_p50": plan.earliest.finish.p50 / 3600 if plan.earliest else None,
        "earliest_usd_p50": plan.earliest.usd.p50 if plan.earliest else None,
    }
    return dg.AssetObservation(
        asset_key=ledger.rows_key(report.dataset),
        description=command.reason,
        metadata={
            "decision": dg.MetadataValue.text("capacity"),
            "kind": dg.MetadataValue.text(command.kind),
            "request": dg.MetadataValue.text(target.request),
            "instances_before": dg.MetadataValue.int(target.instances),
            "instances": dg.MetadataValue.int(command.instances),
            "instances_held": dg.MetadataValue.int(len(report.held)),
            "rows_left": dg.MetadataValue.int(work.rows),
            "tokens_left": dg.MetadataValue.int(round(work.tokens)),
            **{name: dg.MetadataValue.float(round(value, 6)) for name, value in numbers.items() if value is not None},
            **({"clock": dg.MetadataValue.text(scale)} if (scale := scale_words(report.clocks)) else {}),
            "offers": dg.MetadataValue.text(offers_words(command.offers) or "none"),
            "held": dg.MetadataValue.text(held_words(report.held) or "none"),
            **({"retire": dg.MetadataValue.text(", ".join(command.retire))} if command.retire else {}),
            **({"pause": dg.MetadataValue.text(command.pause)} if command.pause else {}),
            "next_best": dg.MetadataValue.text("; ".join(words(one) for one in plan.next_best) or "none"),
            "reason": dg.MetadataValue.text(command.reason),
        },
    )


def check_event(report: Report) -> dg.AssetCheckEvaluation:
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


def done_event(target: DatasetTarget, story: RequestStatus, now: float) -> dg.AssetObservation:
    """The end of a request: when, for how much, and whether that was what was wanted."""
    said = f"done in {duration(target.age)} for {story.usd_spent:.4f} $"
    if story.missing:
        said = f"given up after {duration(target.age)} and {story.usd_spent:.4f} $ with {story.missing} batches missing"
    elif target.deadline_at is not None:
        margin = target.deadline_at - now
        said += f", {duration(abs(margin))} {'before' if margin >= 0 else 'after'} the deadline"
    if target.budget_usd is not None:
        said += f", of a budget of {target.budget_usd:.2f} $"
    numbers = {"seconds": target.age, "usd": story.usd_spent, "wasted_usd": story.usd_wasted}
    return dg.AssetObservation(
        asset_key=ledger.rows_key(target.dataset),
        description=said,
        metadata={
            "decision": dg.MetadataValue.text("capacity"),
            "kind": dg.MetadataValue.text("done"),
            "request": dg.MetadataValue.text(target.request),
            "instances": dg.MetadataValue.int(1),
            **{name: dg.MetadataValue.float(round(float(value), 6)) for name, value in numbers.items()},
            "missing_batches": dg.MetadataValue.int(story.missing),
            **({} if story.on_time is None else {"on_time": dg.MetadataValue.bool(story.on_time)}),
            "reason": dg.MetadataValue.text(said),
        },
    )


def _expected(report: Report) -> dict[str, dg.MetadataValue]:
    chosen = report.plan.chosen
    if chosen is None:
        return {}
    return {
        "finish_p50": dg.MetadataValue.timestamp(report.now + chosen.finish.p50),
        "finish_p95": dg.MetadataValue.timestamp(report.now + chosen.finish.p95),
    }


def alerts_of(report: Report) -> list[Alert]:
    """What operators should hear of: late, infeasible, budget reached, no capacity; else that all is well."""
    command, plan, deadline = report.command, report.plan, report.wanted.deadline
    numbers = {"instances": command.instances, "spent_usd": round(report.spend.usd, 4)}
    found: list[Alert] = []
    if command.pause:
        found.append(Alert("budget", report.dataset, f"{report.dataset} is paused: {command.pause}", numbers))
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


def words(one: Candidate) -> str:
    """A way to do it: `2 × sim-east/…: in 1 h 05 min (P95 1 h 20 min) for 4.10 $ (P95 4.80 $)`."""
    fleet = " + ".join(f"{count} × {option.name}" for option, count in one.fleet if count)
    return (
        f"{fleet or 'nothing'}: in {duration(one.finish.p50)} (P95 {duration(one.finish.p95)}) "
        f"for {one.usd.p50:.2f} $ (P95 {one.usd.p95:.2f} $)"
    )


def offers_words(offers: tuple[tuple[str, int], ...]) -> str:
    """`2 × a, 1 × b`."""
    return ", ".join(f"{count} × {name}" for name, count in offers)


def held_words(held: tuple[Held, ...]) -> str:
    """Instances by offer; those that boot are said to."""
    counts = Counter((one.option.name, one.ready_in > 0) for one in held)
    return ", ".join(
        f"{count} × {name}{' (booting)' if boots else ''}" for (name, boots), count in sorted(counts.items())
    )
