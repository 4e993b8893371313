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

    `retire`: held instances that are to be drained and ended. `pause`: why nothing may be rented, "" otherwise.
    """

    instances: int
    offers: tuple[tuple[str, int], ...]
    retire: tuple[str, ...] = ()
    pause: str = ""
    pilot: bool = False
    kind: Kind = "steady"
    reason: str = ""


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


def trim(command: Command, options: Sequence[Option], held: Sequence[Held], budget: float, pace: Pace) -> Command:
    """The command without what the budget could not keep until it is ended: what is dearest by the hour goes first.

    What is new must be able to boot as well.
    """
    known = {one.name: one for one in (*options, *(one.option for one in held))}
    there = dict(counts([one for one in held if one.instance not in command.retire]))
    fleet = dict(command.offers)
    left = budget
    for name in sorted(fleet, key=lambda name: known[name].usd_per_hour):
        price = known[name].usd_per_hour / HOUR
        each = 2 * pace.reserve * price
        kept = min(fleet[name], there.get(name, 0), int(left / each))
        new = min(fleet[name] - kept, int((left - kept * each) / (each + price * known[name].boot_seconds)))
        fleet[name] = max(0, kept + max(0, new))
        left -= each * fleet[name]
    if fleet == dict(command.offers):
        return command
    offers = tuple((name, fleet[name]) for name, _ in command.offers if fleet[name])
    retire = list(command.retire)
    for one in sorted(held, key=lambda one: -one.ready_in):
        if one.instance not in retire and there.get(one.option.name, 0) > fleet.get(one.option.name, 0):
            there[one.option.name] -= 1
            retire.append(one.instance)
    reason = f"the budget has {budget:.2f} $ left, which is not enough for more; {command.reason}"
    return replace(command, instances=sum(fleet.values()), offers=offers, retire=tuple(retire), reason=reason)
