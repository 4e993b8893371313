"""The fleet of the DAGSTER_HOME of this environment."""

from __future__ import annotations

from pathlib import Path

from batch_assets import settings
from batch_assets.local_dagster.home import prepare_home
from resources.fleet.resource import GpuFleet


def fleet_of(home: Path, database: str) -> GpuFleet:
    """The fleet of a DAGSTER_HOME in a database."""
    return GpuFleet(database=database, home=str(home), config_path=str(settings.fleet_config()))


def the_fleet() -> GpuFleet:
    """The fleet of this DAGSTER_HOME, which is made where there is none."""
    return fleet_of(prepare_home(), settings.fleet_database())
