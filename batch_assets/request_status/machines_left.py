"""What stands of a dataset's machines when its request is given up: which stays, until when, at which cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo

from batch_assets.durations import duration
from gpu_runner.fleet_database.database import Instance
from gpu_runner.money import format_usd


def machines_left(
    instances: Sequence[Instance],
    dataset: str,
    *,
    idle_seconds: float,
    ends_now: Callable[[Instance], bool],
    now: float,
    zone: tzinfo | None = None,
) -> list[str]:
    """A sentence for each machine that the dataset pays for and no other one uses.

    `idle_seconds`: how long the fleet keeps a machine for the next run. `ends_now`: whether it ends with this command.
    `now`: Unix seconds; moments are said in `zone`, the computer's own without.
    """
    return [
        _sentence(one, idle_seconds, now, zone, ends_now=ends_now(one))
        for one in instances
        if one.payer == dataset and one.state != "ended" and one.works_for in (None, dataset)
    ]


def _sentence(one: Instance, idle_seconds: float, now: float, zone: tzinfo | None, *, ends_now: bool) -> str:
    spot = " spot" if one.spot else ""
    said = f"{one.name} ({one.provider} {one.instance_type}{spot}, {format_usd(one.price_per_hour)} $/h)"
    if one.state == "ending":
        return f"{said} is being ended"
    if ends_now:
        return f"{said} ends with this command"
    if one.retiring or one.state != "ready":
        return f"{said} is ended within half a minute"
    left = max(0.0, idle_seconds - (one.idle_seconds or 0.0))
    until = datetime.fromtimestamp(now + left, zone).strftime("%H:%M:%S")
    usd = one.price_per_hour * one.clock * left / 3600
    return (
        f"{said} stays for the next run until {until}, for {duration(left)} and {format_usd(usd)} $ at most; "
        "`batch-assets fleet down` ends it now"
    )
