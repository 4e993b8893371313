"""An instance from an offer: written down, created, awaited; and ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from gpu_runner.cost_meter import CostMeter
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError, Instance, Lease
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.models.facts import Placement
from gpu_runner.money import format_usd
from gpu_runner.offers.offer import HOUR, Offer
from gpu_runner.offers.selection import FailureKind
from gpu_runner.providers.base import (
    EngineAccess,
    EngineOrder,
    NoCapacity,
    Provider,
    ProviderError,
    ProviderUnclear,
    open_access,
)
from gpu_runner.providers.engine_process import EngineStartError
from resources.fleet.fleet_config import FleetConfig
from resources.fleet.leased_engine import LeasedEngine, Requirement
from resources.pricing.market import Market

LOOK_SECONDS = 1.0

Pause = Callable[[float], None]
Say = Callable[[str], None]


class ProvisioningFailed(Exception):
    """This one offer could not be had: says why. `started`: it was had, and its engine did not come up."""

    def __init__(self, message: str, *, started: bool = False) -> None:
        super().__init__(message)
        self.started = started


class Provisioner:
    """What one run orders of the providers. `market_guard`: the market answers one at a time."""

    def __init__(
        self,
        config: FleetConfig,
        providers: Mapping[str, Provider],
        market: Market,
        fleet_db: FleetDatabase,
        heartbeat: Heartbeat,
    ) -> None:
        self.config, self.providers, self.market, self.fleet_db, self.heartbeat = (
            config,
            providers,
            market,
            fleet_db,
            heartbeat,
        )
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
        """Create an instance from this offer and wait until its engine answers. None: the dataset has all it may lease.

        The row in the fleet's database comes first: its name is the idempotency token, so a lost answer leaves nothing
        unknown. Raises ProvisioningFailed; the offer is then remembered as bad for a while. Raises BudgetReached, and
        FleetFull.
        """
        heartbeat, fleet_db = self.heartbeat, self.fleet_db
        provider = self.providers[offer.provider]
        order = self._order(need, offer)  # before the intent, from which on the bill is counted
        asked_at = heartbeat.now()
        lease = fleet_db.intend(
            fleet_db.new_name(),
            offer,
            clock=provider.clock,
            engine_key=need.engine_key,
            model=need.model,
            run_id=heartbeat.run_id,
            dataset=need.dataset,
            ttl=heartbeat.ttl,
            limit=limit,
            cap=self.config.max_instances,
            replaces=replaces,
            drain_seconds=heartbeat.drain_seconds(),
        )
        if lease is None:
            return None
        heartbeat.hold(lease, asked_at)
        try:
            note(f"renting {offer.name} at {format_usd(offer.price_per_hour)} $/h as {lease.instance}")
            self._create(provider, offer, order, lease)
            access = self._wait_ready(provider, offer, lease, pause)
        except BaseException as error:
            heartbeat.stop_renewing(lease)
            self._give_up(offer, lease, error)
            raise
        with self.handing_over(lease, access.close):
            instance = fleet_db.instance(lease.instance)
            assert instance is not None
            return self.leased(lease, instance, offer, access)

    @contextlib.contextmanager
    def handing_over(self, lease: Lease, close: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Until the run has the engine: whatever is raised meanwhile, its lease ends and its tunnel is closed at once.

        An instance that is ready stays warm for others, unless it is to end. While the database does not answer, the
        lease is renewed no more and lapses.
        """
        try:
            yield
        except BaseException as error:
            self.heartbeat.stop_renewing(lease)
            try:
                close()
            finally:
                self._give_back(lease, error)
            raise

    def _give_back(self, lease: Lease, error: BaseException) -> None:
        reason = f"not taken: {type(error).__name__}"
        try:
            self.fleet_db.release(lease, reason=reason)
            self.end(lease.instance, reason)  # if it was to end with this lease
        except FleetDatabaseError as silent:
            error.add_note(f"{lease.instance} was not given back ({type(silent).__name__}): its lease lapses by itself")

    def _wait_ready(self, provider: Provider, offer: Offer, lease: Lease, pause: Pause) -> EngineAccess:
        """Waits until the engine answers, and writes that down."""
        boot_seconds = self._boot_seconds(offer, provider)
        machine = provider.wait_ready(lease.instance, boot_seconds, self._unless_retired(lease, pause))
        if machine.endpoint is None:
            raise ProvisioningFailed(f"{lease.instance}: its provider names no address of its engine")
        try:
            access = open_access(provider, lease.instance, machine.endpoint)
        except (ProviderError, ProviderUnclear) as error:
            raise EngineStartError(f"its engine answered and cannot be reached from here: {error}") from error
        try:
            if not self.fleet_db.ready(lease, machine.endpoint, machine.max_num_seqs):
                raise ProvisioningFailed(f"the lease on {lease.instance} lapsed while it booted")
        except BaseException:
            access.close()
            raise
        return access

    def _give_up(self, offer: Offer, lease: Lease, error: BaseException) -> None:
        """Ends what was begun. Raises ProvisioningFailed where the fault is the offer's, which is remembered."""
        fleet_db = self.fleet_db
        if not (isinstance(error, ProviderError) and fleet_db.refused(lease, _short(error))):
            fleet_db.give_up(lease, _short(error))
            self.end(lease.instance, _short(error))
        if not isinstance(error, ProviderError | ProviderUnclear | EngineStartError):
            return
        started = isinstance(error, EngineStartError)
        if isinstance(error, NoCapacity):
            fleet_db.offer_failed(offer.provider, offer.name, FailureKind.NO_CAPACITY)
        else:
            kind = FailureKind.FAILED if started else FailureKind.REFUSED
            fleet_db.offer_failed(offer.provider, offer.name, kind, _short(error))
        raise ProvisioningFailed(f"{offer.name}: {_short(error)}", started=started) from error

    def _unless_retired(self, lease: Lease, pause: Pause) -> Pause:
        """`pause`, for a boot that nobody waits for any more once its instance is to end."""
        look_at = time.monotonic() + LOOK_SECONDS

        def watch(seconds: float) -> None:
            nonlocal look_at
            pause(seconds)
            if time.monotonic() < look_at:
                return
            look_at = time.monotonic() + LOOK_SECONDS
            with contextlib.suppress(FleetDatabaseError):
                instance = self.fleet_db.instance(lease.instance)
                if instance is not None and instance.retiring:
                    raise ProvisioningFailed(f"{lease.instance} was to end while it booted: {instance.reason}")

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
        if not self.fleet_db.created(lease, machine_id, just_now=answered):
            raise ProvisioningFailed(f"the lease on {lease.instance} lapsed while it was created")

    def _order(self, need: Requirement, offer: Offer) -> EngineOrder:
        """How the engine is to be started: the server's flags where sizing knows the model; a simulation knows its
        own.
        """
        placed, simulated = self.placement(need, offer), self.market.simulates(offer.provider)
        engine = need.engine.for_simulator if simulated else need.engine
        server, own = engine.server or "vllm", engine.arguments()
        if server == "sglang" and need.task == "embedding":
            own = (*own, "--is-embedding")
        if placed is None:
            return EngineOrder(need.model, need.task, engine.max_num_seqs, own, server)
        flags = () if simulated else placed.arguments(server)
        return EngineOrder(need.model, need.task, placed.slots, (*flags, *own), server)

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

    def access(self, instance: Instance) -> EngineAccess | None:
        """A way to the engine of an instance that is ready; None where there is none now."""
        provider = self.providers.get(instance.provider)
        if provider is None or instance.endpoint is None:
            return None
        try:
            return open_access(provider, instance.name, instance.endpoint)
        except (ProviderError, ProviderUnclear):
            return None

    def leased(self, lease: Lease, instance: Instance, offer: Offer, access: EngineAccess) -> LeasedEngine:
        spending = CostMeter(instance.price_per_hour / HOUR * instance.clock)
        self.heartbeat.account(lease, spending.spent)
        return LeasedEngine(
            lease=lease,
            endpoint=access.endpoint,
            api_key=access.api_key,
            max_num_seqs=instance.max_num_seqs,
            provider=instance.provider,
            instance_type=instance.instance_type,
            spot=instance.spot,
            offer=offer,
            clock=instance.clock,
            spending=spending,
            close=access.close,
            reachability=access.reachability,
            region=instance.region,
        )

    def end(self, name: str, reason: str) -> None:
        """End the machine now, if the provider answers; else the reaper does."""
        instance = self.fleet_db.instance(name)
        if instance is None or instance.state != "ending":
            return
        if (provider := self.providers.get(instance.provider)) is None:
            return
        with contextlib.suppress(ProviderError, ProviderUnclear):
            provider.terminate(name)
            seen = [one for one in provider.list(name) if one.name == name]
            if seen and seen[0].state == "ended":
                self.fleet_db.ended(name, seen[0].ended_seconds or 0.0, reason, seen[0].billed_seconds)


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
