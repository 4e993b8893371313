"""`batch-assets plan NAME --upstream`: rows that each step of a chain would ask, and why, before anything is paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from batch_assets import settings
from batch_assets.capacity_planning.planner_input import FleetView, propose
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.cli.output import output_console, print_json
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.orchestration.source_place import at_its_place
from batch_assets.request_status.dataset_status import Observer, observing
from batch_assets.snapshot.builder import changed_rows
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.discovery import Datasets
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.errors import UserFacingError
from gpu_runner.money import format_usd
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.types import ControlTiming
from resources.objects.opening import temporary_folder


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows of one dataset that a run would ask: `new` in its source, `changed` there or in its file, and `never_asked`:
    in batches of the snapshot that are not done. `usd`: their median cost; None: not planned.

    `more_from`: the step before is to be run first, and what it makes comes on top. `problem`: why nothing is known, or
    why a run would not begin.
    """

    dataset: str
    new: int = 0
    changed: int = 0
    never_asked: int = 0
    usd: float | None = None
    more_from: str | None = None
    problem: str = ""

    @property
    def rows(self) -> int:
        """Rows that would be asked as far as it is known now."""
        return self.new + self.changed + self.never_asked

    def as_json(self) -> dict[str, Any]:
        """Plain values, stable keys."""
        return {
            "dataset": self.dataset,
            "rows": self.rows,
            "new": self.new,
            "changed": self.changed,
            "never_asked": self.never_asked,
            "usd_p50": self.usd,
            "more_from": self.more_from,
            "problem": self.problem or None,
        }


def show_chain_plan(datasets: Datasets, steps: Sequence[str], *, json: bool) -> int:
    """Print what each step would ask; returns the exit status: 1 when a source cannot be read. Writes nothing."""
    plans = chain_plans(datasets, steps)
    if json:
        whole = {"dataset": steps[-1], "rows": sum(one.rows for one in plans)}
        print_json(whole | {"steps": [one.as_json() for one in plans]})
    else:
        output_console().print(_table(plans), highlight=False)
    return int(any(one.problem for one in plans))


def chain_plans(datasets: Datasets, steps: Sequence[str]) -> list[StepPlan]:
    """One plan a step, in order. Reads all sources."""
    found: list[StepPlan] = []
    with observing(steps) as observers:
        for seen, name in zip(observers, steps, strict=True):
            before = found[-1] if found else None
            waits = before is not None and bool(before.rows or before.more_from or before.problem)
            found.append(_plan(seen, *datasets[name], steps[len(found) - 1] if waits else None))
    return found


def _plan(seen: Observer, spec: GeneratedDatasetSpec, folder: Path, more_from: str | None) -> StepPlan:
    try:
        work, new, changed = _work(seen, spec, folder)
    except SourceError as error:
        snapshot = seen.store.current_snapshot()
        if more_from is not None and snapshot is None:
            return StepPlan(spec.name, more_from=more_from)
        if more_from is not None and seen.source_counts(snapshot).streaming is not None:  # rows that were read so far
            work = WorkloadEstimator(spec, seen.store, folder).look()
            return StepPlan(spec.name, 0, 0, work.rows, _usd(spec, work) if work.rows else 0.0, more_from)
        return StepPlan(spec.name, more_from=more_from, problem=str(error))
    rows = work.rows + new + changed
    usd = _usd(spec, replace(work, rows=rows, all_rows=max(rows, work.all_rows))) if rows else 0.0
    return StepPlan(spec.name, new, changed, work.rows, usd, more_from, "; ".join(work.problems))


def _work(seen: Observer, spec: GeneratedDatasetSpec, folder: Path) -> tuple[Workload, int, int]:
    """Work of batches that are not done, rows that are new, rows that have changed. Raises SourceError."""
    placed = at_its_place(spec, seen.instance, seen.store.objects)
    anew = [key for key, one in ledger.ledger_versions(seen.instance, spec.name).items() if one.anew]
    work = WorkloadEstimator(placed, seen.store, folder).look(anew)
    with temporary_folder() as workdir:
        counts = changed_rows(placed, seen.store, workdir=workdir, base=folder)
    return (work, 0, 0) if counts is None else (work, counts.added, counts.changed)


def _usd(spec: GeneratedDatasetSpec, work: Workload) -> float | None:
    """The median cost, in US dollars; None where no plan can be made: `batch-assets plan NAME` says why."""
    fleet, timing = the_fleet(), ControlTiming.of_sensor(settings.capacity_seconds())
    try:
        with fleet.open_database() as fleet_db:
            plan = propose(FleetView.look(fleet, fleet_db), fleet_db, spec, work, {}, timing).plan
    except UserFacingError:
        return None
    return None if plan.chosen is None else round(plan.chosen.usd.p50, 6)


def _table(plans: Sequence[StepPlan]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step", no_wrap=True)
    for name in ("rows to ask", "new", "changed", "never asked", "$"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for one in plans:
        said = one.problem or (f"and what comes of {one.more_from}" if one.more_from else "")
        counts = (f"{number:,}" for number in (one.rows, one.new, one.changed, one.never_asked))
        table.add_row(one.dataset, *counts, "?" if one.usd is None else format_usd(one.usd, fine=True), said)
    return table
