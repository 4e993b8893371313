"""Which fleet to begin with while speeds are not known: a search over first fleets (`gpu_runner.rehearsal`). Pure.

Thought about are the fleets that would be right if speeds were this or that, and offers that are cheap to try, alone
and beside such a fleet. What is chosen is expected to cost least in the end among those that are hardly ever
late and leave a way out if they turn out slow (`gpu_runner.pilots.recoverable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpu_runner.beliefs import Machine
from gpu_runner.course import Course, fleet_of, usd_per_token
from gpu_runner.pilots import booted, machine, recoverable, unsure
from gpu_runner.planner import Held, Option, Plan, make_plan
from gpu_runner.rehearsal import DRAWS, Outlook, Rehearsal

CAUTIONS = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0)  # below 0: speeds are better than believed
WAY_OUT = 0.5  # caution at which the rest must still be possible, and is planned in the draws
SHORT = 0.2  # where the usual fleet runs out of money in so many draws, there is none to try things with
HARDLY = 1.5 / DRAWS  # one draw more may be late
PROBES = 5  # offers that are cheap to try, at most


@dataclass(frozen=True, slots=True)
class Opening:
    """What goes on, what is ordered, and the plan that it comes from, if from one."""

    kept: tuple[Held, ...]
    new: tuple[tuple[Option, int], ...]
    plan: Plan | None = field(default=None, compare=False)

    @property
    def instances(self) -> int:
        """How many in all."""
        return len(self.kept) + sum(number for _, number in self.new)

    def beside(self, option: Option) -> Opening:
        """With one more of it."""
        number = dict(self.new).get(option, 0)
        return Opening(self.kept, (*(pair for pair in self.new if pair[0] != option), (option, number + 1)))


def best_opening(
    course: Course, usual: Opening, pilots: int, budget: float | None, later: float = HARDLY
) -> tuple[Opening, Outlook] | None:
    """The best one and what to expect of it; None: the usual one, which meets the deadline at full caution.

    `pilots`: offers that may be tried beside a fleet. `budget`: US dollars, whatever the course's target says. `later`:
    share of the draws that more than the least may be late.
    """
    search = _Search(course, usual, budget, later)
    if budget is not None and search.floor > SHORT:
        return None
    probes = _probes(course)
    wait = Opening(course.held, ())
    alone = [wait.beside(option) for option in probes if machine(option) not in _tried(wait)]
    found = [one for one in (*_planned(course), *alone) if one.new]
    if course.held:
        found.append(wait)
    for one in found:
        search.look(one)
    while len(tried := _tried(search.best)) < pilots:
        base = search.best
        for option in probes:
            if machine(option) not in tried:
                search.look(base.beside(option))
        if search.best is base:
            break
    best = search.best
    return None if best is usual else (best, search.seen[best])


class _Search:
    """Openings and what to expect of them. The usual one counts whatever it is."""

    def __init__(self, course: Course, usual: Opening, budget: float | None, later: float) -> None:
        target = replace(course.target, budget_usd=budget)
        self._course = course
        self._later = later
        self._rehearsal = Rehearsal(course.work, course.options, course.held, target, course.ramp, WAY_OUT, course.pace)
        self.seen: dict[Opening, Outlook] = {usual: self._rehearsal.outlook(usual.kept, usual.new)}

    def look(self, one: Opening) -> None:
        """Take it into account, if it is allowed and leaves a way out."""
        course = self._course
        if one in self.seen or one.instances > course.most:
            return
        fleet = [*one.kept, *booted(one.new, ())]
        if recoverable(course.work, course.options, fleet, course.target, WAY_OUT, course.pace):
            self.seen[one] = self._rehearsal.outlook(one.kept, one.new)

    @property
    def floor(self) -> float:
        """The least share of draws that are late."""
        return min(outlook.late for outlook in self.seen.values())

    @property
    def best(self) -> Opening:
        """The cheapest of those that are hardly more often late than need be."""
        fair = [one for one, outlook in self.seen.items() if outlook.late <= self.floor + self._later]
        return min(fair, key=lambda one: self.seen[one].usd)


def _planned(course: Course) -> Iterator[Opening]:
    """What the plan would be if speeds were this or that, with and without spot."""
    ways = [(course.options, course.ramp)]
    if len(course.sure) < len(course.options):
        ways.append((course.sure, 0.0))
    for caution in CAUTIONS:
        for options, ramp in ways:
            plan = make_plan(
                course.work, options, course.held, course.target, detail=False, ramp=ramp, caution=caution, anyway=False
            )
            if plan.chosen is not None:
                yield opening_of(course, plan)


def _tried(opening: Opening) -> set[Machine]:
    """The machines of unknown speed in it."""
    options = [*(one.option for one in opening.kept), *(option for option, _ in opening.new)]
    return {machine(one) for one in options if unsure(one)}


def opening_of(course: Course, plan: Plan) -> Opening:
    """What a plan keeps and orders."""
    kept = tuple(one for one in course.held if one.instance in plan.keep)
    there = Counter(one.option for one in kept)
    new = tuple((option, number - there[option]) for option, number in fleet_of(plan))
    return Opening(kept, tuple(pair for pair in new if pair[1] > 0), plan)


def _probes(course: Course) -> list[Option]:
    """Of each machine of unknown speed the offer that costs least to try; the cheapest tokens first."""

    def cost(option: Option) -> float:
        return option.usd_per_hour * (option.boot_seconds + course.pace.measuring)

    found: dict[Machine, Option] = {}
    for one in sorted(course.options, key=cost):
        if unsure(one) and one.capacity != 0:
            found.setdefault(machine(one), one)
    return sorted(found.values(), key=usd_per_token)[:PROBES]
