"""What a reserve leaves of a command, and what ends when a model has no open batches any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_runner.fleet.capacity_plan import RequestSummary
from gpu_runner.fleet.database import FleetDatabase, Instance
from gpu_runner.fleet.targets import DatasetTarget
from gpu_runner.planner.controller import Command


def at_least(command: Command, held: Sequence[str], least: int) -> Command:
    """The command with no fewer instances than that, of those `held` first, whatever a budget or the plan says.

    A first engine is what serves a model at all; budgets of batches bound what is rented beyond it.
    """
    if command.instances >= least:
        return command
    ended = [name for name in command.retire if name in held]
    kept = frozenset(ended[: max(0, least - (len(held) - len(ended)))])
    words = f"{least} stay: the reserve of the model, and one for each kind of task"
    return replace(
        command,
        instances=least,
        pause=None,
        retire=tuple(name for name in command.retire if name not in kept),
        replaced=tuple(name for name in command.replaced if name not in kept),
        assignments=tuple(one for one in command.assignments if one.instance not in kept),
        reason=f"{words}; {command.reason}",
    )


def end_model(fleet_db: FleetDatabase, target: DatasetTarget, reserve: int) -> bool:
    """No batch is open: what the model pays for ends at once, one instance or the reserve when it is idle for long.

    False: its request is another one by now.
    """
    spent, now = fleet_db.spend(target.dataset), fleet_db.now()
    summary = RequestSummary(
        request=target.request,
        finished_at=now,
        usd_spent=spent.usd,
        instances=max(1, reserve),
        reason="no batch is open",
    )
    if not fleet_db.end_request(target.dataset, target.request, summary):
        return False
    if reserve > 1:
        fleet_db.set_instances(target.dataset, reserve)
    mine = sorted((one for one in fleet_db.fleet() if _stands_for(one, target.dataset)), key=_leaves_last)
    for one in mine[max(1, reserve) :]:
        fleet_db.retire(one.name, "no batch is open")
    return True


def _stands_for(one: Instance, dataset: str) -> bool:
    return one.payer == dataset and not one.retiring and one.state in ("intent", "booting", "ready")


def _leaves_last(one: Instance) -> tuple[bool, bool, float]:
    """Leased and ready ones first, the cheapest of them."""
    return not one.leased, one.state != "ready", one.price_per_hour
