"""Root of the code location: every dataset of `defs/`, and what they share."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from batch_assets import settings
from batch_assets.assets import freshness
from batch_assets.capacity import Datasets, capacity_sensor
from batch_assets.declared import check_files, declared, foreign_folder
from batch_assets.generated_dataset import dataset_definitions
from batch_assets.launcher_sensor import launcher_sensor
from batch_assets.loopback import keep_loopback_direct
from batch_assets.publisher_sensor import publish_job, publisher_sensor
from batch_assets.reaper_sensor import reaper_sensor
from batch_assets.reconcile_sensor import reconcile_sensor
from batch_assets.spend import bookkeeper, spend
from batch_assets.watchdog_sensor import watchdog_sensor
from resources.fleet import GpuFleet
from resources.objects import checked_root
from resources.store import BatchStore


def the_fleet() -> GpuFleet:
    """The fleet of this DAGSTER_HOME."""
    return _fleet(settings.fleet_database())


def _fleet(database: str) -> GpuFleet:
    return GpuFleet(database=database, home=str(settings.dagster_home()), config_path=str(settings.fleet_config()))


def _shown_fleet() -> GpuFleet:
    """The same as a resource. The UI shows its configuration: of a database of the environment the variable's name."""
    return _fleet(dg.EnvVar(settings.FLEET_DB)) if os.environ.get(settings.FLEET_DB) else the_fleet()


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions."""
    keep_loopback_direct(os.environ)
    found = declared()
    if foreign_folder() is None:
        check_files(Path(__file__).parent / "defs")
        datasets = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    else:
        datasets = dg.Definitions.merge(*(dataset_definitions(*one) for one in found.values()))
    return dg.Definitions.merge(datasets, platform(datasets, found))


def platform(
    datasets: dg.Definitions | None = None,
    found: Datasets | None = None,
    store: BatchStore | None = None,
    fleet: GpuFleet | None = None,
) -> dg.Definitions:
    """Resources, sensors, executor and the table of spend: the same for every dataset.

    `found` are the specs of `datasets`. Store and fleet are those of the settings unless others are given.
    """
    datasets, found = datasets or dg.Definitions(), found or {}
    store, shown = store or BatchStore(root=checked_root(settings.store_root())), fleet or _shown_fleet()
    fleet = fleet or the_fleet()
    jobs = {job.name: job for job in datasets.jobs or () if isinstance(job, UnresolvedAssetJobDefinition)}
    specs = {name: spec for name, (spec, _) in found.items() if publish_job(name) in jobs}
    publishing = {name: jobs[publish_job(name)] for name in specs}
    awaited = [name for name, spec in specs.items() if freshness(spec) is not None]
    own = [launcher_sensor(specs, store, fleet), publisher_sensor(publishing, store, expecting_news=awaited)]
    return dg.Definitions(
        assets=[spend],
        sensors=[
            *(own if specs else ()),
            watchdog_sensor(fleet),
            reaper_sensor(fleet),
            bookkeeper,
            capacity_sensor(declared, settings.capacity_seconds()),
            reconcile_sensor(declared, store),
        ],
        executor=dg.in_process_executor,
        resources={"store": store, "fleet": shown},
    )
