"""The market: everything that can be rented now, priced for the work in hand, and why the rest is not taken.

Only what a configured provider itself offers can be rented. Price lists and catalogs are read beside it: they give
medians against which absurd prices stand out, and they show what providers that nobody configured would cost. No offer
is dropped in silence. Answers are kept for a few seconds, as runs and sensors ask all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gpu_runner.models.facts import KnownModel, Placement, place
from gpu_runner.offers.gpus import find_sheet
from gpu_runner.offers.offer import Objective, Offer, OfferFilter, Ranking, Refusal, rank, screen
from gpu_runner.offers.speed import LengthMix, Measurement, NoSpeed, Speed, Throughput
from gpu_runner.providers.base import HardwareProvider, Provider, ProviderError, ProviderUnclear
from gpu_runner.providers.rentable import lines_to_rent
from gpu_runner.rows import POOLED, Task
from resources.pricing.model_catalog import DeclaredModel, Models
from resources.pricing.price_files import PricingError
from resources.pricing.sources import PricingConfig, Source, provider_name

OFFERS_SECONDS = 2.0  # a price drop in the middle of a run is seen within this time
PRICES_SECONDS = 60.0
RETRY_SECONDS = 15.0  # a provider that does not answer blocks for up to five seconds each time

UNMEASURED = 100.0  # tokens per second of a machine of one's own of which nothing is known yet

NO_PRICES = PricingConfig()
ANY_OFFER = OfferFilter()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfferSnapshot:
    """What is there now: offers that can be rented, at believable prices; all others with their reasons.

    `problems`: providers and price sources that did not answer. `silent`: what those providers offered when they last
    did, each at the worst price that anybody lists for its GPU: what a plan may reckon with. `own`: all that providers
    themselves offer, at whatever price; `all_answered`: none of them kept silent.
    """

    offers: tuple[Offer, ...]
    refused: tuple[Refusal, ...]
    problems: tuple[str, ...]
    silent: tuple[Offer, ...] = ()
    own: tuple[Offer, ...] = ()
    all_answered: bool = True


class Market:
    """Offers of some providers and price sources. Not for several threads at once."""

    def __init__(
        self,
        providers: Sequence[Provider],
        prices: PricingConfig = NO_PRICES,
        *,
        simulated: Collection[str] | None = None,
        trusted: Collection[str] = (),
        really: Callable[[str], bool] = lambda _: False,
        models: Models | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`simulated`: names of providers that only play their machines; by default those whose clock is not 1.

        They serve any model: one of which nothing is known is taken for an 8B. `trusted`: providers that are the
        user's own machines: who sets one up knows what fits, and its speed shows once it works. `really`: whether
        something in fleet.yaml serves a model that is no simulation; simulated providers do not play those. `clock`:
        Unix seconds. Raises PricingError when the recorded history cannot be read.
        """
        self._clock = clock
        self._models = models or Models()
        names = [one.name for one in providers if one.clock != 1.0] if simulated is None else simulated
        self._simulated = {provider_name(name) for name in names}
        self._trusted = {provider_name(name) for name in trusted}
        self._really = really
        self._hub = any(provider_name(one.name) not in self._simulated for one in providers)
        self._sanity = prices.sanity()
        self._providers = tuple(providers)
        self._own = {one.name: _Kept(one.offers, (ProviderError, ProviderUnclear)) for one in providers}
        self._stock: tuple[float, OfferSnapshot] | None = None
        self._listed = [_Kept(self._ask(source), (PricingError,)) for source in prices.sources()]

    def _ask(self, source: Source) -> Callable[[], list[Offer]]:
        return lambda: source.offers(self._clock())

    def simulates(self, provider: str) -> bool:
        """Whether the provider only plays its machines."""
        return provider_name(provider) in self._simulated

    def rents(self, provider: str) -> bool:
        """Whether a provider of this name is configured."""
        return provider_name(provider) in {provider_name(name) for name in self._own}

    def trusts(self, provider: str) -> bool:
        """Whether the provider is a machine of the user's own."""
        return provider_name(provider) in self._trusted

    def stock(self) -> OfferSnapshot:
        """What can be rented now, before any wish of a dataset. Looked at anew every OFFERS_SECONDS."""
        now = self._clock()
        if self._stock is None or not 0 <= now - self._stock[0] < OFFERS_SECONDS:
            self._stock = now, self._look(now)
        return self._stock[1]

    def _look(self, now: float) -> OfferSnapshot:
        problems: list[str] = []
        silent: list[Refusal] = []
        own: list[Offer] = []
        all_answered = True
        for name, kept in self._own.items():
            if why := kept.look(now, 0.0):
                all_answered = False
                problems.append(f"{name} does not say what it offers: {why}")
                silent += [Refusal(offer, (f"{name} does not answer: {why}",)) for offer in kept.value or ()]
            else:
                own += kept.value or ()
        listed: list[Offer] = []
        for source in self._listed:
            if why := source.look(now, PRICES_SECONDS):
                problems.append(why)
            listed += source.value or ()  # an earlier price list is still one; its prices grow old by themselves
        believed, doubted = screen([*own, *listed], now, self._sanity)
        mine, configured = set(own), {provider_name(name) for name in self._own}
        refused = [replace(one, reasons=(*_no_provider(one.offer, configured, mine), *one.reasons)) for one in doubted]
        refused += [Refusal(offer, _no_provider(offer, configured, mine)) for offer in believed if offer not in mine]
        refused.sort(key=lambda one: one.offer not in mine)
        worst = _worst_prices([*believed, *(one.offer for one in silent)])
        missed = tuple(replace(one.offer, price_per_hour=worst[one.offer.hardware]) for one in silent)
        rentable = tuple(one for one in believed if one in mine)
        return OfferSnapshot(rentable, (*silent, *refused), tuple(problems), missed, tuple(own), all_answered)

    def model(self, name: str, declared: DeclaredModel | None = None) -> KnownModel:
        """What is known of a model. The hub is asked only where a real provider is configured."""
        return self._models.known(name, declared, hub=self._hub)

    def ranking(
        self,
        model: str,
        task: Task,
        mix: LengthMix,
        tokens: float,
        *,
        accept: OfferFilter = ANY_OFFER,
        objective: Objective = "cheapest",
        measurements: Iterable[Measurement] = (),
        longest: int = 1,
        max_model_len: int | None = None,
        declared: DeclaredModel | None = None,
        stock: OfferSnapshot | None = None,
    ) -> Ranking:
        """Offers for `tokens` tokens in rows of this mix, best first; every other offer with all its reasons.

        `longest`: tokens of the longest row, which every engine must hold. `stock`: one that was looked at already.
        """
        known, mix = self.model(model, declared), mix_of(task, mix)
        throughput = Throughput(measurements)
        stock = stock or self.stock()

        def pace(offer: Offer) -> Speed | NoSpeed:
            return self._pace(known, throughput, offer, mix, longest, max_model_len)

        found = rank(stock.offers, tokens, pace, accept=accept, objective=objective)
        wishes = tuple(replace(one, reasons=(*one.reasons, *accept.reasons(one.offer))) for one in stock.refused)
        return Ranking(objective, found.ranked, (*found.refused, *wishes))

    def never_fits(
        self, model: str, task: Task, mix: LengthMix, longest: int, measurements: Iterable[Measurement]
    ) -> Sequence[Refusal]:
        """Every offer, each with why it can serve such rows of the model at no time. Empty: one can, or that is not
        known, as a provider does not answer, offers less now than it could (`HardwareProvider`) or does not state what
        it could, or nothing is known of the model. Simulations count for nothing where something is to serve the model
        really.
        """
        known, mix, stock = self.model(model), mix_of(task, mix), self.stock()
        throughput, never = Throughput(measurements), []
        providers = [one for one in self._providers if not (self.simulates(one.name) and self._really(known.name))]
        if not stock.all_answered or not all(_offers_all(one, stock.own) for one in providers):
            return []
        asked = {provider_name(one.name) for one in providers}
        for offer in stock.own:
            if provider_name(offer.provider) not in asked:
                continue
            pace = self._pace(known, throughput, offer, mix, longest, None)
            if not isinstance(pace, NoSpeed) or not pace.permanent:
                return []
            never.append(Refusal(offer, (pace.reason,)))
        return never

    def _pace(
        self,
        known: KnownModel,
        throughput: Throughput,
        offer: Offer,
        mix: LengthMix,
        longest: int,
        max_model_len: int | None,
    ) -> Speed | NoSpeed:
        """Speed of an offer: measured as it is; an estimate only where the model is known and fits."""
        if self.simulates(offer.provider) and self._really(known.name):
            return NoSpeed(f"fleet.yaml has what really serves {known.name}; simulated texts would mix with its own")
        facts = known.facts(mix.tokens)
        found = throughput.speed(facts, offer.gpu, offer.gpu_memory_gib, offer.gpus, mix)
        if isinstance(found, Speed) and found.basis != "estimate":
            return found
        own = provider_name(offer.provider) in self._trusted
        if own and (known.knowledge == "assumed" or find_sheet(offer.gpu, offer.gpu_memory_gib) is None):
            return Speed(UNMEASURED, "estimate")
        if known.knowledge == "assumed" and provider_name(offer.provider) not in self._simulated:
            return NoSpeed(f"nothing is known of the model: {known.where}")
        placed = place(known, offer.gpu, offer.gpu_memory_gib, offer.gpus, mix, longest, max_model_len)
        if isinstance(placed, NoSpeed):
            return placed
        if isinstance(found, NoSpeed):
            return found
        facts = replace(facts, tensor_parallel=(placed.tensor_parallel * known.pipeline_parallel,))
        return throughput.speed(facts, offer.gpu, offer.gpu_memory_gib, offer.gpus, mix)

    def placement(
        self,
        offer: Offer,
        model: str,
        task: Task,
        mix: LengthMix,
        *,
        longest: int = 1,
        max_model_len: int | None = None,
        declared: DeclaredModel | None = None,
    ) -> Placement | None:
        """How an instance of this offer would serve the model; None where only a measurement says that it can."""
        known = self.model(model, declared)
        mix = mix_of(task, mix)
        placed = place(known, offer.gpu, offer.gpu_memory_gib, offer.gpus, mix, longest, max_model_len)
        return placed if isinstance(placed, Placement) else None


