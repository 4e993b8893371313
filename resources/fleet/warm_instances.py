"""Which instances that stand may be leased at once for a run's work: no boot is paid for them."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_runner.fleet.database import FleetDatabase, Instance
from gpu_runner.providers.base import Provider
from gpu_runner.providers.engine_process import served_length
from resources.fleet.leased_engine import Requirement, instance_offer
from resources.fleet.provisioning import Provisioner
from resources.pricing.market import Market


class WarmInstances:
    """Those of the fleet, as one run sees them."""

    def __init__(
        self, providers: Mapping[str, Provider], market: Market, fleet_db: FleetDatabase, orders: Provisioner
    ) -> None:
        self._providers, self._market, self._fleet_db, self._orders = providers, market, fleet_db, orders

    def usable(self, need: Requirement) -> list[Instance]:
        """Instances that may be leased at once for this work: idle ones first, those that few share next; by price."""
        found = [one for one in self._fleet_db.warm(need.engine_key) if one.provider in self._providers]
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
