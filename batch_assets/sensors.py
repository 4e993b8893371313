"""The sensors: launcher and publisher of each dataset, one watchdog for all. They read, decide, and say why."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from batch_assets import ledger
from batch_assets.backfills import open_backfill, range_runs
from batch_assets.dead_letters import dead_batches
from batch_assets.launcher import (
    CANCELED_TAG,
    REDRIVE_TAG,
    REFRESH_TAG,
    REQUEST_TAG,
    RangeRunRecord,
    plan_launch,
    run_size,
)
from batch_assets.lost_workers import lost_workers, repository_label
from batch_assets.rows import ENDPOINT_TAG
from batch_assets.spec import GeneratedDatasetSpec
from batch_assets.wishes import WISH_TAGS, WishError, wishes
from gpu_runner.fleet import RunBeat
from gpu_runner.targets import DatasetTarget
from resources.fleet import GpuFleet
from resources.store import BatchEntry, BatchStore, CorruptObject, DatasetStore

PUBLISH_TAG = "batch/publish"
PUBLISH_VOID_TAG = "batch/publish_void"  # on a publication whose table was lost, or that failed before a new request
PUBLISH_ATTEMPTS = 3
SECONDS = 5
SPARE_RUNS = 3
UNPLANNED_INSTANCES = 8  # until the capacity sensor has planned
RETRY_PRIORITY = "10"
QUEUE_LOOK = 100
_NOT_ASKED = "{} batches are missing, but nobody asked for this snapshot: start {}_refresh to generate them"
ALIVE = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)


class SnapshotCache:
    """The batch list of the current snapshot, read again only when the snapshot changed: 80,000 lines cost 0.1 s."""

    def __init__(self) -> None:
        self._snapshot: str | None = None
        self._entries: list[BatchEntry] = []

    def entries(self, store: DatasetStore) -> tuple[str | None, list[BatchEntry]]:
        """Current snapshot id and its batches; (None, []) before the first."""
        snapshot = store.current_snapshot()
        if snapshot is not None and snapshot != self._snapshot:
            self._snapshot, self._entries = snapshot, store.entries(snapshot)
        return (snapshot, self._entries) if snapshot is not None else (None, [])


def latest_request(instance: dg.DagsterInstance, tag: str, dataset: str) -> dg.DagsterRun | None:
    """The newest successful run that asked for work on the dataset."""
    found = instance.get_runs(dg.RunsFilter(tags={tag: dataset}, statuses=[dg.DagsterRunStatus.SUCCESS]), limit=1)
    return found[0] if found else None


def snapshot_asked(instance: dg.DagsterInstance, request: dg.DagsterRun) -> str | None:
    """The snapshot that a request was made for, as its own materialization says; None when that was wiped."""
    for entry in instance.all_logs(request.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        found = entry.asset_materialization.metadata.get("snapshot") if entry.asset_materialization else None
        if found is not None:
            return str(found.value)
    return None


@dataclass(frozen=True, slots=True)
class Request:
    """A run that asked for work, and what is at work on the dataset's batches, for it or for others.

    Read before the ledger. The other way round, a run that ends in between has its last batches neither in flight nor
    in the ledger, and they are started again.
    """

    asked_by: dg.DagsterRun
    runs: list[RangeRunRecord]
    backfill_open: bool

    @classmethod
    def newest(cls, instance: dg.DagsterInstance, tag: str, dataset: str) -> "Request | None":
        """The newest request of this kind; None before the first."""
        run = latest_request(instance, tag, dataset)
        if run is None:
            return None
        return cls(run, range_runs(instance, dataset, run.run_id), open_backfill(instance, dataset))


def launcher_sensor(spec: GeneratedDatasetSpec) -> dg.SensorDefinition:
    """Starts packed range runs for what a refresh, `batch-assets run` or a re-drive wants."""
    cache = SnapshotCache()

    @dg.sensor(
        name=f"{spec.name}_launcher",
        asset_selection=dg.AssetSelection.assets(ledger.rows_key(spec.name)),
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Starts runs for the batches that a refresh or re-drive wants.",
    )
    def launcher(context: dg.SensorEvaluationContext, store: BatchStore, fleet: GpuFleet) -> dg.SensorResult:
        refresh = Request.newest(context.instance, REFRESH_TAG, spec.name)
        redrive = Request.newest(context.instance, REDRIVE_TAG, spec.name)
        if refresh is None and redrive is None:
            return dg.SensorResult(skip_reason="nothing was requested")
        try:
            snapshot, entries = cache.entries(store.dataset(spec.name))
        except CorruptObject as error:
            return dg.SensorResult(skip_reason=str(error))
        versions = ledger.ledger_versions(context.instance, spec.name)
        missing = [entry for entry in entries if not _current(versions.get(entry.key), entry)]
        launches: list[dg.RunRequest] = []
        reasons: list[str] = []
        if refresh is not None:
            asked = _asked(context.instance, refresh, snapshot) if missing else True
            wanted = [entry.key for entry in missing] if asked else []
            found, reason = _launch(context.instance, spec, fleet, refresh, wanted, {})
            launches, reasons = found, [reason if asked else _NOT_ASKED.format(len(missing), spec.name)]
        if redrive is not None and not missing:
            try:
                dead = dead_batches(store.dataset(spec.name))
            except CorruptObject as error:
                return dg.SensorResult(skip_reason=str(error))
            wanted = dead if dead and _asked(context.instance, redrive, snapshot) else []
            found, reason = _launch(context.instance, spec, fleet, redrive, wanted, {"redrive": True})
            launches, reasons = launches + found, [*reasons, f"re-drive: {reason}"]
        said = f"snapshot {snapshot}: {'; '.join(reasons)}"
        context.log.info(said) if launches else None
        return dg.SensorResult(run_requests=launches) if launches else dg.SensorResult(skip_reason=said)

    return launcher


def _asked(instance: dg.DagsterInstance, request: Request, snapshot: str | None) -> bool:
    """A request is for one snapshot: making `prompts` anew by hand spends nothing, a re-drive is no standing order."""
    return snapshot_asked(instance, request.asked_by) in (None, snapshot)


def _current(version: ledger.LedgerVersion | None, entry: BatchEntry) -> bool:
    return version is not None and version.data_version == entry.data_version


def _launch(
    instance: dg.DagsterInstance,
    spec: GeneratedDatasetSpec,
    fleet: GpuFleet,
    request: Request,
    wanted: Sequence[str],
    config: dict[str, bool],
) -> tuple[list[dg.RunRequest], str]:
    """Run requests for the wanted batches of one request, and the reason in words."""
    asked_by, runs = request.asked_by, request.runs
    if not wanted:
        return [], "nothing is missing"
    if CANCELED_TAG in asked_by.tags:
        return [], "this request was canceled: start it again to go on"
    if config.get("redrive"):
        tried = [run.keys for run in runs if run.request == asked_by.run_id and run.outcome == "succeeded"]
        wanted = [key for key in wanted if not any(key in keys for keys in tried)]
    with fleet.open_book() as book:
        target = book.target(spec.name)
    room = (1 if target is None else target.instances) + SPARE_RUNS
    launch = plan_launch(
        asked_by.run_id,
        instance.get_dynamic_partitions(spec.name),
        dict.fromkeys(wanted),
        runs,
        backfill_open=request.backfill_open,
        batches_per_run=run_size(spec.batches_per_run, len(wanted), _at_once(spec, asked_by, target)),
        room=room,
    )
    own = sum(run.request == asked_by.run_id for run in runs)
    copied = {key: asked_by.tags[key] for key in (ENDPOINT_TAG, *WISH_TAGS) if key in asked_by.tags}
    op = ledger.rows_key(spec.name).to_python_identifier()
    requests = [
        dg.RunRequest(
            run_key=f"{asked_by.run_id}:{keys.first}:{keys.last}:{own + number}",
            asset_selection=[ledger.rows_key(spec.name)],
            run_config={"ops": {op: {"config": config}}} if config else {},
            tags={
                REQUEST_TAG: asked_by.run_id,
                ledger.RANGE_START_TAG: keys.first,
                ledger.RANGE_END_TAG: keys.last,
                **copied,
            },
        )
        for number, keys in enumerate(launch.ranges)
    ]
    return requests, launch.reason


def _at_once(spec: GeneratedDatasetSpec, asked_by: dg.DagsterRun, target: DatasetTarget | None) -> int | None:
    """How many instances the request may come to use at once; None where nothing presses."""
    try:
        wanted = wishes(spec, asked_by.tags)
    except WishError:
        return None  # its runs will say so
    if wanted.deadline is None and wanted.objective == "cheapest":
        return None
    planned = target.plan.get("instances_wanted") if target is not None else None
    most = wanted.max_instances or UNPLANNED_INSTANCES
    return min(most, planned) if planned else most


def publisher_sensor(
    spec: GeneratedDatasetSpec, job: UnresolvedAssetJobDefinition, *, expects_news: bool = False
) -> dg.SensorDefinition:
    """Publishes the table when every batch of the current snapshot is in the ledger at its data version.

    `expects_news`: a new table is awaited after each refresh, also of one that changed nothing.
    """
    cache = SnapshotCache()

    @dg.sensor(
        name=f"{spec.name}_publisher",
        job=job,
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Publishes the table when every batch of the snapshot is there.",
    )
    def publisher(context: dg.SensorEvaluationContext, store: BatchStore) -> dg.RunRequest | dg.SkipReason:
        try:
            snapshot, entries = cache.entries(store.dataset(spec.name))
        except CorruptObject as error:
            return dg.SkipReason(str(error))
        if snapshot is None:
            return dg.SkipReason("no snapshot yet")
        # Before the ledger: what a run reports while we look is then in it, or the run is still under way here.
        under_way = [run for run in range_runs(context.instance, spec.name, "") if run.outcome == "unfinished"]
        versions = ledger.ledger_versions(context.instance, spec.name)
        missing = sum(not _current(versions.get(entry.key), entry) for entry in entries)
        if missing:
            return dg.SkipReason(f"snapshot {snapshot}: {missing} of {len(entries)} batches are missing")
        if under_way:
            return dg.SkipReason(
                f"snapshot {snapshot} is complete; {len(under_way)} runs over its batches are under way"
            )
        state = ledger_state(snapshot, entries, versions)
        runs = _publishing(context.instance, state, spec.name if expects_news else None)
        if any(run.status == dg.DagsterRunStatus.SUCCESS for run in runs):
            return dg.SkipReason(f"snapshot {snapshot} is published")
        if any(not run.is_finished or ledger.will_be_retried(run) for run in runs):
            return dg.SkipReason(f"snapshot {snapshot} is being published")
        if len(runs) >= PUBLISH_ATTEMPTS:
            return dg.SkipReason(f"publishing snapshot {snapshot} failed {len(runs)} times: see job {job.name}")
        number = context.instance.get_runs_count(dg.RunsFilter(tags={PUBLISH_TAG: state}))
        return dg.RunRequest(run_key=f"{state}:{number}", tags={PUBLISH_TAG: state})

    return publisher


def _publishing(instance: dg.DagsterInstance, state: str, dataset: str | None) -> list[dg.DagsterRun]:
    """Newest runs that published this state. With a `dataset`, only those since its last refresh: where a table is
    awaited on a schedule, a refresh that changed nothing publishes it again, so that Dagster calls it fresh."""
    records = instance.get_run_records(dg.RunsFilter(tags={PUBLISH_TAG: state}), limit=PUBLISH_ATTEMPTS)
    since = 0.0
    if dataset is not None:
        done = dg.RunsFilter(tags={REFRESH_TAG: dataset}, statuses=[dg.DagsterRunStatus.SUCCESS])
        since = max((found.end_time or 0.0 for found in instance.get_run_records(done, limit=1)), default=0.0)
    found_since = [found.dagster_run for found in records if found.create_timestamp.timestamp() >= since]
    return [run for run in found_since if PUBLISH_VOID_TAG not in run.tags]


def ledger_state(snapshot: str, entries: Sequence[BatchEntry], versions: dict[str, ledger.LedgerVersion]) -> str:
    """Hash of the snapshot and of every batch's newest generation: changes with each regenerate and re-drive."""
    digest = hashlib.sha256(snapshot.encode())
    for entry in entries:
        digest.update(f"{entry.key}:{entry.data_version}:{versions[entry.key].generation};".encode())
    return digest.hexdigest()[:16]


