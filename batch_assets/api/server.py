"""The service as a process: `batch-assets serve`. Ends in order at SIGTERM and SIGINT.

Requests that are under way have `END_SECONDS` to end; connections that are idle are closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from types import FrameType

import uvicorn

from batch_assets.api.capacity.fleet_claim import fleet_claim
from batch_assets.api.front_door import FrontDoor, build_front_door
from batch_assets.api.health import Readiness
from batch_assets.api.models import known_models
from batch_assets.api.requests.callers import embedded_caller
from batch_assets.api.settings import ApiSettings
from batch_assets.api.telemetry.gauges import certificate_gauges
from batch_assets.api.telemetry.repeated_lines import counted_repeated_lines
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.settings import SettingError, fleet_database
from gpu_runner.bounded_http.tls_files import LOOK_SECONDS, RotatingContext, client_tls, server_context

END_SECONDS = 10
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
COLLECTIONS = (50_000, 50, 100)
DRAIN = "BATCH_ASSETS_API_DRAIN_SECONDS"
MOST_DRAIN_SECONDS = 3600.0
MOST_MODELS = 20  # that are named at the start


@dataclass(frozen=True, slots=True)
class Start:
    """What was found at the start of the service. `away`: endpoints that do not answer. `engines`, `providers`: names
    of the fleet's, where there are no endpoints. `models`: None: not known now.
    """

    with_keys: bool
    away: Collection[str] = ()
    engines: Sequence[str] = ()
    providers: Sequence[str] = ()
    models: Sequence[str] | None = None


def start_report(settings: ApiSettings, start: Start) -> list[str]:
    """What `batch-assets serve` says when it has begun: address, who may call, engines, models, what is missing."""
    scheme = "http" if settings.tls is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    callers = "callers show a key or a token" if start.with_keys else "no key is asked for: this machine only"
    lines = [f"OpenAI's API: {scheme}://{host}:{settings.port}/v1   ({callers}; Ctrl-C ends it)"]
    for url in settings.endpoints:
        state = "does not answer: what is asked of it waits until it does" if url in start.away else "answers"
        lines.append(f"engine {url}: {state}")
    if not settings.endpoints:
        lines += _fleet(start)
    lines.append(_models(settings, start))
    return lines


def _fleet(start: Start) -> list[str]:
    if not start.engines and not start.providers:
        missing = "missing: name engines or providers in fleet.yaml (docs/fleet.md), or give --endpoint URL"
        return [f"engines: none. {missing}"]
    named = [("engines", start.engines), ("providers", start.providers)]
    said = "; ".join(f"{kind} {', '.join(names)}" for kind, names in named if names)
    return [f"fleet: {said}; an engine is leased when somebody asks for its model"]


def _models(settings: ApiSettings, start: Start) -> str:
    if start.models:
        further = len(start.models) - MOST_MODELS
        return f"models: {', '.join(start.models[:MOST_MODELS])}{f' and {further:,} more' if further > 0 else ''}"
    if settings.endpoints:
        return "models: not known until an engine answers"
    return "models: none. missing: declare a dataset, or name `models` of an engine in fleet.yaml"


def drain_seconds() -> float:
    """How long the process goes on after SIGTERM: none on one machine, longer than a readiness probe's period behind a
    balancer. Raises SettingError.
    """
    text = os.environ.get(DRAIN, "").strip() or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_DRAIN_SECONDS:
        raise SettingError(f"{DRAIN}: expected seconds, 0 to {MOST_DRAIN_SECONDS:g}, found {text!r:.40}")
    return seconds


class DrainingServer(uvicorn.Server):
    """A uvicorn that says that it ends before it does. A second signal ends it at once, SIGINT without waiting.

    At SIGTERM `/readyz` answers 503 for `seconds` while everything is still served, so that whoever distributes
    requests stops sending them here. Then uvicorn closes its sockets and gives requests under way their time.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        readiness: Readiness,
        seconds: float,
        begun: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`begun`: called once it listens; nothing waits for it."""
        super().__init__(config)
        self._readiness, self._seconds, self._begun = readiness, seconds, begun
        self._telling: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self._begun is not None and self.started:
            self._telling = asyncio.ensure_future(self._begun())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls at a signal, in the main thread."""
        waits = sig == signal.SIGTERM and self._seconds > 0 and not self._readiness.draining
        self._readiness.draining = True
        if not waits:
            super().handle_exit(sig, frame)
            return
        end = super().handle_exit
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: loop.call_later(self._seconds, end, sig, frame))


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
