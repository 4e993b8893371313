"""Which offers a simulated provider has at a moment: its list or its price history, and the changes so far. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.simulated.config import OfferChange, SimulatedProviderConfig

Prices = Callable[[float], list[Offer]]


def offers_at(
    config: SimulatedProviderConfig, prices: Prices | None, changes: Iterable[OfferChange], now: float, elapsed: float
) -> list[Offer]:
    """The offers at Unix time `now`, `elapsed` simulated seconds after the cloud began; `capacity` is the total."""
    offers = listed(config, now)
    if prices is not None:
        offers += [replace(offer, provider=config.name, observed_at=now) for offer in prices(now)]
    due = [change for change in (*config.changes, *changes) if change.at <= elapsed]
    for change in sorted(due, key=lambda one: one.at):
        offers = [_changed(offer, change) if offer.instance_type == change.offer else offer for offer in offers]
    return offers


def listed(config: SimulatedProviderConfig, now: float) -> list[Offer]:
    """The offers that stand in the config."""
    return [
        Offer(
            provider=config.name,
            region=config.region,
            instance_type=one.instance_type,
            gpu=one.gpu,
            gpus=one.gpus,
            gpu_memory_gib=one.gpu_memory_gib,
            spot=one.spot,
            price_per_hour=one.price_per_hour,
            boot_seconds=config.boot_seconds if one.boot_seconds is None else one.boot_seconds,
            reliability=config.reliability,
            observed_at=now,
            source="simulated",
            capacity=one.capacity,
        )
        for one in config.offers
    ]


def _changed(offer: Offer, change: OfferChange) -> Offer:
    price = offer.price_per_hour if change.price_per_hour is None else change.price_per_hour
    return replace(offer, price_per_hour=price, capacity=offer.capacity if change.capacity is None else change.capacity)


def taken_at(
    config: SimulatedProviderConfig, offer: Offer, elapsed: float, chance: float
) -> tuple[float, float | None] | None:
    """When a machine ordered now is taken away, in simulated seconds from now, with its notice; None: never.

    Spot machines at a constant rate: exponential, from one number in [0, 1), and so long after their boot.
    Scheduled interruptions: the next one.
    """
    found: list[tuple[float, float | None]] = []
    if offer.spot and config.interruptions_per_hour > 0:
        found.append((-math.log(1 - chance) / config.interruptions_per_hour * 3600, config.notice_seconds))
    if offer.spot and config.taken_after_seconds is not None:
        found.append((offer.boot_seconds + config.taken_after_seconds, config.notice_seconds))
    for one in config.interruptions:
        if one.at > elapsed and (offer.spot if one.offer is None else one.offer == offer.instance_type):
            notice = config.notice_seconds if one.notice_seconds is None else one.notice_seconds
            found.append((one.at - elapsed, notice))
    return min(found, key=lambda one: one[0], default=None)
