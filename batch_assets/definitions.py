"""Root of the code location: every dataset of `defs/`, and what they share."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg

from batch_assets import settings
from batch_assets.capacity import capacity_sensor
from batch_assets.declared import declared, foreign_folder
from batch_assets.generated_dataset import dataset_definitions
from batch_assets.loopback import keep_loopback_direct
from batch_assets.sensors import reaper, watchdog
from batch_assets.spend import bookkeeper, spend
from resources.fleet import GpuFleet
from resources.objects import checked_root
from resources.store import BatchStore


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions."""
    keep_loopback_direct(os.environ)
    if foreign_folder() is None:
        datasets = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    else:
        datasets = dg.Definitions.merge(*(dataset_definitions(*found) for found in declared().values()))
    return dg.Definitions.merge(datasets, platform())


def _database() -> str:
    """The fleet's database as configuration, which the UI shows: one of the environment by the variable's name."""
    return dg.EnvVar(settings.FLEET_DB) if os.environ.get(settings.FLEET_DB) else settings.fleet_database()


def platform() -> dg.Definitions:
    """Resources, sensors, executor and the table of spend: the same for every dataset."""
    return dg.Definitions(
        assets=[spend],
        sensors=[watchdog, reaper, bookkeeper, capacity_sensor(declared, settings.capacity_seconds())],
        executor=dg.in_process_executor,
        resources={
            "store": BatchStore(root=checked_root(settings.store_root())),
            "fleet": GpuFleet(
                database=_database(),
                home=str(settings.dagster_home()),
                config_path=str(settings.fleet_config()),
            ),
        },
    )
