"""The whole service: the application with its callers, limits, metrics, audit log and interactive routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import sqlalchemy as sa
from fastapi import FastAPI
from starlette.types import ASGIApp

from batch_assets.api import health
from batch_assets.api.access.audit import FILE as AUDIT_FILE
from batch_assets.api.access.audit import AuditLog
from batch_assets.api.access.authentication import JwtSettings, authenticator, jwt_settings
from batch_assets.api.access.browser_guard import BrowserGuard
from batch_assets.api.access.enforcement import LimitedAuthenticator
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.access.quotas import Quotas
from batch_assets.api.access.rate_limiter import BucketTable, LocalLimiter, RateLimiter, SharedLimiter
from batch_assets.api.access.rate_limits import FILE as LIMITS_FILE
from batch_assets.api.access.rate_limits import read_limits
from batch_assets.api.app import body_limit, create_app
from batch_assets.api.billing.interactive_usage import InteractiveUsage
from batch_assets.api.billing.usage import Kind, Tokens
from batch_assets.api.billing.usage_journal import FOLDER as USAGE_FOLDER
from batch_assets.api.billing.usage_journal import UsageJournal, left_file
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.home_folders import own_folder
from batch_assets.api.database.service_database import Records
from batch_assets.api.health import Readiness
from batch_assets.api.interactive import routes
from batch_assets.api.interactive.boot_wait import BootWait, boot_wait_seconds
from batch_assets.api.interactive.cache_salt import CacheSalts, salt_key
from batch_assets.api.interactive.embedding_lists import embedding_lists
from batch_assets.api.interactive.engine_choice import EngineChoice, RoutingFigures, routing_policy
from batch_assets.api.interactive.engine_directory import EngineDirectory
from batch_assets.api.interactive.event_stream import Usage
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.api.interactive.proxy import Proxy
from batch_assets.api.interactive.replica_engines import ReplicaEngines
from batch_assets.api.interactive.shared_supply import SharedSupply, first_token_policy
from batch_assets.api.models import EndpointModels, ServedModel, known_models, served_models
from batch_assets.api.online import routes as online_routes
from batch_assets.api.online.dispatcher import ProxyDispatcher
from batch_assets.api.online.list_dispatcher import ListDispatcher
from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.online.online_service import OnlineService
from batch_assets.api.online.online_settings import online_settings
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind
from batch_assets.api.requests.callers import embedded_caller
from batch_assets.api.requests.direct_routes import DirectRoutes
from batch_assets.api.service import task_of
from batch_assets.api.settings import ApiSettings
from batch_assets.api.telemetry.gauges import FleetSource, KeptSamples, record_gauges
from batch_assets.api.telemetry.metrics import ServiceMetrics
from batch_assets.api.telemetry.observation import Observation
from batch_assets.api.telemetry.trace_export import spans_of_environment
from batch_assets.api.telemetry.tracing import Spans
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.settings import FLEET_DB, fleet_database
from gpu_runner.bounded_http.key_variables import key_in
from gpu_runner.bounded_http.tls_files import ssl_of

log = logging.getLogger(__name__)

_DIRECT_ROUTES = (*routes.DIRECT_ROUTES, *online_routes.DIRECT_ROUTES)
_LINES_LOST = ("batch_assets_audit_lines_lost", "Lines of the audit log that could not be written.")
_ANSWERS_LOST = ("batch_assets_usage_answers_lost", "Answers whose usage could not be written down.")
LOOK_SECONDS = 10.0  # between two looks at the configured engines


class ModelsServer(Protocol):
    """One engine; `EndpointModels` is one."""

    async def ask(self) -> Sequence[ServedModel] | None:
        """Its models now; None: it gives no list of models, or does not answer."""


class EndpointWatch:
    """Whether the configured engines answer: a context, in which `servers` (by address) are asked every `seconds`.

    It lives on one event loop. The log and `/readyz` tell what it finds. An engine that is away takes nothing from the
    service's own readiness: batches are taken, and their lines wait for it.
    """

    def __init__(self, servers: Mapping[str, ModelsServer], seconds: float = LOOK_SECONDS) -> None:
        self._servers, self._seconds = servers, seconds
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.away: tuple[str, ...] = ()  # addresses, as of the last look

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look_often())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def first_look(self) -> None:
        """Wait until all were looked at once."""
        await self._looked.wait()

    async def _look_often(self) -> None:
        while True:
            said = await asyncio.gather(*(server.ask() for server in self._servers.values()))
            away = tuple(url for url, models in zip(self._servers, said, strict=True) if models is None)
            for url in away:
                if url not in self.away:
                    log.warning("engine %s gives no list of models: what is asked of it waits until it does", url)
            for url in self.away:
                if url not in away:
                    log.warning("engine %s answers again", url)
            self.away = away
            self._looked.set()
            await asyncio.sleep(self._seconds)


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What a server runs. `inner`: the application itself, without what is around it. `watch`: of endpoints."""

    app: ASGIApp
    inner: FastAPI
    readiness: Readiness
    metrics: ServiceMetrics
    watch: EndpointWatch | None = None


