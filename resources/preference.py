"""What a dataset may lease by the capacity sensor's command, and which of the offers to be had come first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_runner.offers import RankedOffer


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many instances a dataset may lease, of which offers (`Offer.name`) first and how many, and why none.

    `leave`: instances that are to be left for others, and `reason`: why.
    """

    instances: int = 1
    offers: tuple[tuple[str, int], ...] = ()
    pause: str = ""
    leave: tuple[str, ...] = ()
    reason: str = ""

    @property
    def names(self) -> frozenset[str] | None:
        """The offers that are named; None: any will do."""
        return frozenset(name for name, count in self.offers if count > 0) or None

    def missing(self, standing: Mapping[str, int]) -> list[str]:
        """Offers of which fewer stand than are named, each as often as it is missing, in the command's order."""
        return [name for name, count in self.offers for _ in range(count - standing.get(name, 0))]

    def successor(self, instance: str, standing: Mapping[str, int]) -> str | None:
        """The offer that shall take the place of this instance; None: it is to stay. Each missing one has one taker."""
        missing = self.missing(standing)
        place = self.leave.index(instance) if instance in self.leave else len(missing)
        return missing[place] if place < len(missing) else None

    def why_none(self) -> str:
        """Why nothing may be leased."""
        return f"paused: {self.pause}" if self.pause else "capacity 0"


def prefer(
    order: Sequence[RankedOffer], named: Sequence[tuple[str, int]], standing: Mapping[str, int]
) -> list[RankedOffer]:
    """Named offers of which fewer stand than were named, in the command's order; then the other named ones.

    `order`: what can be had now, best first; `named`: `Offer.name` and how many instances of it are wanted, held ones
    included; `standing`: how many the dataset holds. Offers without a name are left out, unless no named one is there.
    """
    by_name = {one.offer.name: one for one in reversed(order)}
    there = [(name, count) for name, count in named if name in by_name and count > 0]
    if not there:
        return list(order)
    wanted = [name for name, count in there if standing.get(name, 0) < count]
    enough = [name for name, count in there if standing.get(name, 0) >= count]
    return [by_name[name] for name in dict.fromkeys(wanted + enough)]
