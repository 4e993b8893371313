"""What a dataset may lease by the capacity sensor's command, which of the offers to be had come first, and what a run
says that gets none. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_runner.fleet_database.accounting.request_budget import BudgetRefusal
from gpu_runner.fleet_database.capacity_plan import Assignment, Pause
from gpu_runner.fleet_database.wait_reason import RunActivity, WaitKind, WaitReason
from gpu_runner.offers.offer import RankedOffer, Ranking
from gpu_runner.offers.selection import OfferFailure


@dataclass(frozen=True, slots=True)
class CapacityAllocation:
    """How many instances a dataset may lease, of which offers (`Offer.name`) first and how many, and why none.

    `planned` False: there is no plan, and a run decides for itself whether to move. `assignments`: what the plan wants
    of moves, and `reason`: why.
    """

    instances: int = 1
    offers: tuple[tuple[str, int], ...] = ()
    pause: Pause | None = None
    planned: bool = False
    assignments: tuple[Assignment, ...] = ()
    reason: str = ""

    @property
    def names(self) -> frozenset[str] | None:
        """The offers that are named; None: any will do."""
        return frozenset(name for name, count in self.offers if count > 0) or None

    def assignment(self, instance: str) -> Assignment | None:
        """The offer that shall take the place of this instance; None: it has no successor."""
        return next((one for one in self.assignments if one.instance == instance and one.successor), None)

    def move_limit(self, instance: str) -> int:
        """How many instances the dataset may lease when this one is left for another, itself not counted.

        Where the number counts both, a successor that somebody else leased first has taken the place.
        """
        assigned = self.assignment(instance)
        return self.instances - (assigned is not None and assigned.beside)

    @property
    def wait_kind(self) -> WaitKind:
        """What a run waits for that may lease nothing."""
        return WaitKind.PAUSED if self.pause else WaitKind.CAPACITY

    def why_none(self) -> str:
        """Why nothing may be leased."""
        return f"paused: {self.pause.describe()}" if self.pause else "capacity 0"


def order_by_plan(
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


def waits(kind: WaitKind, words: str, refusal: BudgetRefusal | None = None) -> RunActivity:
    """What a run that waits says, and why it waits."""
    return RunActivity(f"waiting: {words}", WaitReason(kind, refusal))


def waits_for_offer(ranking: Ranking, failures: Sequence[OfferFailure]) -> RunActivity:
    """Nothing can be rented, for the most frequent reasons; without times, so that it stays the same for a while."""
    if ranking.ranked:
        said = sorted({failure.text for failure in failures})
        words = f"{len(ranking.ranked)} suitable offers failed a moment ago: {'; '.join(said)}"[:280]
        return waits(WaitKind.OFFERS_FAILED, words)
    counts = Counter(refusal.reason for refusal in ranking.refused)
    words = "no suitable offer" + "".join(f"; {number} × {reason}" for reason, number in counts.most_common(2))
    return waits(WaitKind.NO_OFFER, words)