def build_front_door(
    settings: ApiSettings, *, inner: FastAPI | None = None, tokens: JwtSettings | None = None
) -> FrontDoor:
    """The service with these settings and the environment's. Raises AccessSettingsError, LimitsError, RecordsError.

    Without keys and tokens it has one tenant, no limits, and lets no web page in.
    """
    keys = KeyStore(settings.database, time.time)
    authenticate = authenticator(settings.host, keys, tokens or jwt_settings())
    embedded = authenticate is embedded_caller
    limits = read_limits(settings.home / LIMITS_FILE)  # a mistake in it is said at the start, also where none hold
    if not embedded:
        authenticate = LimitedAuthenticator(authenticate, limits, _limiter(keys.records), Quotas(keys.records))
    inner = inner or create_app(settings)
    inner.state.authenticate = authenticate
    figures = ServiceMetrics()
    fleet = _observe(figures, settings, keys.records)
    inner.state.on_commit = lambda footer: figures.committed(
        footer.model, footer.ok, footer.dead, footer.prompt_tokens, footer.completion_tokens
    )
    inner.state.on_lost = figures.results_lost
    spans = inner.state.spans = spans_of_environment()
    watch = _endpoint_watch(settings)
    readiness = _readiness(keys.records, watch)
    inner.state.metrics, inner.state.readiness = figures, readiness
    inner.include_router(health.router)
    inner.include_router(routes.router)
    proxy = _proxy(settings, figures, spans)
    online_requests = online_settings()
    if (key := salt_key(settings.home, several_tenants=not embedded)) is not None:
        proxy.salts = CacheSalts(key, online_requests.cache_groups, proxy.choice.read)
        proxy.choice.hears = proxy.salts.seen
    inner.state.proxy = proxy
    lists = inner.state.embedding_lists = embedding_lists(proxy, figures)
    policy = first_token_policy()
    inner.state.share_engines = lambda supply: SharedSupply(supply, proxy.directory, proxy.first_tokens, policy)
    proxy.known = lambda: known_models(inner.state.models)
    usage = inner.state.interactive_usage = _interactive_usage(settings, keys.records)
    replicas = None if settings.endpoints else _replica_engines(inner, settings, proxy, figures)
    limits_of_callers = authenticate if isinstance(authenticate, LimitedAuthenticator) else None
    inner.include_router(online_routes.router)
    inner.state.online = online = OnlineService(
        online_requests,
        settings.home,
        ProxyDispatcher(proxy) if lists is None else ListDispatcher(ProxyDispatcher(proxy), lists, proxy.used),
        proxy.directory,
        OnlineFigures(figures.registry),
        lambda: served_models(inner.state.models),
        limits_of_callers,
        charge=partial(_charge, usage),
    )
    audit = AuditLog(settings.home / AUDIT_FILE)
    figures.add_gauges(lambda: [(*_LINES_LOST, {}, audit.lost), (*_ANSWERS_LOST, {}, usage.lost)])
    closed = [contextlib.closing(one) for one in (keys, fleet)]
    _live_with(inner, [*closed, audit, usage, replicas], [proxy, lists, watch], [online])
    guarded: ASGIApp = DirectRoutes(inner, inner, _DIRECT_ROUTES, partial(body_limit, settings.limits))
    if embedded:
        guarded = BrowserGuard(guarded, settings.port, "http" if settings.tls is None else "https")
    app = Observation(guarded, figures, audit, wall=time.time, clock=time.monotonic, spans=spans)
    return FrontDoor(app, inner, readiness, figures, watch)


def _interactive_usage(settings: ApiSettings, records: Records) -> InteractiveUsage:
    folder = own_folder(settings.home / USAGE_FOLDER, records, left_file)
    journal = UsageJournal(folder, lambda: UsageLedger(Records(settings.database)))
    return InteractiveUsage(journal, settings.prices, time.time)


def _endpoint_watch(settings: ApiSettings) -> EndpointWatch | None:
    if not settings.endpoints:
        return None
    key = os.environ.get("BATCH_ASSETS_API_KEY") or None
    return EndpointWatch({url: EndpointModels(url, key, settings.engine_tls) for url in settings.endpoints})


def _readiness(records: Records, watch: EndpointWatch | None) -> Readiness:
    found = Readiness(time.monotonic, {"database": lambda: _look(records)})
    if watch is not None:
        found.engines_away = lambda: watch.away
    return found


