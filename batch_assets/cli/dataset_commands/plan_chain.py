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
from batch_assets.cli.dataset_commands.plan import played_words, unusable_user
from batch_assets.cli.output import output_console, print_json
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.orchestration.source_place import COPIED_ROWS, at_its_place, store_of, without_rows
from batch_assets.publishing.published_table import published_table
from batch_assets.request_status.dataset_status import Observer, observing
from batch_assets.snapshot.builder import Compared, compare, removed_rows
from batch_assets.snapshot.source.errors import ConditionError, SourceError
from batch_assets.spec.discovery import Datasets
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.errors import UserFacingError
from gpu_runner.money import format_usd
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.types import ControlTiming
from resources.fleet.resource import FleetConfig
from resources.objects.opening import CorruptObject, temporary_folder

NAMED_ROWS = 100_000  # of those that go: ids of so many are held in memory


@dataclass(frozen=True, slots=True)
class GoneRows:
    """Ids of the rows of a step that go. `untold`: why these are not known; "": all are here."""

    ids: Sequence[str] = ()
    untold: str = ""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows of one dataset that a run would ask: `new` in its source, `changed` there or in its file, and `never_asked`:
    in batches of the snapshot that are not done. `usd`: their median cost; None: not planned.

    `removed`: rows of the snapshot that its source does not have any more, which go; `removed_with`: those that go
    because rows of the step before, `upstream`, do; None: that is not known, `untold` says why. `gone`: both, by their
    ids, for the step after it. `more_from`: the step before is to be run first, and what it makes comes on top.
    `problem`: why nothing is known, or why a run would not begin.
    """

    dataset: str
    new: int = 0
    changed: int = 0
    never_asked: int = 0
    usd: float | None = None
    more_from: str | None = None
    problem: str = ""
    removed: int = 0
    removed_with: int | None = 0
    upstream: str = ""
    untold: str = ""
    gone: GoneRows = GoneRows()

    @property
    def rows(self) -> int:
        """Rows that would be asked as far as it is known now."""
        return self.new + self.changed + self.never_asked

    @property
    def removed_words(self) -> str:
        """How many rows go, for people."""
        if self.removed_with is not None:
            return f"{self.removed + self.removed_with:,}"
        return f"at least {self.removed:,}" if self.removed else "not told"

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
        if self.untold:
            said.append(f"how many go with rows of {self.upstream} is not told: {self.untold}")
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
        fleet, config = the_fleet(), _fleet_config()
        if config is None:
            return cls({}, ())
        try:
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
    config = _fleet_config()
    with observing(steps) as observers:
        for seen, name in zip(observers, steps, strict=True):
            before = found[-1] if found else None
            waits = before is not None and bool(before.rows or before.more_from or before.problem)
            more_from = before.dataset if before is not None and waits else None
            plan = _plan(seen, *datasets[name], before, more_from, NAMED_ROWS if name != steps[-1] else 0)
            if config is not None and (unusable := unusable_user(datasets[name][0], config)):
                plan = replace(plan, problem="; ".join(filter(None, [plan.problem, unusable])))
            found.append(plan)
    return found


def _fleet_config() -> FleetConfig | None:
    """fleet.yaml; None where it is broken."""
    try:
        return the_fleet().config()
    except UserFacingError:
        return None


def _plan(
    seen: Observer,
    spec: GeneratedDatasetSpec,
    folder: Path,
    before: StepPlan | None,
    more_from: str | None,
    most_named: int,
) -> StepPlan:
    gone = GoneRows() if before is None else before.gone
    try:
        work, now, then = _work(seen, spec, folder, gone.ids, 0 if gone.untold else most_named)
    except SourceError as error:
        snapshot, is_made = seen.store.current_snapshot(), more_from is not None and not _has_source(seen, spec)
        if is_made and snapshot is None:
            return StepPlan(spec.name, more_from=more_from)
        if is_made and seen.source_counts(snapshot).streaming is not None:  # rows that were read so far
            work = WorkloadEstimator(spec, seen.store, folder).look()
            return StepPlan(spec.name, 0, 0, work.rows, _usd(spec, work) if work.rows else 0.0, more_from)
        found = StepPlan(spec.name, more_from=more_from, removed_with=None, gone=GoneRows(untold=untold_of(spec)))
        stands = more_from is None or isinstance(error, ConditionError) or bool(error.rejects)
        return replace(found, problem=str(error)) if stands else found  # the table above is to be another one
    if now is None:
        return StepPlan(spec.name, 0, 0, work.rows, _cost(spec, work, work.rows), more_from, "; ".join(work.problems))
    later, untold = (now, then) if isinstance(then, str) else (then, gone.untold)
    counts, removed = later.counts, removed_rows(spec, now.counts)
    removed_with = None if untold else max(0, removed_rows(spec, counts) - removed)
    return StepPlan(
        dataset=spec.name,
        new=counts.added,
        changed=counts.changed,
        never_asked=work.rows,
        usd=_cost(spec, work, work.rows + counts.to_ask),
        more_from=more_from,
        problem="; ".join(work.problems),
        removed=removed,
        removed_with=removed_with,
        upstream="" if before is None else before.dataset,
        untold=untold,
        gone=_gone(spec, later, untold),
    )


def _has_source(seen: Observer, spec: GeneratedDatasetSpec) -> bool:
    """Whether the table that a dataset reads of another one is published."""
    if spec.source.dataset is None:
        return True
    try:
        return published_table(store_of(spec.source, seen.store.objects)) is not None
    except CorruptObject:
        return True


def untold_of(spec: GeneratedDatasetSpec) -> str:
    """Why nothing is told of the rows below a step."""
    return f"which rows of {spec.name} go is not known"


def _gone(spec: GeneratedDatasetSpec, found: Compared, untold: str) -> GoneRows:
    """The rows of a step that go, for the one after it."""
    if untold:
        return GoneRows(untold=untold_of(spec))
    rows, changed = removed_rows(spec, found.counts), found.counts.added and found.counts.removed
    if changed and not spec.has_ids:
        return GoneRows(untold=f"without ids, a row of {spec.name} that is changed is another one")
    if rows > NAMED_ROWS:
        return GoneRows(untold=f"more than {NAMED_ROWS:,} rows of {spec.name} go")
    if len(found.gone) == rows:
        return GoneRows(found.gone)
    return GoneRows(untold=f"the snapshot of {spec.name} is damaged: `batch-assets verify {spec.name}` says where")


def _work(
    seen: Observer, spec: GeneratedDatasetSpec, folder: Path, gone_above: Sequence[str], most_named: int
) -> tuple[Workload, Compared | None, Compared | str]:
    """Work of batches that are not done, and what a run would do to the rows of the snapshot: now, and once rows of the
    step before with the ids `gone_above` have gone, or why that is not known. Raises SourceError."""
    placed = at_its_place(spec, seen.instance, seen.store.objects)
    anew = [key for key, one in ledger.ledger_versions(seen.instance, spec.name).items() if one.anew]
    work = WorkloadEstimator(placed, seen.store, folder).look(anew)
    with temporary_folder() as workdir:
        now = compare(placed, seen.store, workdir=workdir, base=folder, most_named=0 if gone_above else most_named)
    if now is None or not gone_above:
        return work, now, now or ""
    with temporary_folder() as table, temporary_folder() as workdir, contextlib.suppress(SourceError):
        later = without_rows(placed, gone_above, table, folder)
        if later is None:
            return work, now, f"its source has more than {COPIED_ROWS:,} rows"
        then = compare(later, seen.store, workdir=workdir, base=folder, most_named=most_named)
        return work, now, then or now
    return work, now, "no row of its source that is there now would be left"


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
        numbers = (one.rows, one.new, one.changed, one.never_asked)
        usd = "?" if one.usd is None else format_usd(one.usd, fine=True)
        figures = (*(f"{number:,}" for number in numbers), one.removed_words, usd)
        table.add_row(one.dataset, *figures, "; ".join(one.notes))
    return table
