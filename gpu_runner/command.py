"""What the controller commands, what it remembers, and what the budget leaves of a command. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gpu_runner.course import counts
from gpu_runner.offers import HOUR
from gpu_runner.pilots import Pace
from gpu_runner.planner import Held, Option

Kind = Literal["pilot", "steady", "grow", "shrink", "switch", "infeasible", "paused", "done"]


@dataclass(frozen=True, slots=True)
class Command:
    """What the fleet may do: `instances` in all, of which `offers` (name and number, held ones included) come first.

    Offers of one name are added up. `retire`: held instances that are to be drained and ended. `pause`: why nothing may
    be rented, "" otherwise.
    """

    instances: int
    offers: tuple[tuple[str, int], ...]
    retire: tuple[str, ...] = ()
    pause: str = ""
    pilot: bool = False
    kind: Kind = "steady"
    reason: str = ""

    def __post_init__(self) -> None:
        merged: dict[str, int] = {}
        for name, number in self.offers:
            merged[name] = merged.get(name, 0) + number
        object.__setattr__(self, "offers", tuple(merged.items()))


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept from tick to tick: the last command's fleet, and the offers that had a pilot."""

    instances: int = 0
    offers: tuple[tuple[str, int], ...] = ()
    tried: tuple[str, ...] = ()
    changed_at: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Memory:
        """From `as_json`; an empty one is the beginning."""
        return cls(
            instances=int(values.get("instances", 0)),
            offers=tuple((str(name), int(number)) for name, number in values.get("offers", ())),
            tried=tuple(str(name) for name in values.get("tried", ())),
            changed_at=float(values.get("changed_at", 0.0)),
        )


def entry_usd(option: Option, pace: Pace) -> float:
    """US dollars that a budget must have left before an instance of this offer is ordered.

    Its boot, as long again (at least one reserve) to earn it, and the reserve that it costs on after the decision to
    end it. So what is commanded is not refused by the books, which ask for twice the boot, a drain and a lease's end
    (`gpu_runner.budget.refuse_beyond`).
    """
    return option.usd_per_hour / HOUR * (option.boot_seconds + max(option.boot_seconds, pace.reserve) + pace.reserve)


def affordable(options: Sequence[Option], budget: float, pace: Pace) -> list[Option]:
    """Offers of which one instance can be had, works, and may be ordered with so much left."""
    there = (one for one in options if one.capacity != 0 and one.tokens_per_second > 0)
    return [one for one in there if entry_usd(one, pace) <= budget]


def trim(command: Command, options: Sequence[Option], held: Sequence[Held], budget: float, pace: Pace) -> Command:
    """The command without new instances that the budget could not boot, use and end: the dearest go first.

    It may be that nothing is left of it: then the controller has to choose among what is affordable.
    """
    known = {one.name: one for one in (*options, *(one.option for one in held))}
    there = dict(counts([one for one in held if one.instance not in command.retire]))
    fleet = dict(command.offers)
    price = {name: known[name].usd_per_hour / HOUR for name in fleet}
    left = budget - sum(pace.reserve * price[name] * min(number, there.get(name, 0)) for name, number in fleet.items())
    for name in sorted(fleet, key=lambda name: price[name]):
        each = entry_usd(known[name], pace)
        wanted = max(0, fleet[name] - there.get(name, 0))
        new = max(0, min(wanted, int(left / each))) if each > 0 else wanted
        fleet[name] += new - wanted
        left -= 2 * pace.reserve * price[name] * new
    if fleet == dict(command.offers):
        return command
    offers = tuple((name, fleet[name]) for name, _ in command.offers if fleet[name])
    reason = f"the budget has {budget:.2f} $ left, which is not enough for more; {command.reason}"
    return replace(command, instances=sum(fleet.values()), offers=offers, reason=reason)


def why_no_entry(options: Sequence[Option], budget: float, pace: Pace) -> str:
    """The rule by which no instance may be ordered, with the numbers of the offer that comes closest."""
    nearest = min(options, key=lambda one: entry_usd(one, pace))
    rate, boot = nearest.usd_per_hour / HOUR, nearest.boot_seconds
    parts = (
        f"{rate * boot:.2f} $ to boot, {rate * max(boot, pace.reserve):.2f} $ to work at least as long, "
        f"{rate * pace.reserve:.2f} $ held back for the {pace.reserve:.0f} s until it is drained and ended"
    )
    needs = f"the next instance needs {entry_usd(nearest, pace):.2f} $ ({nearest.name}: {parts})"
    return f"{budget:.2f} $ are left, and {needs}"