def _limiter(records: Records) -> RateLimiter:
    """Replicas share a Postgres, and so their buckets; a SQLite file belongs to one process."""
    if records.engine.dialect.name == "sqlite":
        return LocalLimiter(time.monotonic)
    return SharedLimiter(BucketTable(records, time.time), time.monotonic)


def _proxy(settings: ApiSettings, figures: ServiceMetrics, spans: Spans) -> Proxy:
    """What sends interactive requests on: to engines that are announced, and to the configured endpoints."""
    routing, measured = routing_policy(), RoutingFigures(figures)
    if not settings.endpoints:
        directory = EngineDirectory(time.monotonic)
        choice = EngineChoice(directory, time.monotonic, routing, measured)
        return Proxy(directory, figures, FirstTokens(time.monotonic), choice, spans=spans)
    api_key, tls = key_in("BATCH_ASSETS_API_KEY"), settings.engine_tls
    ssl_of(tls)  # what cannot be used is said at the start

    async def models(url: str) -> list[str]:
        return await proxy.models_of(url, api_key, tls)

    directory = EngineDirectory(
        time.monotonic,
        endpoints=settings.endpoints,
        api_key=api_key,
        tls=tls,
        models=models,
        regions=settings.regions,
    )
    choice = EngineChoice(directory, time.monotonic, routing, measured)
    proxy = Proxy(directory, figures, FirstTokens(time.monotonic), choice, spans=spans)
    return proxy


def _observe(figures: ServiceMetrics, settings: ApiSettings, records: Records) -> FleetSource:
    """Figures of the records, and of the fleet where engines come from it."""
    figures.add_gauges(KeptSamples("records", record_gauges(records, time.time), time.monotonic))
    fleet = FleetSource(_fleet_url(settings))
    if not settings.endpoints:
        figures.add_gauges(KeptSamples("fleet", fleet.read, time.monotonic))
    return fleet


def _fleet_url(settings: ApiSettings) -> str:
    return fleet_database() if os.environ.get(FLEET_DB) else f"sqlite:///{settings.home / 'fleet.db'}"


def _replica_engines(app: FastAPI, settings: ApiSettings, proxy: Proxy, figures: ServiceMetrics) -> ReplicaEngines:
    """Engines of the fleet are leased for what is asked for; those that other replicas lease are found, too."""
    replicas = ReplicaEngines(fleet_of(settings.home, _fleet_url(settings)), proxy.directory)

    def want(model: str, path: str) -> None:
        replicas.want(model)
        _want(app, model, path)

    proxy.want, proxy.find = want, replicas.find
    boots = proxy.boots = BootWait(boot_wait_seconds())
    figures.add_gauges(boots.samples)
    boots.awaited = lambda model, path: _of_service(app, "awaited", model, path)
    boots.never_served = lambda model, path: _of_service(app, "never_served", model, task_of(path))
    return replicas


def _want(app: FastAPI, model: str, path: str) -> None:
    want: Callable[[str, str], None] | None = getattr(app.state, "want", None)
    if want is not None:
        want(model, path)


def _of_service(app: FastAPI, name: str, *words: str) -> Any:
    """What the service says that stands behind the application; None where there is none."""
    call = getattr(app.state, name, None)
    return None if call is None else call(*words)


def _charge(usage: InteractiveUsage, task: OnlineTask, used: Usage | None) -> None:
    """An engine has answered an online request."""
    kind = Kind.EMBEDDINGS if task.kind is TaskKind.EMBEDDING else Kind.COMPLETIONS
    tokens = None if used is None else Tokens(used.prompt_tokens, used.cached_tokens, used.completion_tokens)
    usage.answered(task.tenant, task.model, kind, tokens, task.task_id)


def _look(records: Records) -> None:
    with records.reading() as connection:
        connection.execute(sa.select(1))


def _live_with(
    app: FastAPI,
    held: Sequence[AbstractContextManager[object] | None],
    before: Sequence[AbstractAsyncContextManager[object] | None],
    after: Sequence[AbstractAsyncContextManager[object]],
) -> None:
    """Open and close with the application what it holds, what it needs before it starts, and what needs it."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[object]:
        async with contextlib.AsyncExitStack() as stack:
            for one in filter(None, held):
                stack.enter_context(one)
            stack.push_async_callback(asyncio.to_thread, app.state.spans.close)
            for part in filter(None, before):
                await stack.enter_async_context(part)
            state = await stack.enter_async_context(inner(app))
            for part in after:
                await stack.enter_async_context(part)
            yield state

    app.router.lifespan_context = lifespan  # type: ignore[assignment]
