"""Which instances that stand may be leased at once for a run's work: no boot is paid for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.providers.base import Provider
from gpu_runner.providers.engine_process import served_length
from resources.fleet.leased_engine import Requirement, instance_offer
from resources.fleet.provisioning import Provisioner
from resources.pricing.market import Market

RETRY_SECONDS = 30.0  # until an instance to which there was no way is tried again


@dataclass
class _Unreached:
    """An instance to which there was no way, by our clock: since when, and when it was tried last."""

    since: float
    tried: float


class WarmInstances:
    """Those of the fleet, as one run sees them.

    No way to an instance says nothing of its engine: the API server may be away, or what we need for a tunnel may be
    missing here. It is left alone for a while, and given up when there was no way for as long as an idle one waits.
    """

    def __init__(
        self, providers: Mapping[str, Provider], market: Market, fleet_db: FleetDatabase, orders: Provisioner
    ) -> None:
        self._providers, self._market, self._fleet_db, self._orders = providers, market, fleet_db, orders
        self._idle_seconds, self._clock = orders.config.idle_minutes * 60, orders.heartbeat.now
        self._unreached: dict[str, _Unreached] = {}

    def reached(self, name: str) -> None:
        """There was a way to the instance."""
        self._unreached.pop(name, None)

    def is_out_of_reach(self, name: str) -> bool:
        """There was no way to the instance just now; True when that has lasted too long."""
        now = self._clock()
        known = self._unreached.setdefault(name, _Unreached(now, now))
        known.tried = now
        return now - known.since >= self._idle_seconds

    def usable(self, need: Requirement) -> list[Instance]:
        """Instances that may be leased at once for this work: idle ones first, those that few share next; by price."""
        now = self._clock()
        waits = {name for name, one in self._unreached.items() if now - one.tried < RETRY_SECONDS}
        warm = [one for one in self._fleet_db.warm(need.engine_key) if one.name not in waits]
        found = [one for one in warm if one.provider in self._providers]
        found = [one for one in found if not self._orders.config.leaves_out(one.provider, need.model)]
        found.sort(key=lambda one: (len(one.draining), one.price_per_hour))
        found = [one for one in found if not need.accept.reasons(instance_offer(one))]
        return [one for one in found if self._takes_rows(one, need)]

    def _takes_rows(self, instance: Instance, need: Requirement) -> bool:
        """Whether its engine takes rows as long as ours: it may have been started with less context than the model has.

        What a new instance of the same kind would take is enough: longer rows fit nowhere. Of a model that is not
        known, and of machines of one's own, whoever set them up knows.
        """
        if self._market.trusts(instance.provider) or instance.endpoint is None:
            return True
        with self._orders.market_guard:
            known = self._market.model(need.model, need.declared)
        if known.knowledge == "assumed" or (served := self._served_length(instance)) is None:
            return True
        if (placed := self._orders.placement(need, instance_offer(instance))) is None:
            return False
        longest, most = need.work().longest, placed.max_model_len or known.context
        return served >= (longest if most is None else min(longest, most))

    def _served_length(self, instance: Instance) -> int | None:
        if (access := self._orders.access(instance)) is None:
            return None
        try:
            return served_length(access.endpoint, access.api_key)
        finally:
            access.close()
