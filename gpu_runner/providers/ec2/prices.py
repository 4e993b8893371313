"""Offers of EC2: what fleet.yaml rents, at prices of fleet.yaml, of price lists, and for spot of EC2 itself."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.ec2.config import Ec2InstanceTypeConfig, Ec2ProviderConfig

PRODUCTS = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
HISTORY_SECONDS = 3600.0  # EC2 adds the last change before the start


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars an hour. `at`: when it was seen, Unix seconds."""

    usd: float
    at: float
    source: str


Prices = Mapping[tuple[str, str, bool], Price]  # by region, instance type, spot


def listed_prices(offers: Iterable[Offer]) -> dict[tuple[str, str, bool], Price]:
    """What price lists say of AWS. Of several prices the last seen counts, of those of one moment the highest."""
    found: dict[tuple[str, str, bool], Price] = {}
    for one in offers:
        key = (one.region, one.instance_type, one.spot)
        price = Price(one.price_per_hour, one.observed_at, one.source)
        if key not in found or (price.at, price.usd) > (found[key].at, found[key].usd):
            found[key] = price
    return found


def spot_prices(region: str, history: Iterable[Mapping[str, Any]], now: float) -> dict[tuple[str, str, bool], Price]:
    """The highest current price of each instance type among the zones, of DescribeSpotPriceHistory.

    The highest, because it is not known in which zone there will be room. It counts as seen `now`: EC2 lists changes.
    """
    latest: dict[tuple[str, str], tuple[dt.datetime, float]] = {}
    for line in history:
        kind, zone, at = line.get("InstanceType"), line.get("AvailabilityZone"), line.get("Timestamp")
        usd = _number(line.get("SpotPrice"))
        if not (isinstance(kind, str) and isinstance(zone, str) and isinstance(at, dt.datetime)) or usd is None:
            continue
        if (kind, zone) not in latest or at > latest[kind, zone][0]:
            latest[kind, zone] = at, usd
    highest: dict[tuple[str, str, bool], Price] = {}
    for (kind, _), (_, usd) in latest.items():
        key = (region, kind, True)
        if key not in highest or usd > highest[key].usd:
            highest[key] = Price(usd, now, "EC2 spot price history")
    return highest


def make_offers(config: Ec2ProviderConfig, listed: Prices, spot: Prices, now: float) -> list[Offer]:
    """What can be rented. What has no price is left out (`unpriced` names it), and spot above its highest price."""
    found: list[Offer] = []
    for region in config.regions:
        for kind in config.instance_types:
            for is_spot in kind.ways:
                price = _price(kind, region.region, is_spot, listed, spot, now)
                too_dear = is_spot and price and kind.max_spot_price and price.usd > kind.max_spot_price
                if price is not None and not too_dear:
                    found.append(_offer(config, kind, region.region, is_spot, price))
    return found


def unpriced(config: Ec2ProviderConfig, listed: Prices, spot: Prices) -> list[str]:
    """What fleet.yaml rents and nobody knows a price of: region, instance type, and whether it is spot."""
    return [
        f"{region.region}/{kind.instance_type}{' spot' if is_spot else ''}"
        for region in config.regions
        for kind in config.instance_types
        for is_spot in kind.ways
        if _price(kind, region.region, is_spot, listed, spot, 0.0) is None
    ]


def _price(
    kind: Ec2InstanceTypeConfig, region: str, spot: bool, listed: Prices, current: Prices, now: float
) -> Price | None:
    """EC2's own price counts before a list's; on demand, that of fleet.yaml before both."""
    if not spot and kind.price_per_hour is not None:
        return Price(kind.price_per_hour, now, "fleet.yaml")
    key = (region, kind.instance_type, spot)
    return current.get(key) or listed.get(key)


def _offer(config: Ec2ProviderConfig, kind: Ec2InstanceTypeConfig, region: str, spot: bool, price: Price) -> Offer:
    gpu, gpus, memory = kind.hardware
    return Offer(
        provider=config.name,
        region=region,
        instance_type=kind.instance_type,
        gpu=gpu,
        gpus=gpus,
        gpu_memory_gib=memory,
        spot=spot,
        price_per_hour=price.usd,
        boot_seconds=config.boot_seconds,
        reliability=config.spot_reliability if spot else config.reliability,
        observed_at=price.at,
        source=price.source,
    )


def _number(text: object) -> float | None:
    try:
        found = float(str(text))
    except ValueError:
        return None
    return found if 0 < found < 100_000 else None
