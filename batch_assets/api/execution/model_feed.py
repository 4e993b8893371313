"""One feed of rows per model: all batches of a model share its engines, and none costs a run.

Batches wait in the order of `batch_queue`. Lines that were read and not sent wait in the order of their batches'
urgency: a batch with a short window overtakes the lines of others. An engine that is lost, refuses everything or cannot
be had is waited for: that is no failure of lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial

from batch_assets.api.execution.batch_queue import BatchQueue
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.engines.engine_slots import EngineSlot, EngineSlots
from batch_assets.api.execution.engines.engine_supply import (
    Awaited,
    EngineAway,
    EngineSupply,
    EngineWait,
    NobodyWaits,
    NoFurtherEngine,
    ServingEngine,
    Waiting,
)
from batch_assets.api.execution.local_journal import LocalJournal
from batch_assets.api.telemetry.tracing import NO_SPANS, SpanKind, Spans, engine_call, sent_in
from batch_assets.worker.job_worker import JobWorker, client_of
from gpu_runner.bounded_http.tls_files import TlsFilesError
from gpu_runner.client.engine_client import BATCH_PRIORITY, EngineLost, EngineRefused
from gpu_runner.client.verbatim_client import VerbatimClient
from gpu_runner.rows import Generation, Task
from resources.store.dataset_store import BatchFooter

log = logging.getLogger(__name__)

AWAY_SECONDS = (0.2, 2.0)  # between two tries to get an engine, at first and at most
FLUSH_SECONDS = 0.2
ANSWER_BYTES = 64 << 20
LOOK_SECONDS = 1.0
IDLE_SECONDS = 30.0  # how long a leased engine waits for the next batch

Committed = Callable[[BatchRun, BatchFooter], None]


class ModelFeed:
    """The batches of one model and endpoint. All but `queue` belongs to one event loop."""

    def __init__(
        self,
        model: str,
        task: Task,
        engines: EngineSupply,
        committed: Committed,
        local: LocalJournal,
        spans: Spans = NO_SPANS,
        most_engines: int = 1,
    ) -> None:
        self.model, self.task, self._spans = model, task, spans
        self._slots = EngineSlots(most_engines)
        self._wait = EngineWait()
        self._kept_until = 0.0  # by the monotonic clock: engines stay so long without batches
        self._idle_since: float | None = None  # as far as somebody has looked
        self._may_lease = asyncio.Event()
        self._may_lease.set()
        self._local = local
        self._engines, self._on_commit = engines, committed
        self._queue = BatchQueue()
        self._done: dict[str, asyncio.Event] = {}  # by name of a run
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="batches-store")
        self._work = asyncio.Event()
        self._stops: set[asyncio.Event] = set()  # of the sessions with engines that are under way
        self._draining = False
        self._worker = JobWorker[BatchRun](
            self._queue,
            self._pool,
            next_urgency=self._queue.next_urgency,
            committed=self._committed,
            noted=lambda run, part, outcome: local.note(run.batch_id, part, outcome),
            left_out=self._read_again,
        )

    def add(self, run: BatchRun) -> asyncio.Event:
        """Take a batch on; returns an event that is set when all its rows are kept."""
        done = self._done[run.name] = asyncio.Event()
        self._worker.add(run)
        if run.done:
            done.set()
        else:
            self._wait_to_be_read(run)
            self._idle_since = None
            self._may_lease.set()
            self._work.set()
        return done

    def end(self, run: BatchRun) -> None:
        """A batch is over: its rows that were read already reach no engine, and what they would answer is not kept."""
        run.over = True  # the queue reads no more of it
        if not run.done:
            self._worker.end(run)

    def remove(self, run: BatchRun) -> None:
        """A batch is over, and what it has kept is written, or another worker's to write."""
        self.end(run)
        self._worker.remove(run)
        self._done.pop(run.name, None)

    def keep(self, until: float) -> None:
        """Have engines until this time of the monotonic clock, whether there are batches or not."""
        self._kept_until, self._idle_since = max(self._kept_until, until), None
        self._work.set()

    def want_engines(self, number: int) -> None:
        """So many engines from now on. What is too many is answered, and given back.

        0: who has lines of this model is to have what may be leased. One that has none itself leases none: interactive
        requests go to engines that others lease.
        """
        if self._draining:
            return
        self._slots.want(number)
        if number < 1 and not self._has_lines:
            self._may_lease.clear()
        else:
            self._may_lease.set()

    @property
    def idle(self) -> bool:
        """No batch has lines to send, nor lines under way, and nobody else wants its engines."""
        return not self._has_lines and time.monotonic() >= self._kept_until

    @property
    def _has_lines(self) -> bool:
        return not all(run.paused for run in self._worker.jobs.values())

    @property
    def waiting(self) -> Waiting | None:
        """What lines wait for, while no engine serves them."""
        return self._wait.look(self._engines.awaited(self.model, self.task))

    def drain(self) -> None:
        """Send nothing more, get no engine; `serve` returns when what is in flight is answered and kept."""
        self._draining = True
        self._slots.end_waiting()
        for stop in self._stops:
            stop.set()
        self._work.set()
        self._may_lease.set()

    async def serve(self) -> None:
        """Until drained or cancelled: an engine while there is work, the journal often."""
        flushing = asyncio.create_task(self._worker.flush_often(FLUSH_SECONDS, self.flush))
        try:
            await self._slots.run(self._serve)
        finally:
            self._queue.close()  # its reader ends, whatever becomes of the rest
            try:
                flushing.cancel()
                await asyncio.gather(flushing, return_exceptions=True)
                await self.flush()
            finally:  # a store that hangs is not waited for when this is cancelled again
                self._local.close()
                self._pool.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, slot: EngineSlot) -> None:
        wait = AWAY_SECONDS[0]
        while True:
            await self._work.wait()
            await self._may_lease.wait()
            if self._draining or not slot.needed:
                return
            began = time.monotonic()
            self._wait.begin()
            try:
                async with self._engines.engine(self.model, self.task, self._waits) as engine:
                    slot.serving = True
                    await self._on_engine(engine, slot)
            except (NoFurtherEngine, NobodyWaits) as error:
                log.debug("model %s: %s", self.model, error)
            except (EngineLost, EngineRefused, EngineAway, TlsFilesError) as error:
                self._wait.failed(_awaited(error))
                log.warning("model %s: %s: %s", self.model, type(error).__name__, error)
            finally:
                slot.serving = False
            if self._draining or not slot.needed:
                return
            wait = AWAY_SECONDS[0] if time.monotonic() - began > AWAY_SECONDS[1] else min(2 * wait, AWAY_SECONDS[1])
            await asyncio.sleep(wait)

    def _call_span(self, names: Sequence[str], endpoint: str) -> AbstractContextManager[object]:
        """The span of one request for lines of the runs of these names: of the first one that is traced."""
        traces = (run.trace for name in names if (run := self._worker.jobs.get(name)) is not None)
        trace = next((trace for trace in traces if trace is not None), None)
        if trace is None:
            return contextlib.nullcontext()
        said, attributes = engine_call(self.task, self.model, endpoint)
        return sent_in(self._spans.begin(said, SpanKind.CLIENT, trace, attributes))

    async def _on_engine(self, engine: ServingEngine, slot: EngineSlot) -> None:
        generation = Generation(self.task, self.model)
        client = client_of(engine, VerbatimClient, generation, answer_bytes=ANSWER_BYTES, priority=BATCH_PRIORITY)
        async with client:
            info = await client.info()
            if self._draining:
                return
            stop = asyncio.Event()
            self._stops.add(stop)
            watching = asyncio.create_task(self._stop_in_time(engine, slot, stop))
            try:
                with self._wait.serving():
                    await self._worker.serve(
                        client,
                        engine,
                        model=self.model,
                        version=info.version or "unknown",
                        run_id="api",
                        stop=stop,
                        share=engine.share,
                        context=partial(self._call_span, endpoint=engine.endpoint) if self._spans.active else None,
                    )
            finally:
                watching.cancel()
                self._stops.discard(stop)

    async def _stop_in_time(self, engine: ServingEngine, slot: EngineSlot, stop: asyncio.Event) -> None:
        """Ends the session when the engine takes no more rows, is one too many, or was leased and has had no work for a
        while, or is to be another feed's, which shares it."""
        while not engine.ending.is_set() and not slot.leaves:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await engine.ending.wait()
            if engine.leased and (self._idle_for_long() or not (engine.own or self._may_lease.is_set())):
                break
        stop.set()

    def _waits(self) -> bool:
        """Whether an engine is waited for that is not there yet."""
        return self._may_lease.is_set() and not self._idle_for_long()

    def _idle_for_long(self) -> bool:
        """Asked again and again. Then no engine is wanted until there is work."""
        now = time.monotonic()
        self._idle_since = None if not self.idle else now if self._idle_since is None else self._idle_since
        if self._idle_since is None or now - self._idle_since < IDLE_SECONDS:
            return False
        self._work.clear()
        return True

    def _committed(self, run: BatchRun, footer: BatchFooter) -> None:
        self._on_commit(run, footer)
        if run.done and (done := self._done.get(run.name)) is not None:
            done.set()

    def _read_again(self, run: BatchRun, part: str) -> None:
        """A part of which a budget has let some through: the rest is read when there is room."""
        run.put_back(part)
        self._wait_to_be_read(run)

    def _wait_to_be_read(self, run: BatchRun) -> None:
        self._queue.add(run)
        self._worker.more()

    async def flush(self) -> None:
        """Write what waits for the journal; and look whether batches that could not be read are to be read again."""
        self._local.turn()
        if await self._worker.flush():
            self._local.drop_closed()
        if self._queue.take_back():
            self._worker.more()


def _awaited(error: EngineLost | EngineRefused | EngineAway | TlsFilesError) -> Awaited:
    if isinstance(error, EngineAway):
        return error.awaited
    return Awaited.ACCEPTANCE if isinstance(error, EngineRefused) else Awaited.ANSWER
