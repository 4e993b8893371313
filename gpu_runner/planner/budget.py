"""What a budget allows: one rule and one reserve for plans, for commands and for what is told to people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.types import Candidate, ControlTiming, PlannedOffer


def entry_usd(option: PlannedOffer, reserve: float) -> float:
    """US dollars that a budget must have left before an instance of this offer is ordered.

    Its boot, as long again (at least one reserve) to earn it, and the reserve (seconds): what it costs on after the
    decision to end it. So what is commanded is not refused by the fleet's database, which ask for twice the boot, a
    drain and a lease's end (`gpu_runner.fleet_database.accounting.request_budget.refuse_beyond`).
    Of an engine that is paid by the token: what one row may cost.
    """
    if option.row_usd is not None:
        return option.row_usd
    return option.usd_per_hour / HOUR * (option.boot_seconds + max(option.boot_seconds, reserve) + reserve)


def affordable(options: Sequence[PlannedOffer], budget: float, timing: ControlTiming) -> list[PlannedOffer]:
    """Offers of which one instance can be had, works, and may be ordered with so much left."""
    there = (one for one in options if one.capacity != 0 and one.tokens_per_second > 0)
    return [one for one in there if entry_usd(one, timing.reserve) <= budget]


def fitting(
    new: Sequence[tuple[PlannedOffer, int]], budget: float, reserve: float
) -> tuple[tuple[PlannedOffer, int], ...]:
    """The instances to order that the budget can boot, use and end; the dearest are left out first."""
    found: list[tuple[PlannedOffer, int]] = []
    left = budget
    for option, wanted in sorted(new, key=lambda pair: pair[0].usd_per_hour):
        entry = entry_usd(option, reserve)
        number = wanted if entry <= 0 else max(0, min(wanted, int(left / entry)))
        left -= 2 * reserve * option.held_usd_per_hour / HOUR * number
        found += [(option, number)] if number else []
    return tuple(found)


def needed_usd(fleet: Candidate, reserve: float) -> float:
    """US dollars from now on with which this fleet, all of it new, is ordered at once and works to the end.

    What the work costs and the reserve of all its instances; not less than what `fitting` asks for all of them. Where
    tokens are paid, what they cost in 95 of 100 cases and one row more: the last row is not sent for less.
    """
    rate = sum(option.held_usd_per_hour * number for option, number in fleet.fleet) / HOUR
    rows = [option.row_usd for option, _ in fleet.fleet if option.row_usd is not None]
    needed, begun = (fleet.usd.p95 if rows else fleet.usd.p50) + sum(rows) + reserve * rate, 0.0
    for option, number in sorted(fleet.fleet, key=lambda pair: pair[0].usd_per_hour):
        needed = max(needed, begun + number * entry_usd(option, reserve))
        begun += 2 * reserve * option.held_usd_per_hour / HOUR * number
    return needed * (1 + 1e-9)  # the same sum, added up in another order
