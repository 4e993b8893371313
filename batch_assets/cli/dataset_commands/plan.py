"""What `batch-assets plan NAME` prints: what to rent for the work that is left, what it will cost, and when it is done.

Rents nothing and changes nothing. The same planner decides while the work goes on
(batch_assets/sensors/capacity_sensor.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from batch_assets import settings
from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.capacity_planning.planner_input import FleetView, Proposal, propose
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.cli.dataset_commands.declared_changes import DeclaredChanges
from batch_assets.cli.output import output_console, print_json
from batch_assets.durations import duration
from batch_assets.filtering.wanted_rows import rows_to_come, standing
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.orchestration.active_request import request_under_way
from batch_assets.orchestration.source_place import at_its_place, older_part
from batch_assets.request_status.dataset_status import Observer, observing
from batch_assets.snapshot.left_out import first_reject, left_out
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.deadline import Deadline
from batch_assets.spec.discovery import declared_specs
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.money import format_usd, round_up_usd
from gpu_runner.offers.workload import Assumption, Subject, Workload
from gpu_runner.planner.types import Candidate, ControlTiming, Interval, Plan, Target
from resources.fleet.fleet_config import FleetConfigError
from resources.fleet.resource import FleetConfig
from resources.store.dataset_store import DatasetStore

CURVE_LINES = 12


def as_json(found: Proposal) -> dict[str, Any]:
    """Plain values, stable keys. Seconds count from now."""
    plan, target = found.plan, found.target
    return {
        "dataset": found.dataset,
        "rows": found.work.rows,
        "rejected_rows": found.work.rejected,
        "tokens": round(found.work.tokens),
        "request": found.request or None,
        "deadline_seconds": target.deadline,
        "budget_usd": target.budget_usd,
        "objective": target.objective,
        "max_instances": target.max_instances,
        "spent_usd": None if found.spend is None else round(found.spend.usd, 6),
        "feasible": plan.feasible,
        "instances": plan.instances,
        "reason": plan.reason,
        "least_usd": None if plan.least_usd is None else round_up_usd(plan.least_usd),
        "chosen": _candidate_json(plan.chosen),
        "earliest": _candidate_json(plan.earliest),
        "next_best": [_candidate_json(one) for one in plan.next_best],
        "curve": [_candidate_json(one) for one in plan.curve],
        "assumptions": [str(one) for one in found.work.assumptions],
        "speeds": [
            {
                "offer": one.offer,
                "tokens_per_second": round(one.speed.tokens_per_second, 1),
                "basis": one.basis,
                "rows": one.speed.rows,
            }
            for one in found.speeds
        ],
        "batch_apis": list(found.batch_apis),
        "problems": list(found.problems),
        "stops": found.work.stops or None,
        "clocks": dict(found.clocks),
    }


def show_plan(spec: GeneratedDatasetSpec, folder: Path, tags: Mapping[str, str], *, json: bool) -> int:
    """Print the plan for a dataset whose defs.yaml lies in `folder`; returns the exit status: 1 when it cannot be done,
    as a run would stop, too, before it asks a row.

    Raises SourceError, StoreError, and what fleet.yaml, the price sources or the source have against it.
    """
    view = proposal(spec, folder, tags)
    if json:
        print_json(as_json(view))
    else:
        output_console().print(report(view), highlight=False)
    return 0 if view.plan.feasible and not view.work.stops else 1


def proposal(spec: GeneratedDatasetSpec, folder: Path, tags: Mapping[str, str]) -> Proposal:
    """Look at the work, the fleet's database and the market, and plan."""
    try:
        with observing([spec.name]) as (seen,):
            versions = ledger.ledger_versions(seen.instance, spec.name)
            request = request_under_way(seen.instance, seen.fleet_db, spec, seen.store, folder)
            anew = [key for key, found in versions.items() if found.anew]
            asked_before = seen.store.current_snapshot() is not None
            placed = spec if asked_before else at_its_place(spec, seen.instance, seen.store.objects)
            work = WorkloadEstimator(placed, seen.store, folder).look(anew)
            if asked_before:
                work = _with_changes(work, DeclaredChanges.look(spec, folder, seen), spec.name)
                work = _with_rejects(_until_accepted(work, spec, seen.store), seen)
            elif older := older_part(spec.source, seen.store.objects):
                work = replace(work, assumptions=(*work.assumptions, Assumption(Subject.ROWS, older)))
    except SourceError as error:
        raise SourceError(f"{spec.name}: {error}", error.rejects) from None
    fleet = the_fleet()
    with fleet.open_database() as fleet_db:
        timing = ControlTiming.of_sensor(settings.capacity_seconds())
        around = FleetView.look(fleet, fleet_db)
        found = propose(around, fleet_db, spec, work, tags, timing, request)
    found = replace(found, problems=(*found.problems, *work.problems))
    if unusable := unusable_user(spec, around.config):
        work = replace(found.work, stops=found.work.stops or unusable)
        found = replace(found, work=work, problems=(*found.problems, unusable))
    if around.config.only_plays(spec.model):
        found = replace(found, problems=(*found.problems, played_words(f"run {spec.name}")))
    return found


