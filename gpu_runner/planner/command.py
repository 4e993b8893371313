"""What the controller commands, and what the budget leaves of a command. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpu_runner.fleet_database.capacity_plan import Assignment, Pause, PauseKind
from gpu_runner.money import format_usd, round_up_usd
from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.budget import affordable, entry_usd, fitting, needed_usd
from gpu_runner.planner.feasibility import MIN_SAVING, FeasibilityCheck
from gpu_runner.planner.planned_fleet import FleetCandidate
from gpu_runner.planner.planner import least_budget, make_plan
from gpu_runner.planner.types import ControlTiming, HeldInstance, Plan, PlannedOffer

EXCHANGED_AT_ONCE = 5  # one in so many may be given up at once for others that save money

CommandKind = Literal["pilot", "steady", "grow", "shrink", "switch", "infeasible", "paused", "done"]


@dataclass(frozen=True, slots=True)
class Command:
    """What the fleet may do: `instances` in all, of which `offers` (name and number, held ones included) come first.

    `retire`: held instances that are given up. `replaced`: those that work on until what takes their place was to be
    had, and then are given up. `new`: what is to be ordered, in the order in which it takes places. `assignments`: how
    runs carry that out (`assign`). `pause`: why nothing may be rented, if so.
    """

    instances: int
    offers: tuple[tuple[str, int], ...]
    retire: tuple[str, ...] = ()
    pause: Pause | None = None
    pilot: bool = False
    kind: CommandKind = "steady"
    reason: str = ""
    replaced: tuple[str, ...] = ()
    new: tuple[tuple[str, int], ...] = ()
    assignments: tuple[Assignment, ...] = ()


def order(
    fleet: FleetCandidate,
    held: Sequence[HeldInstance],
    kind: CommandKind,
    reason: str,
    replaced: Sequence[str] = (),
) -> Command:
    """The command for exactly this fleet. `replaced`: those of its instances that are to work on for a while only."""
    ended = tuple(one.instance for one in held if one not in fleet.kept)
    return Command(
        len(fleet.options),
        fleet.offers,
        ended,
        pilot=kind == "pilot",
        kind=kind,
        reason=reason,
        replaced=tuple(name for name in replaced if name not in ended),
        new=tuple((option.name, number) for option, number in fleet.new),
    )


def assign(command: Command, number_held: int, room: int | None, before: Sequence[Assignment]) -> Command:
    """The command with who takes whose place: each new instance that of one, the same as before while both are there.

    Of `retire` as many are drained at once as there are too many of the `number_held`, or as have no room in the fleet
    beside their successors. `room`: how many more the fleet may have; None: any number.
    """
    number = max(0, number_held - command.instances, 0 if room is None else len(command.retire) - room)
    drained, given_up = command.retire[:number], (*command.retire[number:], *command.replaced)
    places = [name for name, count in command.new for _ in range(count)]
    successors: dict[str, str] = {}
    for one in before:
        if one.instance in given_up and one.successor is not None and one.successor in places:
            successors[one.instance] = one.successor
            places.remove(one.successor)
    open_places = iter(places)
    for name in given_up:
        if name not in successors and (place := next(open_places, None)) is not None:
            successors[name] = place
    pairs = (Assignment(name, successors[name], name in command.replaced) for name in given_up if name in successors)
    return replace(command, assignments=(*(Assignment(name) for name in drained), *pairs))


def keep_all(held: Sequence[HeldInstance], words: str, kind: CommandKind = "steady") -> Command:
    """The command that changes nothing."""
    kept = "1 is kept" if len(held) == 1 else f"{len(held)} are kept"
    return order(FleetCandidate(tuple(held)), held, kind, f"{kept}: {words}")


def revise(before: Command, fleet: FleetCandidate, held: Sequence[HeldInstance], words: str) -> Command:
    """The command for this fleet; the same one where nothing is different, or nothing would be left."""
    after = order(fleet, held, before.kind, f"{words}; {before.reason}", before.replaced)
    if not after.offers or (sorted(after.offers), {*after.retire}) == (sorted(before.offers), {*before.retire}):
        return before
    gone, kind = len(after.retire) > len(before.retire), before.kind
    if kind == "steady":
        kind = "switch" if fleet.is_probe and gone else "grow" if fleet.is_probe else "shrink" if gone else kind
    return replace(after, pilot=before.pilot or fleet.is_probe, kind=kind)


def change_to(
    wanted: FleetCandidate, check: FeasibilityCheck, plan: Plan, why: str, *, needed: bool = False
) -> Command:
    """From what is held to another fleet. What is given up works on until what replaces it was to be had.

    Where the limit leaves no room for both, it goes first: all at once when the change is needed for the deadline
    or to be made at once, else one, and a few at a time once the new offer was to be had.
    """
    fleet, number_new = wanted, sum(number for _, number in wanted.new)
    others = sorted((one for one in check.held if one not in wanted.kept), key=lambda one: _spare(one, plan))
    plain = [one for one in others if _spare(one, plan)[0] == 0]
    crowd = max(0, len(wanted.options) + len(others) - check.most)
    if number_new:
        had = any(option.name == one.option.name for option, _ in wanted.new for one in wanted.kept)
        few = crowd if needed else min(crowd, len(plain), max(1, check.most // EXCHANGED_AT_ONCE) if had else 1)
        for _ in range(min(crowd - few, number_new)):
            fleet = fleet.without(max(fleet.new, key=lambda pair: pair[1])[0].name)
    else:
        few = max(crowd, len(plain))
    fleet = replace(fleet, kept=(*fleet.kept, *others[few:]))
    replaced = [one.instance for one in plain[few:]] if number_new else []
    number, held = len(fleet.options), len(check.held)
    reason = f"{number} instance{'s' * (number != 1)} instead of {held}, which {why}; {plan.reason}"
    return order(fleet, check.held, _kind(plan, number, few, held), reason, replaced)


def _spare(one: HeldInstance, plan: Plan) -> tuple[int, float]:
    """What goes first is what comes first: known and not part of any plan, then by price, the dearest token first.

    What is being measured stays, and so does cheap spot beside a plan that does not count on spot.
    """
    dearest = max((option.usd_per_token for option, _ in plan.fleet), default=0.0)
    cheap = one.option.usd_per_token <= (1 + MIN_SAVING) * dearest
    helps = one.option.spot and not plan.has_spot and cheap
    return int(one.option.is_unmeasured or helps), -one.option.usd_per_token


def _kind(plan: Plan, number: int, retired: int, held: int) -> CommandKind:
    if not plan.met:
        return "infeasible"
    if retired:
        return "switch" if number > held - retired else "shrink"
    return "grow" if number > held else "steady"


def fit_budget(command: Command, fleet: FleetCandidate, budget: float, timing: ControlTiming) -> Command:
    """The command without new instances that the budget could not boot, use and end: the dearest go first.

    `fleet`: what it commands. It may be that nothing is left of it: then the controller has to choose among what is
    affordable.
    """
    left = budget - timing.reserve * sum(one.option.usd_per_hour for one in fleet.kept) / HOUR
    new = fitting(fleet.new, left, timing.reserve)
    fewer = FleetCandidate(fleet.kept, new)
    if len(fewer.options) == len(fleet.options):
        return command
    reason = f"the budget has {format_usd(budget)} $ left, which is not enough for more; {command.reason}"
    ordered = {option.name: number for option, number in new}
    places = tuple((name, ordered[name]) for name, _ in command.new if name in ordered)
    return replace(command, instances=len(fewer.options), offers=fewer.offers, reason=reason, new=places)


def end_beyond_budget(check: FeasibilityCheck) -> tuple[Command, Plan] | None:
    """The command where the budget lasts neither for what is held and its end, nor for a first instance; else None."""
    budget, held, reserve = check.target.budget_usd, check.held, check.timing.reserve
    if budget is None:
        return None
    kept: list[HeldInstance] = []
    for one in sorted(held, key=lambda one: (one.ready_in > 0, one.option.usd_per_token)):
        if sum(other.option.usd_per_hour for other in (*kept, one)) / HOUR * reserve <= budget:
            kept.append(one)
    there = [one for one in check.options if one.capacity != 0 and one.tokens_per_second > 0]
    if len(kept) == len(held) and (held or not there or affordable(there, budget, check.timing)):
        return None
    target = check.target if held else replace(check.target, reserve_seconds=reserve)
    plan = make_plan(check.work, check.options, held, target)
    if kept:
        reason = f"{format_usd(budget)} $ are left of the budget: {len(kept)} of {len(held)} instances are kept"
        return order(FleetCandidate(tuple(kept)), held, "shrink", reason), plan
    if held:
        least = min(one.option.usd_per_hour for one in held) / HOUR * reserve
        until = "until an instance that goes on is drained and ended"
        rule = f"{format_usd(least)} $ are held back for the {reserve:.0f} s {until}"
    else:
        rule = _why_no_entry(there, check.timing)
    enough = _enough(check, plan)
    reason = f"budget reached: {format_usd(budget)} $ are left, and {rule}; the work needs {_needed(enough)}"
    pause, ended = Pause(PauseKind.BUDGET_REACHED, reason, enough), tuple(one.instance for one in held)
    return Command(0, (), ended, pause=pause, kind="paused", reason=reason), plan


def _why_no_entry(options: Sequence[PlannedOffer], timing: ControlTiming) -> str:
    """The rule by which no instance may be ordered, with the numbers of the offer that comes closest."""
    nearest = min(options, key=lambda one: entry_usd(one, timing.reserve))
    if nearest.row_usd is not None:
        return f"the next row may cost {format_usd(nearest.row_usd)} $ ({nearest.name})"
    rate, boot = nearest.usd_per_hour / HOUR, nearest.boot_seconds
    work = f"{format_usd(rate * max(boot, timing.reserve))} $ to work at least as long"
    return (
        f"the next instance needs {format_usd(entry_usd(nearest, timing.reserve))} $ ({nearest.name}: "
        f"{format_usd(rate * boot)} $ to boot, {work}, {format_usd(rate * timing.reserve)} $ held back "
        f"for the {timing.reserve:.0f} s until it is drained and ended)"
    )


def _enough(check: FeasibilityCheck, plan: Plan) -> float | None:
    """US dollars from now on with which the work can be done after a pause: all that is held has ended then.

    None where nothing that could do it is offered or held.
    """
    anew = least_budget(check.work, check.options, (), replace(check.target, reserve_seconds=check.timing.reserve))
    if anew is not None:
        return anew[0]
    return plan.least_usd if plan.chosen is None else needed_usd(plan.chosen, check.timing.reserve)


def _needed(enough: float | None) -> str:
    return "more" if enough is None else f"{format_usd(round_up_usd(enough))} $ from now on"
