"""Which fleet to begin with while speeds are not known: a search over first fleets (`gpu_runner.rehearsal`). Pure.

Thought about are the fleets that would be right if speeds were this or that, and offers that are cheap to try, alone
and beside such a fleet. What is chosen is expected to cost least in the end, is late in no more draws than the fleet
that a cautious plan orders, and leaves a way out if it turns out slow (`gpu_runner.pilots.recoverable`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_runner.course import Course, fleet_of
from gpu_runner.offers import HOUR
from gpu_runner.pilots import booted, recoverable, unsure
from gpu_runner.planner import Held, Option, Plan, make_plan
from gpu_runner.rehearsal import Outlook, Rehearsal, machine

CAUTIONS = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0)  # below 0: speeds are better than believed
LATE = 3.0  # being late is as bad as paying so many times as much
PROBES = 5  # offers that are cheap to try, at most


@dataclass(frozen=True, slots=True)
class Opening:
    """What goes on, what is ordered, and the plan that it comes from, if from one."""

    kept: tuple[Held, ...]
    new: tuple[tuple[Option, int], ...]
    plan: Plan | None = None

    @property
    def instances(self) -> int:
        """How many in all."""
        return len(self.kept) + sum(number for _, number in self.new)

    def beside(self, option: Option) -> Opening:
        """With one more of it."""
        number = dict(self.new).get(option, 0)
        return Opening(self.kept, (*(pair for pair in self.new if pair[0] != option), (option, number + 1)))


def best_opening(
    course: Course, usual: Opening, caution: float, pilots: int, budget: float | None
) -> tuple[Opening, Outlook] | None:
    """The best one and what to expect of it; None: the usual one. `pilots`: offers that may be tried beside a fleet.

    `caution`: the way out must hold at half of it. `budget`: US dollars, whatever the course's target says.
    """
    target = replace(course.target, budget_usd=budget)
    rehearsal = Rehearsal(course.work, course.options, course.held, target, course.ramp, course.pace)
    best, least = usual, rehearsal.outlook(usual.kept, usual.new)
    each = LATE * least.usd

    def better(one: Opening) -> bool:
        nonlocal best, least
        fleet = [*one.kept, *booted(one.new, ())]
        if one.instances > course.most or not recoverable(
            course.work, course.options, fleet, course.target, caution / 2, course.pace
        ):
            return False
        found = rehearsal.outlook(one.kept, one.new)
        if found.late > least.late or found.usd >= least.usd:
            return False
        best, least = one, found
        return True

    probes = _probes(course)
    for one in [*_planned(course), *(Opening(course.held, ((option, 1),)) for option in probes)]:
        better(one)
    for _ in range(pilots - 1):
        base = best
        there = {machine(one.option) for one in base.kept} | {machine(option) for option, _ in base.new}
        if not any([better(base.beside(option)) for option in probes if machine(option) not in there]):
            break
    return None if best is usual else (best, least)


def _planned(course: Course) -> Iterator[Opening]:
    """What the plan would be if speeds were this or that, with and without spot."""
    seen: set[tuple[tuple[Held, ...], tuple[tuple[Option, int], ...]]] = set()
    for caution in CAUTIONS:
        for options, ramp in ((course.options, course.ramp), (course.sure, 0.0)):
            plan = make_plan(
                course.work, options, course.held, course.target, detail=False, ramp=ramp, caution=caution, anyway=False
            )
            if plan.chosen is not None:
                one = opening_of(course, plan)
                if (one.kept, one.new) not in seen:
                    seen.add((one.kept, one.new))
                    yield one


def opening_of(course: Course, plan: Plan) -> Opening:
    """What a plan keeps and orders."""
    kept = tuple(one for one in course.held if one.instance in plan.keep)
    there: dict[Option, int] = {}
    for one in kept:
        there[one.option] = there.get(one.option, 0) + 1
    new = tuple((option, number - there.get(option, 0)) for option, number in fleet_of(plan))
    return Opening(kept, tuple(pair for pair in new if pair[1] > 0), plan)


def _probes(course: Course) -> list[Option]:
    """Of each machine of unknown speed the offer that costs least to try; the cheapest tokens first."""
    found: dict[object, Option] = {}
    for one in course.options:
        if unsure(one) and one.capacity != 0:
            other = found.get(machine(one))
            if other is None or _cost(one) < _cost(other):
                found[machine(one)] = one
    return sorted(found.values(), key=lambda one: one.usd_per_hour / one.tokens_per_second)[:PROBES]


def _cost(option: Option) -> float:
    return option.usd_per_hour / HOUR * (option.boot_seconds + 120.0)
