"""The states of a batch that a worker holds: its input is checked, it is over, its files are written.

`WorkerContext` is what a worker works with, `Carried` a batch that it holds. What is asked of the store or of the
records is asked again while they are away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from batch_assets.api.batches.lines import LineError
from batch_assets.api.batches.snapshot import TASKS, Checked, check_input
from batch_assets.api.billing.batch_usage import BatchUsage, Settle
from batch_assets.api.billing.spending import BUDGET, Spending
from batch_assets.api.billing.usage import Tokens
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, Held
from batch_assets.api.database.file_records import FileRecord, FileRecords, content_path
from batch_assets.api.database.service_database import is_records_trouble
from batch_assets.api.database.states import (
    ACCEPT,
    COMPLETE,
    END_CANCEL,
    EXPIRE,
    FINALIZE,
    GIVE_UP,
    REFUSE,
    BatchStatus,
    Transition,
)
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.engines.engine_supply import EngineSupply
from batch_assets.api.execution.engines.token_counts import too_long_texts
from batch_assets.api.execution.model_feed import Committed
from batch_assets.api.execution.results import Results, ResultsLost, write_results
from batch_assets.api.models import Models, known_contexts, known_models
from batch_assets.api.settings import ApiLimits
from batch_assets.api.store_threads import StoreThreads
from batch_assets.api.telemetry.tracing import NO_SPANS, Span, Spans
from gpu_runner.rows import Task
from resources.objects.opening import CorruptObject, Objects
from resources.objects.store_health import is_store_trouble

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
AGAIN_SECONDS = (1.0, 60.0)  # between two times that lines are written again, at first and at most
READINGS = 3  # of lines that are damaged, each after they were written again
VALIDATIONS = 2
COUNTINGS = 4  # batches whose texts are counted at once, each with up to 32 MiB of them
STORE_CALLS, RECORD_CALLS = 16, 4  # at once; the former more than loads and validations of batches
DAY = 86_400

Result = TypeVar("Result")

OnLost = Callable[[BatchRun, int, int], None]
Capacity = Callable[[Sequence[BatchRecord], Collection[str]], Mapping[tuple[str, Task], int]]


class InputAway(Exception):
    """A file that is recorded is not in the store now: its batch is tried again later, and others go on."""


@dataclass(slots=True)
class Carried:
    """A batch that this worker holds. `news` is set when its record has changed."""

    held: Held
    record: BatchRecord
    task: asyncio.Task[None] | None = None
    run: BatchRun | None = None
    counted: tuple[int, int] = (0, 0)
    spending: Spending | None = None
    waiting: tuple[str | None, int | None] = (None, None)
    span: Span | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker works with. `committed` hears of every part that is written, `usage` of what each batch used.

    `resolve`: the model behind a name. `reserve`: engines of a model that stay, also without work. `engines_at_once`:
    how many a feed asks for without a reserve. `capacity`: how many engines each feed may have of a fleet, as of open
    batches and those that this worker holds; None: nothing is rented. `never_served`: why nothing can ever serve
    a model; it may block. `lost`: hears of parts that are damaged or gone: of how many the lines are asked for again,
    and of how many not once more. `local`: a folder of this computer for rows that the store does not have yet; None:
    there is none.
    """

    batches: BatchRecords
    files: FileRecords
    objects: Objects
    models: Models
    engines: EngineSupply
    limits: ApiLimits
    committed: Committed
    usage: BatchUsage
    resolve: Callable[[str], str] = lambda name: name
    clock: Callable[[], float] = time.time
    spans: Spans = NO_SPANS
    reserve: Mapping[str, int] = field(default_factory=dict)
    engines_at_once: int = 1
    capacity: Capacity | None = None
    never_served: Callable[[str, Task], str | None] = lambda model, task: None
    lost: OnLost = lambda run, again, given_up: None
    local: Path | None = None


