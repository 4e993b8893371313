"""Whether it pays to move a run to another instance, and to which. Pure.

Speeds are seconds of the provider's clock. What is left is the dataset's work, because the instance passes on to the
next run; but the run itself must last for some boots, or it would pay for a machine that it never uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_runner.offers.offer import Offer, Ranking
from gpu_runner.offers.selection import MEMORY, OfferFailure, Pace, choose, consider_move

MARGIN = 0.05  # of what staying costs: speeds are not known better than that
ENOUGH_BOOTS = 1.5  # boots that must fit into what is left of the run
TRUSTED_PENALTY = 1.1  # an offer that failed more, or more lately, is no reason to leave an engine that works


@dataclass(frozen=True, slots=True)
class Migration:
    """A move to another offer that pays, and the figures it rests on. Speeds are per second of the provider's clock."""

    instance: str
    old: Offer
    new: Offer
    tokens_left: float
    old_tokens_per_second: float
    new_tokens_per_second: float
    saved_usd: float
    sentence: str


@dataclass(frozen=True, slots=True)
class CurrentPlacement:
    """Where a run is: its instance, that one's own speed once it is known, and tokens left of dataset and run."""

    instance: str
    offer: Offer
    tokens_per_second: float | None
    dataset_tokens: float
    run_tokens: float


def find_move(
    present: CurrentPlacement,
    ranking: Ranking,
    estimates: Ranking,
    warm: Iterable[Offer],
    failures: Sequence[OfferFailure],
) -> Migration | None:
    """The move that saves most by the break-even rule, or None. For a run without a plan.

    `ranking`: what can be rented, with the best known speeds; `estimates`: the same without any measurement, which
    tells how far off the estimate of our own hardware was; `warm`: instances that stand ready, offers without a boot.
    """
    old = present.offer
    known = {one.offer.hardware: one.speed for one in reversed(ranking.ranked)}
    estimated = {one.offer.hardware: one.speed.tokens_per_second for one in estimates.ranked}
    own = known.get(old.hardware)
    speed = present.tokens_per_second or (None if own is None else own.tokens_per_second)
    if not speed:
        return None
    factor = speed / estimated[old.hardware] if old.hardware in estimated else 1.0
    best: Migration | None = None
    for offer in [*warm, *(one.offer for one in choose(ranking, failures))]:
        there = known.get(offer.hardware)
        if there is None or MEMORY.penalty(offer, failures) > TRUSTED_PENALTY:
            continue
        if offer.hardware == old.hardware:
            pace = speed
        else:
            pace = there.tokens_per_second * (factor if there.basis == "estimate" else 1.0)
        if present.run_tokens / speed < ENOUGH_BOOTS * offer.boot_seconds:
            continue
        here = Pace(old.price_per_hour, speed)
        move = consider_move(present.dataset_tokens, here, Pace(offer.price_per_hour, pace, offer.boot_seconds))
        if not move.worth or move.saved_usd < MARGIN * here.usd(present.dataset_tokens):
            continue
        if best is None or move.saved_usd > best.saved_usd:
            sentence = f"{present.instance}: from {old.name} to {offer.name}: {move.reason}"
            tokens = present.dataset_tokens
            best = Migration(present.instance, old, offer, tokens, speed, pace, move.saved_usd, sentence)
    return best


def assigned_move(
    present: CurrentPlacement,
    successor: str,
    ranking: Ranking,
    warm: Iterable[Offer],
    failures: Sequence[OfferFailure],
    why: str,
) -> Migration | None:
    """The move to the offer of this name that the plan assigned. Whether it pays is not asked again.

    None while there is none of that offer, or it failed a moment ago, or the run ends before the successor would be of
    use to it: the run stays where it is, and the controller sees the same offers at its next tick.
    """
    old, known = present.offer, {one.offer.hardware: one.speed for one in reversed(ranking.ranked)}
    there = [*warm, *(one.offer for one in choose(ranking, failures))]
    offer = next((one for one in there if one.name == successor), None)
    if offer is None or offer.hardware not in known:
        return None
    pace = known[offer.hardware].tokens_per_second
    own = known.get(old.hardware)
    speed = present.tokens_per_second or (pace if own is None else own.tokens_per_second)
    if present.run_tokens / speed < ENOUGH_BOOTS * offer.boot_seconds:
        return None
    here, then = Pace(old.price_per_hour, speed), Pace(offer.price_per_hour, pace, offer.boot_seconds)
    move = consider_move(present.dataset_tokens, here, then)
    sentence = f"{present.instance}: from {old.name} to {offer.name}: the plan: {why}; {move.reason}"
    return Migration(present.instance, old, offer, present.dataset_tokens, speed, pace, move.saved_usd, sentence)