def played_words(command: str) -> str:
    """What a command does where nothing real is there: `run NAME`."""
    return f"there are simulated providers alone: `batch-assets {command}` takes them with --simulate only"


def unusable_user(spec: GeneratedDatasetSpec, config: FleetConfig) -> str:
    """What a run would refuse of the engine that plays the user, or ""."""
    user = spec.prompt.user_model
    if user is None or user.engine is None or user.model is None:
        return ""
    try:
        config.user_engine(user.engine, user.model)
    except FleetConfigError as error:
        return str(error)
    return ""


def _with_changes(work: Workload, changed: DeclaredChanges, dataset: str) -> Workload:
    """The work with rows that a run would ask for and the snapshot does not, or with what would stop it."""
    if changed.stops:
        return replace(work, problems=(*work.problems, changed.problem), stops=changed.problem)
    said = tuple(Assumption(Subject.ROWS, line.removeprefix(f"{dataset}: ")) for line in changed.lines(dataset))
    rows = work.rows + changed.rows
    return replace(work, rows=rows, all_rows=max(rows, work.all_rows), assumptions=(*work.assumptions, *said))


def _with_rejects(work: Workload, seen: Observer) -> Workload:
    """The work with what the snapshot says of rows that it leaves out."""
    snapshot = seen.store.current_snapshot()
    counts = seen.source_counts(snapshot)
    if snapshot is None or not counts.rejected:
        return work
    first = first_reject(seen.store, snapshot)
    text = left_out(counts.rejected, counts.rows) + (f", such as {first}" if first is not None else "")
    said = Assumption(Subject.ROWS, text)
    return replace(work, rejected=counts.rejected, assumptions=(*work.assumptions, said))


def _until_accepted(work: Workload, spec: GeneratedDatasetSpec, store: DatasetStore) -> Workload:
    """The work with the rows of later rounds, until enough are accepted."""
    specs = declared_specs()
    low, middle, high = (round(number) for number in rows_to_come(spec, store, specs))
    found = standing(spec, store, specs)
    if spec.want is None or found is None or not middle:
        return work
    made = f"{found.accepted:,} of {found.made:,} rows are accepted so far" if found.round is not None else ""
    text = f"{middle:,} rows ({low:,} to {high:,}) are made later, until {spec.want.rows:,} are accepted"
    said = Assumption(Subject.ROWS, "; ".join(filter(None, [made, text])))
    rows = work.rows if work.rows else middle  # those of a round that is under way have them on top already
    return replace(work, rows=rows, all_rows=max(rows, work.all_rows), assumptions=(*work.assumptions, said))