def mix_of(task: Task, mix: LengthMix) -> LengthMix:
    """The mix as the task has it: an embedding, and whatever else is pooled, has no completion."""
    return LengthMix(max(1.0, mix.prompt_tokens), 0.0) if task in POOLED else mix


def _worst_prices(offers: Iterable[Offer]) -> dict[tuple[str, int, int], float]:
    """The highest price per hour of each kind of hardware."""
    worst: dict[tuple[str, int, int], float] = {}
    for offer in offers:
        worst[offer.hardware] = max(worst.get(offer.hardware, 0.0), offer.price_per_hour)
    return worst


def _no_provider(offer: Offer, configured: Collection[str], mine: Collection[Offer]) -> tuple[str, ...]:
    """Why a listed offer cannot be rented; nothing for a provider's own."""
    if offer in mine:
        return ()
    if provider_name(offer.provider) in configured:
        return (f"from {offer.source}: only what {offer.provider} itself offers can be rented{_lines(offer)}",)
    return (f"no provider configured for {offer.provider}{_lines(offer)}",)


def _lines(offer: Offer) -> str:
    """What fleet.yaml needs for the offer, where there is a provider for its cloud."""
    lines = lines_to_rent(offer)
    return f"; fleet.yaml would rent it with {lines}" if lines else ""


def _offers_all(provider: Provider, own: Iterable[Offer]) -> bool:
    """Whether all hardware that the provider could ever offer is among its offers; not where it does not state it."""
    ever = provider.all_hardware() if isinstance(provider, HardwareProvider) else None
    now = {offer.hardware for offer in own if provider_name(offer.provider) == provider_name(provider.name)}
    return ever is not None and bool(now) and ever <= now


class _Kept(Generic[T]):
    """The last answer to a question that costs time, and when to ask again. A failure keeps the answer before it."""

    def __init__(self, ask: Callable[[], T], failures: tuple[type[Exception], ...]) -> None:
        self._ask, self._failures = ask, failures
        self._at: float | None = None
        self._why = ""
        self.value: T | None = None

    def look(self, now: float, seconds: float) -> str:
        """Ask again if the answer is `seconds` old (longer after a failure). Returns why there is no new one, or ""."""
        wait = max(seconds, RETRY_SECONDS) if self._why else seconds
        if self._at is None or not 0 <= now - self._at < wait:
            try:
                self.value, self._why = self._ask(), ""
            except self._failures as error:
                self._why = str(error) or type(error).__name__
            self._at = now
        return self._why
