"""The sensor that ends what is rented and of no more use."""

from __future__ import annotations

import dagster as dg

from batch_assets.sensors.instance import SECONDS, fleet_database_of
from resources.fleet.resource import GpuFleet


def reaper_sensor(fleet: GpuFleet) -> dg.SensorDefinition:
    """Nothing rented outlives its lease by more than the TTL and one sweep, whatever died."""

    @dg.sensor(
        name="reaper",
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Ends what is rented and of no more use: expired leases, idle, unknown and lost instances.",
    )
    def reaper(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        with fleet_database_of(context, fleet) as fleet_db:
            said = fleet.sweep(fleet_db)
            standing = fleet_db.fleet()
        for sentence in said:
            context.log.info(sentence)
        return dg.SkipReason("; ".join(said) or f"{len(standing)} instances, nothing to do")

    return reaper