class BatchLifecycle:
    """Carries held batches from state to state."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._validations = asyncio.Semaphore(VALIDATIONS)
        self._countings = asyncio.Semaphore(COUNTINGS)
        self._store = StoreThreads(STORE_CALLS, "batches-lifecycle")
        # Calls of the records are not to wait for the store.
        self._records = ThreadPoolExecutor(RECORD_CALLS, thread_name_prefix="batches-states")

    def close(self) -> None:
        """What waits for a thread is cancelled."""
        self._store.close()
        self._records.shutdown(wait=False, cancel_futures=True)

    async def validated(self, carried: Carried) -> bool:
        """Check the input. False: the batch has ended with that."""
        record, context = carried.record, self._context
        async with self._validations:
            models = await known_models(context.models)
            contexts = await known_contexts(context.models)
            checked = await self.patiently(lambda: self._check(record, models, contexts))
        checked = await self._counted(await self._servable(checked, record), contexts)
        now = int(context.clock())
        if not checked.errors and context.usage.unpriced(record, checked.model or ""):
            said = f"The model '{(checked.model or '')[:100]}' has no price for batches: a budget cannot be kept."
            checked = Checked([LineError("unsupported_parameter", said, f"metadata.{BUDGET}")])
        if checked.errors:
            errors = json.dumps([error.shown() for error in checked.errors])
            for transition in (REFUSE, END_CANCEL):
                if await self._move(carried, transition, now, errors=errors):
                    return False
            return False
        await self._move(carried, ACCEPT, now, total=checked.lines, model=checked.model)
        await self._asked(lambda: context.batches.describe(carried.held, checked.lines, checked.model))
        current = await self._asked(lambda: context.batches.current(carried.held))
        if current is None:
            return False
        carried.record = current
        return True

    async def _servable(self, checked: Checked, record: BatchRecord) -> Checked:
        """The same, refused where nothing can ever serve the model."""
        model, context = checked.model, self._context
        if checked.errors or model is None or context.engines.running(model):
            return checked
        error = await self._never_served(record.endpoint, model)
        return checked if error is None else Checked([error])

    async def _never_served(self, endpoint: str, model: str) -> LineError | None:
        why = await asyncio.to_thread(self._context.never_served, model, TASKS[endpoint])
        said = f"The model '{model[:100]}' can never be served here. {why}"
        return None if why is None else LineError("model_unavailable", said, "body.model")

    async def given_up(self, carried: Carried) -> bool:
        """End a batch under way whose model nothing can ever serve, as is known by now. One that has an outcome goes
        on.
        """
        record, run = carried.record, carried.run
        error = await self._never_served(record.endpoint, record.model or "")
        if error is None or run is None or run.completed or run.failed:
            return False
        return await self._move(carried, GIVE_UP, int(self._context.clock()), errors=json.dumps([error.shown()]))

    async def _counted(self, checked: Checked, contexts: Mapping[str, int]) -> Checked:
        """The same, refused where an engine that runs says that prompts are too long.

        Nobody waits for that: where COUNTINGS other batches are being counted, it is left to the lines' engine.
        """
        if not checked.long_texts or checked.model is None or self._countings.locked():
            return checked
        async with self._countings:
            engines = self._context.engines.running(checked.model)
            errors = await too_long_texts(engines, checked.long_texts, contexts.get(checked.model, 0))
        return Checked(errors) if errors else checked

    def _check(self, record: BatchRecord, models: frozenset[str] | None, contexts: Mapping[str, int]) -> Checked:
        context, path = self._context, content_path(record.input_file_id)
        try:
            return check_input(
                context.objects, path, record.id, record.endpoint, models, context.limits, context.resolve, contexts
            )
        except FileNotFoundError:
            if context.files.has(record.input_file_id):  # its record goes last: the store is away, or has lost it
                raise InputAway(path) from None
            return Checked([LineError("invalid_input_file", "The input file was deleted or has expired.")])

    async def lines_written_again(self, carried: Carried) -> bool:
        """Write the lines of a batch under way again from its input file: those in the store are damaged or gone.

        They are the same rows, so what is done stays done. False: the file is gone, or is not what it was.
        """
        record, context = carried.record, self._context
        model = record.model
        if model is None:
            return False

        path = content_path(record.input_file_id)

        def write() -> bool:
            with contextlib.suppress(FileNotFoundError):
                limits = replace(context.limits, lines=max(context.limits.lines, record.total))
                lines, by_name = record.total, lambda name: model
                found = check_input(
                    context.objects, path, record.id, record.endpoint, None, limits, by_name, lines=lines
                )
                return not found.errors
            return False

        async with self._validations:
            written = await self.patiently(write)
        if written:
            log.warning("batch %s: its lines were damaged or gone; they are written again", record.id)
        else:
            said = "batch %s: its lines are damaged or gone, and so is its input file: restore %s, or cancel the batch"
            log.error(said, record.id, path)
        return written

    async def reading_lines(self, carried: Carried, call: Callable[[], Result]) -> Result:
        """A call that reads the lines of a batch: those that are damaged or gone are written again. Raises
        CorruptObject where that does not help.
        """
        for _ in range(READINGS - 1):
            try:
                return await self.patiently(call)
            except CorruptObject:
                if not await self.lines_written_again(carried):
                    raise
        return await self.patiently(call)

    async def until_over(self, carried: Carried, done: asyncio.Event) -> str:
        """Wait until all rows are kept, or the batch is cancelled or expires: the code of the lines that are left.

        Lines that its feed finds damaged meanwhile are written again, and the feed goes on.
        """
        pause, again_at = AGAIN_SECONDS[0], 0.0
        while not done.is_set():
            if carried.record.state is BatchStatus.CANCELLING:
                return "batch_cancelled"
            left = carried.record.expires_at - self._context.clock()
            if left <= 0:
                return "batch_expired"
            if carried.run is not None and carried.run.lines_damaged:
                if (wait := again_at - time.monotonic()) <= 0:
                    await self.lines_written_again(carried)
                    carried.run.lines_damaged = False
                    again_at, pause = time.monotonic() + pause, min(2 * pause, AGAIN_SECONDS[1])
                    continue
                left = min(left, wait)
            waiting = [asyncio.create_task(event.wait()) for event in (done, carried.news)]
            try:
                await asyncio.wait(waiting, timeout=min(left, 60.0), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
            carried.news.clear()
        return ""

    async def deliver(self, carried: Carried, run: BatchRun, rest: str) -> bool:
        """Write the files, and say so in one transaction with the end of the batch.

        False: results are lost that can be asked for again; they are left in `run`.
        """
        context, record = self._context, run.record
        if run.done:  # whatever the last look has seen: it may be older than the batch's last move
            await self._move(carried, FINALIZE, int(context.clock()))
        now = int(context.clock())
        life = int(context.limits.batch_file_days * DAY) if record.output_seconds is None else record.output_seconds
        try:
            found = await self.reading_lines(carried, lambda: self._results(run, rest, now, now + life))
        except ResultsLost as lost:
            again = run.ask_again(lost.keys)
            context.lost(run, len(again), len(lost.keys) - len(again))
            return False if again else await self.deliver(carried, run, rest)
        used = found.usage
        tokens = Tokens(used.input_tokens, used.cached_tokens, used.output_tokens)
        settled = context.usage.settle(
            run.record, tokens, found.completed, paused=run.budget is not None and run.budget.paused
        )
        for transition in (COMPLETE, END_CANCEL, EXPIRE):
            moved = await self._move(
                carried,
                transition,
                int(context.clock()),
                found.files,
                also=settled,
                output_file_id=None if found.output is None else found.output.id,
                error_file_id=None if found.error is None else found.error.id,
                completed=found.completed,
                failed=found.failed,
                usage=found.usage.to_json(),
            )
            if moved:
                with contextlib.suppress(Exception):  # garbage, deleted with the batch otherwise
                    await self._store.call(run.drop_journal)
                return True
        log.warning("batch %s: another worker has taken it over; its journal stays", run.batch_id)
        return True

    @staticmethod
    def _results(run: BatchRun, rest: str, now: int, until: int) -> Results:
        """`rest` is empty for a batch that is done: what is lost of one whose window is open is asked for again."""
        over = bool(rest) or run.record.expires_at <= now
        return write_results(run, rest or "batch_cancelled", now, until, without_lost=over)

    async def ended_as_it_is(self, carried: Carried) -> bool:
        """End a batch that is being cancelled or whose window is over, without result files."""
        context = self._context
        current = await self._asked(lambda: context.batches.current(carried.held))
        if current is None:
            return False
        now = int(context.clock())
        said = "The results of this batch could not be written."
        errors = json.dumps([LineError("server_error", said).shown()])
        nothing = context.usage.settle(current, Tokens(), 0)  # what is not delivered is not charged
        if current.state is BatchStatus.CANCELLING:
            return await self._move(carried, END_CANCEL, now, also=nothing, errors=errors)
        return current.expires_at <= now and await self._move(carried, EXPIRE, now, also=nothing, errors=errors)

    async def _move(
        self,
        carried: Carried,
        transition: Transition,
        now: int,
        files: Sequence[FileRecord] = (),
        also: Settle | None = None,
        **values: Any,
    ) -> bool:
        moves = self._context.batches.move
        move = partial(moves, carried.held, transition, now, files, also=also, **values)
        return await self._repeated(lambda: self._asked(move))

    async def _asked(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._records, call)

    async def patiently(self, call: Callable[[], Result]) -> Result:
        """A call of the store, again and again while it is away, or the records are."""
        return await self._repeated(lambda: self._store.call(call))

    @staticmethod
    async def _repeated(call: Callable[[], Awaitable[Result]]) -> Result:
        while True:
            try:
                return await call()
            except Exception as error:
                if not is_store_trouble(error) and not is_records_trouble(error):
                    raise
                log.warning("waits for the store or the records: %s", type(error).__name__)
            await asyncio.sleep(RETRY_SECONDS)
