"""What a dataset may lease by the capacity sensor's command, and which of the offers to be had come first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_runner.offers import SPOT, Offer, RankedOffer


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many instances a dataset may lease, of which offers (`Offer.name`) first and how many, and why none.

    `deadline`: there is one to be kept.
    """

    instances: int = 1
    offers: tuple[tuple[str, int], ...] = ()
    pause: str = ""
    deadline: bool = False

    @property
    def names(self) -> frozenset[str] | None:
        """The offers that are named; None: any will do."""
        return frozenset(name for name, count in self.offers if count > 0) or None

    def must_leave(self, offer: Offer) -> str:
        """Why an instance is to be left although that costs more; "": it is not.

        A plan for a deadline that names no spot instance any more has found them too risky for what is left.
        """
        names = self.names or frozenset()
        if not (self.deadline and names and offer.spot) or any(name.endswith(SPOT) for name in names):
            return ""
        return "the deadline is not left to spot instances any more"

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
