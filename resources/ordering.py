"""An instance from an offer: written down, created, awaited; and ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from gpu_runner.choice import NO_CAPACITY
from gpu_runner.fleet import BookError, FleetBook, Instance, Lease
from gpu_runner.heart import Heart
from gpu_runner.model_facts import Placement
from gpu_runner.offers import HOUR, Offer
from gpu_runner.providers.base import EngineOrder, NoCapacity, Provider, ProviderError, ProviderUnclear
from gpu_runner.providers.local import EngineStartError
from gpu_runner.spend import Spending
from resources.fleet_config import FleetConfig
from resources.leased import LeasedEngine, Requirement
from resources.market import Market

LOOK_SECONDS = 1.0

Pause = Callable[[float], None]
Say = Callable[[str], None]


class NotRented(Exception):
    """This one offer could not be had: says why. `started`: it was had, and its engine did not come up."""

    def __init__(self, message: str, *, started: bool = False) -> None:
        super().__init__(message)
        self.started = started


class Orders:
    """What one run orders of the providers. `market_guard`: the market answers one at a time."""

    def __init__(
        self,
        config: FleetConfig,
        providers: Mapping[str, Provider],
        market: Market,
        book: FleetBook,
        heart: Heart,
    ) -> None:
        self.config, self.providers, self.market, self.book, self.heart = config, providers, market, book, heart
        self.market_guard = threading.Lock()

    def rent(
        self,
        need: Requirement,
        offer: Offer,
        *,
        limit: int,
        note: Say,
        pause: Pause,
        replaces: Lease | None = None,
    ) -> LeasedEngine | None:
        """Create an instance from this offer and wait until its engine answers. None: no more may be leased now.

        The row in the book comes first: its name is the idempotency token, so a lost answer leaves nothing unknown.
        Raises NotRented; the offer is then remembered as bad for a while. Raises BudgetReached.
        """
        heart, book = self.heart, self.book
        provider = self.providers[offer.provider]
        order = self._order(need, offer)  # before the intent, from which on the bill is counted
        asked_at = heart.now()
        lease = book.intend(
            book.new_name(),
            offer,
            clock=provider.clock,
            engine_key=need.engine_key,
            model=need.model,
            run_id=heart.run_id,
            dataset=need.dataset,
            ttl=heart.ttl,
            limit=limit,
            cap=self.config.max_instances,
            replaces=replaces,
            drain_seconds=heart.drain_seconds(),
        )
        if lease is None:
            return None
        heart.hold(lease, asked_at)
        try:
            note(f"renting {offer.name} at {offer.price_per_hour:.2f} $/h as {lease.instance}")
            self._create(provider, offer, order, lease)
            boot_seconds = self._boot_seconds(offer, provider)
            machine = provider.wait_ready(lease.instance, boot_seconds, self._unless_retired(lease, pause))
            if machine.endpoint is None or not book.ready(lease, machine.endpoint, machine.max_num_seqs):
                raise NotRented(f"the lease on {lease.instance} lapsed while it booted")
        except BaseException as error:
            heart.let_go(lease)
            if not (isinstance(error, ProviderError) and book.refused(lease, _short(error))):
                book.give_up(lease, _short(error))
                self.end(lease.instance, _short(error))
            if isinstance(error, ProviderError | ProviderUnclear | EngineStartError):
                said = NO_CAPACITY if isinstance(error, NoCapacity) else _short(error)
                book.offer_failed(offer.provider, offer.name, said)
                started = isinstance(error, EngineStartError)
                raise NotRented(f"{offer.name}: {_short(error)}", started=started) from error
            raise
        instance = book.instance(lease.instance)
        assert instance is not None
        return self.leased(lease, instance, offer)

    def _unless_retired(self, lease: Lease, pause: Pause) -> Pause:
        """`pause`, for a boot that nobody waits for any more once its instance is to end."""
        look_at = time.monotonic() + LOOK_SECONDS

        def watch(seconds: float) -> None:
            nonlocal look_at
            pause(seconds)
            if time.monotonic() < look_at:
                return
            look_at = time.monotonic() + LOOK_SECONDS
            with contextlib.suppress(BookError):
                instance = self.book.instance(lease.instance)
                if instance is not None and instance.retiring:
                    raise NotRented(f"{lease.instance} was to end while it booted: {instance.reason}")

        return watch

    def _create(self, provider: Provider, offer: Offer, order: EngineOrder, lease: Lease) -> None:
        answered = True
        try:
            machine_id = provider.create(offer, lease.instance, order)
        except ProviderUnclear as unclear:
            answered = False
            try:
                found = [one for one in provider.list(lease.instance) if one.name == lease.instance]
            except ProviderError:
                raise unclear from None  # its list says no, which is no answer to the order
            if not found or found[0].state == "ended":
                raise
            machine_id = found[0].id
        if not self.book.created(lease, machine_id, just_now=answered):
            raise NotRented(f"the lease on {lease.instance} lapsed while it was created")

    def _order(self, need: Requirement, offer: Offer) -> EngineOrder:
        """How the engine is to be started: vLLM's flags where sizing knows the model; a simulation knows its own."""
        placed = self.placement(need, offer)
        if placed is None:
            return EngineOrder(need.model, need.task)
        flags = () if self.market.simulates(offer.provider) else placed.arguments()
        return EngineOrder(need.model, need.task, placed.slots, flags)

    def placement(self, need: Requirement, offer: Offer) -> Placement | None:
        work = need.work()
        with self.market_guard:
            return self.market.placement(
                offer,
                need.model,
                need.task,
                work.mix,
                longest=work.longest,
                max_model_len=need.max_model_len,
                declared=need.declared,
            )

    def _boot_seconds(self, offer: Offer, provider: Provider) -> float:
        """Real seconds that a boot may take: three times what the offer says, and at least a minute."""
        return max(60.0, 3 * offer.boot_seconds / provider.clock, self.config.start_seconds / provider.clock)

    def leased(self, lease: Lease, instance: Instance, offer: Offer) -> LeasedEngine:
        spending = Spending(instance.price_per_hour / HOUR * instance.clock)
        self.heart.account(lease, spending.spent)
        assert instance.endpoint is not None
        return LeasedEngine(
            lease=lease,
            endpoint=instance.endpoint,
            api_key=None,
            max_num_seqs=instance.max_num_seqs,
            provider=instance.provider,
            instance_type=instance.instance_type,
            spot=instance.spot,
            offer=offer,
            clock=instance.clock,
            spending=spending,
        )

    def end(self, name: str, reason: str) -> None:
        """End the machine now, if the provider answers; else the reaper does."""
        instance = self.book.instance(name)
        if instance is None or instance.state != "ending":
            return
        if (provider := self.providers.get(instance.provider)) is None:
            return
        with contextlib.suppress(ProviderError, ProviderUnclear):
            provider.terminate(name)
            seen = [one for one in provider.list(name) if one.name == name]
            if seen and seen[0].state == "ended":
                self.book.ended(name, seen[0].ended_seconds, reason)


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