def adjust_request(
    spec: GeneratedDatasetSpec,
    folder: Path,
    deadline: Deadline | None,
    budget_usd: float | None,
    accepted_gates: Sequence[str] = (),
) -> str | None:
    """Change what is wanted of the request under way; returns what is wanted now, None when there is no request."""
    name = spec.name
    with observing([name]) as (seen,):
        fleet_db = seen.fleet_db
        if request_under_way(seen.instance, fleet_db, spec, seen.store, folder) is None:
            return None
        changes: dict[str, float] = {} if budget_usd is None else {"budget_usd": budget_usd}
        if deadline is not None:
            changes["deadline_at"] = deadline.at(fleet_db.now())
        if not fleet_db.override(name, **changes):
            return None
        if accepted_gates:
            fleet_db.accept_gates(name, accepted_gates)
        target = fleet_db.target(name)
    assert target is not None
    wanted = Target(target.deadline_in, target.budget_usd)
    accepted = f"; accepted: {', '.join(accepted_gates)}" if accepted_gates else ""
    if off := [gate for gate in accepted_gates if gate in spec.gates.off]:
        on = ", ".join(spec.gates.on) or "none"
        accepted += f" ({', '.join(off)} {'is' if len(off) == 1 else 'are'} off in its file; on: {on})"
    paused = f"; still paused: {target.pause.describe()}" if target.pause is not None and accepted_gates else ""
    return f"{name}: now {wanted_words(wanted, most=False)}{accepted}{paused}"


def report(view: Proposal) -> Group:
    """The view for people: work, target, the plan, other ways, and cost against finish time."""
    plan, work = view.plan, view.work
    head = [
        f"{view.dataset}: {work.rows:,} rows, {work.tokens:,.0f} tokens "
        f"({work.mix.prompt_tokens:,.0f} + {work.mix.output_tokens:,.0f} per row, {work.output_basis})",
        *(f"  assumed: {text}" for text in work.assumptions),
        *(f"speed: {one.describe()}" for one in view.speeds),
        f"wanted: {wanted_words(view.target)}",
        *([f"held: {len(view.held)} instances; spent so far: {format_usd(view.spend.usd)} $"] if view.spend else []),
        *([scale] if (scale := scale_words(view.clocks)) else []),
        *(f"batch API: {text}" for text in view.batch_apis),
        *(f"problem: {text}" for text in view.problems),
    ]
    parts: list[Text | Table] = [Text(line) for line in head]
    real = " (in real time; the clock of its providers is scaled)" if scale_words(view.clocks) else ""
    parts += [Text(), Text(f"{plan.reason}{real}", style="bold" if plan.feasible else "bold red")]
    shown = [("plan", plan.chosen), ("earliest", plan.earliest), *(("or", one) for one in plan.next_best)]
    if rows := [(name, one) for name, one in shown if one is not None]:
        parts += [Text(), _table("", rows)]
    if plan.curve:
        picked = _spread(plan.curve, CURVE_LINES)
        parts += [Text(), Text("Cost against finish time", style="bold")]
        parts.append(_table("", [(_mark(one, plan), one) for one in picked]))
    if work.stops:
        said = f"{view.dataset}: a run would stop before it asks a row: {work.stops}"
        parts += [Text(), Text(said, style="bold red")]
    return Group(*parts)


def wanted_words(target: Target, *, most: bool = True) -> str:
    """Deadline and budget in words; with `most`, also the objective and most instances."""
    words = ["no deadline" if target.deadline is None else f"done in {duration(max(0.0, target.deadline))}"]
    words.append("no budget" if target.budget_usd is None else f"for at most {format_usd(target.budget_usd)} $")
    words += [target.objective, f"at most {target.max_instances} instances"] if most else []
    return ", ".join(words)


def _mark(one: Candidate, plan: Plan) -> str:
    return "plan" if plan.chosen is not None and one.fleet == plan.chosen.fleet else ""


def _table(title: str, rows: Sequence[tuple[str, Candidate]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=title or None)
    table.add_column("", no_wrap=True)
    for name in ("done in", "P95", "$", "P95 $"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("instances", overflow="fold")
    for name, one in rows:
        fleet = " + ".join(f"{count} × {option.name}" for option, count in one.fleet if count)
        figures = (
            duration(one.finish.p50),
            duration(one.finish.p95),
            *(format_usd(usd, fine=True) for usd in (one.usd.p50, one.usd.p95)),
        )
        table.add_row(name, *figures, Text(fleet))
    return table


def _spread(items: Sequence[Candidate], most: int) -> list[Candidate]:
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def _candidate_json(one: Candidate | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "fleet": [{"offer": option.name, "instances": count} for option, count in one.fleet if count],
        "finish_seconds": _interval(one.finish),
        "usd": _interval(one.usd),
    }


def _interval(one: Interval) -> dict[str, float]:
    return {"p50": round(one.p50, 6), "p95": round(one.p95, 6)}
