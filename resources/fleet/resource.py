"""The fleet as a Dagster resource: a run asks for an engine that serves its model, and gives it back.

What there is to lease stands in `fleet.yaml` (resources/fleet/fleet_config.py). Without one there is an embedded fleet:
three simulated providers, so that everything works on a machine without a GPU and without an account.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import dagster as dg

from gpu_runner.bounded_http.addresses import AddressRefused
from gpu_runner.client.llama_cpp import DEFAULT_CONTEXT
from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.fleet_database.heartbeat import Heartbeat
from gpu_runner.fleet_database.reaper import MISSING_SECONDS, sweep
from gpu_runner.models.facts import SLOTS_FLAG
from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import Provider, ProviderError
from gpu_runner.providers.engine_process import EngineProcess, EngineStartError, wait_reachable
from gpu_runner.providers.machine_host.manager import keep_alive
from gpu_runner.providers.machine_host.registry import MachineRegistry
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import ReplayConfig, SimulatedCloudConfig, SimulatedModel
from resources.fleet.client import FleetClient, Pause
from resources.fleet.fleet_config import EngineConfig, FleetConfig, FleetConfigError
from resources.fleet.leased_engine import LeasedEngine, Requirement, StaticEngine
from resources.fleet.providers import rented_providers
from resources.pricing.market import Market
from resources.pricing.model_catalog import Models
from resources.pricing.price_files import PricingError
from resources.pricing.sources import PriceHistory, PricingConfig, provider_name

__all__ = [
    "EngineConfig",
    "EngineHeld",
    "EngineStartError",
    "FleetConfig",
    "FleetConfigError",
    "GpuFleet",
    "LeasedEngine",
    "Requirement",
]

ENDPOINT_SECONDS = 600.0
DOWN_ROUNDS = 8
SETTLE_SECONDS = MISSING_SECONDS + 5.0  # until what its provider does not list counts as gone, and one more sweep
SIMULATED_CONTEXT = 16_384


class EngineHeld(Exception):
    """Somebody else has the engine: says who."""


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
    def open_database(self) -> Iterator[FleetDatabase]:
        """The fleet's tables, for as long as the body runs."""
        fleet_db = FleetDatabase(self.database)
        try:
            yield fleet_db
        finally:
            fleet_db.close()

    def heartbeat(self, fleet_db: FleetDatabase, run_id: str) -> Heartbeat:
        """The heartbeat of one run."""
        return Heartbeat(fleet_db, run_id, ttl=self.ttl, interval=self.beat, signs_of_life=self.sign_of_life)

    def sign_of_life(self) -> None:
        """Tell machines on this host that somebody still looks after them: they end themselves when nobody does."""
        keep_alive(Path(self.home))

    @contextlib.contextmanager
    def alive(self, run_id: str, dataset: str, doing: str) -> Iterator[FleetDatabase]:
        """Beat for a run that leases nothing, so that the watchdog finds it too when its worker is gone.

        Raises RunEnded for a run that was declared dead before.
        """
        with self.open_database() as fleet_db:
            heartbeat = self.heartbeat(fleet_db, run_id)
            heartbeat.tell(doing)
            with heartbeat.beating(dataset, "", ""):
                yield fleet_db

    def providers(self, config: FleetConfig, need: Requirement | None = None) -> dict[str, Provider]:
        """Providers of fleet.yaml by name. Simulated ones play the model that is needed, as far as it is known."""
        home = Path(self.home)
        found: list[Provider] = []
        if config.simulated is not None:
            played = config.simulated if need is None else _with_model(config.simulated, need)
            found += _cloud(home, played, config.prices).providers.values()
        found += rented_providers(home, config)
        return {provider.name: provider for provider in found}

    def simulated_providers(self, fleet_db: FleetDatabase) -> frozenset[str]:
        """Names of providers that only play their machines: those of fleet.yaml, and those in the bills whose clock is
        scaled, as fleet.yaml may have changed since.
        """
        played = {one.provider for one in fleet_db.costs() if one.clock != 1.0}
        with contextlib.suppress(FleetConfigError):
            config = self.config()
            played |= {one.name for one in config.simulated.providers} if config.simulated is not None else set()
        return frozenset(played)

    @staticmethod
    def market(config: FleetConfig, providers: Mapping[str, Provider]) -> Market:
        """What these providers offer. Raises PricingError for a history that cannot be read."""
        played = [] if config.simulated is None else [one.name for one in config.simulated.providers]
        own = [*(one.name for one in config.local), *(one.name for one in config.ssh)]
        real = config.serves_really
        return Market(tuple(providers.values()), config.prices, simulated=played, trusted=own, really=real)

    def client(self, fleet_db: FleetDatabase, heartbeat: Heartbeat, need: Requirement) -> FleetClient:
        """A run's client of the fleet. Raises FleetConfigError, and PricingError for a history that cannot be read."""
        config = self.config()
        config.check_asked(need.model, need.endpoint, simulate=need.simulate)
        providers = self.providers(config, need)
        market = self.market(config, providers)
        return FleetClient(
            config, providers, market, fleet_db, heartbeat, lambda *words: self._start(heartbeat.run_id, *words)
        )

    @contextlib.contextmanager
    def lease(
        self,
        need: Requirement,
        fleet_db: FleetDatabase,
        heartbeat: Heartbeat,
        *,
        say: Callable[[str], None] = lambda _: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> Iterator[LeasedEngine]:
        """Wait, visibly, for an engine; hold it while the body runs; give it back once (see FleetClient.acquire)."""
        client = self.client(fleet_db, heartbeat, need)
        leased = client.acquire(need, say=say, pause=pause)
        try:
            yield leased
        finally:
            client.release(leased)

    @contextlib.contextmanager
    def engine_held(self, engine: EngineConfig, need: Requirement, run_id: str) -> Iterator[StaticEngine]:
        """One engine of fleet.yaml, held and, where it is a process, started, while the body runs: for no Dagster run.

        Raises EngineHeld when somebody else has it, EngineStartError, FleetConfigError.
        """
        with self.open_database() as fleet_db:
            heartbeat = self.heartbeat(fleet_db, run_id)
            with heartbeat.beating(need.dataset, "", ""):
                asked_at = heartbeat.now()
                lease = fleet_db.try_lease(engine.name, run_id, need.dataset, self.ttl)
                if lease is None:
                    raise EngineHeld(f"engine {engine.name} is held by run {fleet_db.holder(engine.name)}")
                heartbeat.hold(lease, asked_at)
                try:
                    standing = self._start(run_id, engine, need, time.sleep)
                    try:
                        yield standing
                    finally:
                        standing.close()
                finally:
                    heartbeat.stop_renewing(lease)
                    fleet_db.release(lease)

    def sweep(self, fleet_db: FleetDatabase) -> list[str]:
        """One round of the reaper: end what is expired, idle, unknown or gone. Returns what was done."""
        config = self.config()
        self.sign_of_life()
        return sweep(
            fleet_db,
            list(self.providers(config).values()),
            tag=fleet_db.tag(),
            idle_seconds=config.idle_minutes * 60,
            alive=self.sign_of_life,
        )

    def down(
        self, fleet_db: FleetDatabase, *, here: bool = False, pause: Callable[[float], None] = time.sleep
    ) -> tuple[list[str], list[str]]:
        """End every instance, leased or not. Returns what was done, and the names of those that would not end.

        `here`: only those whose machines are processes of this computer, with their records in `home`. Perhaps nobody
        sweeps after this, and what is not settled is booked for as long. So an instance that its provider does not
        list, because its order never arrived, is waited for until it counts as gone: SETTLE_SECONDS at most. An order
        that is on its way arrives meanwhile, and is ended. Machines of this computer are waited for until their
        processes are gone, too.
        """
        said: list[str] = []

        def all_standing() -> list[Instance]:
            own = {record.name for record in MachineRegistry(Path(self.home)).machines()} if here else None
            return [one for one in fleet_db.fleet() if own is None or one.name in own]

        paused = 0.0
        for number in itertools.count():
            standing = all_standing()
            missing = any(one.missing_seconds is not None for one in standing)
            if not standing or (number >= DOWN_ROUNDS and not (missing and paused < SETTLE_SECONDS)):
                break
            for one in standing:
                for lease in [*([one.lease] if one.lease else []), *one.draining]:
                    fleet_db.release_run(lease.run_id)
                fleet_db.begin_ending(one.name, "fleet down")
            said += self.sweep(fleet_db)
            if number:
                seconds = min(1.0, 0.1 * 2**number)
                pause(seconds)
                paused += seconds
        hosted = (Path(self.home) / "cloud.db").exists()
        running = MachineRegistry(Path(self.home)).wait_gone(pause) if hosted else []
        return said, list(dict.fromkeys([*(one.name for one in all_standing()), *running]))

    def _start(self, run_id: str, engine: EngineConfig, need: Requirement, pause: Pause) -> StaticEngine:
        if engine.runs_already:
            assert engine.url is not None
            try:
                wait_reachable(engine.url, min(engine.start_seconds, ENDPOINT_SECONDS), pause)
            except AddressRefused as error:
                raise FleetConfigError(f"engine {engine.name}: {error}") from None
            return StaticEngine(engine.url)
        process = EngineProcess(
            _command(engine, need),
            model=need.model,
            log=Path(self.home) / "engines" / f"{engine.name}-{run_id[:8]}.log",
            environment={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120", **engine.environment},
        )
        try:
            process.wait_ready(engine.start_seconds, pause)
        except BaseException:
            process.close()
            raise
        return StaticEngine(process.endpoint, True, process.close)


def _cloud(home: Path, config: SimulatedCloudConfig, prices: PricingConfig) -> SimulatedCloud:
    """The cloud of a home, with the prices that its providers play."""
    played = {one.name: one.plays for one in config.providers if one.plays is not None}
    if not played:
        return SimulatedCloud(home, config)
    sources = prices.sources()

    def offers(whose: ReplayConfig, now: float) -> list[Offer]:
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


def _command(engine: EngineConfig, need: Requirement) -> list[str]:
    """How the engine is started. Raises FleetConfigError when it cannot be."""
    if engine.kind == "llama_cpp":
        return _llama_cpp_command(engine, need)
    options = need.engine.for_simulator if engine.simulated else need.engine
    flag = SLOTS_FLAG[options.server or "vllm"]
    slots = [f"{flag}={options.max_num_seqs}"] if options.max_num_seqs else []
    command = _simulator_command(engine) if engine.kind == "simulated" else engine.command
    return [*command, *slots, *options.arguments()]


def _llama_cpp_command(engine: EngineConfig, need: Requirement) -> list[str]:
    if find_spec("xllamacpp") is None:
        raise FleetConfigError(f"engine {engine.name}: expected the package xllamacpp: install batch-assets[cpu]")
    if engine.gguf is None or not engine.gguf.is_file():
        raise FleetConfigError(f"engine {engine.name}: gguf: expected a file, found none at {engine.gguf}")
    longest = need.max_model_len or 0
    context = engine.context or max(DEFAULT_CONTEXT, longest)
    if longest > context:
        raise FleetConfigError(
            f"engine {engine.name}: context: expected at least {longest} tokens, the dataset's hardware.max_model_len, "
            f"found {context}"
        )
    command = [sys.executable, "-m", "gpu_runner.providers.llama_cpp_server", "--gguf", str(engine.gguf)]
    command += ["--model", "{model}", "--port", "{port}", "--slots", str(engine.slots), "--context", str(context)]
    command += ["--threads", str(engine.threads)] if engine.threads else []
    command += ["--embedding"] if need.task == "embedding" else []
    return command + engine.arguments


def _simulator_command(engine: EngineConfig) -> list[str]:
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "{model}", "--port", "{port}"]
    command += ["--max-num-seqs", str(engine.max_num_seqs or 256), "--speed", str(engine.speed)]
    return command + engine.arguments