@dg.sensor(
    name="watchdog",
    minimum_interval_seconds=SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Fails runs whose heartbeat stopped, so that they are retried and their slots and leases are free.",
)
def watchdog(context: dg.SensorEvaluationContext, fleet: GpuFleet) -> dg.SkipReason:
    """Dagster itself never notices a worker that died together with its code server."""
    found: list[str] = []
    with fleet.open_book() as book:
        for beat in book.runs():
            if beat.age > 2 * fleet.ttl:
                found += _end_silent_run(context.instance, beat)
                book.release_run(beat.run_id)
                book.end_run(beat.run_id)
        beating = {beat.run_id for beat in book.runs()}
    for run, pid in lost_workers(context.instance, repository_label(context), beating):
        found += _end_run(context.instance, run, f"process {pid} is gone, and its code server with it")
    found += _let_retries_go_first(context.instance)
    alive = len(beating)
    return dg.SkipReason("; ".join(found) or f"{alive} runs, all of them alive")


def _let_retries_go_first(instance: dg.DagsterInstance) -> Iterator[str]:
    """A retry continues work that is half done; Dagster gives it the priority of the run that was lost."""
    for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]), limit=QUEUE_LOOK):
        if ledger.RETRY_NUMBER_TAG in run.tags and ledger.PRIORITY_TAG not in run.tags and _is_ours(run):
            instance.add_run_tags(run.run_id, {ledger.PRIORITY_TAG: RETRY_PRIORITY})
            yield f"retry {run.run_id[:8]} goes first"


