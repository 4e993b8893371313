"""The sensor that takes a chain of refreshes on: when the table of a step is published, the next step reads it."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.publications import ledger_state, publish_runs
from batch_assets.catalog.run_errors import failed_checks
from batch_assets.dagster_internals import UnresolvedAssetJobDefinition
from batch_assets.sensors.instance import SECONDS, instance_of
from batch_assets.sensors.many_datasets import Rounds, TickOutcome
from batch_assets.snapshot.cache import SnapshotCache
from batch_assets.spec.chain import steps_to
from batch_assets.spec.endpoint_limits import LIMIT_TAGS
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.tags import (
    AUTOMATIC_TAG,
    CANCELED_TAG,
    CHAIN_BUDGET_TAG,
    CHAIN_DEADLINE_TAG,
    CHAIN_SINCE_TAG,
    CHAIN_TAG,
    ENDPOINT_TAG,
    INSTANCES_TAG,
    OBJECTIVE_TAG,
    PUBLISH_VOID_TAG,
    REFRESH_TAG,
    SIMULATE_TAG,
    UPSTREAM_TAG,
)
from resources.store.dataset_store import BatchStore

LOOKED_AT = 20  # refreshes of a dataset
# From one step to the next. Its deadline and budget are its own share, which it finds out itself.
HANDED_ON = (
    *(UPSTREAM_TAG, CHAIN_TAG, CHAIN_SINCE_TAG, CHAIN_DEADLINE_TAG, CHAIN_BUDGET_TAG),
    *(ENDPOINT_TAG, SIMULATE_TAG, OBJECTIVE_TAG, INSTANCES_TAG, *LIMIT_TAGS),
)


def chain_sensor(
    specs: Mapping[str, GeneratedDatasetSpec], jobs: Mapping[str, UnresolvedAssetJobDefinition], store: BatchStore
) -> dg.SensorDefinition:
    """One sensor for all datasets. `jobs`: what refreshes each that reads the table of another one."""
    rounds = Rounds(sorted(specs))
    caches = {name: SnapshotCache() for name in specs}

    @dg.sensor(
        name="chain",
        jobs=list(jobs.values()),
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Refreshes the next dataset of a chain when the table that it reads is published "
        "(`batch-assets run NAME --upstream`, or the job `NAME_refresh_upstream`).",
    )
    def chain(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        instance = instance_of(context)
        return rounds.tick(context, instance, lambda name: _look(instance, name, specs, store, caches[name]))

    return chain


def _look(
    instance: dg.DagsterInstance,
    name: str,
    specs: Mapping[str, GeneratedDatasetSpec],
    store: BatchStore,
    cache: SnapshotCache,
) -> TickOutcome:
    """Whether the step after one dataset is to be started now."""
    request = newest_refresh(instance, name)
    last = request.tags.get(UPSTREAM_TAG) if request is not None else None
    if request is None or last is None or CHAIN_TAG not in request.tags:
        return TickOutcome("no chain")
    steps = steps_to(specs, last) if last in specs else []
    if name not in steps[:-1]:
        return TickOutcome("the end of its chain")
    following = steps[steps.index(name) + 1]
    chain = request.tags[CHAIN_TAG]
    if instance.get_runs(dg.RunsFilter(tags={CHAIN_TAG: chain, REFRESH_TAG: following}), limit=1):
        return TickOutcome(f"{following} was started")
    if CANCELED_TAG in request.tags:
        return TickOutcome(f"canceled: {following} is not started")
    published = published_by(instance, name, store, cache)
    if published is None:
        return TickOutcome(f"{following} waits for its table", "open")
    if errors := failed_checks(instance, published)[0]:
        return TickOutcome(f"failed checks: {'; '.join(errors)}: {following} is not started", "blocked")
    tags = {tag: request.tags[tag] for tag in HANDED_ON if tag in request.tags}
    started = dg.RunRequest(run_key=f"{chain}:{following}", job_name=f"{following}_refresh", tags=tags)
    return TickOutcome(f"its table is published: refreshing {following}", "open", [started])


def newest_refresh(instance: dg.DagsterInstance, dataset: str) -> dg.DagsterRun | None:
    """The newest refresh that a person, a schedule or a chain has asked for: one of the automation ends no chain."""
    done = dg.RunsFilter(tags={REFRESH_TAG: dataset}, statuses=[dg.DagsterRunStatus.SUCCESS])
    return next((run for run in instance.get_runs(done, limit=LOOKED_AT) if AUTOMATIC_TAG not in run.tags), None)


def published_by(instance: dg.DagsterInstance, dataset: str, store: BatchStore, cache: SnapshotCache) -> str | None:
    """The run that published the table of the dataset's snapshot as it is now; None before."""
    snapshot, entries = cache.entries(store.for_sensor(dataset))
    versions = ledger.ledger_versions(instance, dataset)
    if snapshot is None or ledger.missing(entries, versions):
        return None
    done = publish_runs(dataset, ledger_state(snapshot, entries, versions), dg.DagsterRunStatus.SUCCESS)
    return next((run.run_id for run in instance.get_runs(done) if PUBLISH_VOID_TAG not in run.tags), None)
