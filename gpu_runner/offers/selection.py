"""Which offer to take next, and whether it pays to move to a cheaper one. Pure: ages come in as seconds."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpu_runner.money import format_usd
from gpu_runner.offers.offer import HOUR, Offer, RankedOffer, Ranking, Refusal, describe, objective_value


class FailureKind(enum.StrEnum):
    """How an instance of an offer failed."""

    NO_CAPACITY = "no_capacity"  # the provider has none now
    LOST = "lost"  # it worked, and was lost: trusted less for a while, but asked at once when there is nothing better
    REFUSED = "refused"  # the order was refused or not answered: nothing was paid
    FAILED = "failed"  # anything else, such as a boot that was paid: `OfferFailure.text` says what


@dataclass(frozen=True, slots=True)
class OfferFailure:
    """An instance of an offer (`Offer.name`) that was not to be had or was lost, `age` real seconds ago.

    `text`: what went wrong, for people.
    """

    provider: str
    offer: str
    age: float
    kind: FailureKind
    text: str


@dataclass(frozen=True, slots=True)
class Memory:
    """How failures count: an offer is left alone for a while, and then looks dearer than it is for a longer while.

    `no_capacity`, `refused` and `other`: seconds for which an offer is not asked after such a failure. `weight`: by how
    much a fresh failure raises the expected cost (1: doubles it); it halves every `half_life` seconds. The values are
    ours: capacity may come back at any moment, and asking costs nothing; a boot that fails was paid.
    """

    no_capacity: float = 10.0
    refused: float = 20.0
    other: float = 60.0
    half_life: float = 600.0
    weight: float = 1.0

    @property
    def horizon(self) -> float:
        """Seconds after which a failure counts for less than 1 %."""
        return 7 * self.half_life

    def penalty(self, offer: Offer, failures: Iterable[OfferFailure]) -> float:
        """Factor on the offer's expected cost: 1 + weight × 2^(-age / half_life) for each failure."""
        ages = [max(0.0, one.age) for one in _of(offer, failures)]
        return 1.0 + self.weight * sum(math.exp2(-age / self.half_life) for age in ages)

    def pause(self, offer: Offer, failures: Iterable[OfferFailure]) -> tuple[float, str] | None:
        """Seconds for which the offer is still left alone, and after which failure, in words; None: it may be asked."""
        seconds = {
            FailureKind.NO_CAPACITY: self.no_capacity,
            FailureKind.LOST: 0.0,
            FailureKind.REFUSED: self.refused,
            FailureKind.FAILED: self.other,
        }
        waits = [(seconds[one.kind] - one.age, one.text) for one in _of(offer, failures)]
        longest = max(waits, default=(0.0, ""))
        return longest if longest[0] > 0 else None


MEMORY = Memory()


def choose(ranking: Ranking, failures: Iterable[OfferFailure] = (), memory: Memory = MEMORY) -> list[RankedOffer]:
    """The ranking's offers in the order in which to ask for them: by its own objective, with failures in mind.

    Offers that are left alone now are not among them (`in_backoff`). The figures are those of the ranking.
    """
    failures = list(failures)
    open_now = [one for one in ranking.ranked if memory.pause(one.offer, failures) is None]
    return sorted(
        open_now, key=lambda one: objective_value(_dearer(one, memory.penalty(one.offer, failures)), ranking.objective)
    )


def recently_lost(failures: Iterable[OfferFailure], standing: Mapping[str, int], memory: Memory = MEMORY) -> set[str]:
    """Names of offers that were lost lately (within `half_life`) as often as instances of them are `standing`.

    A plan names none of them: where the last one was just taken, the next one may be too. One loss among many that
    stand says little.
    """
    lost = Counter(one.offer for one in failures if one.kind is FailureKind.LOST and one.age <= memory.half_life)
    return {name for name, times in lost.items() if times >= standing.get(name, 0)}


