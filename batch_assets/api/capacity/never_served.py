"""Whether anything of a fleet can ever serve a model, however long its lines wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from batch_assets.api.billing.margin import fleet_name
from batch_assets.capacity_planning.planner_input import Markets
from gpu_runner.fleet_database.database import FleetDatabaseError
from gpu_runner.rows import Task
from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.fleet.resource import GpuFleet, Requirement
from resources.pricing.market import OFFERS_SECONDS
from resources.pricing.price_files import PricingError

KEPT_SECONDS = 10.0


class NeverServed:
    """For several threads. `clock`: seconds that never jump. That something may serve a model holds for KEPT_SECONDS.

    A batch that is refused has failed for good, so that nothing can holds only while fleet.yaml says the same, and no
    longer than what a market knows of its providers.
    """

    def __init__(self, fleet: GpuFleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._clock = fleet, clock
        self._markets, self._lock = Markets(), threading.Lock()
        self._said: dict[tuple[str, Task], tuple[float, str | None, FleetConfig | None]] = {}

    def why(self, model: str, task: Task) -> str | None:
        """A sentence for the client; None: something can serve it, or that is not known now. Blocks: providers."""
        with self._lock:
            until, said, config = self._said.get((model, task), (float("-inf"), None, None))
            if self._clock() < until and (said is None or self._config() == config):
                return said
            config = self._config()
            said = None if config is None else self._look(config, model, task)
            kept = KEPT_SECONDS if said is None else OFFERS_SECONDS
            self._said[model, task] = self._clock() + kept, said, config
            return said

    def _config(self) -> FleetConfig | None:
        """fleet.yaml as it is now; None: it cannot be used."""
        try:
            return self._fleet.config()
        except FleetConfigError:
            return None

    def _look(self, config: FleetConfig, model: str, task: Task) -> str | None:
        try:
            if not config.may_serve(model, batches=False) or config.only_plays(model):
                return "No engine and no provider that is configured may serve it."
            if config.engines_for(model, None, batches=False):
                return None
            return self._misfit(config, model, task)
        except (FleetConfigError, PricingError, FleetDatabaseError):  # whoever leases says it, and the batch waits
            return None

    def _misfit(self, config: FleetConfig, model: str, task: Task) -> str | None:
        with self._fleet.open_database() as fleet_db:
            if any(one.model == model for one in fleet_db.fleet()):
                return None
            measurements = fleet_db.measurements()
        market, _ = self._markets.of(self._fleet, config)
        work = Requirement(fleet_name(model), model, task).work()
        never = market.never_fits(model, task, work.mix, work.longest, measurements)
        if not never:
            return None
        largest = max(never, key=lambda one: one.offer.gpus * one.offer.gpu_memory_gib)
        return f"No offer of its providers can serve it (there are {len(never):,}). The largest: {largest.reason}."
