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
    known = {one.name: one for one in (*(one.option for one in course.held), *course.options)}
    fleet = Counter({name: number for name, number in command.offers if name in known})
    luck, plan = _plan(course)
    lucky: dict[Machine, Option] = {}
    for option, _ in fleet_of(plan) if plan else ():
        if unsure(known[option.name]):
            lucky.setdefault(machine(option), option)
    if plan is None or not lucky or not fleet:
        return command
    retire = [*command.retire]
    if missing == "money":
        kept = [one for one in course.held if one.instance in plan.keep or unsure(one.option)]
        retire += [one.instance for one in reversed(course.held) if one not in kept and one.instance not in retire]
        fleet = Counter(one.option.name for one in course.held if one.instance not in retire)
    trying: dict[Machine, Held] = {}
    for one in course.held:
        if machine(one.option) in lucky:
            trying.setdefault(machine(one.option), one)
    spare = SACRIFICE * sum(known[name].tokens_per_second * number for name, number in fleet.items())
    added: list[str] = []
    for this, option in lucky.items():
        there = {machine(known[name]) for name in fleet if unsure(known[name])}
        if this in there or len(there) >= most or (this not in trying and luck == 0 and trying):
            continue  # as believed it will do: what is being tried is waited for
        if fleet.total() >= course.most:
            slowest = _slowest(fleet, known, course.held, retire)
            if slowest is None or missing == "perhaps money" or slowest.tokens_per_second > spare:
                break
            if slowest.tokens_per_second >= option.tokens_per_second:
                continue
            spare -= slowest.tokens_per_second
            held = [one.instance for one in course.held if one.option.name == slowest.name]
            held = [one for one in held if one not in retire]
            retire += held[fleet[slowest.name] - 1 :]
            fleet[slowest.name] -= 1
        if this in trying:
            retire.remove(trying[this].instance)
            fleet[trying[this].option.name] += 1
        else:
            fleet[option.name] += 1
            added.append(option.name)
    offers = tuple((name, number) for name, number in fleet.items() if number)
    if not offers or (sorted(offers), retire) == (sorted(command.offers), [*command.retire]):
        return command
    kind = command.kind
    if kind == "steady":
        gone = len(retire) > len(command.retire)
        kind = "switch" if added and gone else "grow" if added else "shrink" if gone else kind
    words = f"{' or '.join(lucky_one.name for lucky_one in lucky.values())} may be faster than believed"
    what = "in time" if missing == "time" else "for this money"
    return replace(
        command,
        instances=fleet.total(),
        offers=offers,
        retire=tuple(retire),
        pilot=command.pilot or bool(added),
        kind=kind,
        reason=f"{words}, and nothing else is sure to do it {what}; {command.reason}",
    )


def _slowest(
    fleet: Counter[str], known: Mapping[str, Option], held: Sequence[Held], retire: Sequence[str]
) -> Option | None:
    """What is given up first: known and slow. What is being measured is not."""
    measuring = {one.option.name for one in held if unsure(one.option) and one.instance not in retire}
    some = [
        known[name] for name, number in fleet.items() if number and name not in measuring and not unsure(known[name])
    ]
    return min(some, key=lambda one: one.tokens_per_second, default=None)


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
