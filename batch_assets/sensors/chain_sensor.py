"""The sensor that takes a chain of refreshes on: when the table of a step is published, the next step reads it. Where
the step wants more accepted rows (`want`), it is refreshed once more before that and reads more of its source.

With `source.streaming`, it reads before that what is committed so far: the first batches without a gap, so that rows
come in the order of the table, and each snapshot goes on where the one before ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import UNFINISHED, range_runs
from batch_assets.catalog.progress import dead_end
from batch_assets.catalog.publications import ledger_state, publish_runs
from batch_assets.catalog.run_errors import failed_checks
from batch_assets.dagster_internals import UnresolvedAssetJobDefinition
from batch_assets.filtering.wanted_rows import standing
from batch_assets.orchestration.source_place import CommittedPart
from batch_assets.orchestration.trial import wanted_entries
from batch_assets.sensors.instance import WOKEN_SECONDS, instance_of
from batch_assets.sensors.many_datasets import Rounds, TickOutcome
from batch_assets.snapshot.cache import SnapshotCache
from batch_assets.spec.chain import round_of, steps_to, wanting
from batch_assets.spec.endpoint_limits import LIMIT_TAGS
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.tags import (
    ACCEPT_GATES_TAG,
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
    STREAMING_TAG,
    UPSTREAM_TAG,
)
from resources.store.dataset_store import BatchStore

LOOKED_AT = 20  # refreshes of a dataset
PAUSE = 2.0  # between two snapshots of rows so far, in times of what the first one took: at 20 million rows, minutes
# From one step to the next. Its deadline and budget are its own share, which it finds out itself.
HANDED_ON = (
    *(UPSTREAM_TAG, CHAIN_TAG, CHAIN_SINCE_TAG, CHAIN_DEADLINE_TAG, CHAIN_BUDGET_TAG),
    *(ENDPOINT_TAG, SIMULATE_TAG, OBJECTIVE_TAG, INSTANCES_TAG, *LIMIT_TAGS),
)
TO_NEXT_ROUND = (*HANDED_ON, ACCEPT_GATES_TAG, AUTOMATIC_TAG)  # of the same step, which reads more of its source


def chain_sensor(
    specs: Mapping[str, GeneratedDatasetSpec], jobs: Mapping[str, UnresolvedAssetJobDefinition], store: BatchStore
) -> dg.SensorDefinition:
    """One sensor for all datasets. `jobs`: what refreshes each that reads the table of another one, or wants rows."""
    rounds = Rounds(sorted(specs))
    caches = {name: SnapshotCache() for name in specs}

    @dg.sensor(
        name="chain",
        jobs=list(jobs.values()),
        minimum_interval_seconds=WOKEN_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Refreshes the next dataset of a chain when the table that it reads is published (batch-assets run "
        "NAME --upstream, or the job NAME_refresh_upstream), and one that wants more accepted rows once more.",
    )
    def chain(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        instance, begun = instance_of(context), set[str]()

        def look(name: str) -> TickOutcome:
            found = _look(instance, name, specs, store, caches)
            chains = {one.tags[CHAIN_TAG] for one in found.requests}
            if chains & begun:  # one refresh of a chain at a time: each counts on what the others leave of the budget
                return TickOutcome("another step of its chain is refreshed first", "open")
            begun.update(chains)
            return found

        return rounds.tick(context, instance, look)

    return chain


def _look(
    instance: dg.DagsterInstance,
    name: str,
    specs: Mapping[str, GeneratedDatasetSpec],
    store: BatchStore,
    caches: Mapping[str, SnapshotCache],
) -> TickOutcome:
    """Whether the step after one dataset is to be started now."""
    if (wants := wanting(specs, name)) is not None:
        more = _one_more_round(instance, name, wants, specs, store, caches[name])
        if more is not None:
            return more
    request = newest_refresh(instance, name)
    last = request.tags.get(UPSTREAM_TAG) if request is not None else None
    if request is None or last is None or CHAIN_TAG not in request.tags:
        return TickOutcome("no chain")
    steps = steps_to(specs, last) if last in specs else []
    if name not in steps[:-1]:
        return TickOutcome("the end of its chain")
    following = steps[steps.index(name) + 1]
    chain = request.tags[CHAIN_TAG]
    asked = instance.get_run_records(dg.RunsFilter(tags={CHAIN_TAG: chain, REFRESH_TAG: following}))
    key = f"{chain}:{following}"
    if _in_rounds(specs, name, following):  # each round refreshes it anew
        since = instance.get_run_record_by_id(request.run_id)
        asked = [one for one in asked if since is None or one.create_timestamp >= since.create_timestamp]
        key += f":{request.run_id}"
    if any(STREAMING_TAG not in one.dagster_run.tags for one in asked):
        return TickOutcome(f"{following} was started")
    if CANCELED_TAG in request.tags:
        return TickOutcome(f"canceled: {following} is not started")
    published = published_by(instance, name, store, caches[name])
    if published is None and specs[following].source.streaming:
        return _stream(instance, request, specs[following], store, caches, asked)
    if published is None:
        return TickOutcome(f"{following} waits for its table", "open")
    if _under_way(instance, chain):  # also of the same step, which would have the last word
        return TickOutcome(f"its table is published: {following} waits for a refresh of its chain", "open")
    if errors := failed_checks(instance, published)[0]:
        return TickOutcome(f"failed checks: {'; '.join(errors)}: {following} is not started", "blocked")
    tags = {tag: request.tags[tag] for tag in HANDED_ON if tag in request.tags}
    started = dg.RunRequest(run_key=key, job_name=f"{following}_refresh", tags=tags)
    return TickOutcome(f"its table is published: refreshing {following}", "open", [started])


def _one_more_round(
    instance: dg.DagsterInstance,
    name: str,
    wants: GeneratedDatasetSpec,
    specs: Mapping[str, GeneratedDatasetSpec],
    store: BatchStore,
    cache: SnapshotCache,
) -> TickOutcome | None:
    """Whether a dataset that wants rows which `name` accepts is to be refreshed once more; None where that is not the
    question: a table is awaited, or it has them."""
    request = newest_refresh(instance, name, automatic=True)
    if request is None or CHAIN_TAG not in request.tags or CANCELED_TAG in request.tags:
        return None
    published = published_by(instance, name, store, cache)
    if published is None:
        return None
    chain = request.tags[CHAIN_TAG]
    found = standing(wants, store.for_sensor(wants.name), specs)
    if found is None:
        return None
    if found.round is None:
        return TickOutcome("its rows are not all judged", "open")
    if said := found.said():
        return TickOutcome(said, "blocked")
    if not found.grows:
        return None
    if _under_way(instance, chain):
        return TickOutcome("a refresh of its chain is under way", "open")
    if errors := failed_checks(instance, published)[0]:
        return TickOutcome(f"failed checks: {'; '.join(errors)}: no more rows are asked", "blocked")
    tags = {tag: request.tags[tag] for tag in TO_NEXT_ROUND if tag in request.tags}
    more = dg.RunRequest(
        run_key=f"{chain}:{wants.name}:{sum(found.round.limits.values())}",
        job_name=f"{wants.name}_refresh",
        tags=tags,
        run_config=request.run_config if name == wants.name else None,
    )
    return TickOutcome(f"{found.accepted:,} of {found.made:,} rows were accepted: reading more", "open", [more])


def _in_rounds(specs: Mapping[str, GeneratedDatasetSpec], name: str, following: str) -> bool:
    """Whether one step follows another in each round of a dataset that wants accepted rows."""
    rounds = (round_of(specs, one) for one in specs.values() if one.want is not None)
    return any(name in steps and following in steps for steps in rounds)


def _under_way(instance: dg.DagsterInstance, chain: str) -> bool:
    """Whether a refresh of the chain has not ended."""
    runs = instance.get_runs(dg.RunsFilter(tags={CHAIN_TAG: chain}, statuses=UNFINISHED))
    return any(REFRESH_TAG in run.tags for run in runs)


def _stream(
    instance: dg.DagsterInstance,
    request: dg.DagsterRun,
    following: GeneratedDatasetSpec,
    store: BatchStore,
    caches: Mapping[str, SnapshotCache],
    asked: Sequence[dg.RunRecord],
) -> TickOutcome:
    """Whether the step after one that is not complete is to read the rows that are committed there so far."""
    name, chain = request.tags[REFRESH_TAG], request.tags[CHAIN_TAG]
    waits = TickOutcome(f"{following.name} waits for its table", "open")
    if _under_way(instance, chain):
        return TickOutcome(f"{following.name} waits for a refresh of its chain", "open")
    data = store.for_sensor(following.name)
    snapshot, entries = caches[following.name].entries(data)
    before = None if snapshot is None else data.manifest(snapshot)
    if before is not None and before.streaming is None:  # rows that it had keep their places
        return waits
    part = CommittedPart.of(instance, store.for_sensor(name), caches[name])
    if part is None:
        return waits
    tags = {STREAMING_TAG: "true"}
    missing = ledger.missing(wanted_entries(entries, tags), ledger.ledger_versions(instance, following.name))
    if asked and not _may_follow(instance, asked[0], following.name, [one.key for one in missing]):
        return waits
    read = before.streaming.read if before is not None and before.streaming is not None else 0
    each = before.rows / read if before is not None and read else following.samples
    new, left = part.so_far.read - read, sum(one.rows for one in missing)
    if not worth_reading(read, new, round(new * each), left, following):
        return TickOutcome(f"{following.name} has read {read:,} rows, {new:,} more are committed", "open")
    tags |= {tag: request.tags[tag] for tag in HANDED_ON if tag in request.tags}
    started = dg.RunRequest(
        run_key=f"{chain}:{following.name}:{part.so_far.read}", job_name=f"{following.name}_refresh", tags=tags
    )
    return TickOutcome(f"{part.so_far}: {following.name} reads them", "open", [started])


def worth_reading(read: int, new: int, makes: int, left: int, spec: GeneratedDatasetSpec) -> bool:
    """Whether a snapshot is to be made of rows so far. `read` by the last one, `new` since, which make about `makes` of
    its own; `left`: to be asked.

    At least an eighth more each time, so that all snapshots together are at most nine times the last one; and when
    there is little work left, so that what is read is asked at once.
    """
    whole = spec.batches_per_run * spec.batch_rows
    enough = 2 * spec.batch_rows if not left else whole  # of two batches one is full, whatever was in the last one
    return left < whole and makes >= enough and 8 * new >= read


def _may_follow(instance: dg.DagsterInstance, newest: dg.RunRecord, dataset: str, missing: Sequence[str]) -> bool:
    """Whether rows so far may be read once more: the last time it went well, all that came of it, and some time ago."""
    run, ended = newest.dagster_run, newest.end_time or newest.update_timestamp.timestamp()
    began = newest.start_time or newest.create_timestamp.timestamp()
    if run.status != dg.DagsterRunStatus.SUCCESS or CANCELED_TAG in run.tags:
        return False
    if time.time() - ended < PAUSE * (ended - began):
        return False
    return not dead_end(missing, range_runs(instance, dataset, run.run_id), run.run_id, backfill_open=False)


def newest_refresh(instance: dg.DagsterInstance, dataset: str, *, automatic: bool = False) -> dg.DagsterRun | None:
    """The newest refresh that a person, a schedule or a chain has asked for: one of the automation ends no chain.
    `automatic`: or the automation."""
    done = dg.RunsFilter(tags={REFRESH_TAG: dataset}, statuses=[dg.DagsterRunStatus.SUCCESS])
    return next(
        (run for run in instance.get_runs(done, limit=LOOKED_AT) if automatic or AUTOMATIC_TAG not in run.tags), None
    )


def published_by(instance: dg.DagsterInstance, dataset: str, store: BatchStore, cache: SnapshotCache) -> str | None:
    """The run that published the table of the dataset's snapshot as it is now; None before."""
    snapshot, entries = cache.entries(store.for_sensor(dataset))
    versions = ledger.ledger_versions(instance, dataset)
    if snapshot is None or ledger.missing(entries, versions):
        return None
    done = publish_runs(dataset, ledger_state(snapshot, entries, versions), dg.DagsterRunStatus.SUCCESS)
    return next((run.run_id for run in instance.get_runs(done) if PUBLISH_VOID_TAG not in run.tags), None)
