"""The states of a batch that a worker holds: its input is checked, it is over, its files are written.

`Site` is what a worker works with, `Carried` a batch that it holds. What is asked of the store or of the records is
asked again while they are away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from batch_assets.api.batches.lines import LineError
from batch_assets.api.batches.snapshot import Checked, check_input
from batch_assets.api.billing.batch_usage import BatchUsage, Settle
from batch_assets.api.billing.spending import BUDGET, Spending
from batch_assets.api.billing.usage import Tokens
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.engines.engine_supply import EngineSupply
from batch_assets.api.execution.engines.token_counts import too_long_texts
from batch_assets.api.execution.model_feed import Committed
from batch_assets.api.execution.results import Results, write_results
from batch_assets.api.models import Models, known_contexts, known_models
from batch_assets.api.records.batches import BatchRecord, BatchRecords, Held
from batch_assets.api.records.database import is_records_trouble
from batch_assets.api.records.files import FileRecord, FileRecords, content_path
from batch_assets.api.records.states import (
    ACCEPT,
    COMPLETE,
    END_CANCEL,
    EXPIRE,
    FINALIZE,
    REFUSE,
    BatchStatus,
    Transition,
)
from batch_assets.api.settings import ApiLimits
from batch_assets.api.telemetry.tracing import NO_SPANS, Span, Spans
from gpu_runner.rows import Task
from resources.objects.health import is_store_trouble
from resources.objects.opening import Objects

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
VALIDATIONS = 2
COUNTINGS = 4  # batches whose texts are counted at once, each with up to 32 MiB of them
DAY = 86_400

Result = TypeVar("Result")

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
    span: Span | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Site:
    """What a worker works with. `committed` hears of every batch object, `usage` of what each batch used.

    `resolve`: the model behind a name. `reserve`: engines of a model that stay, also without work. `engines_at_once`:
    how many a feed asks for without a reserve. `capacity`: how many engines each feed may have of a fleet, as of open
    batches and those that this worker holds; None: nothing is rented. `local`: a folder of this computer for rows that
    the store does not have yet; None: there is none.
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
    local: Path | None = None


class BatchLifecycle:
    """Carries held batches from state to state."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._validations = asyncio.Semaphore(VALIDATIONS)
        self._countings = asyncio.Semaphore(COUNTINGS)

    async def validated(self, carried: Carried) -> bool:
        """Check the input. False: the batch has ended with that."""
        record, site = carried.record, self._site
        async with self._validations:
            models = await known_models(site.models)
            contexts = await known_contexts(site.models)
            checked = await self.patiently(lambda: self._check(record, models, contexts))
        checked = await self._counted(checked, contexts)
        now = int(site.clock())
        if not checked.errors and site.usage.unpriced(record, checked.model or ""):
            said = f"The model '{(checked.model or '')[:100]}' has no price for batches: a budget cannot be kept."
            checked = Checked([LineError("unsupported_parameter", said, f"metadata.{BUDGET}")])
        if checked.errors:
            errors = json.dumps([error.shown() for error in checked.errors])
            for transition in (REFUSE, END_CANCEL):
                if await self._move(carried, transition, now, errors=errors):
                    return False
            return False
        await self._move(carried, ACCEPT, now, total=checked.lines, model=checked.model)
        await asyncio.to_thread(self._site.batches.describe, carried.held, checked.lines, checked.model)
        current = await asyncio.to_thread(site.batches.current, carried.held)
        if current is None:
            return False
        carried.record = current
        return True

    async def _counted(self, checked: Checked, contexts: Mapping[str, int]) -> Checked:
        """The same, refused where an engine that runs says that prompts are too long.

        Nobody waits for that: where COUNTINGS other batches are being counted, it is left to the lines' engine.
        """
        if not checked.long_texts or checked.model is None or self._countings.locked():
            return checked
        async with self._countings:
            engines = self._site.engines.running(checked.model)
            errors = await too_long_texts(engines, checked.long_texts, contexts.get(checked.model, 0))
        return Checked(errors) if errors else checked

    def _check(self, record: BatchRecord, models: frozenset[str] | None, contexts: Mapping[str, int]) -> Checked:
        site, path = self._site, content_path(record.input_file_id)
        try:
            return check_input(
                site.objects, path, record.id, record.endpoint, models, site.limits, site.resolve, contexts
            )
        except FileNotFoundError:
            if site.files.has(record.input_file_id):  # its record goes last: the store is away, or has lost it
                raise InputAway(path) from None
            return Checked([LineError("invalid_input_file", "The input file was deleted or has expired.")])

    async def until_over(self, carried: Carried, done: asyncio.Event) -> str:
        """Wait until all rows are kept, or the batch is cancelled or expires: the code of the lines that are left."""
        while not done.is_set():
            if carried.record.state is BatchStatus.CANCELLING:
                return "batch_cancelled"
            left = carried.record.expires_at - self._site.clock()
            if left <= 0:
                return "batch_expired"
            waiting = [asyncio.create_task(event.wait()) for event in (done, carried.news)]
            try:
                await asyncio.wait(waiting, timeout=min(left, 60.0), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
            carried.news.clear()
        return ""

    async def deliver(self, carried: Carried, run: BatchRun, rest: str) -> None:
        """Write the files, and say so in one transaction with the end of the batch."""
        site, record = self._site, run.record
        if run.done:  # whatever the last look has seen: it may be older than the batch's last move
            await self._move(carried, FINALIZE, int(site.clock()))
        now = int(site.clock())
        life = int(site.limits.batch_file_days * DAY) if record.output_seconds is None else record.output_seconds
        found = await self.patiently(lambda: self._results(run, rest, now, now + life))
        used = found.usage
        tokens = Tokens(used.input_tokens, used.cached_tokens, used.output_tokens)
        settled = site.usage.settle(
            run.record, tokens, found.completed, paused=run.budget is not None and run.budget.paused
        )
        for transition in (COMPLETE, END_CANCEL, EXPIRE):
            moved = await self._move(
                carried,
                transition,
                int(site.clock()),
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
                    await asyncio.to_thread(lambda: run.drop_segments(all_of_them=True))
                return
        log.warning("batch %s: another worker has taken it over; its journal stays", run.batch_id)

    @staticmethod
    def _results(run: BatchRun, rest: str, now: int, until: int) -> Results:
        """`rest` is empty for a batch that is done: one with a damaged object waits for the end of its window."""
        over = bool(rest) or run.record.expires_at <= now
        return write_results(run, rest or "batch_cancelled", now, until, without_damaged=over)

    async def ended_as_it_is(self, carried: Carried) -> bool:
        """End a batch that is being cancelled or whose window is over, without result files."""
        site = self._site
        current = await asyncio.to_thread(site.batches.current, carried.held)
        if current is None:
            return False
        now = int(site.clock())
        said = "The results of this batch could not be written."
        errors = json.dumps([LineError("server_error", said).shown()])
        nothing = site.usage.settle(current, Tokens(), 0)  # what is not delivered is not charged
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
        moves = self._site.batches.move
        return await self.patiently(lambda: moves(carried.held, transition, now, files, also=also, **values))

    async def patiently(self, call: Callable[[], Result]) -> Result:
        """A call of the store or of the records, again and again while they are away."""
        while True:
            try:
                return await asyncio.to_thread(call)
            except Exception as error:
                if not is_store_trouble(error) and not is_records_trouble(error):
                    raise
                log.warning("waits for the store or the records: %s", type(error).__name__)
            await asyncio.sleep(RETRY_SECONDS)
