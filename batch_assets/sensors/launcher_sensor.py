"""The sensor that starts packed range runs for what a refresh, `batch-assets run` or a re-drive wants."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import dagster as dg

from batch_assets.catalog import ledger
from batch_assets.catalog.backfills import latest_request, open_backfill, range_runs, snapshot_asked
from batch_assets.catalog.ranges import KeyRange, RangeRunRecord
from batch_assets.kubernetes.run_workers import WorkerSizes
from batch_assets.orchestration.launch_plan import plan_launch, run_size
from batch_assets.orchestration.trial import wanted_entries
from batch_assets.publishing.dead_letters import dead_batches
from batch_assets.sensors.instance import WOKEN_SECONDS, fleet_database_of, instance_of
from batch_assets.sensors.many_datasets import Rounds, TickOutcome
from batch_assets.snapshot.cache import SnapshotCache
from batch_assets.spec.endpoint_limits import LIMIT_TAGS
from batch_assets.spec.models import GeneratedDatasetSpec
from batch_assets.spec.request_options import OPTION_TAGS, InvalidTag, request_options
from batch_assets.tags import (
    CANCELED_TAG,
    ENDPOINT_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    REDRIVE_ERROR_TAG,
    REDRIVE_TAG,
    REFRESH_TAG,
    REQUEST_TAG,
    ROWS_TAG,
    SIMULATE_TAG,
)
from gpu_runner.fleet_database.targets import DatasetTarget
from resources.fleet.resource import FleetConfigError, GpuFleet
from resources.store.dataset_store import BatchEntry, BatchStore

SPARE_RUNS = 3
UNPLANNED_INSTANCES = 8  # until the capacity sensor has planned
COPIED_TAGS = (ENDPOINT_TAG, SIMULATE_TAG, ROWS_TAG, *OPTION_TAGS, *LIMIT_TAGS)  # from a request to its runs
_NOT_ASKED = "{} batches are missing, but nobody asked for this snapshot: start {}_refresh to generate them"
NO_SIZES = WorkerSizes()
Targeted = Callable[[str], DatasetTarget | None]  # what the fleet's database says of a dataset
CatalogEntry = tuple[int, ledger.LedgerVersion]  # storage id of a batch's newest event, and what it says


def launcher_sensor(
    specs: Mapping[str, GeneratedDatasetSpec], store: BatchStore, fleet: GpuFleet, workers: WorkerSizes = NO_SIZES
) -> dg.SensorDefinition:
    """One sensor for all datasets. It needs no cursor: a new process finds what is wanted in the catalog.

    `workers`: CPU and memory of a run's worker by the size of its range, where runs are pods.
    """
    rounds = Rounds(sorted(specs))
    caches = {name: SnapshotCache() for name in specs}

    @dg.sensor(
        name="launcher",
        asset_selection=dg.AssetSelection.assets(*(ledger.rows_key(name) for name in sorted(specs))),
        minimum_interval_seconds=WOKEN_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Starts runs for the batches that a refresh or re-drive of any dataset wants.",
    )
    def launcher(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        instance = instance_of(context)

        def target(name: str) -> DatasetTarget | None:
            with fleet_database_of(context, fleet) as fleet_db:
                return fleet_db.target(name)

        def look(name: str) -> TickOutcome:
            found = _look(instance, specs[name], store, fleet, caches[name], target)
            sized = [
                request.with_replaced_attrs(tags={**request.tags, **workers.tags(batches)})
                for request, batches in zip(found.requests, found.batches, strict=True)
            ]
            return replace(found, requests=sized)

        return rounds.tick(context, instance, look)

    return launcher


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
    def newest(cls, instance: dg.DagsterInstance, tag: str, dataset: str) -> Request | None:
        """The newest request of this kind; None before the first."""
        run = latest_request(instance, tag, dataset)
        if run is None:
            return None
        return cls(run, range_runs(instance, dataset, run.run_id), open_backfill(instance, dataset))


def _look(
    instance: dg.DagsterInstance,
    spec: GeneratedDatasetSpec,
    store: BatchStore,
    fleet: GpuFleet,
    cache: SnapshotCache,
    target: Targeted,
) -> TickOutcome:
    """What one dataset wants started now."""
    refresh = Request.newest(instance, REFRESH_TAG, spec.name)
    redrive = Request.newest(instance, REDRIVE_TAG, spec.name)
    if refresh is None and redrive is None:
        return TickOutcome("nothing was requested")
    data = store.for_sensor(spec.name)
    snapshot, entries = cache.entries(data)
    known = ledger.ledger_entries(instance, spec.name)
    missing = [entry for entry in entries if not _has(known, entry)]
    looks: list[TickOutcome] = []
    if refresh is not None:
        own = {entry.key for entry in wanted_entries(entries, refresh.asked_by.tags)}
        wanted = [entry.key for entry in missing if entry.key in own]
        if wanted and not _asked(instance, refresh, snapshot):
            looks.append(TickOutcome(_NOT_ASKED.format(len(wanted), spec.name), "blocked"))
        else:
            repair = _lost_since(instance, spec.name, [known.get(key) for key in wanted])
            looks.append(_launch(instance, spec, fleet, target, refresh, wanted, {}, repair=repair))
    if redrive is not None and not missing:
        error = redrive.asked_by.tags.get(REDRIVE_ERROR_TAG, "")
        dead = dead_batches(data, error)
        wanted = dead if dead and _asked(instance, redrive, snapshot) else []
        found = _launch(
            instance,
            spec,
            fleet,
            target,
            redrive,
            wanted,
            {"redrive": True, **({"redrive_error": error} if error else {})},
        )
        looks.append(TickOutcome(f"re-drive: {found.reason}", found.state, found.requests, found.batches))
    states = [look.state for look in looks]
    return TickOutcome(
        f"snapshot {snapshot}: {'; '.join(look.reason for look in looks)}",
        next((state for state in ("open", "blocked") if state in states), "settled"),
        [request for look in looks for request in look.requests],
        [count for look in looks for count in look.batches],
    )


def _has(known: Mapping[str, CatalogEntry], entry: BatchEntry) -> bool:
    found = known.get(entry.key)
    return ledger.is_current(None if found is None else found[1], entry)


def _lost_since(instance: dg.DagsterInstance, dataset: str, wanted: Sequence[CatalogEntry | None]) -> bool:
    """Whether all that is wanted was lost after the dataset was asked for last: a repair (`launch_plan`)."""
    lost = [found[0] for found in wanted if found is not None and found[1].void]
    if not lost or len(lost) < len(wanted):
        return False
    asked = instance.fetch_materializations(ledger.prompts_key(dataset), limit=1).records
    return not asked or min(lost) > asked[0].storage_id


def _asked(instance: dg.DagsterInstance, request: Request, snapshot: str | None) -> bool:
    """A request is for one snapshot: making `prompts` anew by hand spends nothing, a re-drive is no standing order."""
    return snapshot_asked(instance, request.asked_by) in (None, snapshot)


def _launch(
    instance: dg.DagsterInstance,
    spec: GeneratedDatasetSpec,
    fleet: GpuFleet,
    targeted: Targeted,
    request: Request,
    wanted: Sequence[str],
    config: Mapping[str, bool | str],
    *,
    repair: bool = False,
) -> TickOutcome:
    """Run requests for the wanted batches of one request, and the reason in words. `repair`: see `launch_plan`; with a
    deadline ahead it is work like other work.
    """
    asked_by, runs = request.asked_by, request.runs
    if not wanted:
        return TickOutcome("nothing is missing")
    if CANCELED_TAG in asked_by.tags:
        return TickOutcome("this request was canceled: start it again to go on", "blocked")
    if config.get("redrive"):
        tried = [run.keys for run in runs if run.request == asked_by.run_id and run.outcome == "succeeded"]
        wanted = [key for key in wanted if not any(key in keys for keys in tried)]
    target = targeted(spec.name)
    repair = repair and (target is None or target.deadline_at is None)
    known: list[str] = []

    def keys() -> Sequence[str]:
        known.extend(instance.get_dynamic_partitions(spec.name))
        return known

    at_once = None if repair else _at_once(spec, asked_by, target, fleet)
    launch = plan_launch(
        asked_by.run_id,
        keys,
        dict.fromkeys(wanted),
        runs,
        backfill_open=request.backfill_open,
        batches_per_run=run_size(spec.batches_per_run, len(wanted), at_once),
        room=(1 if target is None else target.instances) + SPARE_RUNS,
        repair=repair,
    )
    own = sum(run.request == asked_by.run_id for run in runs)
    requests = [
        _run_request(spec.name, asked_by, found, own + number, config) for number, found in enumerate(launch.ranges)
    ]
    sizes = [sum(key in found for key in known) for found in launch.ranges]
    return TickOutcome(launch.reason, launch.state, requests, sizes)


def _run_request(
    dataset: str, asked_by: dg.DagsterRun, keys: KeyRange, number: int, config: Mapping[str, bool | str]
) -> dg.RunRequest:
    """A run over a range, or some batches of it. Its key has the run id of the request: no two datasets share one."""
    copied = {key: asked_by.tags[key] for key in COPIED_TAGS if key in asked_by.tags}
    op = ledger.rows_key(dataset).to_python_identifier()
    config = {**config, **({} if keys.only is None else {"only": " ".join(sorted(keys.only))})}
    return dg.RunRequest(
        run_key=f"{asked_by.run_id}:{keys.first}:{keys.last}:{number}",
        asset_selection=[ledger.rows_key(dataset)],
        run_config={"ops": {op: {"config": config}}} if config else {},
        tags={
            REQUEST_TAG: asked_by.run_id,
            RANGE_START_TAG: keys.first,
            RANGE_END_TAG: keys.last,
            **copied,
        },
    )


def _at_once(
    spec: GeneratedDatasetSpec, asked_by: dg.DagsterRun, target: DatasetTarget | None, fleet: GpuFleet
) -> int | None:
    """How many instances the request may come to use at once; None where nothing presses."""
    try:
        wanted = request_options(spec, asked_by.tags)
    except InvalidTag:
        return None  # its runs will say so
    if wanted.deadline is None and wanted.objective == "cheapest":
        return None
    planned = target.plan.instances_wanted if target is not None and target.plan is not None else 0
    most = wanted.max_instances or UNPLANNED_INSTANCES
    if (engines := _engines(spec, asked_by, fleet)) is not None:
        most = min(most, engines)
    # A plan begins with one instance, to measure it. One run with all batches would leave nothing to a second one.
    return min(most, max(planned, 2)) if planned else most


def _engines(spec: GeneratedDatasetSpec, asked_by: dg.DagsterRun, fleet: GpuFleet) -> int | None:
    """How many engines there are for the request; None where more can be rented, or fleet.yaml cannot be used."""
    if asked_by.tags.get(ENDPOINT_TAG) or os.environ.get("BATCH_ASSETS_ENDPOINT"):
        return 1
    try:
        config = fleet.config()
        if config.rented or config.simulated is not None:
            return None
        return len(config.engines_for(spec.model, None, spec.engine))
    except FleetConfigError:
        return None
