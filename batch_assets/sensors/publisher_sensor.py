"""The sensor that publishes a table when every batch of its snapshot is in the ledger at its data version.

It also reports the table's check `batches_current`, when that changes: what an interrupted refresh has left is
materialized, as far as Dagster knows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import range_runs
from batch_assets.catalog.publications import PUBLISH_ATTEMPTS, ledger_state, publish_job, publish_runs
from batch_assets.dagster_internals import UnresolvedAssetJobDefinition
from batch_assets.orchestration.asset_checks import StaleBatches
from batch_assets.sensors.instance import WOKEN_SECONDS, instance_of
from batch_assets.sensors.many_datasets import Rounds, TickOutcome
from batch_assets.snapshot.cache import SnapshotCache
from batch_assets.tags import PUBLISH_TAG, PUBLISH_VOID_TAG, REFRESH_TAG
from resources.store.dataset_store import BatchStore


def publisher_sensor(
    jobs: Mapping[str, UnresolvedAssetJobDefinition], store: BatchStore, *, expecting_news: Collection[str] = ()
) -> dg.SensorDefinition:
    """One sensor for all datasets; `jobs`: what publishes each.

    `expecting_news`: a new table of these is awaited after each refresh, also of one that changed nothing.
    """
    rounds = Rounds(sorted(jobs))
    caches = {name: SnapshotCache() for name in jobs}

    @dg.sensor(
        name="publisher",
        jobs=list(jobs.values()),
        minimum_interval_seconds=WOKEN_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Publishes the table of any dataset when every batch of its snapshot is there.",
    )
    def publisher(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        instance, reports = instance_of(context), StaleReports.since(context.cursor, jobs)

        def look(name: str) -> TickOutcome:
            return _look(instance, name, store, caches[name], name in expecting_news, reports)

        return reports.told_with(rounds.tick(context, instance, look))

    return publisher


@dataclass(slots=True)
class StaleReports:
    """Checks to report: what is new since the last tick. `told`: what was said last of each table that is not current.
    Dagster keeps it in the sensor's cursor, together with the events: neither is lost alone.
    """

    told: dict[str, str]
    events: list[dg.AssetCheckEvaluation] = field(default_factory=list)

    @classmethod
    def since(cls, cursor: str | None, datasets: Collection[str]) -> StaleReports:
        """As the last tick left it; of datasets that are gone nothing is kept."""
        try:
            found = json.loads(cursor or "{}")
        except ValueError:
            found = {}
        known = found if isinstance(found, dict) else {}
        return cls({name: str(said) for name, said in known.items() if name in datasets})

    def saw(self, dataset: str, stale: StaleBatches) -> None:
        """Counts are told when no run changes them."""
        said = f"{stale.snapshot}:{'making' if stale.making else len(stale.keys)}" if stale.keys else ""
        if said != self.told.get(dataset, ""):
            self.told[dataset] = said
            self.events.append(stale.event(dataset))

    def told_with(self, found: dg.SensorResult) -> dg.SensorResult:
        """The tick's result with these checks."""
        cursor = json.dumps({name: said for name, said in self.told.items() if said})
        return dg.SensorResult(
            run_requests=found.run_requests, skip_reason=found.skip_reason, asset_events=self.events, cursor=cursor
        )


def _look(
    instance: dg.DagsterInstance,
    dataset: str,
    store: BatchStore,
    cache: SnapshotCache,
    news: bool,
    reports: StaleReports,
) -> TickOutcome:
    """Whether one dataset's table is to be published now."""
    data = store.for_sensor(dataset)
    snapshot, entries = cache.entries(data)
    if snapshot is None:
        return TickOutcome("no snapshot yet")
    # Before the ledger: what a run reports while we look is then in it, or the run is still under way here.
    under_way = [run for run in range_runs(instance, dataset, "") if run.outcome == "unfinished"]
    versions = ledger.ledger_versions(instance, dataset)
    reports.saw(dataset, StaleBatches.of(snapshot, entries, versions, making=bool(under_way)))
    if missing := len(ledger.missing(entries, versions)):
        return TickOutcome(f"snapshot {snapshot}: {missing} of {len(entries)} batches are missing")
    if under_way:
        return TickOutcome(
            f"snapshot {snapshot} is complete; {len(under_way)} runs over its batches are under way", "open"
        )
    if (so_far := data.manifest(snapshot).streaming) is not None:
        return TickOutcome(f"snapshot {snapshot} was made of {so_far}: no table before all are there")
    state = ledger_state(snapshot, entries, versions)
    runs = _publishing(instance, dataset, state, since_refresh=news)
    if any(run.dagster_run.status == dg.DagsterRunStatus.SUCCESS for run in runs):
        return TickOutcome(f"snapshot {snapshot} is published")
    if any(not run.dagster_run.is_finished or ledger.will_be_retried(run, time.time()) for run in runs):
        return TickOutcome(f"snapshot {snapshot} is being published", "open")
    if len(runs) >= PUBLISH_ATTEMPTS:
        said = f"publishing snapshot {snapshot} failed {len(runs)} times: see job {publish_job(dataset)}"
        return TickOutcome(said, "blocked")
    number = instance.get_runs_count(publish_runs(dataset, state))
    request = dg.RunRequest(
        run_key=f"{dataset}:{state}:{number}", job_name=publish_job(dataset), tags={PUBLISH_TAG: state}
    )
    return TickOutcome(f"snapshot {snapshot} is complete: publishing it", "open", [request])


def _publishing(instance: dg.DagsterInstance, dataset: str, state: str, *, since_refresh: bool) -> list[dg.RunRecord]:
    """Newest runs that published this state. `since_refresh`: only those since the last refresh. Where a table is
    awaited on a schedule, a refresh that changed nothing publishes it again, so that Dagster calls it fresh."""
    records = instance.get_run_records(publish_runs(dataset, state), limit=PUBLISH_ATTEMPTS)
    since = 0.0
    if since_refresh:
        done = dg.RunsFilter(tags={REFRESH_TAG: dataset}, statuses=[dg.DagsterRunStatus.SUCCESS])
        since = max((found.end_time or 0.0 for found in instance.get_run_records(done, limit=1)), default=0.0)
    found_since = [found for found in records if found.create_timestamp.timestamp() >= since]
    return [found for found in found_since if PUBLISH_VOID_TAG not in found.dagster_run.tags]
