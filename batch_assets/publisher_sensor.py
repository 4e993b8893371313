"""The sensor that publishes a table when every batch of its snapshot is in the ledger at its data version."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from batch_assets import ledger
from batch_assets.backfills import range_runs
from batch_assets.launcher import REFRESH_TAG
from batch_assets.rounds import Look, Rounds
from batch_assets.sensor_instance import SECONDS, instance_of
from batch_assets.snapshot_cache import SnapshotCache
from resources.store import BatchEntry, BatchStore

PUBLISH_TAG = "batch/publish"
PUBLISH_VOID_TAG = "batch/publish_void"  # on a publication whose table was lost, or that failed before a new request
PUBLISH_ATTEMPTS = 3


def publish_job(dataset: str) -> str:
    """Name of the job that publishes the table."""
    return f"{dataset}_publish"


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
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Publishes the table of any dataset when every batch of its snapshot is there.",
    )
    def publisher(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        instance = instance_of(context)
        return rounds.tick(
            context, instance, lambda name: _look(instance, name, store, caches[name], name in expecting_news)
        )

    return publisher


def _look(instance: dg.DagsterInstance, dataset: str, store: BatchStore, cache: SnapshotCache, news: bool) -> Look:
    """Whether one dataset's table is to be published now."""
    snapshot, entries = cache.entries(store.for_sensor(dataset))
    if snapshot is None:
        return Look("no snapshot yet")
    # Before the ledger: what a run reports while we look is then in it, or the run is still under way here.
    under_way = [run for run in range_runs(instance, dataset, "") if run.outcome == "unfinished"]
    versions = ledger.ledger_versions(instance, dataset)
    missing = sum(not ledger.is_current(versions.get(entry.key), entry) for entry in entries)
    if missing:
        return Look(f"snapshot {snapshot}: {missing} of {len(entries)} batches are missing")
    if under_way:
        return Look(f"snapshot {snapshot} is complete; {len(under_way)} runs over its batches are under way", "open")
    state = ledger_state(snapshot, entries, versions)
    runs = _publishing(instance, dataset, state, since_refresh=news)
    if any(run.status == dg.DagsterRunStatus.SUCCESS for run in runs):
        return Look(f"snapshot {snapshot} is published")
    if any(not run.is_finished or ledger.will_be_retried(run) for run in runs):
        return Look(f"snapshot {snapshot} is being published", "open")
    if len(runs) >= PUBLISH_ATTEMPTS:
        said = f"publishing snapshot {snapshot} failed {len(runs)} times: see job {publish_job(dataset)}"
        return Look(said, "blocked")
    number = instance.get_runs_count(publish_runs(dataset, state))
    request = dg.RunRequest(
        run_key=f"{dataset}:{state}:{number}", job_name=publish_job(dataset), tags={PUBLISH_TAG: state}
    )
    return Look(f"snapshot {snapshot} is complete: publishing it", "open", [request])


def publish_runs(dataset: str, state: str, *statuses: dg.DagsterRunStatus) -> dg.RunsFilter:
    """Runs that published this state of the dataset; of any status where none is given.

    Its job too: two datasets of the same rows have the same state.
    """
    return dg.RunsFilter(job_name=publish_job(dataset), tags={PUBLISH_TAG: state}, statuses=list(statuses) or None)


def _publishing(instance: dg.DagsterInstance, dataset: str, state: str, *, since_refresh: bool) -> list[dg.DagsterRun]:
    """Newest runs that published this state. `since_refresh`: only those since the last refresh. Where a table is
    awaited on a schedule, a refresh that changed nothing publishes it again, so that Dagster calls it fresh."""
    records = instance.get_run_records(publish_runs(dataset, state), limit=PUBLISH_ATTEMPTS)
    since = 0.0
    if since_refresh:
        done = dg.RunsFilter(tags={REFRESH_TAG: dataset}, statuses=[dg.DagsterRunStatus.SUCCESS])
        since = max((found.end_time or 0.0 for found in instance.get_run_records(done, limit=1)), default=0.0)
    found_since = [found.dagster_run for found in records if found.create_timestamp.timestamp() >= since]
    return [run for run in found_since if PUBLISH_VOID_TAG not in run.tags]


def ledger_state(snapshot: str, entries: Sequence[BatchEntry], versions: Mapping[str, ledger.LedgerVersion]) -> str:
    """Hash of the snapshot and of every batch's newest generation: changes with each regenerate and re-drive."""
    digest = hashlib.sha256(snapshot.encode())
    for entry in entries:
        digest.update(f"{entry.key}:{entry.data_version}:{versions[entry.key].generation};".encode())
    return digest.hexdigest()[:16]
