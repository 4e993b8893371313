"""The service as a process: `batch-assets serve`. Ends in order at SIGTERM and SIGINT.

Requests that are under way have `END_SECONDS` to end; connections that are idle are closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from types import FrameType

import uvicorn

from batch_assets.api.capacity.fleet_claim import fleet_claim
from batch_assets.api.drain import DrainingServer, drain_seconds
from batch_assets.api.front_door import FrontDoor, build_front_door
from batch_assets.api.models import known_models
from batch_assets.api.requests.callers import embedded_caller
from batch_assets.api.settings import ApiSettings
from batch_assets.api.start_report import Start, start_report
from batch_assets.api.telemetry.gauges import certificate_gauges
from batch_assets.api.telemetry.repeated_lines import counted_repeated_lines
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.settings import fleet_database
from gpu_runner.http.tls_files import LOOK_SECONDS, RotatingContext, client_tls, server_context

END_SECONDS = 10
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
COLLECTIONS = (50_000, 50, 100)


def serve(settings: ApiSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises AccessSettingsError for an address that others can reach without a key, TlsFilesError for bad certificates,
    FleetTaken where a service with other records leases engines of the same fleet.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ended_in_order)  # uvicorn has its own while it runs, and raises the signal again then
    with counted_repeated_lines():
        _serve(settings)


def _serve(settings: ApiSettings) -> None:
    service = build_front_door(settings)
    config = server_config(service, settings)
    # Fewer, cheaper garbage collections: thousands of live requests make them a large part of the CPU per line.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    with contextlib.nullcontext() if settings.endpoints else fleet_claim(settings.home, settings.database) as claim:
        if claim is not None:
            service.inner.state.check_fleet = claim.check
        DrainingServer(config, service.readiness, drain_seconds(), lambda: _tell(service, settings)).run()


async def _tell(service: FrontDoor, settings: ApiSettings) -> None:
    """Say what has begun, when each configured engine was looked at once."""
    state = service.inner.state
    if service.watch is not None:
        await service.watch.first_look()
    engines, providers = ([], []) if settings.endpoints else await asyncio.to_thread(_fleet_names, settings)
    known = await known_models(state.models)
    found = Start(
        state.authenticate is not embedded_caller,
        () if service.watch is None else service.watch.away,
        engines,
        providers,
        None if known is None else sorted(known),
    )
    sys.stdout.write("".join(f"{line}\n" for line in start_report(settings, found)))
    sys.stdout.flush()


def _fleet_names(settings: ApiSettings) -> tuple[list[str], list[str]]:
    """Names of the fleet's engines and providers."""
    fleet = fleet_of(settings.home, fleet_database())
    config = fleet.config()
    providers = [] if config.simulate_only_if_asked and not config.rents_really else list(fleet.providers(config))
    return [engine.name for engine in config.engines], providers


def server_config(service: FrontDoor, settings: ApiSettings, look_seconds: float = LOOK_SECONDS) -> uvicorn.Config:
    """How uvicorn serves it, with TLS where certificate and key are named. Raises TlsFilesError.

    `look_seconds`: how often their files are looked at.
    """
    tls = None
    if settings.tls is not None:
        tls = RotatingContext(settings.tls, server_context, look_seconds=look_seconds)
    engines = None if settings.engine_tls is None else client_tls(settings.engine_tls)
    service.metrics.add_gauges(lambda: certificate_gauges(tls, engines))
    return uvicorn.Config(
        service.app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=END_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls.for_handshakes(),
    )


def _ended_in_order(number: int, frame: FrameType | None) -> None:
    """The service has ended as it was asked to: exit status 0."""
