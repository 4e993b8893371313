"""Offers: what can be rented, at which price, and which of it does this work best. Pure: the clock is an argument.

An offer is never dropped in silence. Whatever is not taken comes back as a refusal with its reasons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gpu_runner.money import format_usd
from gpu_runner.offers.speed import Basis, NoSpeed, Speed

Objective = Literal["cheapest", "fastest", "efficient"]

HOUR = 3600.0
SPOT = " spot"  # ends the names of spot offers
DAY = 24 * HOUR

Hardware = tuple[str, int, int]  # GPU, its memory in GiB, how many


@dataclass(frozen=True, slots=True)
class Offer:
    """A priced instance type at one provider and region, on demand or spot.

    `price_per_hour`: US dollars for the whole instance. `gpu`: spelled as by `gpu_runner.offers.gpus.spell_gpu`.
    `gpus` or `gpu_memory_gib` 0: the source does not say. `region` or `instance_type` empty: likewise.
    `by_tokens`: tokens are paid, and the price of an hour is that of the tokens of an hour.
    `boot_seconds`: from the order to the first answer. `reliability`: chance that an order starts and is not taken
    away within the hour. `capacity`: instances to be had now, None if unknown. `observed_at`: Unix seconds.
    """

    provider: str
    region: str
    instance_type: str
    gpu: str
    gpus: int
    gpu_memory_gib: float
    spot: bool
    price_per_hour: float
    boot_seconds: float
    reliability: float
    observed_at: float
    source: str
    capacity: int | None = None
    by_tokens: bool = False

    @property
    def name(self) -> str:
        """What a person calls it: provider/region/instance type, and whether it is spot."""
        return offer_name(self.provider, self.region, self.instance_type, self.gpus, self.gpu, self.spot)

    @property
    def hardware(self) -> Hardware:
        """What its speed depends on: GPU, its memory in GiB, how many."""
        return hardware_of(self.gpu, self.gpus, self.gpu_memory_gib)


def hardware_of(gpu: str, gpus: int, gpu_memory_gib: float) -> Hardware:
    """`Offer.hardware`, of an offer or of what may become one."""
    return gpu, round(gpu_memory_gib), gpus


def offer_name(provider: str, region: str, instance_type: str, gpus: int, gpu: str, spot: bool) -> str:
    """`Offer.name`, of an offer or of an instance that was rented from it."""
    parts = (provider, region, instance_type or f"{gpus}x {gpu}")
    return "/".join(part for part in parts if part) + (SPOT if spot else "")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An offer that is not taken, and every reason why."""

    offer: Offer
    reasons: tuple[str, ...]

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class Sanity:
    """When a price is not believed: older than `max_age` seconds, or `factor` times above or below the median price
    per GPU of the same GPU, once `least` offers make a median.

    A day of `future` is allowed, because some lists state a date in another time zone.
    """

    max_age: float = 7 * DAY
    factor: float = 100.0
    least: int = 3
    future: float = DAY


BELIEVABLE = Sanity()


def screen(offers: Iterable[Offer], now: float, sanity: Sanity = BELIEVABLE) -> tuple[list[Offer], list[Refusal]]:
    """Offers with a believable price, and the others with the reasons. Order is kept."""
    offers = list(offers)
    per_gpu: dict[tuple[str, int], list[float]] = {}
    for offer in offers:
        if offer.gpus > 0 and 0 < offer.price_per_hour < math.inf and _age_problem(offer, now, sanity) is None:
            per_gpu.setdefault(_card(offer), []).append(offer.price_per_hour / offer.gpus)
    medians = {card: statistics.median(prices) for card, prices in per_gpu.items() if len(prices) >= sanity.least}
    kept: list[Offer] = []
    refused: list[Refusal] = []
    for offer in offers:
        found = (
            _unknown(offer),
            _age_problem(offer, now, sanity),
            _price_problem(offer, medians.get(_card(offer)), sanity),
        )
        reasons = tuple(reason for reason in found if reason)
        if reasons:
            refused.append(Refusal(offer, reasons))
        else:
            kept.append(offer)
    return kept, refused


def _card(offer: Offer) -> tuple[str, int]:
    return offer.gpu, round(offer.gpu_memory_gib)


def _unknown(offer: Offer) -> str | None:
    missing = [
        words
        for words, value in (("number of GPUs", offer.gpus), ("GPU memory", offer.gpu_memory_gib))
        if not 0 < value < math.inf
    ]
    return f"{' and '.join(missing)} unknown" if missing else None


def _age_problem(offer: Offer, now: float, sanity: Sanity) -> str | None:
    age = now - offer.observed_at
    if age > sanity.max_age:
        return f"price is {age / DAY:.1f} days old, {sanity.max_age / DAY:g} allowed"
    if not age >= -sanity.future:  # also where the time is not a number
        return f"price is dated {-age / DAY:.1f} days in the future"
    return None


def _price_problem(offer: Offer, median: float | None, sanity: Sanity) -> str | None:
    price = offer.price_per_hour
    if not 0 < price < math.inf:
        return f"absurd price: expected more than 0 $/h, found {price:g}"
    if median is None or offer.gpus < 1:
        return None
    each = price / offer.gpus
    if each >= median * sanity.factor or each <= median / sanity.factor:
        return f"absurd price: {each:.4g} $/h per GPU, the median of {offer.gpu} is {median:.4g}"
    return None


