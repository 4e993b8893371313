"""What stands behind the routes: the queue, the consumer of this process, and who may come in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from batch_assets.api.access.enforcement import LimitedAuthenticator
from batch_assets.api.access.rate_limits import retry_after
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.engine_reports import MOST_ENGINES, LoadReader
from batch_assets.api.online.admission import Admission, EnginePressure
from batch_assets.api.online.answers.answer_cache import AnswerCache, LocalCache
from batch_assets.api.online.answers.collapse import CollapsedRequests
from batch_assets.api.online.cancellation import raise_if_cancelled
from batch_assets.api.online.consumer import Charge, Consumer
from batch_assets.api.online.dispatcher import Dispatcher
from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.online.online_settings import OnlineSettings
from batch_assets.api.online.queues.embedded import EmbeddedQueue
from batch_assets.api.online.queues.queue_protocol import (
    Appended,
    KeyReused,
    OnceKey,
    QueueAway,
    QueueDepth,
    StoredTask,
    TaskQueue,
    new_task_id,
)
from batch_assets.api.online.queues.tasks import OnlineTask
from batch_assets.api.online.request import EngineRequest
from batch_assets.api.requests.api_error import ApiError

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.1
LOOK_SECONDS = 1.0
MODELS_SECONDS, NO_MODELS_SECONDS, ASK_MODELS_SECONDS = 5.0, 1.0, 1.0

KnownModels = Callable[[], Awaitable[frozenset[str] | None]]


class EnginePressures:
    """How full the engines are that online requests go to, read from their own metrics while there is work.

    `concurrency`: requests that are sent at a time; a queue in an engine is full when as many wait, or as many as
    run, without rows of our own batches. One that does not tell its load counts as empty: what it cannot take shows in
    our own queue.

    Rows of our own batches come after online requests where an engine has priority scheduling, and fewer are sent
    while first tokens are late. So their place in an engine's queue is no reason to refuse a request: what waits, less
    all rows of ours there, is what would wait without them. Which of them run no engine tells, so it may be too few by
    as many as run; what an engine does not take in time waits in our own queue, which admission counts. Nor does an
    engine tell whose the blocks of its KV cache are: all of them count.
    """

    def __init__(self, directory: EngineDirectory, concurrency: int) -> None:
        self._directory, self._concurrency = directory, max(1, concurrency)
        self._reader = LoadReader()

    async def look(self) -> Mapping[str, EnginePressure]:
        """The pressure of each model: that of its least loaded engine. Takes at most a second."""
        targets = self._directory.targets()[:MOST_ENGINES]
        found = await asyncio.gather(*(self._ask(target) for target in targets))
        pressures: dict[str, EnginePressure] = {}
        for target, pressure in zip(targets, found, strict=True):
            known = pressures.get(target.model)
            if known is None or pressure.most < known.most:
                pressures[target.model] = pressure
        return pressures

    async def close(self) -> None:
        """Close its connections."""
        await self._reader.close()

    async def _ask(self, target: EngineTarget) -> EnginePressure:
        load = (await self._reader.read(target)).load
        if load is None:
            return EnginePressure()
        waiting = max(0, load.waiting - self._directory.batch_rows(target.url))
        return EnginePressure(load.kv_usage, waiting / max(load.running, self._concurrency))


class OnlineService:
    """Async context manager; lives on one event loop. `limits`: callers' limits, where there are any."""

    def __init__(
        self,
        settings: OnlineSettings,
        home: Path,
        dispatcher: Dispatcher,
        directory: EngineDirectory,
        figures: OnlineFigures,
        known: KnownModels,
        limits: LimitedAuthenticator | None = None,
        charge: Charge = lambda task, usage: None,
    ) -> None:
        self._settings, self._figures, self._limits = settings, figures, limits
        self._models, self._directory = _ModelNames(known), directory
        self.queue, self._cache = _kept_in(settings.redis, home)
        self._admission = Admission(settings.most_waiting, random.random)
        figures.read(self._depth_now, lambda: self._admission.fullness)
        self._pressures = EnginePressures(directory, settings.concurrency)
        name = f"{socket.gethostname()[:60]}/{os.getpid()}/{secrets.token_hex(4)}"
        requests = CollapsedRequests(dispatcher, self._cache, settings.cache_groups, figures)
        self._consumer = Consumer(
            self.queue,
            requests,
            figures,
            name=name,
            concurrency=settings.concurrency,
            clock=time.time,
            uniform=random.random,
            settle=self._settle,
            charge=charge,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Open the queue, if it can be had now: else as soon as it can."""
        with contextlib.suppress(QueueAway):
            await self.queue.sweep()
        loops = [self._sweep(), self._look()]
        if self._settings.concurrency > 0:
            loops.append(self._consumer.run())
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("online: %s", type(ended).__name__, exc_info=ended)
        await self._pressures.close()
        await self._cache.close()
        await self.queue.close()

    async def model(self, named: str | None) -> str:
        """The model that is asked for. Raises ApiError 400, 404, 503."""
        known = await self._models.names()
        if served := {target.model for target in self._directory.targets()}:
            known = frozenset(served | (known or frozenset()))
        if named is not None:
            if known is not None and named not in known:
                message = f"The model `{named}` does not exist or you do not have access to it."
                raise ApiError(404, message, code="model_not_found", param="model")
            return named
        if known is None:
            raise ApiError(
                503, "The models cannot be listed now: name one.", param="model", headers={"Retry-After": "2"}
            )
        if len(known) != 1:
            raise ApiError(400, "you must provide a model parameter", param="model", code="missing_required_parameter")
        return next(iter(known))

    async def admit(self, tenant: str, model: str, once: OnceKey | None) -> str | None:
        """None: a request is let in; who does not submit it then calls `withdraw`. While too much waits, the task that
        came with the same key, which needs no room. Raises ApiError 429, 400, 503.
        """
        admitted = self._admission.ask(tenant, model, time.monotonic())
        if admitted.wait is None:
            return None
        if once is not None:
            with self._refusing():
                if (known := await self.queue.known(tenant, once)) is not None:
                    self._figures.accepted(repeated=True)
                    return known
        self._figures.refused("full")
        headers = retry_after(admitted.wait)
        said = "Too many requests wait for an answer now. Please try again later."
        raise ApiError(429, said, code="queue_full", headers=headers)

    def withdraw(self, tenant: str) -> None:
        """A request that was let in was not kept."""
        self._admission.withdraw(tenant)

    async def submit(
        self, tenant: str, client_id: str, asked: EngineRequest, ttl: float, once: OnceKey | None, traceparent: str
    ) -> Appended:
        """Keep a request. Raises ApiError 400, 503."""
        task = OnlineTask(
            new_task_id(tenant, once),
            tenant,
            client_id,
            asked.model,
            asked.kind,
            asked.body,
            time.time(),
            ttl,
            asked.reusable,
            asked.expected_tokens,
            traceparent,
        )
        with self._refusing():
            appended = await self.queue.append(task, once)
        self._figures.accepted(repeated=appended.repeated)
        return appended

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raises ApiError where the queue does not take a request."""
        try:
            yield
        except KeyReused:
            said = "This idempotency key was used for another request."
            raise ApiError(400, said, param="Idempotency-Key", code="idempotency_key_reused") from None
        except QueueAway:
            self._figures.refused("queue_away")
            raise queue_away() from None

    async def result(self, tenant: str, task_id: str, wait: float) -> StoredTask | None:
        """A tenant's own task; None where it has no such one. Raises ApiError 503."""
        try:
            return await self.queue.look(task_id, wait, tenant)
        except QueueAway:
            raise queue_away() from None

    async def _settle(self, tenant: str, more: int) -> None:
        if self._limits is not None:
            await self._limits.settle_tokens(tenant, more)

    def _depth_now(self) -> QueueDepth:
        """What is in the queue at this moment: of one that others share, what came here since it was asked last is
        added.
        """
        return self.queue.depth_now() or self._admission.depth

    async def _sweep(self) -> None:
        while True:
            raise_if_cancelled()
            await asyncio.sleep(SWEEP_SECONDS * (0.5 + random.random()))
            try:
                await self.queue.sweep()
            except QueueAway:
                pass
            except Exception as error:  # a defect must not end all that comes after it
                log.error("online sweep: %s", type(error).__name__, exc_info=error)

    async def _look(self) -> None:
        """Tell admission and metrics how things are."""
        ended = 0
        while True:
            raise_if_cancelled()
            try:
                depth = await self.queue.depth()
                pressures: dict[str, EnginePressure] = {}
                if depth.waiting or depth.delayed or depth.claimed > self._settings.concurrency // 2:
                    pressures |= await self._pressures.look()
                ended, before = self._consumer.ended, ended
                self._admission.observe(depth, pressures, ended - before, time.monotonic())
                self._figures.redis_away.set(0)
            except QueueAway:
                self._figures.redis_away.set(1)
            except Exception as error:
                log.error("online depth: %s", type(error).__name__, exc_info=error)
            await asyncio.sleep(LOOK_SECONDS)


def _kept_in(redis: str | None, home: Path) -> tuple[TaskQueue, AnswerCache]:
    """Queue and cache: of this process, or in Redis, whose library is imported only then."""
    if redis is None:
        return EmbeddedQueue(home, time.time), LocalCache(time.monotonic)
    from batch_assets.api.online.answers.redis_cache import RedisCache
    from batch_assets.api.online.queues.redis_streams import RedisQueue

    return RedisQueue(redis, time.time), RedisCache(redis, time.monotonic)


class _ModelNames:
    """Which models are known, asked for every few seconds and never longer than a second."""

    def __init__(self, known: KnownModels) -> None:
        self._known = known
        self._names: frozenset[str] | None = None
        self._until = 0.0
        self._lock = asyncio.Lock()

    async def names(self) -> frozenset[str] | None:
        """Those known now or before; None: nobody could say it yet."""
        if time.monotonic() >= self._until:
            async with self._lock:
                if time.monotonic() >= self._until:
                    await self._ask()
        return self._names

    async def _ask(self) -> None:
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_MODELS_SECONDS):
                found = await self._known()
        self._names = found if found is not None else self._names
        self._until = time.monotonic() + (MODELS_SECONDS if found is not None else NO_MODELS_SECONDS)


def queue_away() -> ApiError:
    """The queue cannot be used now: nothing is known of what was asked."""
    said = "Requests cannot be kept or looked up now. Please try again."
    return ApiError(503, said, code="queue_unavailable", headers={"Retry-After": "1"})
