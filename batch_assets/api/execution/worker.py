"""Looks for batches, holds them, and carries each one through its states (`batch_lifecycle`) on the feed of its model.

Several workers may share the records: each batch is held by one, which says so every second. A batch whose holder is
gone is taken over at once on the same computer, else after `HOLD_SECONDS`; what it has kept is read from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from batch_assets.api.batches.snapshot import TASKS
from batch_assets.api.billing.spending import Spending
from batch_assets.api.database.batch_records import BatchRecord, OpenBatch
from batch_assets.api.execution.batch_lifecycle import BatchLifecycle, Capacity, Carried, WorkerContext
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.engines.engine_supply import Awaited
from batch_assets.api.execution.local_journal import LeftRows, LocalJournal, gone, own_name
from batch_assets.api.execution.model_feed import ModelFeed
from batch_assets.api.execution.sweeper import Sweeper
from batch_assets.api.models import known_contexts
from batch_assets.api.telemetry.tracing import batch_span
from gpu_runner.rows import Task

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
HOLD_SECONDS, RENEW_SECONDS = 5.0, 1.0
COUNT_SECONDS = 0.5
WAITING_SECONDS = 2.0  # without an engine, before a batch says that it waits
DRAIN_SECONDS = 3.0  # how long requests in flight have at the end
KEEP_SECONDS = 3.0  # how long the store then has to take the rows that were finished last
FAILED_SECONDS = 10.0
LOST_SECONDS = (1.0, 60.0)  # before results that were lost in the store are asked for again, at first and at most
PLAN_SECONDS = 2.0
NEVER_SECONDS = 30.0  # between two looks whether what is waited for can ever come
LOADS = 8

Result = TypeVar("Result")
P = ParamSpec("P")


class Worker:
    """`run` works until it is cancelled. `wake` may be called from any thread."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._name = own_name()
        self._carried: dict[str, Carried] = {}
        self._feeds: dict[tuple[str, Task], tuple[ModelFeed, asyncio.Task[None]]] = {}
        self._woken = asyncio.Event()
        self._ending = False
        self._loop = asyncio.get_running_loop()
        # One thread to renew, one to look: calls of a store that does not answer may hold all others.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="batches-records")
        self._lifecycle, self._loads = BatchLifecycle(context), asyncio.Semaphore(LOADS)
        self._gone: list[str] = []
        self._left = LeftRows(context.local)
        self._failed: dict[str, float] = {}  # when a defect or a damaged object ended the work on a batch
        self._due = {"count": 0.0}

    def want(self, model: str, task: Task, seconds: float) -> None:
        """Somebody else than a batch wants an engine of this model for so long. For any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._keep, model, task, seconds)

    def _keep(self, model: str, task: Task, seconds: float) -> None:
        if not self._ending:
            self._feed(model, task).keep(time.monotonic() + seconds)

    def awaited(self, model: str, task: Task) -> Awaited | None:
        """What the feed of a model waits for; None: it has an engine, or there is no feed. For any thread."""
        found = self._feeds.get((model, task))
        waiting = None if found is None else found[0].waiting
        return None if waiting is None else waiting.what

    def wake(self) -> None:
        """Something has changed: look now."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody looks any more
            self._loop.call_soon_threadsafe(self._woken.set)

    async def run(self) -> None:
        """Until cancelled. Then no more is sent, what is in flight may end, what is finished is kept."""
        context = self._context
        sweeper = Sweeper(context.batches, context.files, context.objects, context.clock)
        for model, engines in self._context.reserve.items():
            if engines:
                self._feed(model, "chat")
        beside = [asyncio.create_task(one) for one in (self._renew_often(), sweeper.run(), self._give_up_often())]
        if context.capacity is not None:
            beside.append(asyncio.create_task(self._plan_often(context.capacity)))
        try:
            while True:
                try:
                    await self._look()
                except Exception as error:  # the database is away: what is under way goes on
                    log.warning("records: %s", type(error).__name__)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._woken.wait()
                self._woken.clear()
        finally:
            for task in beside:
                task.cancel()
            await self._end()

    async def _asked(self, call: Callable[P, Result], *arguments: P.args, **named: P.kwargs) -> Result:
        """A call of the records in a thread of this worker's own."""
        return await self._loop.run_in_executor(self._threads, functools.partial(call, *arguments, **named))

    async def _renew_often(self) -> None:
        """Say that this worker lives, and see who does not. In a task of its own: it must not wait for other calls."""
        batches, clock = self._context.batches, self._context.clock
        while True:
            try:
                await self._asked(batches.renew, self._name, clock(), HOLD_SECONDS)
                self._gone = [name for name in await self._asked(batches.holders) if gone(name)]
            except Exception as error:
                log.warning("records: %s", type(error).__name__)
            await asyncio.sleep(RENEW_SECONDS)

    async def _plan_often(self, capacity: Capacity) -> None:
        """Have the fleet's plan made, or follow it: how many engines each feed has.

        All in a thread of its own: those of `_threads` are for signs of life and for looks.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="batches-capacity")

        def planned(mine: Collection[str]) -> Mapping[tuple[str, Task], int]:
            return capacity(self._context.batches.open_records(), mine)

        try:
            while True:
                try:
                    engines = await self._loop.run_in_executor(thread, planned, list(self._carried))
                    for key, (feed, _) in list(self._feeds.items()):
                        feed.want_engines(engines.get(key, self._reserve(key[0])))
                except Exception as error:  # a database, the store or a provider is away: what was planned stands
                    log.warning("engines are not planned now: %s", type(error).__name__)
                await asyncio.sleep(PLAN_SECONDS)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)  # a provider may take its time to answer

    async def _give_up_often(self) -> None:
        """End batches without an outcome whose model nothing can ever serve: a provider may have said it only now."""
        while True:
            await asyncio.sleep(NEVER_SECONDS)
            for carried in list(self._carried.values()):
                feed = None if carried.run is None else self._served(carried.run)
                waiting = None if feed is None else feed.waiting
                if waiting is None or waiting.what not in (Awaited.OFFER, Awaited.SETTINGS):
                    continue
                try:
                    if await self._lifecycle.given_up(carried) and carried.task is not None:
                        carried.task.cancel()
                except Exception as error:
                    log.warning("batch %s: %s", carried.held.batch_id, type(error).__name__)

    def _reserve(self, model: str) -> int:
        return max(1, self._context.reserve.get(model, 1))

    async def _end(self) -> None:
        self._ending = True  # no feed is made, and no batch added to one
        feeds = [task for _, task in self._feeds.values()]
        for feed, _ in self._feeds.values():
            feed.drain()
        if feeds:
            await asyncio.wait(feeds, timeout=DRAIN_SECONDS)
        # Feeds first: with its end each writes the rows that were finished last, of all batches that it still has.
        await _cancelled(feeds)
        await _cancelled([one.task for one in self._carried.values() if one.task is not None])
        with contextlib.suppress(Exception):
            await self._asked(self._context.batches.release, self._name)
        self._threads.shutdown(wait=False)
        self._lifecycle.close()

    def _is_due(self, what: str, seconds: float) -> bool:
        now = self._loop.time()
        if now < self._due[what]:
            return False
        self._due[what] = now + seconds
        return True

    async def _look(self) -> None:
        """One look at the records."""
        batches = self._context.batches
        found = {record.id: record for record in await self._asked(batches.open_batches)}
        if self._left.waiting:
            await self._asked(self._left.settle, open_batches=found)
        for carried in list(self._carried.values()):
            await self._compare(carried, found.get(carried.held.batch_id))
        # What has this worker's name and is not carried was given up by a feed that failed.
        away = [*self._gone, self._name]
        for batch_id in await self._asked(batches.free, self._context.clock(), away):
            failed_at = self._failed.get(batch_id, float("-inf"))
            rested = self._loop.time() - failed_at >= FAILED_SECONDS
            if rested and batch_id not in self._carried:
                await self._claim(batch_id, away)
        if self._is_due("count", COUNT_SECONDS):
            await self._write_counts()

    async def _compare(self, carried: Carried, now: OpenBatch | None) -> None:
        """What has become of a batch that is carried: cancelled by its client, or taken by another worker."""
        if now is None:
            return  # it has just ended
        if now.epoch != carried.held.epoch:
            log.warning("batch %s: another worker has taken it over", now.id)
            if carried.task is not None:
                carried.task.cancel()
            return
        if now.status == carried.record.status:
            return
        record = await self._asked(self._context.batches.current, carried.held)
        if record is not None:  # it may have moved on meanwhile
            carried.record = record
            carried.news.set()

    async def _claim(self, batch_id: str, away: Sequence[str]) -> None:
        batches = self._context.batches
        held = await self._asked(batches.claim, batch_id, self._name, self._context.clock(), HOLD_SECONDS, away)
        record = None if held is None else await self._asked(batches.current, held)
        if held is None or record is None:
            return
        if held.epoch > 1:
            await self._asked(self._left.scan)
        carried = self._carried[batch_id] = Carried(held, record, waiting=(record.waiting_for, record.waiting_since))
        carried.span = batch_span(self._context.spans, record)
        carried.task = asyncio.create_task(self._carry(carried))
        carried.task.add_done_callback(lambda task: self._carried_to_end(carried, task))

    def _carried_to_end(self, carried: Carried, task: asyncio.Task[None]) -> None:
        self._carried.pop(carried.held.batch_id, None)
        if carried.span is not None:
            lines = (0, 0) if carried.run is None else (carried.run.completed, carried.run.failed)
            carried.span.end({"batch_assets.completed": lines[0], "batch_assets.failed": lines[1]})
        if carried.run is not None and (served := self._served(carried.run)) is not None:
            served.remove(carried.run)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch %s: %s", carried.held.batch_id, type(error).__name__, exc_info=error)
            self._failed[carried.held.batch_id] = self._loop.time()
        else:
            self._failed.pop(carried.held.batch_id, None)

    def _served(self, run: BatchRun) -> ModelFeed | None:
        found = self._feeds.get(_feed_key(run))
        return None if found is None else found[0]

    async def _write_counts(self) -> None:
        for carried in list(self._carried.values()):
            run = carried.run
            if run is not None and (now := (run.completed, run.failed)) != carried.counted:
                await self._asked(self._context.batches.count, carried.held, *now)
                carried.counted = now
            if run is not None and run.budget is not None:
                spending = Spending(run.budget.spent, run.paused)
                if spending != carried.spending:
                    await self._asked(self._context.usage.spending.write, carried.held, spending)
                    carried.spending = spending
            if run is not None and (waiting := self._waiting(carried.record, run)) != carried.waiting:
                await self._asked(self._context.batches.wait, carried.held, *waiting)
                carried.waiting = waiting

    def _waiting(self, record: BatchRecord, run: BatchRun) -> tuple[str | None, int | None]:
        """What the lines of a batch wait for, and since when in Unix seconds; None and None: for nothing."""
        feed = self._served(run)
        found = None if feed is None or run.done or run.paused else feed.waiting
        if found is None:
            return None, None
        since = max(int(found.since), record.in_progress_at or 0)
        return (None, None) if self._context.clock() - since < WAITING_SECONDS else (found.what.value, since)

    # one batch

    async def _carry(self, carried: Carried) -> None:
        """From wherever it stands to its end. What cannot be carried on ends when it is cancelled or expires."""
        try:
            await self._carry_on(carried)
        except Exception as error:
            if not await self._lifecycle.ended_as_it_is(carried):
                raise
            log.error("batch %s: ended without files: %s", carried.held.batch_id, type(error).__name__, exc_info=error)

    async def _carry_on(self, carried: Carried) -> None:
        if carried.record.in_progress_at is None and not await self._lifecycle.validated(carried):
            return
        record = carried.record
        contexts = await known_contexts(self._context.models) if record.metadata else {}
        budget = self._context.usage.budget(record, contexts.get(record.model or ""))
        run = BatchRun(self._context.objects, record, carried.held, self._name, budget)
        async with self._loads:
            await self._lifecycle.reading_lines(carried, lambda: run.load(self._left.of(record.id)))
        if self._left.waiting:
            await self._asked(self._left.settle, [record.id])
        carried.run = run
        run.on_lines_damaged = lambda: self._tell(carried)
        run.trace = None if carried.span is None else carried.span.trace
        pause = LOST_SECONDS[0]
        # A batch that is ready only when this worker ends is left to the next one: no feed begins any more.
        while not self._ending and not await self._served_and_delivered(carried, run):
            rested = asyncio.Event()  # results that were lost in the store are asked for again
            timer = self._loop.call_later(pause, rested.set)
            pause = min(2 * pause, LOST_SECONDS[1])
            rest = await self._lifecycle.until_over(carried, rested)
            timer.cancel()
            if rest:
                run.over = True
                await self._lifecycle.deliver(carried, run, rest)
                return

    def _tell(self, carried: Carried) -> None:
        """There is news of a batch. For any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(carried.news.set)

    async def _served_and_delivered(self, carried: Carried, run: BatchRun) -> bool:
        feed = self._feed(*_feed_key(run))
        done = feed.add(run)
        rest = await self._lifecycle.until_over(carried, done)
        feed.end(run)
        await self._lifecycle.patiently(run.write_journal)
        feed.remove(run)
        return await self._lifecycle.deliver(carried, run, rest)

    def _feed(self, model: str, task: Task) -> ModelFeed:
        """The feed of a model. One that failed is replaced: its batches are taken up again."""
        key = (model, task)
        found = self._feeds.get(key)
        if found is not None and not found[1].done():
            return found[0]
        local = LocalJournal(self._context.local, self._name, self._loop.call_soon)
        context, most = self._context, max(self._context.engines_at_once, self._reserve(model))
        feed = ModelFeed(model, task, context.engines, context.committed, local, context.spans, most)
        serving = asyncio.create_task(feed.serve())
        serving.add_done_callback(lambda ended: self._feed_ended(key, ended))
        self._feeds[key] = (feed, serving)
        if task == "chat" and context.reserve.get(model):
            feed.keep(math.inf)
        return feed

    def _feed_ended(self, key: tuple[str, Task], task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("model %s: its feed failed: %s", key[0], type(error).__name__, exc_info=error)
        for carried in list(self._carried.values()):
            if carried.run is not None and _feed_key(carried.run) == key:
                assert carried.task is not None
                carried.task.cancel()  # the next look takes the batch up again


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End tasks, whatever comes of them. One that still waits for the store after KEEP_SECONDS is left alone."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=KEEP_SECONDS)


def _feed_key(run: BatchRun) -> tuple[str, Task]:
    return run.record.model or "", TASKS[run.record.endpoint]
