"""How many instances of which offers finish the work by the deadline at the least cost. Pure.

The cost of a fleet is what its parts cost: each instance's boot, and each token at the price and speed of the instance
that does it, because an instance is ended when its share is done. Doing the work faster therefore costs boots and the
dearer offers that it takes, nothing else. For a given finish time the least cost is exact
(`gpu_runner.planner.knapsack`), so more time, more offers, more capacity or more money can never make it worse.

Risk. A spot instance that is taken is replaced, and the boot is paid again: `interruptions_per_hour` boots of money and
of time per productive hour. Speeds and the amount of work are lognormal; the room of an instance is what it does at the
95th percentile (speed × exp(-1.645 σ), σ² = speed's variance + work's), so the deadline is held against P95. That is
the percentile itself for a fleet of one kind and on the careful side for a mixed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_runner.money import format_usd, round_up_usd
from gpu_runner.planner.budget import needed_usd
from gpu_runner.planner.search import ENDLESS, PlanSearch
from gpu_runner.planner.types import (
    Candidate,
    HeldInstance,
    Interval,
    Plan,
    PlannedOffer,
    Target,
    Work,
    say_fleet,
    say_time,
)

NOTHING_THERE = "no offer that can do the work is to be had and nothing is held"


def make_plan(
    work: Work,
    options: Sequence[PlannedOffer],
    held: Sequence[HeldInstance],
    target: Target,
    *,
    spot_cutoff: float = 0.0,
    confidence: float = 1.0,
    allow_late: bool = True,
) -> Plan:
    """The plan with the best value of the objective.

    `cheapest`: least cost within deadline and budget. `efficient`: least cost × time within both. `fastest`: the
    earliest finish within the budget. When the deadline cannot be met within the budget: the earliest finish within
    the budget. `in_detail` adds `next_best` and `curve`, which cost most of the time.
    `spot_cutoff`: seconds before the deadline by which spot instances must be done, so that others can still start.
    `confidence`: 1 counts on speeds at P95, 0 on speeds as expected; `met` says whether the deadline holds with it.
    `allow_late` False: nothing is chosen when it does not.
    """
    search = PlanSearch(work, options, held, target, spot_cutoff, confidence)
    if work.tokens <= 0 or search.most < 1:
        return _idle(work, target)
    earliest = search.earliest()
    chosen = search.choose(earliest, allow_late=allow_late) if earliest else None
    if chosen is None and target.budget_usd is not None and allow_late:
        return _beyond_budget(work, options, held, target)
    if earliest is None:
        return Plan(None, None, NOTHING_THERE)
    if chosen is None:
        return Plan(None, earliest.candidate, _explain(None, False, earliest.candidate, target))
    deadline = (ENDLESS if target.deadline is None else target.deadline) + 1e-6
    within = target.deadline is None or chosen.candidate.finish.p95 <= deadline
    return Plan(
        chosen=chosen.candidate,
        earliest=earliest.candidate,
        reason=_explain(chosen.candidate, within, earliest.candidate, target),
        feasible=within,
        met=chosen.finish <= deadline,
        keep=chosen.keep,
    )


def _beyond_budget(work: Work, options: Sequence[PlannedOffer], held: Sequence[HeldInstance], target: Target) -> Plan:
    """Nothing is chosen: says with how much it can be done, by the deadline if it can be kept at all."""
    search = PlanSearch(work, options, held, replace(target, budget_usd=None))
    earliest = search.earliest()
    found = least_budget(work, options, held, target)
    if earliest is None or found is None:
        return Plan(None, None, NOTHING_THERE)
    usd, fleet = found
    reason = (
        f"the budget of {format_usd(target.budget_usd or 0.0)} $ does not pay for all the work: "
        f"{format_usd(round_up_usd(usd))} $ do, with {say_fleet(fleet)}, done in {say_time(fleet.finish.p50)} "
        f"(P95 {say_time(fleet.finish.p95)})"
    )
    return Plan(None, earliest.candidate, reason, least_usd=usd)


def least_budget(
    work: Work, options: Sequence[PlannedOffer], held: Sequence[HeldInstance], target: Target
) -> tuple[float, Candidate] | None:
    """US dollars from now on that do all the work, within the deadline if any sum does, and the fleet; None: none does.

    The sum holds what has to be left of it (`gpu_runner.planner.budget.needed_usd`).
    """
    search = PlanSearch(work, options, held, replace(target, budget_usd=None))
    for deadline in dict.fromkeys((ENDLESS if target.deadline is None else target.deadline, ENDLESS)):
        found = [one.candidate for one in search.frugal(deadline)]
        if found:
            sums = ((needed_usd(one, target.reserve_seconds), one) for one in found)
            return min(sums, key=lambda pair: pair[0])
    return None


def in_detail(
    plan: Plan, work: Work, options: Sequence[PlannedOffer], held: Sequence[HeldInstance], target: Target
) -> Plan:
    """The same plan with the curve and the next-best ones."""
    search = PlanSearch(work, options, held, target)
    earliest = search.earliest() if work.tokens > 0 else None
    if earliest is None:
        return plan
    return replace(plan, next_best=search.others(plan.chosen) if plan.chosen else (), curve=search.curve(earliest))


def plan_to_stay(plan: Plan, rest: Candidate, held: Sequence[HeldInstance], target: Target) -> Plan:
    """A plan that is turned down in favour of what is held: `rest` is what happens when all of that works on."""
    late = target.deadline is not None and rest.finish.p95 > target.deadline + 1e-6
    dear = target.budget_usd is not None and rest.usd.p50 > target.budget_usd
    reason = _explain(rest, not late, plan.earliest or rest, target)
    keep = tuple(one.instance for one in held)
    return replace(plan, chosen=rest, feasible=not late and not dear, reason=reason, keep=keep)


def _idle(work: Work, target: Target) -> Plan:
    if work.tokens <= 0:
        nothing = Candidate((), Interval(0.0, 0.0), Interval(0.0, 0.0))
        return Plan(nothing, nothing, "nothing is left to do", feasible=True, curve=(nothing,))
    return Plan(None, None, f"no instance may work: {target.max_instances} allowed, {work.units} batches left")


def _explain(chosen: Candidate | None, within: bool, earliest: Candidate, target: Target) -> str:
    budget = "" if target.budget_usd is None else f", budget {format_usd(target.budget_usd)} $"
    soonest = (
        f"the earliest possible finish is in {say_time(earliest.finish.p95)} (P95) with {say_fleet(earliest)} "
        f"for {format_usd(earliest.usd.p50)} $"
    )
    if chosen is None and target.budget_usd is None:
        return f"the deadline in {say_time(target.deadline or 0.0)} cannot be met: {soonest}"
    if chosen is None:
        return f"the budget of {format_usd(target.budget_usd or 0.0)} $ does not pay for all the work: {soonest}"
    figures = (
        f"{say_fleet(chosen)}: done in {say_time(chosen.finish.p50)} (P95 {say_time(chosen.finish.p95)}) "
        f"for {format_usd(chosen.usd.p50)} $ (P95 {format_usd(chosen.usd.p95)} $)"
    )
    if target.deadline is None:
        return figures + budget
    wanted = f"deadline in {say_time(target.deadline)}{budget}"
    return f"{figures}; {wanted}" if within else f"too late: {figures}; {wanted}; {soonest}"
