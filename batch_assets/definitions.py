"""Root of the code location: every dataset of `defs/`, and what they share."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from batch_assets import settings
from batch_assets.capacity import capacity_sensor
from batch_assets.declared import check_files, declared, foreign_folder
from batch_assets.generated_dataset import dataset_definitions
from batch_assets.sensors import reaper, watchdog
from batch_assets.spend import bookkeeper, spend
from resources.fleet import GpuFleet
from resources.store import BatchStore


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions."""
    if foreign_folder() is None:
        check_files(Path(__file__).parent / "defs")
        datasets = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    else:
        datasets = dg.Definitions.merge(*(dataset_definitions(*found) for found in declared().values()))
    return dg.Definitions.merge(datasets, platform())


def platform() -> dg.Definitions:
    """Resources, sensors, executor and the table of spend: the same for every dataset."""
    return dg.Definitions(
        assets=[spend],
        sensors=[watchdog, reaper, bookkeeper, capacity_sensor(declared, settings.capacity_seconds())],
        executor=dg.in_process_executor,
        resources={
            "store": BatchStore(root=settings.store_root()),
            "fleet": GpuFleet(
                database=settings.fleet_database(),
                home=str(settings.dagster_home()),
                config_path=str(settings.fleet_config()),
            ),
        },
    )
