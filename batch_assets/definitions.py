"""Root of the code location: every dataset of `defs/`, and what they share."""

from __future__ import annotations

import os
from collections.abc import Callable

import dagster as dg

from batch_assets import settings
from batch_assets.backups.schedule import backup_asset, backup_job, backup_schedule
from batch_assets.catalog.publications import publish_job
from batch_assets.dagster_internals import UnresolvedAssetJobDefinition
from batch_assets.dataset_loading import load_datasets
from batch_assets.kubernetes.run_workers import read_worker_sizes
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.local_dagster.loopback import keep_loopback_direct
from batch_assets.orchestration.cost_report import cost_report_sensor, spend
from batch_assets.orchestration.freshness import freshness
from batch_assets.orchestration.front_door.api_batches import api_batches
from batch_assets.orchestration.front_door.billing_report import billing, billing_report_sensor
from batch_assets.sensors.capacity_sensor import capacity_sensor
from batch_assets.sensors.chain_sensor import chain_sensor
from batch_assets.sensors.launcher_sensor import launcher_sensor
from batch_assets.sensors.liveness_sensor import watchdog_sensor
from batch_assets.sensors.open_datasets import Datasets
from batch_assets.sensors.publisher_sensor import publisher_sensor
from batch_assets.sensors.reaper_sensor import reaper_sensor
from batch_assets.sensors.reconcile_sensor import reconcile_sensor
from batch_assets.spec.chain import upstream_of
from batch_assets.spec.discovery import known_datasets
from resources.fleet.resource import GpuFleet
from resources.objects.opening import checked_root
from resources.store.dataset_store import BatchStore

VALIDATION = "DAGSTER_IS_DEFS_VALIDATION_CLI"  # set by `dg check defs` and `dagster definitions validate`


def the_fleet() -> GpuFleet:
    """The fleet of this DAGSTER_HOME."""
    return _fleet(settings.fleet_database())


def _fleet(database: str) -> GpuFleet:
    return fleet_of(settings.dagster_home(), database)


def _shown_fleet() -> GpuFleet:
    """The same as a resource. The UI shows its configuration: of a database of the environment the variable's name."""
    return _fleet(dg.EnvVar(settings.FLEET_DB)) if os.environ.get(settings.FLEET_DB) else the_fleet()


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions. A file that cannot be used is an asset that says so; for `dg check defs` it is an error."""
    keep_loopback_direct(os.environ)
    loaded = load_datasets()
    if os.environ.get(VALIDATION) and loaded.broken:
        raise loaded.broken[0].error
    datasets = dg.Definitions.merge(*loaded.parts)
    return dg.Definitions.merge(datasets, platform(datasets, loaded.datasets))


def platform(
    datasets: dg.Definitions | None = None,
    found: Datasets | None = None,
    store: BatchStore | None = None,
    fleet: GpuFleet | None = None,
    known: Callable[[], Datasets] | None = None,
) -> dg.Definitions:
    """Resources, sensors, executor and the table of spend: the same for every dataset.

    `found` are the specs of `datasets`. Store and fleet are those of the settings unless others are given. `known`: in
    a code location beside the platform's own, the datasets that are looked after there; what is of all stays out.
    """
    datasets, found = datasets or dg.Definitions(), found or {}
    store, shown = store or BatchStore(root=checked_root(settings.store_root())), fleet or _shown_fleet()
    fleet = fleet or the_fleet()
    jobs = {job.name: job for job in datasets.jobs or () if isinstance(job, UnresolvedAssetJobDefinition)}
    specs = {name: spec for name, (spec, _) in found.items() if publish_job(name) in jobs}
    publishing = {name: jobs[publish_job(name)] for name in specs}
    awaited = [name for name, spec in specs.items() if freshness(spec) is not None]
    workers = read_worker_sizes(settings.run_workers_file())
    launcher = launcher_sensor(specs, store, fleet, workers)
    own = [launcher, publisher_sensor(publishing, store, expecting_news=awaited)]
    looked_after = known or known_datasets
    goes_on = [name for name, spec in specs.items() if spec.want is not None or upstream_of(spec, specs)]
    chained = {name: jobs[f"{name}_refresh"] for name in goes_on}
    own += [chain_sensor(specs, chained, store)] if chained else []
    return dg.Definitions(
        assets=[] if known else [spend, api_batches, billing, backup_asset],
        jobs=[] if known else [backup_job],
        schedules=[] if known else [backup_schedule()],
        sensors=[
            *(own if specs else ()),
            watchdog_sensor(fleet),
            reaper_sensor(fleet),
            *(() if known else (cost_report_sensor, billing_report_sensor)),
            capacity_sensor(looked_after, settings.capacity_seconds()),
            reconcile_sensor(looked_after, store),
        ],
        executor=dg.in_process_executor,
        resources={"store": store, "fleet": shown},
    )
