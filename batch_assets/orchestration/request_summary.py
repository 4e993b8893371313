"""What a request wants, what is expected of it, and what it cost so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from batch_assets.capacity_planning.clock_scale import scale_words
from gpu_runner.fleet_database.accounting.charges import Charge
from gpu_runner.fleet_database.capacity_plan import CapacityPlan, RequestSummary
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.targets import DatasetTarget


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """What is wanted of the request under way, or was of the last one, and what is expected of it.

    Moments are Unix seconds by the fleet's database, money is in US dollars since the request began. `on_time`: is the
    deadline expected to be met, or was it; None without one. `finished_at`: None while it is under way. `p50`: the
    median of what is expected, `p95`: not passed in 95 of 100 cases. `paused`: why nothing may be rented. `missing`:
    batches that were not there when it ended. `clock`: what seconds and dollars mean where a clock is scaled.
    `usd_total`: all that the dataset ever spent, whatever its requests were; `usd_wasted_total` of it in vain,
    `usd_simulated_total` of it asked by providers whose clock is scaled: they are simulated, and nobody pays them.
    """

    request: str | None = None
    deadline: float | None = None
    budget_usd: float | None = None
    on_time: bool | None = None
    finish_p50: float | None = None
    finish_p95: float | None = None
    finished_at: float | None = None
    usd_spent: float = 0.0
    usd_wasted: float = 0.0
    usd_p50: float | None = None
    usd_p95: float | None = None
    instances: int = 1
    paused: str = ""
    reason: str = ""
    missing: int = 0
    clock: str = ""
    usd_total: float = 0.0
    usd_wasted_total: float = 0.0
    usd_simulated_total: float = 0.0


def request_status(fleet_db: FleetDatabase, dataset: str) -> RequestStatus:
    """As the fleet's database has it."""
    target = fleet_db.target(dataset)
    if target is None or not (target.request or target.ended):
        return RequestStatus()
    clocks, whole = fleet_db.provider_clocks(), fleet_db.charges_of(dataset)
    total = sum(charge.usd.total for charge in whole)
    lost = sum(charge.usd.wasted for charge in whole)
    played = sum(charge.usd.total for charge in whole if clocks.get(charge.provider, 1.0) != 1.0)
    if target.ended is not None:
        ended = asdict(target.ended)
        return RequestStatus(**ended, usd_total=total, usd_wasted_total=lost, usd_simulated_total=played)
    plan = target.plan or CapacityPlan()
    mine = [part for charge in whole if (part := charge.between(target.since, math.inf)) is not None]
    return RequestStatus(
        request=target.request,
        deadline=target.deadline_at,
        budget_usd=target.budget_usd,
        on_time=_on_time(target),
        finish_p50=plan.finish_p50 if target.instances else None,
        finish_p95=plan.finish_p95 if target.instances else None,
        usd_spent=sum(charge.usd.total for charge in mine),
        usd_wasted=sum(charge.usd.wasted for charge in mine),
        usd_p50=plan.usd_p50,
        usd_p95=plan.usd_p95,
        instances=target.instances,
        paused="" if target.pause is None else target.pause.describe(),
        reason=plan.reason,
        clock=_clock(clocks, target, mine),
        usd_total=total,
        usd_wasted_total=lost,
        usd_simulated_total=played,
    )


def _clock(clocks: Mapping[str, float], target: DatasetTarget, charges: Sequence[Charge]) -> str:
    """What seconds and dollars mean: by the clocks of the providers whose offers are planned or were rented."""
    rented = {charge.provider for charge in charges}
    offers = [name for name, _ in target.offers]
    used = {
        name: clock
        for name, clock in clocks.items()
        if name in rented or any(offer.startswith(f"{name}/") for offer in offers)
    }
    return scale_words(used)


def _on_time(target: DatasetTarget) -> bool | None:
    """As the sensor expected it last, unless that cannot be true any more: the deadline has passed since, or nothing
    may work."""
    if target.deadline_in is None or target.plan is None:
        return None
    works = target.instances > 0 and not target.pause
    return target.plan.on_time if works and target.deadline_in > 0 else False


def summary_of(status: RequestStatus, *, finished_at: float, on_time: bool | None, missing: int) -> RequestSummary:
    """What is kept of a request that ends now; `missing`: batches that are not there."""
    return RequestSummary(
        request=status.request or "",
        deadline=status.deadline,
        budget_usd=status.budget_usd,
        on_time=on_time,
        finished_at=finished_at,
        usd_spent=status.usd_spent,
        usd_wasted=status.usd_wasted,
        usd_p50=status.usd_p50,
        usd_p95=status.usd_p95,
        instances=status.instances,
        reason=status.reason,
        missing=missing,
        clock=status.clock,
    )
