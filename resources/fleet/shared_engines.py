"""Engines that runs of other processes lease, for requests that need no lease of their own.

A lease says who pays for an engine and whose rows it takes; who only sends single requests beside them needs a way
there and nothing else. So no hour is paid twice, and nothing of it is left when this process is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.fleet_database.database import FleetDatabase, Instance
from gpu_runner.providers.base import EngineAccess, Provider, ProviderError, ProviderUnclear, open_access
from gpu_runner.providers.engine_process import answers
from resources.fleet.fleet_config import EngineConfig, FleetConfig

LAPSED_SECONDS = 5.0  # since its last lease; then who waits for the engine has taken it
RETRY_SECONDS = 10.0  # until an engine to which there was no way is tried again


@dataclass(frozen=True, slots=True)
class SharedEngine:
    """An engine that a run of `dataset` leases, by the way that this process has to it. `max_num_seqs`: its slots."""

    name: str
    dataset: str
    endpoint: str
    api_key: str | None = field(repr=False)
    max_num_seqs: int | None
    provider: str
    instance_type: str
    region: str = ""
    tls: TlsFiles | None = None


class SharedEngines:
    """The ways to them. One stays open while its engine stands, as requests may be under way there. `clock`: steady
    seconds. For one thread.
    """

    def __init__(self, config: FleetConfig, providers: Mapping[str, Provider], clock: Callable[[], float]) -> None:
        self._config, self._providers, self._clock = config, providers, clock
        self._ways: dict[str, EngineAccess] = {}
        self._failed_at: dict[str, float] = {}

    def configure(self, config: FleetConfig, providers: Mapping[str, Provider]) -> None:
        """fleet.yaml has changed. Ways that are open stay."""
        self._config, self._providers = config, providers

    def look(
        self, fleet_db: FleetDatabase, models: Mapping[str, str], without: Collection[str] = ()
    ) -> list[SharedEngine]:
        """Engines that runs of these datasets lease: `models` by dataset. `without`: names, to which no way is opened.

        Not among them: what is to end, what its provider takes away, and processes that a run has started for itself.
        """
        standing = fleet_db.fleet()
        self._close_ways({one.name for one in standing})
        found = [one for one in standing if one.payer in models and one.name not in without and _serves(one)]
        shared = [*self._instances(found)]
        for engine in self._config.engines:
            last = None if engine.url is None else fleet_db.last_lease(engine.name)
            if last is None or engine.name in without or last.over_seconds >= LAPSED_SECONDS:
                continue
            if (model := models.get(last.dataset)) is not None and (not engine.models or model in engine.models):
                shared.append(_standing(engine, last.dataset))
        return shared

    def close(self) -> None:
        """Close all ways."""
        self._close_ways(())

    def _instances(self, found: Collection[Instance]) -> Iterator[SharedEngine]:
        for one in found:
            if (way := self._way(one)) is None:
                continue
            yield SharedEngine(
                name=one.name,
                dataset=one.payer,
                endpoint=way.endpoint,
                api_key=way.api_key,
                max_num_seqs=one.max_num_seqs,
                provider=one.provider,
                instance_type=one.instance_type,
                region=one.region,
            )

    def _way(self, instance: Instance) -> EngineAccess | None:
        """None where there is none now, or nobody answers there."""
        name, provider = instance.name, self._providers.get(instance.provider)
        if (known := self._ways.get(name)) is not None:
            return known
        rests = self._clock() - self._failed_at.get(name, float("-inf")) < RETRY_SECONDS
        if provider is None or instance.endpoint is None or rests:
            return None
        try:
            way = open_access(provider, name, instance.endpoint)
        except (ProviderError, ProviderUnclear):
            way = None
        if way is not None and answers(way.endpoint):
            self._ways[name] = way
            self._failed_at.pop(name, None)
            return way
        if way is not None:
            way.close()
        self._failed_at[name] = self._clock()
        return None

    def _close_ways(self, standing: Collection[str]) -> None:
        for name in [name for name in self._ways if name not in standing]:
            self._ways.pop(name).close()
        self._failed_at = {name: at for name, at in self._failed_at.items() if name in standing}


def _serves(one: Instance) -> bool:
    held = one.idle_seconds is None or one.idle_seconds < LAPSED_SECONDS
    return one.state == "ready" and held and not one.retiring and one.notice_seconds is None


def _standing(engine: EngineConfig, dataset: str) -> SharedEngine:
    assert engine.url is not None
    return SharedEngine(
        name=engine.name,
        dataset=dataset,
        endpoint=engine.url,
        api_key=engine.api_key,
        max_num_seqs=engine.slots,
        provider=engine.provider,
        instance_type=engine.instance_type,
        region=engine.region,
        tls=engine.tls_files,
    )
