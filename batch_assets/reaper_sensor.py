"""The sensor that ends what is rented and of no more use."""

from __future__ import annotations

import dagster as dg

from batch_assets.sensor_instance import CARE_SECONDS
from resources.fleet import GpuFleet


def reaper_sensor(fleet: GpuFleet) -> dg.SensorDefinition:
    """Nothing rented outlives its lease by more than the TTL and one sweep, whatever died."""

    @dg.sensor(
        name="reaper",
        minimum_interval_seconds=CARE_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Ends what is rented and of no more use: expired leases, idle, unknown and lost instances.",
    )
    def reaper(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        with fleet.open_book() as book:
            said = fleet.sweep(book)
            standing = book.fleet()
        for sentence in said:
            context.log.info(sentence)
        return dg.SkipReason("; ".join(said) or f"{len(standing)} instances, nothing to do")

    return reaper
