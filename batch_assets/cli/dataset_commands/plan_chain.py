"""`batch-assets plan NAME --upstream`: rows that each step of a chain would ask, and why, before anything is paid."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from batch_assets import settings
from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.capacity_planning.planner_input import FleetView, propose
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.cli.dataset_commands.plan import played_words
from batch_assets.cli.output import output_console, print_json
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.orchestration.source_place import at_its_place, without_rows
from batch_assets.request_status.dataset_status import Observer, observing
from batch_assets.snapshot.builder import Compared, compare, removed_rows
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

    `removed`: rows of the snapshot that its source does not have any more, which go; `removed_with`: those that go
    because rows of the step before, `upstream`, do. `gone`: the ids of both. `more_from`: the step before is to be run
    first, and what it makes comes on top. `problem`: why nothing is known, or why a run would not begin.
    """

    dataset: str
    new: int = 0
    changed: int = 0
    never_asked: int = 0
    usd: float | None = None
    more_from: str | None = None
    problem: str = ""
    removed: int = 0
    removed_with: int = 0
    upstream: str = ""
    gone: Sequence[str] = ()

    @property
    def rows(self) -> int:
        """Rows that would be asked as far as it is known now."""
        return self.new + self.changed + self.never_asked

    @property
    def notes(self) -> list[str]:
        """What is to be said beside the numbers, for people."""
        if self.problem:
            return [self.problem]
        said = [f"and what comes of {self.more_from}"] if self.more_from else []
        if self.removed:
            said.append(f"{_count(self.removed)} in the table and no longer in its source")
        if self.removed_with:
            said.append(f"{_count(self.removed_with)} removed with the rows of {self.upstream} that go")
        return said

    def as_json(self) -> dict[str, Any]:
        """Plain values, stable keys."""
        return {
            "dataset": self.dataset,
            "rows": self.rows,
            "new": self.new,
            "changed": self.changed,
            "never_asked": self.never_asked,
            "removed": self.removed,
            "removed_with_upstream": self.removed_with,
            "usd_p50": self.usd,
            "more_from": self.more_from,
            "problem": self.problem or None,
        }


def show_chain_plan(datasets: Datasets, steps: Sequence[str], *, json: bool) -> int:
    """Print what each step would ask; returns the exit status: 1 when a source cannot be read. Writes nothing."""
    plans, fleet = chain_plans(datasets, steps), PlannedFleet.look(datasets, steps)
    if json:
        whole = {"dataset": steps[-1], "rows": sum(one.rows for one in plans)}
        steps_json = [one.as_json() for one in plans]
        print_json(whole | {"steps": steps_json, "problems": list(fleet.problems), "clocks": dict(fleet.clocks)})
    else:
        lines = [Text(line) for line in fleet.lines]
        output_console().print(Group(*lines, *([Text()] if lines else []), _table(plans)), highlight=False)
    return int(any(one.problem for one in plans))


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """What the dollars are of: simulated seconds per real second of each provider, and that nothing real is there."""

    clocks: Mapping[str, float]
    problems: tuple[str, ...]

    @classmethod
    def look(cls, datasets: Datasets, steps: Sequence[str]) -> PlannedFleet:
        """As fleet.yaml is now; nothing where it is broken: `batch-assets plan NAME` says why."""
        fleet = the_fleet()
        try:
            config = fleet.config()
            clocks = {name: one.clock for name, one in fleet.providers(config).items()}
        except UserFacingError:
            return cls({}, ())
        played = any(config.only_plays(datasets[name][0].model) for name in steps)
        return cls(clocks, (played_words(f"run {steps[-1]} --upstream"),) if played else ())

    @property
    def lines(self) -> list[str]:
        """For people."""
        scale = scale_words(self.clocks)
        return [*([scale] if scale else []), *(f"problem: {text}" for text in self.problems)]


def chain_plans(datasets: Datasets, steps: Sequence[str]) -> list[StepPlan]:
    """One plan a step, in order. Reads all sources."""
    found: list[StepPlan] = []
    with observing(steps) as observers:
        for seen, name in zip(observers, steps, strict=True):
            before = found[-1] if found else None
            waits = before is not None and bool(before.rows or before.more_from or before.problem)
            found.append(_plan(seen, *datasets[name], before, steps[len(found) - 1] if waits else None))
    return found


def _plan(
    seen: Observer, spec: GeneratedDatasetSpec, folder: Path, before: StepPlan | None, more_from: str | None
) -> StepPlan:
    try:
        work, compared, then = _work(seen, spec, folder, () if before is None else before.gone)
    except SourceError as error:
        snapshot = seen.store.current_snapshot()
        if more_from is not None and snapshot is None:
            return StepPlan(spec.name, more_from=more_from)
        if more_from is not None and seen.source_counts(snapshot).streaming is not None:  # rows that were read so far
            work = WorkloadEstimator(spec, seen.store, folder).look()
            return StepPlan(spec.name, 0, 0, work.rows, _usd(spec, work) if work.rows else 0.0, more_from)
        return StepPlan(spec.name, more_from=more_from, problem=str(error))
    if compared is None or then is None:
        return StepPlan(spec.name, 0, 0, work.rows, _cost(spec, work, work.rows), more_from, "; ".join(work.problems))
    removed, removed_with = removed_rows(spec, compared.counts), max(0, len(then.gone) - len(compared.gone))
    return StepPlan(
        dataset=spec.name,
        new=then.counts.added,
        changed=then.counts.changed,
        never_asked=work.rows,
        usd=_cost(spec, work, work.rows + then.counts.to_ask),
        more_from=more_from,
        problem="; ".join(work.problems),
        removed=removed,
        removed_with=removed_with,
        upstream="" if before is None else before.dataset,
        gone=then.gone if removed or removed_with else (),
    )


def _work(
    seen: Observer, spec: GeneratedDatasetSpec, folder: Path, gone_above: Sequence[str]
) -> tuple[Workload, Compared | None, Compared | None]:
    """Work of batches that are not done, and what a run would do to the rows of the snapshot: now, and once rows of the
    step before with the ids `gone_above` have gone. Raises SourceError."""
    placed = at_its_place(spec, seen.instance, seen.store.objects)
    anew = [key for key, one in ledger.ledger_versions(seen.instance, spec.name).items() if one.anew]
    work = WorkloadEstimator(placed, seen.store, folder).look(anew)
    with temporary_folder() as workdir:
        compared = compare(placed, seen.store, workdir=workdir, base=folder, name_gone=True)
    if compared is None or not gone_above:
        return work, compared, compared
    with temporary_folder() as table, temporary_folder() as workdir, contextlib.suppress(SourceError):
        later = without_rows(placed, gone_above, table, folder)
        return work, compared, compare(later, seen.store, workdir=workdir, base=folder, name_gone=True)
    return work, compared, compared  # nothing would be left: the step itself will say so


def _cost(spec: GeneratedDatasetSpec, work: Workload, rows: int) -> float | None:
    return _usd(spec, replace(work, rows=rows, all_rows=max(rows, work.all_rows))) if rows else 0.0


def _count(rows: int) -> str:
    return "1 row is" if rows == 1 else f"{rows:,} rows are"


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
    for name in ("rows to ask", "new", "changed", "never asked", "removed", "$"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for one in plans:
        numbers = (one.rows, one.new, one.changed, one.never_asked, one.removed + one.removed_with)
        usd = "?" if one.usd is None else format_usd(one.usd, fine=True)
        table.add_row(one.dataset, *(f"{number:,}" for number in numbers), usd, "; ".join(one.notes))
    return table