def _is_ours(run: dg.DagsterRun) -> bool:
    return any(key.path[-1] == "rows" for key in run.asset_selection or ())


@dg.sensor(
    name="reaper",
    minimum_interval_seconds=SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Ends what is rented and of no more use: expired leases, idle, unknown and lost instances.",
)
def reaper(context: dg.SensorEvaluationContext, fleet: GpuFleet) -> dg.SkipReason:
    """Nothing rented outlives its lease by more than the TTL and one sweep, whatever died."""
    with fleet.open_book() as book:
        said = fleet.sweep(book)
        standing = book.fleet()
    for sentence in said:
        context.log.info(sentence)
    return dg.SkipReason("; ".join(said) or f"{len(standing)} instances, nothing to do")


def _end_silent_run(instance: dg.DagsterInstance, beat: RunBeat) -> Iterator[str]:
    run = instance.get_run_by_id(beat.run_id)
    if run is None or run.status not in ALIVE:
        return
    message = f"no heartbeat for {beat.age:.0f} s (last: {beat.state}, {beat.rows_done} rows); the worker is gone"
    yield from _end_run(instance, run, message)


def _end_run(instance: dg.DagsterInstance, run: dg.DagsterRun, message: str) -> Iterator[str]:
    if run.status == dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, message)
    else:
        instance.report_run_failed(run, message)
    yield f"run {run.run_id[:8]}: {message}"
