"""What stands behind the application: records, store, models, and the worker in a thread of its own.

The worker has its own event loop, so that rows and requests do not wait for each other's turns.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import dagster as dg
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from batch_assets.api.billing.batch_usage import BatchCharges, BatchUsage
from batch_assets.api.billing.spending import SpendingRecords
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.capacity.capacity import ModelCapacity
from batch_assets.api.capacity.never_served import NeverServed
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.file_records import FileRecords
from batch_assets.api.database.home_folders import own_folder
from batch_assets.api.database.service_database import Records
from batch_assets.api.execution.batch_lifecycle import Capacity, WorkerContext
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.catalog import CatalogReports
from batch_assets.api.execution.engines.engine_supply import Awaited, EndpointsSupply, EndpointSupply, EngineSupply
from batch_assets.api.execution.engines.fleet_engines import FleetSupply
from batch_assets.api.execution.local_journal import left_file
from batch_assets.api.execution.worker import Worker
from batch_assets.api.models import AliasedModels, EndpointModels, FleetModels, Models, SeveralModels
from batch_assets.api.settings import ApiSettings
from batch_assets.api.telemetry.tracing import NO_SPANS, Spans
from batch_assets.dagster_internals.kept_connections import keep_connections
from batch_assets.local_dagster.local_fleet import fleet_of
from batch_assets.settings import capacity_seconds, fleet_database
from batch_assets.spec.discovery import declared_specs
from gpu_runner.bounded_http.key_variables import key_in
from gpu_runner.bounded_http.tls_files import ssl_of
from gpu_runner.rows import Task
from resources.fleet.resource import GpuFleet
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchFooter

log = logging.getLogger(__name__)

WANTED_SECONDS = 300.0  # how long an engine stays after an interactive request
START_SECONDS, END_SECONDS = 10.0, 8.0
STORE_RETRY_SECONDS, STORE_REQUEST_SECONDS = 20.0, 20.0

AWAY_SECONDS = 10.0  # until one of several endpoints that did not answer is asked for its models again

LOCAL_ROWS = "api_rows"

ShareEngines = Callable[[EngineSupply], EngineSupply]  # lets others use what the worker holds


class Service:
    """Opened by the application's lifespan; `close` leaves no thread, request or connection behind."""

    def __init__(
        self,
        settings: ApiSettings,
        share_engines: ShareEngines = lambda supply: supply,
        spans: Spans = NO_SPANS,
        on_commit: Callable[[BatchFooter], None] = lambda footer: None,
        check_fleet: Callable[[], None] = lambda: None,
        on_lost: Callable[[str, int, int], None] = lambda model, again, given_up: None,
    ) -> None:
        """`check_fleet` raises while another service plans for the same fleet. `on_lost`: as WorkerContext.lost."""
        self.records = Records(settings.database)
        self._on_commit = on_commit
        self.objects = open_objects(
            settings.store_root, retry_seconds=STORE_RETRY_SECONDS, request_seconds=STORE_REQUEST_SECONDS
        )
        self.files, self.batches = FileRecords(self.records), BatchRecords(self.records)
        served, engines, fleet = _engines(settings)
        self.never_served = _no_reason if fleet is None else NeverServed(fleet).why
        self.models = AliasedModels(served, settings.models.aliases)
        engines = share_engines(engines)
        self._catalog = CatalogReports(settings.home, self.batches, self.objects, _open_instance)
        self.ledger = UsageLedger(self.records)
        self._usage = BatchUsage(self.ledger, BatchCharges(settings.prices), SpendingRecords(self.records), time.time)
        self._worker_context = WorkerContext(
            self.batches,
            self.files,
            self.objects,
            self.models,
            engines,
            settings.limits,
            self._committed,
            self._usage,
            settings.models.resolve,
            spans=spans,
            reserve={} if fleet is None else settings.models.reserve,
            engines_at_once=max(1, len(settings.endpoints)),
            capacity=None if fleet is None else _checked(check_fleet, self._capacity(fleet, settings).look),
            never_served=self.never_served,
            lost=lambda run, again, given_up: on_lost(run.record.model or "", again, given_up),
            local=own_folder(settings.home / LOCAL_ROWS, self.records, left_file),
        )
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches-worker", daemon=True)

    def _capacity(self, fleet: GpuFleet, settings: ApiSettings) -> ModelCapacity:
        return ModelCapacity(
            fleet,
            self.objects,
            self.ledger,
            self._usage.spending,
            settings.models.reserve,
            capacity_seconds(),
            decided=self._catalog.decided,
        )

    def attach(self, app: FastAPI) -> None:
        """Give the routers what they need."""
        state = app.state
        state.files, state.batches, state.objects, state.models = self.files, self.batches, self.objects, self.models
        state.want, state.awaited, state.never_served = self.want, self.awaited, self.never_served
        state.wake, state.ledger, state.spending = self.wake, self.ledger, self._usage.spending

    def start(self) -> None:
        """Begin to work on batches."""
        self._catalog.start()
        self._usage.start()
        self._thread.start()
        self._started.wait(START_SECONDS)

    def want(self, model: str, path: str) -> None:
        """An interactive request asks for a model: an engine of it is kept, or leased, for a while."""
        if self._worker is not None:
            self._worker.want(model, task_of(path), WANTED_SECONDS)

    def awaited(self, model: str, path: str) -> Awaited | None:
        """What interactive requests to a path wait for; None: that is not known."""
        return None if self._worker is None else self._worker.awaited(model, task_of(path))

    def wake(self) -> None:
        """A record has changed."""
        if self._worker is not None:
            self._worker.wake()

    def close(self) -> None:
        """End in order: what is finished is kept, batches are given up for the next process."""
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(END_SECONDS)
        self._catalog.close()
        self._usage.close()
        self.records.close()

    def _committed(self, run: BatchRun, footer: BatchFooter) -> None:
        self._catalog.committed(run.batch_id, footer)
        self._usage.committed(run.record, footer)
        self._on_commit(footer)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
                runner.run(self._work())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            log.error("worker: %s", type(error).__name__, exc_info=error)
        finally:
            self._started.set()

    async def _work(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._worker = Worker(self._worker_context)
        self._started.set()
        await self._worker.run()


def task_of(path: str) -> Task:
    """The task of the feed that keeps an engine for interactive requests to a path."""
    return "embedding" if path == "/v1/embeddings" else "chat"


def _no_reason(model: str, task: Task) -> str | None:
    """An endpoint may serve any model when it answers."""
    return None


def _checked(check: Callable[[], None], look: Capacity) -> Capacity:
    def checked(records: Sequence[BatchRecord], mine: Collection[str]) -> Mapping[tuple[str, Task], int]:
        check()
        return look(records, mine)

    return checked


def _engines(settings: ApiSettings) -> tuple[Models, EngineSupply, GpuFleet | None]:
    """The endpoints, or the fleet: its engines' models, and those of the declared datasets."""
    if settings.endpoints:
        return *_endpoints(settings), None
    fleet = fleet_of(settings.home, fleet_database())
    for engine in fleet.config().engines:
        ssl_of(engine.tls_files)  # what cannot be used is said at the start
    declared = {spec.model for spec in declared_specs().values()}
    models = FleetModels(lambda: _fleet_models(fleet, declared), int(time.time()))
    return models, FleetSupply(fleet, settings.models.reserve), fleet


def _fleet_models(fleet: GpuFleet, declared: Collection[str]) -> set[str]:
    """The models of fleet.yaml as it is now, and those of datasets that something there may serve."""
    config = fleet.config()
    named = {model for engine in config.engines if engine.kind != "batch_api" for model in engine.models}
    able = {model for model in declared if config.may_serve(model, batches=False) and not config.only_plays(model)}
    return named | able


def _endpoints(settings: ApiSettings) -> tuple[Models, EngineSupply]:
    key, tls = key_in("BATCH_ASSETS_API_KEY"), settings.engine_tls
    supplies = [EndpointSupply(url, key, settings.max_num_seqs, tls) for url in settings.endpoints]
    if len(supplies) == 1:
        return EndpointModels(settings.endpoints[0], key, tls), supplies[0]
    models = [EndpointModels(url, key, tls, AWAY_SECONDS) for url in settings.endpoints]
    return SeveralModels(models), EndpointsSupply(list(zip(supplies, models, strict=True)))


def _open_instance(home: Path) -> dg.DagsterInstance:
    instance = dg.DagsterInstance.from_config(str(home))
    keep_connections(instance)
    return instance
