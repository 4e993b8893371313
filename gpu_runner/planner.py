"""How many instances of which offers finish the work by the deadline at the least cost. Pure.

The cost of a fleet is what its parts cost: each instance's boot, and each token at the price and speed of the instance
that does it, because an instance is ended when its share is done. Doing the work faster therefore costs boots and the
dearer offers that it takes, nothing else. For a given finish time the least cost is exact (`gpu_runner.cover`), so more
time, more offers, more capacity or more money can never make it worse.

Risk. A spot instance that is taken is replaced, and the boot is paid again: `interruptions_per_hour` boots of money and
of time per productive hour. Speeds and the amount of work are lognormal; the room of an instance is what it does at the
95th percentile (speed × exp(-1.645 σ), σ² = speed's variance + work's), so the deadline is held against P95. That is
the percentile itself for a fleet of one kind and on the careful side for a mixed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_runner.plan_search import ENDLESS, NEARLY, Desk
from gpu_runner.plans import Candidate, Held, Interval, Option, Plan, Target, Work, say_fleet, say_time

__all__ = [
    "NEARLY",
    "Candidate",
    "Held",
    "Interval",
    "Option",
    "Plan",
    "Target",
    "Work",
    "earliest_finish",
    "in_detail",
    "make_plan",
    "plan_to_stay",
    "possible",
    "run_on",
    "say_fleet",
    "say_time",
]


def make_plan(
    work: Work,
    options: Sequence[Option],
    held: Sequence[Held],
    target: Target,
    *,
    detail: bool = True,
    ramp: float = 0.0,
    caution: float = 1.0,
    anyway: bool = True,
) -> Plan:
    """The plan with the best value of the objective.

    `cheapest`: least cost within deadline and budget. `efficient`: least cost × time within both. `fastest`: the
    earliest finish within the budget. When the deadline cannot be met within the budget: the earliest finish within
    the budget. `detail` False leaves out `next_best` and `curve`, which cost most of the time.
    `ramp`: seconds before the deadline by which spot instances must be done, so that others can still be started.
    `caution`: 1 counts on speeds at P95, 0 on speeds as expected; `met` says whether the deadline holds with it.
    `anyway` False: nothing is chosen when it does not.
    """
    desk = Desk(work, options, held, target, ramp, caution)
    if work.tokens <= 0 or desk.most < 1:
        return _idle(work, target)
    earliest = desk.earliest()
    if earliest is None:
        return Plan(None, 0, False, None, (), (), "no offer that can do the work is to be had and nothing is held")
    chosen = desk.choose(earliest, anyway=anyway)
    deadline = (ENDLESS if target.deadline is None else target.deadline) + 1e-6
    met = chosen is not None and chosen.finish <= deadline
    within = target.deadline is None or (chosen is not None and chosen.candidate.finish.p95 <= deadline)
    return Plan(
        chosen=chosen.candidate if chosen else None,
        instances=chosen.candidate.instances if chosen else 0,
        feasible=chosen is not None and within,
        earliest=earliest.candidate,
        next_best=desk.others(chosen.candidate) if detail and chosen else (),
        curve=desk.curve(earliest) if detail else (),
        reason=_explain(chosen.candidate if chosen else None, within, earliest.candidate, target),
        keep=chosen.keep if chosen else (),
        met=met,
    )


def possible(
    work: Work, options: Sequence[Option], held: Sequence[Held], target: Target, *, caution: float = 1.0
) -> bool:
    """Whether some fleet meets the deadline at this caution, whatever it costs: `met` of such a plan, without it."""
    desk = Desk(work, options, held, target, 0.0, caution)
    deadline = ENDLESS if target.deadline is None else target.deadline
    return work.tokens <= 0 or (desk.most > 0 and desk.possible(deadline))


def earliest_finish(
    work: Work, options: Sequence[Option], held: Sequence[Held], target: Target, *, caution: float = 1.0
) -> Candidate | None:
    """`earliest` of a plan, without the plan."""
    desk = Desk(work, options, held, target, 0.0, caution)
    found = desk.earliest() if desk.most > 0 else None
    return found.candidate if found else None


def run_on(work: Work, held: Sequence[Held]) -> Candidate | None:
    """What happens when all that is held works to the end; None when it cannot end."""
    desk = Desk(work, (), held, Target(max_instances=len(held)), 0.0, 1.0)
    return desk.all_of_it() if desk.groups else None


def in_detail(plan: Plan, work: Work, options: Sequence[Option], held: Sequence[Held], target: Target) -> Plan:
    """The same plan with the curve and the next-best ones, as `make_plan` gives them."""
    desk = Desk(work, options, held, target, 0.0, 1.0)
    earliest = desk.earliest() if work.tokens > 0 and desk.most > 0 else None
    if plan.chosen is None or earliest is None:
        return plan
    return replace(plan, next_best=desk.others(plan.chosen), curve=desk.curve(earliest))


def plan_to_stay(plan: Plan, rest: Candidate, held: Sequence[Held], target: Target) -> Plan:
    """A plan that is turned down in favour of what is held: `rest` is what `run_on` says of it."""
    late = target.deadline is not None and rest.finish.p95 > target.deadline + 1e-6
    dear = target.budget_usd is not None and rest.usd.p50 > target.budget_usd
    return replace(
        plan,
        chosen=rest,
        instances=rest.instances,
        feasible=not late and not dear,
        reason=_explain(rest, not late, plan.earliest or rest, target),
        keep=tuple(one.instance for one in held),
    )


def _idle(work: Work, target: Target) -> Plan:
    nothing = Candidate((), Interval(0.0, 0.0), Interval(0.0, 0.0))
    if work.tokens <= 0:
        return Plan(nothing, 0, True, nothing, (), (nothing,), "nothing is left to do")
    limit = f"{target.max_instances} instances allowed, {work.units} batches left"
    return Plan(None, 0, False, None, (), (), f"no instance may work: {limit}")


def _explain(chosen: Candidate | None, within: bool, earliest: Candidate, target: Target) -> str:
    budget = "" if target.budget_usd is None else f", budget {target.budget_usd:.2f} $"
    soonest = (
        f"the earliest possible finish is in {say_time(earliest.finish.p95)} (P95) with {say_fleet(earliest)} "
        f"for {earliest.usd.p50:.2f} $"
    )
    if chosen is None and target.budget_usd is None:
        return f"the deadline in {say_time(target.deadline or 0.0)} cannot be met: {soonest}"
    if chosen is None:
        return f"the budget of {target.budget_usd or 0.0:.2f} $ does not pay for all the work: {soonest}"
    figures = (
        f"{say_fleet(chosen)}: done in {say_time(chosen.finish.p50)} (P95 {say_time(chosen.finish.p95)}) "
        f"for {chosen.usd.p50:.2f} $ (P95 {chosen.usd.p95:.2f} $)"
    )
    if target.deadline is None:
        return figures + budget
    wanted = f"deadline in {say_time(target.deadline)}{budget}"
    return f"{figures}; {wanted}" if within else f"too late: {figures}; {wanted}; {soonest}"
