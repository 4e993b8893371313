"""Whether it pays to move a run to another instance, and to which. Pure.

Speeds are seconds of the provider's clock. What is left is the dataset's work, because the instance passes on to the
next run; but the run itself must last for some boots, or it would pay for a machine that it never uses.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from gpu_runner.choice import MEMORY, OfferFailure, Pace, choose, consider_move
from gpu_runner.offers import Offer, Ranking

MARGIN = 0.05  # of what staying costs: speeds are not known better than that
ENOUGH_BOOTS = 1.5  # boots that must fit into what is left of the run
TRUSTED_PENALTY = 1.1  # an offer that failed more, or more lately, is no reason to leave an engine that works


@dataclass(frozen=True, slots=True)
class Decision:
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
class Present:
    """Where a run is: its instance, that one's own speed once it is known, and tokens left of dataset and run."""

    instance: str
    offer: Offer
    tokens_per_second: float | None
    dataset_tokens: float
    run_tokens: float


def find_move(
    present: Present,
    ranking: Ranking,
    estimates: Ranking,
    warm: Iterable[Offer],
    failures: Sequence[OfferFailure],
    among: Container[str] | None = None,
    *,
    must: str = "",
) -> Decision | None:
    """The move that saves most by the break-even rule, or None.

    `ranking`: what can be rented, with the best known speeds; `estimates`: the same without any measurement, which
    tells how far off the estimate of our own hardware was; `warm`: instances that stand ready, offers without a boot.
    `among`: names of the offers that may be moved to; None: any. `must`: why the instance is to be left even if that
    does not pay.
    """
    old = present.offer
    known = {one.offer.hardware: one.speed for one in reversed(ranking.ranked)}
    estimated = {one.offer.hardware: one.speed.tokens_per_second for one in estimates.ranked}
    own = known.get(old.hardware)
    speed = present.tokens_per_second or (None if own is None else own.tokens_per_second)
    if not speed:
        return None
    factor = speed / estimated[old.hardware] if old.hardware in estimated else 1.0
    best: Decision | None = None
    for offer in [*warm, *(one.offer for one in choose(ranking, failures))]:
        there = known.get(offer.hardware)
        if among is not None and offer.name not in among:
            continue
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
        pays = move.worth and move.saved_usd >= MARGIN * here.usd(present.dataset_tokens)
        if not pays and not must:
            continue
        if best is None or move.saved_usd > best.saved_usd:
            why = move.reason if pays else f"{must}; {move.reason}"
            sentence = f"{present.instance}: from {old.name} to {offer.name}: {why}"
            tokens = present.dataset_tokens
            best = Decision(present.instance, old, offer, tokens, speed, pace, move.saved_usd, sentence)
    return best
