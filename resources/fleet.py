"""The fleet as a Dagster resource: a run asks for an engine that serves its model, and gives it back.

What there is to lease stands in `fleet.yaml` (resources/fleet_config.py). Without one there is an embedded fleet: three
simulated providers, so that everything works on a machine without a GPU and without an account.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import dagster as dg

from gpu_runner.addresses import AddressRefused
from gpu_runner.fleet import FleetBook, Instance
from gpu_runner.heart import Heart
from gpu_runner.offers import Offer
from gpu_runner.providers.base import Provider, ProviderError
from gpu_runner.providers.here import LocalProvider
from gpu_runner.providers.hosting import keep_alive
from gpu_runner.providers.local import EngineProcess, EngineStartError, wait_reachable
from gpu_runner.providers.register import MachineRegister
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import Played, SimulatedCloudConfig, SimulatedModel
from gpu_runner.reaper import sweep
from resources.fleet_config import EngineConfig, FleetConfig, FleetConfigError
from resources.leased import LeasedEngine, Requirement, StandingEngine
from resources.market import Market
from resources.models import Models
from resources.price_files import PricingError
from resources.pricing import PriceHistory, PricingConfig, provider_name
from resources.renting import Pause, Renter

__all__ = [
    "EngineConfig",
    "EngineStartError",
    "FleetConfig",
    "FleetConfigError",
    "GpuFleet",
    "LeasedEngine",
    "Requirement",
]

ENDPOINT_SECONDS = 600.0
DOWN_ROUNDS = 8
SIMULATED_CONTEXT = 16_384


class GpuFleet(dg.ConfigurableResource):  # type: ignore[type-arg]  # Dagster's generic has no use here
    """Leases engines. `database` is a SQLAlchemy URL; `home` keeps engine logs and the simulated cloud."""

    database: str
    home: str
    config_path: str
    ttl: float = 10.0
    beat: float = 2.0

    def config(self) -> FleetConfig:
        """fleet.yaml as it is now. Raises FleetConfigError."""
        return FleetConfig.load(Path(self.config_path), Path(self.home))

    @contextlib.contextmanager
    def open_book(self) -> Iterator[FleetBook]:
        """The fleet's tables, for as long as the body runs."""
        book = FleetBook(self.database)
        try:
            yield book
        finally:
            book.close()

    def heart(self, book: FleetBook, run_id: str) -> Heart:
        """The heartbeat of one run."""
        return Heart(book, run_id, ttl=self.ttl, interval=self.beat, signs_of_life=self.sign_of_life)

    def sign_of_life(self) -> None:
        """Tell machines on this host that somebody still looks after them: they end themselves when nobody does."""
        keep_alive(Path(self.home))

    @contextlib.contextmanager
    def alive(self, run_id: str, dataset: str, doing: str) -> Iterator[FleetBook]:
        """Beat for a run that leases nothing, so that the watchdog finds it too when its worker is gone."""
        with self.open_book() as book:
            heart = self.heart(book, run_id)
            heart.note = doing
            with heart.beating(dataset, "", ""):
                yield book

    def providers(self, config: FleetConfig, need: Requirement | None = None) -> dict[str, Provider]:
        """Providers of fleet.yaml by name. Simulated ones play the model that is needed, as far as it is known."""
        home = Path(self.home)
        found: list[Provider] = []
        if config.simulated is not None:
            played = config.simulated if need is None else _with_model(config.simulated, need)
            found += _cloud(home, played, config.prices).providers.values()
        found += [LocalProvider(home, one) for one in config.local]
        return {provider.name: provider for provider in found}

    @staticmethod
    def market(config: FleetConfig, providers: Mapping[str, Provider]) -> Market:
        """What these providers offer. Raises PricingError for a history that cannot be read."""
        played = [] if config.simulated is None else [one.name for one in config.simulated.providers]
        own = [one.name for one in config.local]
        return Market(tuple(providers.values()), config.prices, simulated=played, trusted=own)

    def renter(self, book: FleetBook, heart: Heart, need: Requirement) -> Renter:
        """A run's hand in the fleet. Raises FleetConfigError, and PricingError for a history that cannot be read."""
        config = self.config()
        providers = self.providers(config, need)
        market = self.market(config, providers)
        return Renter(config, providers, market, book, heart, lambda *words: self._start(heart.run_id, *words))

    @contextlib.contextmanager
    def lease(
        self,
        need: Requirement,
        book: FleetBook,
        heart: Heart,
        *,
        say: Callable[[str], None] = lambda _: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> Iterator[LeasedEngine]:
        """Wait, visibly, for an engine; hold it while the body runs; give it back once (see Renter.acquire)."""
        renter = self.renter(book, heart, need)
        leased = renter.acquire(need, say=say, pause=pause)
        try:
            yield leased
        finally:
            renter.release(leased)

    def sweep(self, book: FleetBook) -> list[str]:
        """One round of the reaper: end what is expired, idle, unknown or gone. Returns what was done."""
        config = self.config()
        self.sign_of_life()
        return sweep(
            book,
            list(self.providers(config).values()),
            tag=book.tag(),
            idle_seconds=config.idle_minutes * 60,
            alive=self.sign_of_life,
        )

    def down(self, book: FleetBook, *, here: bool = False, rounds: int = DOWN_ROUNDS) -> tuple[list[str], list[str]]:
        """End every instance, leased or not. Returns what was done, and the names of those that would not end.

        `here`: only those whose machines are processes of this computer, with their records in `home`.
        """
        said: list[str] = []

        def all_standing() -> list[Instance]:
            own = {record.name for record in MachineRegister(Path(self.home)).machines()} if here else None
            return [one for one in book.fleet() if own is None or one.name in own]

        for number in range(rounds):
            standing = all_standing()
            if not standing:
                break
            for one in standing:
                for lease in [*([one.lease] if one.lease else []), *one.draining]:
                    book.release_run(lease.run_id)
                book.begin_ending(one.name, "fleet down")
            said += self.sweep(book)
            if number:
                time.sleep(min(1.0, 0.1 * 2**number))
        return said, [one.name for one in all_standing()]

    def _start(self, run_id: str, engine: EngineConfig, need: Requirement, pause: Pause) -> StandingEngine:
        if engine.kind == "endpoint":
            assert engine.url is not None
            try:
                wait_reachable(engine.url, min(engine.start_seconds, ENDPOINT_SECONDS), pause)
            except AddressRefused as error:
                raise FleetConfigError(f"engine {engine.name}: {error}") from None
            return StandingEngine(engine.url)
        process = EngineProcess(
            _simulator_command(engine) if engine.kind == "simulated" else engine.command,
            model=need.model,
            log=Path(self.home) / "engines" / f"{engine.name}-{run_id[:8]}.log",
            environment={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120", **engine.environment},
        )
        try:
            process.wait_ready(engine.start_seconds, pause)
        except BaseException:
            process.close()
            raise
        return StandingEngine(process.endpoint, True, process.close)


def _cloud(home: Path, config: SimulatedCloudConfig, prices: PricingConfig) -> SimulatedCloud:
    """The cloud of a home, with the prices that its providers play."""
    played = {one.name: one.plays for one in config.providers if one.plays is not None}
    if not played:
        return SimulatedCloud(home, config)
    sources = prices.sources()

    def offers(whose: Played, now: float) -> list[Offer]:
        moment = now
        if whose.since is not None:
            since = whose.since if whose.since.tzinfo else whose.since.replace(tzinfo=datetime.UTC)
            moment = since.timestamp() + (now - cloud.started_at) * config.clock
        wanted = provider_name(whose.provider)
        recorded = [source for source in sources if isinstance(source, PriceHistory) == (whose.since is not None)]
        try:
            found = [offer for source in recorded for offer in source.offers(moment) if offer.provider == wanted]
        except PricingError as error:
            raise ProviderError(f"the prices that it plays cannot be read: {error}") from None
        return [replace(offer, source=f"simulated: {offer.source}") for offer in found]

    cloud = SimulatedCloud(home, config, {name: partial(offers, whose) for name, whose in played.items()})
    return cloud


def _with_model(cloud: SimulatedCloudConfig, need: Requirement) -> SimulatedCloudConfig:
    known = Models().known(need.model, need.declared, hub=False)
    if need.model in cloud.models or known.knowledge == "assumed":
        return cloud
    facts = known.facts(SIMULATED_CONTEXT)
    played = SimulatedModel(
        weight_bytes=facts.weight_bytes,
        active_parameters=facts.active_parameters,
        kv_bytes_per_token=max(1.0, facts.kv_bytes_per_token),
        max_model_len=known.context or SIMULATED_CONTEXT,
        tensor_parallel=facts.tensor_parallel,
        fp8=facts.fp8,
    )
    return cloud.model_copy(update={"models": {**cloud.models, need.model: played}})


def _simulator_command(engine: EngineConfig) -> list[str]:
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "{model}", "--port", "{port}"]
    command += ["--max-num-seqs", str(engine.max_num_seqs or 256), "--speed", str(engine.speed)]
    return command + engine.arguments
