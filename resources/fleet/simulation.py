"""Whether the engine that a run will get is a simulation: fleet.yaml says it, else the engine does when it is asked."""

from __future__ import annotations

import asyncio

from gpu_runner.bounded_http.addresses import AddressRefused
from gpu_runner.bounded_http.tls_files import TlsFilesError
from gpu_runner.client.engine_client import EngineClient, EngineLost, EngineRefused, TimeOuts
from gpu_runner.rows import Generation, Task
from resources.engine_options import PLAIN, EngineOptions
from resources.fleet.fleet_config import EngineConfig, FleetConfig

CONNECT_SECONDS = 3.0
SECONDS = 30.0  # for one engine to say who it is: one that is busy may take as long as ten seconds for a page


def is_simulation(
    config: FleetConfig, model: str, task: Task, endpoint: str | None, options: EngineOptions = PLAIN
) -> bool:
    """Whether rows of this model will be a simulator's. Raises FleetConfigError for an address that is not allowed.

    Of engines that run already, those that answer are believed; one that does not answer counts as a real one.
    """
    engines = config.engines_for(model, endpoint, options)
    if not endpoint and not config.serves_really(model):
        return True
    standing = [engine for engine in engines if engine.url]
    if len(standing) < len(engines) or (not endpoint and config.rents_really):
        return False
    return all(_says_simulated(engine, model, task) for engine in standing)


def _says_simulated(engine: EngineConfig, model: str, task: Task) -> bool:
    try:
        return asyncio.run(asyncio.wait_for(_ask(engine, Generation(task, model)), SECONDS))
    except (EngineLost, EngineRefused, AddressRefused, TlsFilesError, OSError, ValueError):
        return False


async def _ask(engine: EngineConfig, generation: Generation) -> bool:
    assert engine.url is not None
    waits = TimeOuts(connect=CONNECT_SECONDS)
    async with EngineClient(
        engine.url, generation, api_key=engine.api_key, time_outs=waits, tls=engine.tls_files
    ) as client:
        return (await client.info()).simulated
