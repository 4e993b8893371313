"""What `run --regenerate` says before it asks: how many rows are asked again, and what that will cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from batch_assets import settings
from batch_assets.capacity_planning.decision import words
from batch_assets.capacity_planning.planner_input import FleetView, propose
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.catalog import ledger
from batch_assets.cli.user_errors import CommandError
from batch_assets.local_dagster.local_fleet import the_fleet
from batch_assets.orchestration.made_anew import Regeneration
from batch_assets.orchestration.trial import wanted_entries
from batch_assets.request_status.dataset_status import observing
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.tags import ENDPOINT_TAG, ROWS_TAG
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.types import ControlTiming
from resources.fleet.hosted_engines import hosted_engines
from resources.store.dataset_store import BatchObject


def regeneration_words(
    spec: GeneratedDatasetSpec, folder: Path, wanted: Regeneration, tags: Mapping[str, str], endpoint: str | None
) -> str:
    """Rows, tokens and cost of a regeneration. Raises CommandError where there is nothing to ask again.

    `tags`: those of the request, of which the wishes and the rows of a trial count.
    """
    with observing([spec.name]) as (seen,):
        snapshot = seen.store.current_snapshot()
        if snapshot is None:
            raise CommandError(f"{spec.name}: nothing was generated yet; leave --regenerate out")
        entries, reports = seen.store.entries(snapshot), seen.reports()
        found = list(wanted.counts(seen.store, wanted_entries(entries, tags), reports))
        rows = sum(count for _, count in found)
        if not rows:
            raise CommandError(f"{spec.name}: --where: no row of a committed batch meets {wanted.where!r}")
        versions = {key: report.version for key, report in reports.items()}
        committed = [
            BatchObject(entry.key, entry.data_version, versions[entry.key].generation)
            for entry in entries
            if ledger.is_current(versions.get(entry.key), entry)
        ]
        work, _ = WorkloadEstimator(spec, seen.store, folder).left(snapshot, rows, committed)
    batches = "1 batch" if len(found) == 1 else f"{len(found):,} batches"
    return (
        f"{spec.name}: {rows:,} of {sum(entry.rows for entry in entries):,} rows, in {batches}, are asked again: about "
        f"{work.tokens:,.0f} tokens; {_cost(spec, work, {**tags}, endpoint)}. What they are now stays in the store "
        "until you delete it, and leaves the table"
    )


def _cost(spec: GeneratedDatasetSpec, work: Workload, tags: dict[str, str], endpoint: str | None) -> str:
    fleet = the_fleet()
    config = fleet.config()
    hosted = hosted_engines(config, spec.model, endpoint, spec.engine)
    if endpoint:
        tags[ENDPOINT_TAG] = endpoint
    if not hosted and (endpoint or config.engines_for(spec.model, None, spec.engine)):
        return "by an engine that stands there anyway, whose price is not known here"
    tags.pop(ROWS_TAG, None)
    with fleet.open_database() as fleet_db:
        timing = ControlTiming.of_sensor(settings.capacity_seconds())
        plan = propose(FleetView.look(fleet, fleet_db), fleet_db, spec, work, tags, timing).plan
    return plan.reason if plan.chosen is None else words(plan.chosen)


def confirm(said: str, *, yes: bool) -> None:
    """Show it and ask. Raises CommandError where nobody can be asked, and typer.Abort for a no."""
    sys.stderr.write(f"{said}\n")
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError("--regenerate asks first, and there is no terminal: add --yes")
    typer.confirm("Ask these rows again?", abort=True, err=True)