@dataclass(frozen=True, slots=True)
class OfferFilter:
    """Which offers a dataset accepts. None: all. In names of providers, regions and GPUs only letters and
    digits count: `RTX 4090` is `rtx4090`.

    Spot only when asked for: it surprised users as a default (dstack#1650).
    """

    providers: frozenset[str] | None = None
    regions: frozenset[str] | None = None
    gpus: frozenset[str] | None = None
    spot: bool = False
    max_price_per_hour: float | None = None
    min_reliability: float = 0.0

    def reasons(self, offer: Offer) -> list[str]:
        """Why the offer is not accepted; empty when it is."""
        found = [
            f"{what} {value or 'unknown'} is not among {', '.join(sorted(allowed))}"
            for what, value, allowed in (
                ("provider", offer.provider, self.providers),
                ("region", offer.region, self.regions),
                ("GPU", offer.gpu, self.gpus),
            )
            if allowed is not None and _bare(value) not in map(_bare, allowed)
        ]
        if offer.spot and not self.spot:
            found.append("spot is not allowed")
        if self.max_price_per_hour is not None and not offer.price_per_hour <= self.max_price_per_hour:
            found.append(f"price {format_usd(offer.price_per_hour)} $/h is above {format_usd(self.max_price_per_hour)}")
        if not offer.reliability >= self.min_reliability:
            found.append(f"reliability {offer.reliability:.3f} is below {self.min_reliability:.3f}")
        if offer.capacity is not None and offer.capacity < 1:
            found.append("no capacity left")
        return found


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class RankedOffer:
    """An offer that can do the work: `seconds` until one instance is done, boot included, and what that costs."""

    offer: Offer
    speed: Speed
    seconds: float
    usd: float

    @property
    def usd_per_million_tokens(self) -> float:
        """Price of a million tokens (prompt and completion) once the instance runs."""
        return self.offer.price_per_hour / HOUR / self.speed.tokens_per_second * 1e6


@dataclass(frozen=True, slots=True)
class Ranking:
    """Best first, and every other offer with its reasons. Together they hold each offer exactly once."""

    objective: Objective
    ranked: tuple[RankedOffer, ...]
    refused: tuple[Refusal, ...]


SpeedOf = Callable[[Offer], Speed | NoSpeed]


def rank(
    offers: Iterable[Offer],
    tokens: float,
    speed: SpeedOf,
    *,
    accept: OfferFilter = OfferFilter(),
    objective: Objective = "cheapest",
) -> Ranking:
    """Order offers by what one instance costs for `tokens` tokens: price × (boot + tokens ÷ speed).

    `cheapest`: least cost. `fastest`: least seconds. `efficient`: least cost × seconds, so that twice the money must
    buy half the time. Equal ones: the cheaper, the faster, then by name. A warm instance is an offer with
    `boot_seconds` 0. Prices are taken as they are: `screen` comes first. Raises ValueError on negative tokens.
    """
    if not 0 <= tokens < math.inf:
        raise ValueError(f"tokens: expected 0 or more, found {tokens}")
    ranked: list[RankedOffer] = []
    refused: list[Refusal] = []
    for offer in offers:
        reasons = accept.reasons(offer)
        if not 0 < offer.price_per_hour < math.inf:
            reasons.append(f"absurd price: expected more than 0 $/h, found {offer.price_per_hour:g}")
        pace = speed(offer)
        if isinstance(pace, NoSpeed):
            reasons.append(pace.reason)
        elif not 0 < pace.tokens_per_second < math.inf:
            reasons.append(f"absurd speed: {pace.tokens_per_second:g} tokens/s")
        if reasons or isinstance(pace, NoSpeed):
            refused.append(Refusal(offer, tuple(reasons)))
            continue
        seconds = offer.boot_seconds + tokens / pace.tokens_per_second
        ranked.append(RankedOffer(offer, pace, seconds, offer.price_per_hour / HOUR * seconds))
    ranked.sort(
        key=lambda one: (*objective_value(one, objective), one.offer.name, one.offer.source, one.offer.observed_at)
    )
    return Ranking(objective, tuple(ranked), tuple(refused))


def objective_value(one: RankedOffer, objective: Objective) -> tuple[float, float, float]:
    """What an objective compares; less is better."""
    if objective == "fastest":
        return one.seconds, one.usd, one.offer.price_per_hour
    if objective == "efficient":
        return one.usd * one.seconds, one.usd, one.seconds
    return one.usd, one.seconds, one.offer.price_per_hour


def describe(one: RankedOffer) -> str:
    """One sentence: why this offer stands where it does."""
    basis: dict[Basis, str] = {
        "measured": "measured",
        "scaled": "measured on other lengths",
        "estimate": "a roofline estimate",
    }
    return (
        f"{one.offer.name}: {format_usd(one.usd)} $ in {one.seconds / HOUR:.2f} h "
        f"({format_usd(one.offer.price_per_hour)} $/h, boot {one.offer.boot_seconds:.0f} s, "
        f"{one.speed.tokens_per_second:,.0f} tokens/s, {basis[one.speed.basis]})"
    )
