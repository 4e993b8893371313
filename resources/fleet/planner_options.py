"""Offers and instances as the planner sees them: in real seconds, with their risks. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpu_runner.fleet_database.database import Instance
from gpu_runner.offers.offer import HOUR, Offer, RankedOffer, Ranking, objective_value
from gpu_runner.offers.selection import MEMORY, FailureKind, OfferFailure, recently_lost, set_aside
from gpu_runner.offers.speed import Basis, Speed
from gpu_runner.planner.speed_model import HardwareType, SpeedEstimate, condition_on
from gpu_runner.planner.types import HeldInstance, PlannedOffer
from resources.fleet.leased_engine import instance_offer

# Relative standard deviation of a speed by how we know it (see `gpu_runner.offers.speed.Speed`). Values of ours.
SPREAD: Mapping[Basis, float] = {"measured": 0.05, "scaled": 0.2, "estimate": 0.5}
UNSTATED_INTERRUPTIONS = 0.05  # per hour, of a spot offer that claims to be as reliable as any


Beliefs = Mapping[HardwareType, SpeedEstimate]


def beliefs(known: Ranking, estimates: Ranking) -> Beliefs:
    """How fast each kind of hardware is, and how sure that is. What was measured corrects what was only estimated.

    `known`: offers with the best known speeds; `estimates`: the same without any measurement.
    """
    found = {HardwareType(*one.offer.hardware): _belief(one.speed) for one in reversed(estimates.ranked)}
    measured: dict[HardwareType, float] = {}
    for one in reversed(known.ranked):
        if one.speed.basis == "measured":
            measured[HardwareType(*one.offer.hardware)] = one.speed.tokens_per_second
        if one.speed.basis == "scaled" or HardwareType(*one.offer.hardware) not in found:
            found[HardwareType(*one.offer.hardware)] = _belief(one.speed)
    return condition_on(found, measured)


def _belief(speed: Speed) -> SpeedEstimate:
    return SpeedEstimate(speed.tokens_per_second, SPREAD[speed.basis])


def as_planned(
    ranking: Ranking,
    clocks: Mapping[str, float],
    failures: Iterable[OfferFailure],
    believed: Beliefs,
    standing: Mapping[str, int],
    idle_seconds: float,
) -> Ranking:
    """The ranking with what a plan would reckon: the speeds that it believes, and the idle end that it pays for.

    What it leaves out for what failed lately is refused here, too. `idle_seconds`: real ones after the last row.
    """
    found = set_aside(ranking, failures, standing)
    ranked = [_planned(one, clocks.get(one.offer.provider, 1.0), believed, idle_seconds) for one in found.ranked]
    ranked.sort(key=lambda one: (*objective_value(one, ranking.objective), one.offer.name))
    return replace(found, ranked=tuple(ranked))


def _planned(one: RankedOffer, clock: float, believed: Beliefs, idle_seconds: float) -> RankedOffer:
    speed = believed.get(HardwareType(*one.offer.hardware), _belief(one.speed)).tokens_per_second
    work = (one.seconds - one.offer.boot_seconds) * one.speed.tokens_per_second / speed
    seconds = one.offer.boot_seconds + work
    usd = one.offer.price_per_hour / HOUR * (seconds + idle_seconds * clock)
    return RankedOffer(one.offer, replace(one.speed, tokens_per_second=speed), seconds, usd)


def options(
    ranking: Ranking,
    clocks: Mapping[str, float],
    failures: Iterable[OfferFailure],
    believed: Beliefs,
    standing: Mapping[str, int],
) -> list[PlannedOffer]:
    """What can be rented now. `clocks`: simulated seconds per real second of each provider.

    An offer that failed a moment ago and is left alone for now has no capacity, and one that is lost lately as often
    as it stands. `standing`: instances by the name of their offer.
    """
    failures = list(failures)
    avoided = recently_lost(failures, standing)
    found: list[PlannedOffer] = []
    seen: set[str] = set()
    for one in ranking.ranked:
        if one.offer.name in seen:
            continue  # of offers that are called the same, the best
        seen.add(one.offer.name)
        clock = clocks.get(one.offer.provider, 1.0)
        paused = MEMORY.pause(one.offer, failures) is not None or one.offer.name in avoided
        speed = believed.get(HardwareType(*one.offer.hardware), _belief(one.speed))
        found.append(_option(one.offer, speed, clock, failures, 0 if paused else one.offer.capacity))
    return found


def held(instances: Iterable[Instance], failures: Iterable[OfferFailure], believed: Beliefs) -> list[HeldInstance]:
    """Instances as the planner counts them. One of whose speed nothing is believed is left out.

    A run that holds two changes from the older one to the other.
    """
    failures, instances = list(failures), list(instances)
    by_age = sorted((one for one in instances if one.lease is not None), key=lambda one: one.age)
    oldest = {one.lease.run_id: one.name for one in by_age if one.lease is not None}  # the last one counts
    found: list[HeldInstance] = []
    for instance in instances:
        offer = replace(instance_offer(instance), boot_seconds=instance.boot_seconds)
        if (speed := believed.get(HardwareType(*offer.hardware))) is not None:
            option = _option(offer, speed, instance.clock, failures, None)
            left = max(1.0, option.boot_seconds - instance.age)
            first = instance.name if instance.lease is None else oldest[instance.lease.run_id]
            replaces = "" if first == instance.name else first
            found.append(HeldInstance(instance.name, option, 0.0 if instance.state == "ready" else left, replaces))
    return found


def _option(
    offer: Offer, speed: SpeedEstimate, clock: float, failures: list[OfferFailure], capacity: int | None
) -> PlannedOffer:
    return PlannedOffer(
        name=offer.name,
        usd_per_hour=offer.price_per_hour * clock,
        tokens_per_second=speed.tokens_per_second * clock,
        boot_seconds=offer.boot_seconds / clock,
        capacity=capacity,
        spot=offer.spot,
        interruptions_per_hour=_interruptions(offer, clock, failures) if offer.spot else 0.0,
        spread=speed.spread,
        hardware=HardwareType(*offer.hardware),
    )


def _interruptions(offer: Offer, clock: float, failures: list[OfferFailure]) -> float:
    """Per real hour: what its reliability says (the chance to last an hour), and what was lost in the last hour."""
    stated = -math.log(min(0.999, max(0.01, offer.reliability)))
    stated = stated if offer.reliability < 1 else UNSTATED_INTERRUPTIONS
    lost = Counter(one.offer for one in failures if one.kind is FailureKind.LOST and one.age * clock <= HOUR)
    return (stated + lost[offer.name] * 0.5) * clock
