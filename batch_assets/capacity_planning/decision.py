"""One decision on capacity: what it rests on, and how it is told to the fleet's database and to the catalog."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg

from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.durations import duration
from gpu_runner.fleet_database.accounting.request_budget import Spend
from gpu_runner.fleet_database.capacity_plan import CapacityMemory, CapacityPlan
from gpu_runner.fleet_database.targets import DatasetTarget
from gpu_runner.money import format_usd
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.controller import Command
from gpu_runner.planner.types import Candidate, HeldInstance, Plan, Target


@dataclass(slots=True)
class Decision:
    """One decision and what it rests on. `work`: what is left; None: nothing to plan. `idle`: instances that wait for a
    lease and may be ended. `now`: Unix seconds by the database's clock."""

    dataset: str
    work: Workload | None
    target: DatasetTarget
    command: Command
    plan: Plan
    held: tuple[HeldInstance, ...]
    idle: tuple[str, ...]
    wanted: Target
    spend: Spend
    now: float
    rows_total: int
    clocks: Mapping[str, float]  # simulated seconds per real second, by provider
    memory: CapacityMemory  # what the fleet's database keeps for the next tick

    @property
    def drained(self) -> tuple[str, ...]:
        """Instances that are drained and ended now. Others that are given up are left by their runs for a successor."""
        return tuple(one.instance for one in self.command.assignments if one.successor is None)

    @property
    def reason(self) -> str:
        """Why, in a sentence or two."""
        return self.command.reason

    @property
    def signature(self) -> str:
        """What is announced once: another one is another command."""
        command, request = self.command, self.target.request
        return json.dumps([request, command.kind, command.instances, command.pause is not None, sorted(command.offers)])

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


def capacity_plan(decision: Decision) -> CapacityPlan:
    """What the fleet's database keeps of the decision."""
    chosen, spent = decision.plan.chosen, decision.spend.usd
    return CapacityPlan(
        kind=decision.command.kind,
        reason=decision.command.reason,
        planned_at=decision.now,
        instances_wanted=max(decision.plan.instances, decision.command.instances),
        feasible=decision.plan.feasible,
        on_time=decision.on_time,
        finish_p50=None if chosen is None else decision.now + chosen.finish.p50,
        finish_p95=None if chosen is None else decision.now + chosen.finish.p95,
        usd_p50=None if chosen is None else spent + chosen.usd.p50,
        usd_p95=None if chosen is None else spent + chosen.usd.p95,
        usd_spent=spent,
        assignments=decision.command.assignments,
        rows_left=decision.work.rows if decision.work else 0,
        rows_total=decision.rows_total,
        next_best=tuple(words(one) for one in decision.plan.next_best),
    )


def observation(decision: Decision, asset: dg.AssetKey) -> dg.AssetObservation:
    """Why so many instances, with all numbers; an observation of this asset, because no batch changed."""
    command, target, plan = decision.command, decision.target, decision.plan
    work = decision.work
    assert work is not None
    numbers: dict[str, float | None] = {
        "deadline_hours_left": None if decision.wanted.deadline is None else decision.wanted.deadline / 3600,
        "budget_usd": target.budget_usd,
        "spent_usd": decision.spend.usd,
        "finish_hours_p50": plan.chosen.finish.p50 / 3600 if plan.chosen else None,
        "finish_hours_p95": plan.chosen.finish.p95 / 3600 if plan.chosen else None,
        "forecast_usd_p50": decision.spend.usd + plan.chosen.usd.p50 if plan.chosen else None,
        "forecast_usd_p95": decision.spend.usd + plan.chosen.usd.p95 if plan.chosen else None,
        "earliest_hours_p50": plan.earliest.finish.p50 / 3600 if plan.earliest else None,
        "earliest_usd_p50": plan.earliest.usd.p50 if plan.earliest else None,
    }
    return dg.AssetObservation(
        asset_key=asset,
        description=command.reason,
        metadata={
            "reason": dg.MetadataValue.text(command.reason),
            "decision": dg.MetadataValue.text("capacity"),
            "kind": dg.MetadataValue.text(command.kind),
            "request": dg.MetadataValue.text(target.request),
            "instances_before": dg.MetadataValue.int(target.instances),
            "instances": dg.MetadataValue.int(command.instances),
            "instances_held": dg.MetadataValue.int(len(decision.held)),
            "rows_left": dg.MetadataValue.int(work.rows),
            "tokens_left": dg.MetadataValue.int(round(work.tokens)),
            **{name: dg.MetadataValue.float(round(value, 6)) for name, value in numbers.items() if value is not None},
            **({"clock": dg.MetadataValue.text(scale)} if (scale := scale_words(decision.clocks)) else {}),
            "offers": dg.MetadataValue.text(offers_words(command.offers) or "none"),
            "held": dg.MetadataValue.text(held_words(decision.held) or "none"),
            **({"retire": dg.MetadataValue.text(", ".join(command.retire))} if command.retire else {}),
            **({"pause": dg.MetadataValue.text(command.pause.describe())} if command.pause else {}),
            "next_best": dg.MetadataValue.text("; ".join(words(one) for one in plan.next_best) or "none"),
        },
    )


def words(one: Candidate) -> str:
    """A way to do it: `2 × sim-east/…: in 1 h 05 min (P95 1 h 20 min) for 4.10 $ (P95 4.80 $)`."""
    fleet = " + ".join(f"{count} × {option.name}" for option, count in one.fleet if count)
    return (
        f"{fleet or 'nothing'}: in {duration(one.finish.p50)} (P95 {duration(one.finish.p95)}) "
        f"for {format_usd(one.usd.p50)} $ (P95 {format_usd(one.usd.p95)} $)"
    )


def offers_words(offers: tuple[tuple[str, int], ...]) -> str:
    """`2 × a, 1 × b`."""
    return ", ".join(f"{count} × {name}" for name, count in offers)


def held_words(held: tuple[HeldInstance, ...]) -> str:
    """Instances by offer; those that boot are said to."""
    counts = Counter((one.option.name, one.ready_in > 0) for one in held)
    return ", ".join(
        f"{count} × {name}{' (booting)' if boots else ''}" for (name, boots), count in sorted(counts.items())
    )
