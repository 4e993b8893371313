"""What to try when nothing that is known will do: machines that would make it if they are faster than believed. Pure.

A deadline or a budget that cannot be met by the speeds as believed may still be met if one of them is better. Trying it
costs a boot and two minutes of one instance; not trying it is a certain miss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gpu_runner.command import Command
from gpu_runner.course import Course, fleet_of
from gpu_runner.pilots import machine, unsure
from gpu_runner.planner import Option, Plan, make_plan

LUCK = (0.0, 0.5, 1.0, 1.5)  # standard deviations by which the speeds that are not known may be better than believed


def long_shot(course: Course, command: Command, most: int, *, frugal: bool) -> Command:
    """The command, and one instance each of at most `most` machines with which, if they are fast, it can be done.

    Where the limit on instances leaves no room they take the place of others. `frugal`: the budget is what is missing,
    so that what is no part of the lucky plan ends now. Without any such machine: the command as it is.
    """
    known = {one.name: one for one in (*(one.option for one in course.held), *course.options)}
    fleet = Counter({name: number for name, number in command.offers if name in known})
    luck, plan = _plan(course)
    lucky = [known[option.name] for option, _ in fleet_of(plan) if unsure(known[option.name])] if plan else []
    if plan is None or not lucky or not fleet:
        return command
    retire = set(command.retire)
    if frugal:
        kept = [one for one in course.held if one.instance in plan.keep or unsure(one.option)]
        fleet = Counter(one.option.name for one in kept if one.instance not in retire)
        retire |= {one.instance for one in course.held if one not in kept}
    there = {machine(known[name]) for name in fleet}
    trying = {machine(one.option): one for one in course.held if unsure(one.option)}
    wanted = {machine(one): one for one in reversed(lucky) if machine(one) not in there}
    for one in [*wanted][:most]:
        if one in trying:
            retire.discard(trying[one].instance)
            fleet[trying[one].option.name] += 1
        elif luck > 0 or not trying:
            fleet[wanted[one].name] += 1
    while fleet.total() > course.most:
        largest, number = max(fleet.items(), key=lambda pair: (not unsure(known[pair[0]]), pair[1]))
        held = [one.instance for one in course.held if one.option.name == largest and one.instance not in retire]
        retire |= set(held[number - 1 :])
        fleet[largest] -= 1
    kind = command.kind
    if kind == "steady":
        grown = fleet.total() + len(retire) > len(course.held)
        kind = "switch" if grown and retire else "grow" if grown else "shrink" if retire else "steady"
    for_what = "for this money" if frugal else "in time"
    return replace(
        command,
        instances=fleet.total(),
        offers=tuple(pair for pair in fleet.items() if pair[1]),
        retire=tuple(one.instance for one in course.held if one.instance in retire),
        pilot=True,
        kind=kind,
        reason=f"{_names(lucky)} may be faster than believed, and nothing else can do it {for_what}; {command.reason}",
    )


def _names(options: Sequence[Option]) -> str:
    return " or ".join(one.name for one in options)


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
