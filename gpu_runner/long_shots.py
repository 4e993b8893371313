"""What to try when nothing that is known will do: machines that would make it if they are faster than believed. Pure.

A deadline or a budget that cannot be met with the speeds as they are believed may still be met if one is better. Trying
it costs a boot and two minutes of one instance; without it the miss is all but certain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from gpu_runner.beliefs import Machine
from gpu_runner.command import Command
from gpu_runner.course import Course, fleet_of
from gpu_runner.pilots import machine, unsure
from gpu_runner.planner import Held, Option, Plan, make_plan

LUCK = (0.0, 0.5, 1.0, 1.5)  # standard deviations by which the speeds that are not known may be better than believed
SACRIFICE = 0.2  # share of the fleet's speed that may make room for tries at the limit on instances

Missing = Literal["time", "money", "perhaps money"]


def long_shot(course: Course, command: Command, most: int, missing: Missing) -> Command:
    """The command, and one instance each of machines with which it can be done if they are fast.

    `most`: machines of unknown speed that there may be in all. `missing`: what makes it impossible without luck. For
    want of time they take the place of the slowest where the limit on instances leaves no room. For want of money
    what is no part of the lucky plan ends. Where money may yet be enough they are only added. What is being measured
    stays in any case. Without any such machine: the command as it is.
    """
    fleet = _Fleet(course, command)
    luck, plan = _plan(course)
    lucky: dict[Machine, Option] = {}
    for option, _ in fleet_of(plan) if plan else ():
        if unsure(fleet.known[option.name]):
            lucky.setdefault(machine(option), option)
    if plan is None or not lucky or not fleet.numbers:
        return command
    if missing == "money":
        fleet.end_all_but([one for one in course.held if one.instance in plan.keep or unsure(one.option)])
    trying: dict[Machine, Held] = {}
    for one in course.held:
        if machine(one.option) in lucky:
            trying.setdefault(machine(one.option), one)
    spare = 0.0 if missing == "perhaps money" else SACRIFICE * fleet.speed
    added = False
    for this, option in lucky.items():
        there = fleet.machines_of_unknown_speed
        if this in there or len(there) >= most or (this not in trying and luck == 0 and trying):
            continue  # as believed it will do: what is being tried is waited for
        lost = fleet.make_room(option, spare)
        if lost is None:
            continue
        spare -= lost
        if this in trying:
            fleet.keep(trying[this])
        else:
            fleet.numbers[option.name] += 1
            added = True
    return fleet.command(_words(lucky, missing), added)


def _words(lucky: Mapping[Machine, Option], missing: Missing) -> str:
    names = " or ".join(one.name for one in lucky.values())
    what = "in time" if missing == "time" else "for this money"
    return f"{names} may be faster than believed, and nothing else is sure to do it {what}"


class _Fleet:
    """A command's fleet while it is changed: how many of each offer, and which held instances go."""

    def __init__(self, course: Course, command: Command) -> None:
        self._course = course
        self._command = command
        self.known = {one.name: one for one in (*(one.option for one in course.held), *course.options)}
        self.numbers = Counter({name: number for name, number in command.offers if name in self.known})
        self._retire = [*command.retire]

    @property
    def speed(self) -> float:
        """Tokens per second of all."""
        return sum(self.known[name].tokens_per_second * number for name, number in self.numbers.items())

    @property
    def machines_of_unknown_speed(self) -> set[Machine]:
        return {machine(self.known[name]) for name in self.numbers if unsure(self.known[name])}

    def end_all_but(self, kept: Sequence[Held]) -> None:
        """Nothing is ordered, and of what is held only these go on."""
        here = [one.instance for one in reversed(self._course.held) if one not in kept]
        self._retire += [name for name in here if name not in self._retire]
        self.numbers = Counter(one.option.name for one in self._course.held if one.instance not in self._retire)

    def keep(self, one: Held) -> None:
        """It does not go after all."""
        if one.instance in self._retire:
            self._retire.remove(one.instance)
            self.numbers[one.option.name] += 1

    def make_room(self, option: Option, spare: float) -> float | None:
        """Room for one of these: the speed given up for it, at most `spare`. None: there is none.

        The slowest goes, if it is slower. What is being measured does not.
        """
        if self.numbers.total() < self._course.most:
            return 0.0
        here = [one for one in self._course.held if one.instance not in self._retire]
        some = [self.known[name] for name, number in self.numbers.items() if number and not unsure(self.known[name])]
        slowest = min(some, key=lambda one: one.tokens_per_second, default=None)
        if slowest is None or slowest.tokens_per_second > min(spare, option.tokens_per_second):
            return None
        alike = [one.instance for one in here if one.option.name == slowest.name]
        self._retire += alike[self.numbers[slowest.name] - 1 :]
        self.numbers[slowest.name] -= 1
        return slowest.tokens_per_second

    def command(self, words: str, added: bool) -> Command:
        """The command for this fleet; the old one where nothing is different, or nothing would be left."""
        before = self._command
        offers = tuple((name, number) for name, number in self.numbers.items() if number)
        if not offers or (sorted(offers), self._retire) == (sorted(before.offers), [*before.retire]):
            return before
        kind = before.kind
        if kind == "steady":
            gone = len(self._retire) > len(before.retire)
            kind = "switch" if added and gone else "grow" if added else "shrink" if gone else kind
        return replace(
            before,
            instances=self.numbers.total(),
            offers=offers,
            retire=tuple(self._retire),
            pilot=before.pilot or added,
            kind=kind,
            reason=f"{words}; {before.reason}",
        )


def _plan(course: Course) -> tuple[float, Plan | None]:
    """The plan that meets deadline and budget with the least luck, and how much that is."""
    for luck in LUCK:
        options = [_faster(one, luck) for one in course.options]
        held = [replace(one, option=_faster(one.option, luck)) for one in course.held]
        plan = make_plan(
            course.work, options, held, course.target, detail=False, ramp=course.ramp, caution=0.0, anyway=False
        )
        if plan.met:
            return luck, plan
    return LUCK[-1], None


def _faster(option: Option, luck: float) -> Option:
    if not unsure(option):
        return option
    return replace(option, tokens_per_second=option.tokens_per_second * math.exp(luck * option.spread))