def set_aside(
    ranking: Ranking, failures: Iterable[OfferFailure], standing: Mapping[str, int], memory: Memory = MEMORY
) -> Ranking:
    """The ranking as a plan takes it: offers that it leaves out for what failed lately are refused, with the reason."""
    failures = list(failures)
    lost = recently_lost(failures, standing, memory)
    paused = in_backoff(ranking, failures, memory)
    out = {one.offer.name for one in paused}
    taken = [
        Refusal(one.offer, ("instances of it were taken away lately, as many as there are",))
        for one in ranking.ranked
        if one.offer.name in lost - out
    ]
    kept = tuple(one for one in ranking.ranked if one.offer.name not in out | lost)
    return replace(ranking, ranked=kept, refused=(*paused, *taken, *ranking.refused))


def in_backoff(ranking: Ranking, failures: Iterable[OfferFailure], memory: Memory = MEMORY) -> list[Refusal]:
    """Offers that could do the work but failed a moment ago, and for how long they are not asked."""
    failures = list(failures)
    paused = [(one.offer, memory.pause(one.offer, failures)) for one in ranking.ranked]
    return [
        Refusal(offer, (f"left alone for {wait[0]:.0f} s more: {wait[1]}",))
        for offer, wait in paused
        if wait is not None
    ]


def explain(one: RankedOffer, failures: Iterable[OfferFailure] = (), memory: Memory = MEMORY) -> str:
    """One sentence: why this offer stands where `choose` put it."""
    penalty = memory.penalty(one.offer, failures)
    return describe(one) + ("" if penalty < 1.01 else f", counted × {penalty:.2f} because it failed lately")


def _of(offer: Offer, failures: Iterable[OfferFailure]) -> Iterable[OfferFailure]:
    return (one for one in failures if (one.provider, one.offer) == (offer.provider, offer.name))


def _dearer(one: RankedOffer, penalty: float) -> RankedOffer:
    return replace(one, usd=one.usd * penalty, seconds=one.seconds * penalty)


@dataclass(frozen=True, slots=True)
class Pace:
    """What an instance costs and does: US dollars per hour, tokens per second, and seconds until it is ready."""

    price_per_hour: float
    tokens_per_second: float
    boot_seconds: float = 0.0

    def usd(self, tokens: float) -> float:
        """What so many tokens cost once it is ready."""
        return self.price_per_hour / HOUR * tokens / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class Move:
    """The verdict on moving, what it saves (negative: costs), and one sentence of reason."""

    worth: bool
    saved_usd: float
    reason: str


def consider_move(tokens: float, old: Pace, new: Pace) -> Move:
    """Whether to move the `tokens` that are left from a running instance to a new one of another price and speed.

    The old one works on while the new one boots. What is left then costs price ÷ speed on either; moving costs the new
    one's boot on top: with equal speeds it pays if (p_old - p_new) × hours left > boot × p_new, prices per hour. Raises
    ValueError unless prices and speeds are above 0.
    """
    for pace in (old, new):
        if not (0 < pace.price_per_hour < math.inf and 0 < pace.tokens_per_second < math.inf):
            raise ValueError(f"pace: expected a price and a speed above 0, found {pace}")
    left = tokens - old.tokens_per_second * new.boot_seconds
    boot = new.price_per_hour / HOUR * new.boot_seconds
    if left <= 0:
        return Move(False, -boot, f"stay: the work is done in {tokens / old.tokens_per_second:.0f} s, before it boots")
    stay, go = old.usd(left), new.usd(left) + boot
    figures = (
        f"{left:,.0f} tokens cost {format_usd(stay)} $ here ({format_usd(old.price_per_hour)} $/h) "
        f"and {format_usd(go)} $ there ({format_usd(new.price_per_hour)} $/h, boot {format_usd(boot)} $ included)"
    )
    if stay <= go:
        return Move(False, stay - go, f"stay: {figures}")
    return Move(True, stay - go, f"move and save {format_usd(stay - go)} $: {figures}")
