"""How many engines of fleet.yaml a command counts with, which runs take before anything is rented."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from batch_assets.capacity_planning.planner_input import free_engines, time_presses
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.planner.controller import Command
from gpu_runner.planner.types import Target
from resources.engine_options import PLAIN, EngineOptions
from resources.fleet.resource import FleetConfig, FleetConfigError


def with_standing_engines(
    fleet_db: FleetDatabase,
    config: FleetConfig,
    command: Command,
    wanted: Target,
    *,
    dataset: str,
    model: str,
    endpoint: str | None,
    options: EngineOptions = PLAIN,
    units: int,
    rents: bool,
    planned: Collection[str] = (),
) -> Command:
    """The command with those that serve the model, or the one at `endpoint`; those that others use do not count.

    Where time presses all of them on top of what is rented, but no more than `units` have work; else one instead of it.
    `rents`: there is something to rent, or something is held. `planned`: names of what the planner was asked about: a
    Batch API that is not among them is not worth it.
    """
    try:
        engines = config.engines_for(model, endpoint, options)
    except FleetConfigError:
        engines = ()
    engines = [one for one in engines if one.kind != "batch_api" or one.name in planned]
    if not engines or command.pause:
        return command
    usable = free_engines(fleet_db, engines, dataset)
    if not usable:
        return command
    presses = time_presses(wanted)
    standing = min(len(usable), wanted.max_instances, units) if presses else 1
    if rents and presses and not endpoint:
        return replace(command, instances=min(wanted.max_instances, command.instances + standing))
    reason = f"{standing} of {len(engines)} engines that stand in fleet.yaml; nothing is rented for it"
    return Command(standing, (), kind="steady", reason=reason)
