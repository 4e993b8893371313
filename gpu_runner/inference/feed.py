"""The row feed: rows of many open batches flow through engines continuously; full batches are handed on.

The durable unit is the batch, never the scheduling unit. State survives the loss of an
engine: call `serve` again with the next one, or with two at once.

Who does what: `row_state.py` has the states of a row and what may follow on what, `row_queue.py` holds the rows that
no engine has, `engine_worker.py` brings rows through one engine, `failed_requests.py` keeps those that failed there
until they are judged, this module reads batches, hands complete ones on, and ends the engine workers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace

from gpu_runner.client.engine_connections import allow_open_files
from gpu_runner.client.protocol import EngineLost
from gpu_runner.client.vector_length import VectorLength
from gpu_runner.cost_meter import CostMeter
from gpu_runner.due_timer import DueTimer
from gpu_runner.inference.answer_memory import AnswerMemory
from gpu_runner.inference.engine_monitor import Engine
from gpu_runner.inference.engine_worker import EngineWorker
from gpu_runner.inference.failures.failing_requests import FailingRequests
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.row_queue import Counts, Work, end_tasks
from gpu_runner.inference.row_state import OpenBatch, RequestContext
from gpu_runner.inference.second_requests import SecondRequests
from gpu_runner.inference.windows.concurrency_window import Window
from gpu_runner.inference.windows.first_token_window import InteractiveShare
from gpu_runner.inference.windows.rate_limit import RateLimit
from gpu_runner.request_limits import NO_LIMITS, RequestLimits
from gpu_runner.rows import Batch, Origin, Outcome, Urgency

# Open files that are no connection to an engine: store, database, logs.
OTHER_FILES = 256

__all__ = ["Counts", "Engine", "Feed", "FeedPolicy", "FeedProgress", "RequestContext"]


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """A snapshot. `rows_done` = `known` + `ok` + `dead`; `queued` rows are read but not submitted.

    `mean_seconds`: how long a row was with an engine. `last_rows`: every row is in flight or done; an engine may take
    other work beside what is left. `late`: rows in flight for much longer than others took; `hedges`: second requests
    for such rows.
    """

    rows_done: int
    known: int
    ok: int
    dead: int
    in_flight: int
    late: int
    hedges: int
    queued: int
    open_batches: int
    batches_done: int
    prompt_tokens: int
    completion_tokens: int
    requests: int
    engine_deaths: int
    window: int
    mean_seconds: float
    last_rows: bool
    finished: bool
    turns: int = 0
    held_back: int = 0

    @property
    def only_held_back(self) -> bool:
        """What is left are rows that wait for another engine."""
        return 0 < self.held_back == self.queued and self.in_flight == 0


def _unknown() -> None:
    return None


class Feed:
    """Brings every row of `batches` to exactly one outcome.

    `batches` is read in a thread, only as far ahead as the windows need. Rows that are ready go in the order of their
    batches' urgency (`row_queue.py`), so those of a batch that is read later may go before them. `next_urgency()`, on
    the loop, is that of the batch which `batches` gives next, where it knows: it is read while few ready rows go before
    its rows.

    `on_row(job, batch key, outcome)` is called on the loop for every outcome of an engine and must be quick; also for
    each turn of a conversation that goes on, with what has `begun`.
    `on_batch(job, batch key, outcomes in row order)` may wait: a bounded number run at once, and reading stops while
    too many batches wait for it. It is called again for a batch whose call was cancelled.

    `user_elsewhere`: what a model says for the user of conversations is asked of engines of its own, which are served
    with `plays_user`; others then are asked for answers alone.

    An outcome's `tries` are its charged failures and the request that ended it; repairs of an answer that did
    not fit the schema, and failures that were the engine's, are no tries. Its `seconds` are those of all its
    requests that were answered, without waiting between them.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        *,
        on_row: Callable[[str, str, Outcome], None],
        on_batch: Callable[[str, str, list[Outcome]], Awaitable[None]],
        policy: FeedPolicy | None = None,
        rng: random.Random | None = None,
        vectors: VectorLength | None = None,
        next_urgency: Callable[[], Urgency | None] = _unknown,
        user_elsewhere: bool = False,
    ) -> None:
        self._batches, self._next_urgency = batches, next_urgency
        self._on_batch = on_batch
        self._policy = policy or FeedPolicy()
        self._rng = rng or random.Random()
        memory = AnswerMemory(self._policy.open_bytes, self._policy.batch_bytes)
        self._work = Work(on_row, memory, vectors or VectorLength(), self._policy.prefixes)
        self._users = self._work.part() if user_elsewhere else self._work
        self._work.on_low = self._check_room
        self._work.call_below(self._policy.ahead)
        self._failure: BaseException | None = None
        self._workers: list[EngineWorker] = []
        self._second_requests = SecondRequests(self._work, lambda: self._workers)
        self._reading: Future[Batch | None] | None = None
        self._ended_since: set[str] = set()  # jobs that ended while this batch is read
        self._reader: ThreadPoolExecutor | None = None
        self._read_task: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._preparing = False
        self._commits: dict[asyncio.Task[None], OpenBatch] = {}
        self._timer = DueTimer(self._wake)

    @property
    def finished(self) -> bool:
        """True when every row has its outcome and every batch was handed on."""
        return self._work.exhausted and self._work.open_batches == 0

    @property
    def counts(self) -> Counts:
        """Counters since the feed began."""
        return self._work.counts

    def batch_came(self) -> None:
        """The source has a further batch. To be called on the loop."""
        self._work.look_again()
        self._check_room()

    def end_job(self, job: str) -> None:
        """Asks for no row of this job any more. To be called on the loop, and not by `on_row`.

        Its requests are broken off; rows of other jobs in the same requests are asked for again. Its batches leave the
        feed: `on_row` and `on_batch` are not called for them, but an `on_batch` that has begun goes on. `batches` gives
        none of it afterwards, except the one that is being read: that is left out.
        """
        if self._reading is not None:
            self._ended_since.add(job)
        self._work.end_job(job)
        for worker in self._workers:
            worker.end_jobs()
        self._work.look_again()
        self._check_room()
        self._wake()

    def progress(self) -> FeedProgress:
        """Where the feed stands; cheap. May be called from any thread."""
        counts, work = self._work.counts, self._work
        return FeedProgress(
            rows_done=counts.known + counts.ok + counts.dead,
            known=counts.known,
            ok=counts.ok,
            dead=counts.dead,
            in_flight=sum(len(worker.in_flight) for worker in self._workers),
            late=sum(worker.late_rows for worker in self._workers),
            hedges=counts.hedges,
            queued=work.queued,
            open_batches=work.open_batches,
            batches_done=counts.batches,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            requests=counts.requests,
            engine_deaths=counts.engine_deaths,
            window=sum(worker.window.size for worker in self._workers),
            mean_seconds=counts.seconds / max(1, counts.ok + counts.dead),
            last_rows=self._work.exhausted and work.queued == 0 and not self._turns_to_come,
            finished=self.finished,
            turns=counts.turns,
            held_back=len(work.held_back),
        )

    @property
    def _turns_to_come(self) -> bool:
        """Whether a conversation in flight goes on after the turn that is asked now.

        Of copies: the feed's own thread changes what is in flight meanwhile.
        """
        return any(item.goes_on for worker in list(self._workers) for item in list(worker.in_flight))

    def failing(self, before: float) -> FailingRequests | None:
        """What every request meets, since `before` (seconds of the loop's clock) or longer; None while one is answered.

        May be called from any thread.
        """
        for work in dict.fromkeys((self._work, self._users)):
            in_flight = sum(len(worker.in_flight) for worker in list(self._workers) if worker.work is work)
            if (found := work.failures.failing(in_flight, before)) is not None:
                return found if work is self._work else replace(found, plays_user=True)
        return None

    def not_ready(self, error: EngineLost, *, plays_user: bool = False) -> None:
        """An engine that was to be served gave no answer to who it is: this counts as a failed request."""
        now = asyncio.get_running_loop().time()
        work = self._users if plays_user else self._work
        work.failures.failed(error, error.reason, error.detail, now)

    async def serve(
        self,
        engine: Engine,
        origin: Origin,
        max_num_seqs: int | None = None,
        *,
        stop: asyncio.Event | None = None,
        spending: CostMeter | None = None,
        share: InteractiveShare | None = None,
        limits: RequestLimits = NO_LIMITS,
        context: RequestContext | None = None,
        plays_user: bool = False,
    ) -> None:
        """Feeds one engine until every batch is handed on, or until `stop` is set and its rows are answered.

        `spending` keeps the fleet's database of the engine's time, and prices the rows. `share`: interactive requests
        on the same engine, to which rows give way. `limits`: how many rows may be in flight, and requests and tokens
        of a minute. `context(jobs)` is entered around each request, with the jobs of its rows. `plays_user`: its model
        writes what the user says, and nothing else.

        Raises EngineLost (the rows in flight are back in the queue, call again with the next engine),
        EngineRefused, or what `batches`, `on_row` or `on_batch` raised. Two calls at once share the work.
        Cancel at any moment: no request, task or thread hand-over is left behind.
        """
        self._raise_failure()
        if self.finished:
            return
        policy, window = self._sized(limits, max_num_seqs, share)
        limited = limits.requests_per_minute is not None or limits.tokens_per_minute is not None
        worker = EngineWorker(
            engine,
            origin,
            self._users if plays_user else self._work,
            policy,
            self._rng,
            window,
            self._wake,
            spending or CostMeter(),
            lambda late: self._second_requests.ask(worker, late),
            RateLimit(limits, engine.generation.most_tokens) if limited else None,
            context,
        )
        self._workers.append(worker)
        watcher = None if stop is None else asyncio.create_task(_drain_at(stop, worker))
        in_order = False
        try:
            with nullcontext() if share is None else share.feeding(lambda: worker.rows_in_flight):
                worker.start()
                self._start_reading()
                self._wake()
                await worker.life.ended.wait()
            in_order = worker.life.error is None or isinstance(worker.life.error, EngineLost)
        finally:
            if watcher is not None:
                watcher.cancel()
            await self._leave(worker, in_order)
        if worker.life.error is not None and not self.finished:
            raise worker.life.error

    def _sized(
        self, limits: RequestLimits, max_num_seqs: int | None, share: InteractiveShare | None
    ) -> tuple[FeedPolicy, Window]:
        """How an engine with these limits is fed, and how many rows it gets at once."""
        most, policy = max(1, allow_open_files() - OTHER_FILES), self._policy
        if limits.batches is not None:
            max_num_seqs = most = limits.batches.rows
            policy = policy.for_batches(most, limits.batches.elsewhere)
        return policy, Window(policy.window, max_num_seqs, most=min(most, limits.concurrency or most), share=share)

    async def prepare(self) -> bool:
        """Reads up to the first row that needs an engine, handing on batches that are complete without one.

        Returns False when nothing is left to do: no engine need be rented. Not to be called beside `serve`.
        """
        self._preparing = True
        try:
            while not self._work.queued and not self._work.exhausted:
                if self._has_room():
                    self._take_in(await self._next_batch())
                    self._start_commits()
                else:
                    await asyncio.wait(self._commits, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failure()
            in_order = True
        except BaseException:
            in_order = False
            raise
        finally:
            self._preparing = False
            await self._rest(in_order)
        return not self.finished

    async def _leave(self, worker: EngineWorker, in_order: bool) -> None:
        try:
            await worker.close()
        finally:
            self._workers.remove(worker)
            if self._workers:
                self._wake()
            else:
                await self._rest(in_order)

    async def _rest(self, in_order: bool) -> None:
        """Nobody is served any more: stops reading. Complete batches are still handed on, or, when we are
        cancelled or failed, their calls are cancelled.
        """
        self._timer.set(None)
        reading, self._read_task = self._read_task, None
        try:
            await end_tasks([] if reading is None else [reading])
            while in_order and (self._commits or self._work.complete) and self._failure is None:
                self._start_commits()
                await asyncio.wait(self._commits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._reader is not None:
                self._reader.shutdown(wait=False)
                self._reader = None
            await end_tasks(self._commits)
        if in_order:
            self._raise_failure()

    # --- movement ---

    def _wake(self) -> None:
        """Moves whatever can move: due rows, free slots, complete batches, room to read."""
        if not self._workers:
            return
        loop = asyncio.get_running_loop()
        for work in dict.fromkeys((self._work, self._users)):
            work.promote(loop.time())
        for worker in self._workers:
            worker.fill()
        self._start_commits()
        quarter = sum(worker.window.size for worker in self._workers) // 4
        self._work.call_below(max(self._policy.ahead, quarter, self._work.prefixes.ahead))
        self._check_room()
        due = [at for work in (self._work, self._users) if (at := work.next_due) is not None]
        self._timer.set(min(due, default=None))
        if self.finished:
            for worker in self._workers:
                worker.end()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for worker in self._workers:
            worker.end(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- reading ---

    def _has_room(self) -> bool:
        work, policy = self._work, self._policy
        window = sum(worker.window.size for worker in self._workers)
        return (
            work.open_rows < max(policy.open_rows, policy.open_windows * window)
            and len(work.complete) + len(self._commits) < policy.commit_backlog
            and not work.memory.full
            and work.ready.prompt_bytes < policy.ahead_bytes
            and (len(work.ready) < work.low or self._next_is_urgent())
        )

    def _next_is_urgent(self) -> bool:
        """Whether few ready rows go before those of the source's next batch. Where not, sets when to look again.

        Rows that came back from an engine do not count as read ahead.
        """
        work = self._work
        if len(work.ready) >= work.look_below or work.ready.unsent >= self._policy.urgent_factor * work.low:
            return False
        if (urgency := self._next_urgency()) is None:
            work.look_again(0)
            return False
        too_many = work.ready.before(urgency) - work.low
        if too_many >= 0:
            work.look_again(len(work.ready) - too_many)
        return too_many < 0

    def _check_room(self) -> None:
        if not self._room.is_set() and self._has_room():
            self._room.set()

    def _start_reading(self) -> None:
        if self._read_task is None and not self._work.exhausted:
            self._read_task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while not self._work.exhausted:
                while not self._has_room():
                    self._room.clear()
                    await self._room.wait()
                self._take_in(await self._next_batch())
                self._work.look_again()
                self._wake()
        except Exception as error:
            self._fail(error)

    def _take_in(self, batch: Batch | None) -> None:
        ended, self._ended_since = self._ended_since, set()
        if batch is None:
            self._work.no_more_batches()
        elif batch.job not in ended:
            self._work.open(batch)

    async def _next_batch(self) -> Batch | None:
        """The source's next batch; a read that a cancel interrupted is taken up again by the next call."""
        if self._reading is None or self._reading.cancelled():
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
            self._reading = self._reader.submit(next, self._batches, None)
        batch = await asyncio.wrap_future(self._reading)
        self._reading = None
        return batch

    # --- handing on ---

    def _start_commits(self) -> None:
        complete = self._work.complete
        while complete and len(self._commits) < self._policy.commits and self._may_commit(complete[0]):
            batch = self._work.take_complete()
            task = asyncio.create_task(self._commit(batch))
            self._commits[task] = batch
            task.add_done_callback(self._committed)

    def _may_commit(self, batch: OpenBatch) -> bool:
        """A batch is written from a copy or two of its answers: large ones one after the other."""
        writing = sum(other.bytes.held for other in self._commits.values())
        return not self._commits or writing + batch.bytes.held <= self._policy.commit_bytes

    async def _commit(self, batch: OpenBatch) -> None:
        await self._on_batch(batch.job, batch.key, [outcome for outcome in batch.outcomes if outcome is not None])

    def _committed(self, task: asyncio.Task[None]) -> None:
        batch = self._commits.pop(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._work.put_back(batch)
            if error is not None:
                self._fail(error)
            return
        self._work.close(batch)
        if self._preparing:  # the source may wait for an engine, and who asks for one waits for the complete batches
            self._start_commits()
        self._wake()


async def _drain_at(stop: asyncio.Event, worker: EngineWorker) -> None:
    await stop.wait()
    worker.drain()
