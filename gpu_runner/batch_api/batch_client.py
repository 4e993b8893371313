"""An engine whose rows go out as input files of a Batch API. To a feed it is an engine like any other, only slow.

Rows are gathered for a moment, written to a file, and sent as one batch. Each row's request waits until the batch's
files are here, and then has its line as an answer; what the line means is decided where every answer is read. A batch
is written down before it is created (submitted_batches.py): a row whose request is in such a batch takes its line from
there, whoever sent it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import aiohttp

from gpu_runner.batch_api import batch_calls
from gpu_runner.batch_api.batch_calls import BatchCalls, BatchState, InputError, QueueFull
from gpu_runner.batch_api.batch_lines import FoundLine, LineAnswer, OutputLines, custom_ids, digest_of, input_line
from gpu_runner.batch_api.patient_calls import GONE, PatientCalls
from gpu_runner.batch_api.provider_leftovers import clear
from gpu_runner.batch_api.submitted_batches import BatchRecords, SubmittedBatch
from gpu_runner.bounded_http.bounded_read import FREE_BYTES, Admit, BodyTooLarge
from gpu_runner.client.answers.quota_codes import quota_code
from gpu_runner.client.engine_client import EngineClient, ReadAnswer
from gpu_runner.client.engine_info import EngineInfo
from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.client.protocol import (
    PATHS,
    EngineError,
    EngineLost,
    EngineRefused,
    RequestDenied,
    RowRejected,
    Transient,
    error_of,
)
from gpu_runner.client.server_sentence import says
from gpu_runner.request_limits import BatchLimits
from gpu_runner.rows import Generation

log = logging.getLogger(__name__)

T = TypeVar("T")

TASKS = ("chat", "completion", "embedding")

FIRST_POLL_SECONDS, POLL_GROWTH = 0.5, 1.5
OVERDUE = 1.25  # times the window: a batch that has not ended by then is given up
QUEUE_FULL = batch_calls.QUEUE_FULL | {"rate_limit_exceeded"}  # of a batch that failed: not a limit per minute
QUEUE_SECONDS, LONGEST_QUEUE_SECONDS = 60.0, 600.0
CANCEL_SECONDS, LEAVE_SECONDS = 900.0, 1.5  # OpenAI's take up to ten minutes
LACKS_OUTPUT_SECONDS = 120.0  # until a batch that has ended must say where its answers are, and give them whole
SETTLE_SECONDS = 30.0  # for what a provider is to delete
AT_ONCE = 100  # rows that are answered before others get their turn
LOOKED_AT = 100  # lines of which it is compared why they are refused
ALL_REFUSED = 8  # lines that are refused alike and none answered: then it is not the rows
MOST_REFUSED = 5  # input files, one after the other, that are refused for some of their lines
HINTS = {"too_many_tasks": " Lower batch.max_requests_per_batch of the engine."}
NOT_COME_TO = {"cancelled": "batch_cancelled", "expired": "batch_expired"}


@dataclass(eq=False, slots=True)
class _Row:
    """A row that waits for its line."""

    body: bytes
    digest: str
    line: asyncio.Future[FoundLine]
    given: tuple[_Batch, str] | None = None  # the batch, and the custom_id, of its line


@dataclass(eq=False, slots=True)
class _Batch:
    """One that was sent, or is to be. `rows`: that wait for a line of it, by `custom_id`; `free`: lines that nobody
    has asked for yet, by digest. `cancelled`: by us. `files`: of its answers, at the provider.
    """

    record: SubmittedBatch
    rows: dict[str, _Row] = field(default_factory=dict)
    free: dict[str, deque[str]] = field(default_factory=dict)
    lines: OutputLines | None = None
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    over: str = ""  # the status that it ended with
    given: bool = False  # every line that came has gone to its row
    unclear: bool = True  # whether it may be at the provider, although we have no id of it
    files: tuple[str, ...] = ()

    @property
    def ids(self) -> list[str]:
        return custom_ids(self.record.digests)

    @property
    def done(self) -> bool:
        """Whether nobody can ask for a line of it."""
        return self.given and not any(self.free.values())

    def put_back(self, custom_id: str) -> None:
        """Whoever asks for such a row takes this line."""
        self.free.setdefault(custom_id.rpartition("-")[0], deque()).append(custom_id)


class BatchClient(EngineClient):
    """`records`: where batches are written down. `labels`: for a batch's metadata; they are shown by the provider."""

    def __init__(
        self,
        endpoint: str,
        generation: Generation,
        *,
        batches: BatchLimits,
        records: BatchRecords,
        labels: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        **engine: Any,
    ) -> None:
        super().__init__(endpoint, generation, **engine)
        self._batch_limits, self._records, self._labels, self._clock = batches, records, dict(labels), clock
        self._path = f"/v1/{PATHS[generation.task]}"
        self._place = hashlib.sha256(f"{self._api}\0{generation.asked_model}".encode()).hexdigest()[:16]
        self._gathered: list[_Row] = []
        self._gathered_bytes = 0
        self._gathering: asyncio.TimerHandle | None = None
        self._known: dict[str, _Batch] = {}
        self._sent: set[str] = set()  # keys of batches of ours
        self._seen: set[str] = set()  # keys of all records that need not be read again
        self._places = asyncio.Semaphore(batches.max_open)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unread: set[_Row] = set()  # have a line, which is not an answer yet
        self._all_read = asyncio.Event()
        self._all_read.set()
        self._over: EngineError | None = None
        self._leaving = asyncio.Event()
        self._most_rows, self._queue_seconds = batches.max_requests, QUEUE_SECONDS
        self._refused_files, self._ever_answered = 0, False
        self._folder = Path()
        self._calls: BatchCalls | None = None
        self._patient: PatientCalls | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._folder = Path(tempfile.mkdtemp(prefix="batch-api-"))
        self._calls = BatchCalls(self._api, self._api_key.decode() or None, self._tls, self._time_outs.connect)
        self._patient = PatientCalls(self._calls, self._batch_limits)
        await self._look_for_records()
        return self

    async def close(self) -> None:
        """Closes all connections. Batches go on at the provider: the next client with these records has their lines."""
        for task in self._tasks:
            task.cancel()
        if self._gathering is not None:
            self._gathering.cancel()
        calls, self._calls = self._calls, None
        try:
            if calls is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                await calls.close()
        finally:
            await super().close()

    # --- what a feed asks ---

    async def info(self) -> EngineInfo:
        """As of any engine. Raises EngineRefused for what a batch cannot hold, too."""
        generation, user = self.generation, self._of_user
        if generation.task not in TASKS:
            raise EngineRefused(
                f"task {generation.task}: expected one of {', '.join(TASKS)}, which a Batch API takes. Use an engine "
                "of kind endpoint"
            )
        if user is not None and user.asked_model != generation.asked_model:
            raise EngineRefused("user_model: expected none, as a batch is of one model. Use an engine of kind endpoint")
        return await super().info()

    @property
    def takes_lists(self) -> bool:
        """Each row is a line."""
        return False

    async def load(self) -> EngineLoad | None:
        """Nothing is known of it."""
        return None

    async def healthy(self) -> bool:
        """Rows wait for hours: whether the provider answers shows when it is asked for a batch."""
        return True

    async def canary(self, prompt: bytes | None = None) -> None:
        """The API answers, and takes the key: no row is asked for it."""
        await self._api_calls.answers()

    async def probe(self, prompt: bytes, *, content: bool, fields: bytes = b"") -> None:
        """The same: lines of one batch show whether only some are refused."""
        await self._api_calls.answers()

    @property
    def _api_calls(self) -> BatchCalls:
        if self._calls is None:
            raise RuntimeError("BatchClient is not open: use `async with`")
        return self._calls

    @property
    def _provider(self) -> PatientCalls:
        if self._patient is None:
            raise RuntimeError("BatchClient is not open: use `async with`")
        return self._patient

    async def _ask(self, body: bytes, admit: Admit | None, read: ReadAnswer[T]) -> T:
        if self._over is not None:
            raise self._over
        row = _Row(body, digest_of(body), asyncio.get_running_loop().create_future())
        if not self._attach(row):
            self._gather(row)
        try:
            line = await row.line
            if admit is not None and line.length > FREE_BYTES:
                await admit(line.length)
            return await read(cast("aiohttp.ClientResponse", line.read()), None)
        except asyncio.CancelledError:
            if row.given is not None:
                batch, custom_id = row.given
                batch.put_back(custom_id)
            raise
        finally:
            self._unread.discard(row)
            if not self._unread:
                self._all_read.set()

    async def _body_of(self, answer: aiohttp.ClientResponse, limit: int, admit: Admit | None = None) -> bytes:
        if not isinstance(answer, LineAnswer):
            return await super()._body_of(answer, limit, admit)
        if len(answer.body) > limit:
            raise BodyTooLarge(limit)
        return answer.body

    # --- batches that were sent ---

    async def _look_for_records(self) -> None:
        """Takes in batches that others have sent, or we before we were ended."""
        for record in await asyncio.to_thread(self._records.all, frozenset(self._seen)):
            if not record.input_file_id or record.key in self._seen:
                continue
            self._seen.add(record.key)
            if record.place == self._place:
                self._known[record.key] = batch = _Batch(record)
                for custom_id in batch.ids:
                    batch.put_back(custom_id)

    def _attach(self, row: _Row) -> bool:
        """Gives the row a line of a batch that was sent already, if one has its request."""
        for batch in self._known.values():
            if not (free := batch.free.get(row.digest)):
                continue
            custom_id = free.popleft()
            if batch.lines is not None:
                self._give(batch, custom_id, row)
                return True
            batch.rows[custom_id] = row
            if batch.task is None:
                batch.task = self._begin(self._follow(batch))
            return True
        return False

    async def settle(
        self, committed: Callable[[SubmittedBatch], bool] | None = None, seconds: float = SETTLE_SECONDS
    ) -> None:
        """Every row that was answered is written elsewhere by now: forget the batches all of whose lines were given,
        and those of which `committed` says that no row is asked for any more. The provider is to delete their files,
        for which it has so many seconds.
        """
        done = [batch for batch in self._known.values() if batch.done]
        keys = [batch.record.key for batch in done]
        for key in keys:
            del self._known[key]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    for batch in done:
                        await self._provider.delete(*batch.files)
                    if committed is not None:
                        await self._clear(committed, keys)
        finally:
            await asyncio.to_thread(self._records.drop, keys)

    async def _clear(self, committed: Callable[[SubmittedBatch], bool], keys: list[str]) -> None:
        """Adds the keys of batches of which the provider has nothing any more."""
        for record in await asyncio.to_thread(self._records.all):
            if record.place == self._place and record.key not in keys and committed(record):
                with suppress(EngineError):
                    if await clear(record, self._api_calls, self._clock()):
                        keys.append(record.key)

    # --- sending ---

    def _gather(self, row: _Row) -> None:
        limits = self._batch_limits
        size = len(row.body) + 256
        if size > limits.max_file_bytes:
            row.line.set_exception(RowRejected("request_too_large", f"more than {limits.max_file_bytes:,} bytes"))
            return
        if self._gathered_bytes + size > limits.max_file_bytes:
            self._send_gathered()
        self._gathered.append(row)
        self._gathered_bytes += size
        if len(self._gathered) >= self._most_rows:
            self._send_gathered()
            return
        if self._gathering is not None:
            self._gathering.cancel()
        self._gathering = asyncio.get_running_loop().call_later(limits.gather_seconds, self._send_gathered)

    def _send_gathered(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        rows, self._gathered, self._gathered_bytes, self._gathering = self._gathered, [], 0, None
        if rows and not self._leaving.is_set():
            self._begin(self._send(rows))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, rows: list[_Row]) -> None:
        """The rows as one batch, until all have their lines."""
        try:
            async with self._places:
                await self._look_for_records()  # of a run that has ended meanwhile
                rows = [row for row in rows if not row.line.done() and not self._attach(row)]
                if rows and not self._leaving.is_set():
                    await self._follow(await self._submit(rows))
        except EngineError as error:
            self._fail(rows, error)
        except Exception as error:  # of this computer, or of the store of the records
            log.exception("a batch was not sent")
            self._fail(rows, EngineLost("not_ready", f"the batch cannot be written: {type(error).__name__}"))

    async def _submit(self, rows: list[_Row]) -> _Batch:
        key, digests = uuid.uuid4().hex, tuple(row.digest for row in rows)
        ids = custom_ids(digests)
        record = SubmittedBatch(key=key, place=self._place, created_at=self._clock(), labels=self._labels)
        await asyncio.to_thread(self._records.keep, record)
        file = self._folder / f"{key}.jsonl"
        await asyncio.to_thread(self._write, file, ids, rows)
        try:
            file_id = await self._provider.upload(file, record.file_name, record.created_at)
        except (EngineRefused, RequestDenied):
            await asyncio.to_thread(self._records.drop, [key])
            raise
        file.unlink()
        record = record.model_copy(update={"digests": digests, "input_file_id": file_id})
        batch = _Batch(record, dict(zip(ids, rows, strict=True)), unclear=False)
        self._known[key] = batch  # first: what is written down and not seen is another run's
        self._sent.add(key)
        self._seen.add(key)
        try:
            await asyncio.to_thread(self._records.keep, record)
        except Exception:
            del self._known[key]
            raise
        return batch

    def _write(self, file: Path, ids: Sequence[str], rows: Sequence[_Row]) -> None:
        with file.open("wb") as into:
            for custom_id, row in zip(ids, rows, strict=True):
                into.write(input_line(custom_id, self._path, row.body))

    async def _created(self, batch: _Batch) -> BatchState | None:
        """The batch at its provider, created where it is not; None: it is not there any more, or its file is not.

        The answer to a creation may be lost: the batch is looked for.
        """
        record, own = batch.record, batch.record.key in self._sent
        try:
            if record.batch_id:
                return await self._provider.look(record.batch_id)
            unclear, batch.unclear = batch.unclear, True
            state = await self._provider.create(record, self._path, unclear=unclear)
        except EngineRefused as error:
            if error.status in GONE and not own:
                return None
            raise
        began = record.created_at if unclear else self._clock()  # its window, not that of its upload
        batch.record = record.model_copy(update={"batch_id": state.batch_id, "created_at": began})
        await asyncio.to_thread(self._records.keep, batch.record)
        log.info("batch %s sent: %s rows", state.batch_id, len(record.digests))
        return state

    # --- following ---

    async def _follow(self, batch: _Batch) -> None:
        """Until the batch has ended, and every row that waits for it has its line, or an error."""
        try:
            if self._leaving.is_set() and batch.record.key in self._sent and not batch.record.batch_id:
                await self._forget(batch)
                return
            if (created := await self._created(batch)) is None:
                await self._forget(batch)
                self._gather_again(batch)
                return
            if self._leaving.is_set() and not created.over and not batch.cancelled:
                await self._cancel(batch)
            state = await self._ended(batch, created)
            await self._collect(batch, state)
        except QueueFull:
            await self._queue_full(batch)
        except Transient as error:  # it has not ended in time
            await self._forget(batch)
            self._fail(list(batch.rows.values()), error)
        except EngineError as error:
            self._let_go(batch, error)
        except Exception as error:  # as in `_send`
            log.exception("batch %s: its answers were not read", batch.record.batch_id)
            lost = EngineLost("not_ready", f"the batch's files cannot be kept: {type(error).__name__}")
            self._let_go(batch, lost)

    async def _ended(self, batch: _Batch, state: BatchState) -> BatchState:
        wait, until = FIRST_POLL_SECONDS, batch.record.created_at + OVERDUE * self._batch_limits.window_seconds
        while not state.over:
            if self._clock() > until and not batch.cancelled:
                until = self._clock() + CANCEL_SECONDS
                await self._cancel(batch)
            elif self._clock() > until:
                raise Transient("batch_overdue", f"status {state.status} after its window")
            await asyncio.sleep(wait)
            wait = min(self._batch_limits.poll_seconds, wait * POLL_GROWTH)
            state = await self._provider.look(batch.record.batch_id)
        until = self._clock() + LACKS_OUTPUT_SECONDS
        while state.lacks_output and self._clock() < until:
            await asyncio.sleep(wait)
            state = await self._provider.look(batch.record.batch_id)
        return state

    async def _cancel(self, batch: _Batch) -> None:
        batch.cancelled = True
        await self._provider.cancel(batch.record.batch_id)

    async def _failed(self, batch: _Batch, state: BatchState) -> None:
        """The provider has refused the file as a whole: nothing of it was done, or is paid."""
        if state.code in QUEUE_FULL:
            await self._queue_full(batch)
            return
        await self._forget(batch)
        if named := self._named_lines(batch, state):
            self._refused_files += 1
            log.warning("an input file was refused for %s of its %s lines", len(named), len(batch.record.digests))
            for custom_id, error in named.items():
                if (row := batch.rows.get(custom_id)) is not None and not row.line.done():
                    row.line.set_exception(RequestDenied("rejected_400", f"line refused: {error.code}", error.message))
            self._gather_again(batch)
            return
        rows = list(batch.rows.values())
        words = f"{state.code}.{says(state.errors[0].message)}" if state.code else "no reason was given."
        words += HINTS.get(state.code, "")
        if quota_code(state.code):
            denied = RequestDenied("rejected_429", f"expected an account that can pay, found {words}", of_account=True)
            self._fail(rows, denied)
            return
        self._fail(rows, EngineRefused(f"expected a batch that the provider takes, found it refused: {words}"))

    def _named_lines(self, batch: _Batch, state: BatchState) -> dict[str, InputError]:
        """By `custom_id`, the lines for which a file was refused; none where that is what all lines have in common."""
        ids = batch.ids
        named = {ids[error.line - 1]: error for error in state.errors if 0 < error.line <= len(ids)}
        some = 2 * len(named) <= len(ids) or self._ever_answered
        whole = any(not 0 < error.line <= len(ids) for error in state.errors) or self._refused_files >= MOST_REFUSED
        return named if some and not whole else {}

    async def _queue_full(self, batch: _Batch) -> None:
        """The batch is not there, as the account has too much in its queue: its rows go out again later."""
        await self._forget(batch)
        await self._wait_for_queue(len(batch.record.digests))
        self._gather_again(batch)

    async def _wait_for_queue(self, rows: int) -> None:
        """The account has too much in its queue. With nothing of ours there, a batch of so many rows may be more than
        it takes at all: further ones are half as long, until one is taken.
        """
        if not any(one.record.batch_id and one.lines is None and one.rows for one in self._known.values()):
            self._most_rows = max(1, min(self._most_rows, rows) // 2)
        log.warning("the account's queue is full: batches of up to %s rows are sent from now on", self._most_rows)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), self._queue_seconds)
        self._queue_seconds = min(LONGEST_QUEUE_SECONDS, 2 * self._queue_seconds)

    def _gather_again(self, batch: _Batch) -> None:
        for row in batch.rows.values():
            if not row.line.done():
                self._gather(row)

    def _let_go(self, batch: _Batch, error: EngineError) -> None:
        """Its rows have this error. The batch is there: who asks for one of them again takes its line."""
        rows = list(batch.rows.items())
        for custom_id, row in rows:
            batch.free.setdefault(row.digest, deque()).append(custom_id)
        batch.rows.clear()
        batch.task = None
        self._fail([row for _, row in rows], error)

    async def _forget(self, batch: _Batch) -> None:
        """No row takes a line of it any more."""
        del self._known[batch.record.key]
        await asyncio.to_thread(self._records.drop, [batch.record.key])
        await self._provider.delete(batch.record.input_file_id)

    async def _collect(self, batch: _Batch, state: BatchState) -> None:
        """Its files, then each row its line."""
        lines = await self._whole_lines(batch, state)
        if state.status == "failed" and not lines.found:
            await self._failed(batch, state)
            return
        if not lines.found and state.output_file_id and batch.record.key not in self._sent:
            await self._forget(batch)  # of another run, weeks ago: its provider has deleted the answers
            self._gather_again(batch)
            return
        self._most_rows = min(self._batch_limits.max_requests, 2 * self._most_rows)
        self._queue_seconds, self._refused_files = QUEUE_SECONDS, 0
        self._ever_answered = self._ever_answered or any(line.status == 200 for line in lines.found.values())
        refused = self._all_refused(batch, lines)
        batch.lines, batch.over = lines, state.status
        batch.files = tuple(filter(None, (state.output_file_id, state.error_file_id)))
        for number, (custom_id, row) in enumerate(list(batch.rows.items())):
            if refused is not None and not row.line.done():
                row.line.set_exception(refused)
            elif not (batch.cancelled and self._leaving.is_set() and custom_id not in lines.found):
                self._give(batch, custom_id, row)
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        batch.given = True
        await self._provider.delete(batch.record.input_file_id)

    async def _whole_lines(self, batch: _Batch, state: BatchState) -> OutputLines:
        """The files again, while they have fewer lines than the provider says: a file that is cut is not all of it."""
        wait, until = FIRST_POLL_SECONDS, self._clock() + LACKS_OUTPUT_SECONDS
        while True:
            lines = await self._lines(batch, state)
            if lines.readable >= state.lines or lines.left or self._clock() > until:
                return lines
            log.info("batch %s: %s of %s lines have come", state.batch_id, lines.readable, state.lines)
            await asyncio.sleep(wait)
            wait = min(self._batch_limits.poll_seconds, wait * POLL_GROWTH)

    async def _lines(self, batch: _Batch, state: BatchState) -> OutputLines:
        lines, ids = OutputLines(), set(batch.ids)
        longest = self._limit + 4096
        for number, file_id in enumerate((state.output_file_id, state.error_file_id)):
            if not file_id:
                continue
            path = self._folder / f"{batch.record.key}-{number}.jsonl"
            if (whole := await self._provider.download(file_id, path, self._batch_limits.max_output_bytes)) is None:
                log.warning("batch %s: a file of it is missing", state.batch_id)
                lines.left = True
                continue
            lines.left = lines.left or not whole
            await asyncio.to_thread(lines.read, path, ids, longest)
        if odd := {
            name: n for name in ("unreadable", "unknown", "doubled") if (n := cast("int", getattr(lines, name)))
        }:
            log.warning("batch %s: lines that are not used: %s", state.batch_id, odd)
        return lines

    def _give(self, batch: _Batch, custom_id: str, row: _Row) -> None:
        found = None if batch.lines is None else batch.lines.found.get(custom_id)
        if row.line.done():
            if found is not None:
                batch.put_back(custom_id)
        elif found is None:
            code = NOT_COME_TO.get(batch.over, "missing_in_batch")
            said = (
                f"the batch was {batch.over} before this row" if batch.over in NOT_COME_TO else "no line of it has come"
            )
            row.line.set_exception(Transient(code, said, taken=batch.over not in NOT_COME_TO))
        else:
            row.given = batch, custom_id
            self._unread.add(row)
            self._all_read.clear()
            row.line.set_result(found)

    def _all_refused(self, batch: _Batch, lines: OutputLines) -> EngineError | None:
        """Every line was refused alike: by the key, the model or the settings, not for what a row says."""
        statuses = {line.status for line in lines.found.values()}
        if len(lines.found) < ALL_REFUSED or len(statuses) != 1 or not 400 <= (status := statuses.pop()) < 500:
            return None
        some = islice(lines.found.items(), LOOKED_AT)
        errors = {custom_id: error_of(status, {}, line.read().body) for custom_id, line in some}
        custom_id, first = next(iter(errors.items()))
        if not isinstance(first, RequestDenied) or first.of_account:
            return None
        if not all(isinstance(error, RequestDenied) and first.like(error) for error in errors.values()):
            return None
        row = batch.rows.get(custom_id)
        said = "" if row is None else says(first.message, row.body)
        return EngineRefused(
            f"expected lines of a batch to be answered, found all {len(lines.found):,} refused with status {status}: "
            f"check the engine's key and model, and sampling and output against what the server allows.{said}"
        )

    def _fail(self, rows: Sequence[_Row], error: EngineError) -> None:
        if isinstance(error, EngineRefused | EngineLost) and not isinstance(error, RequestDenied):
            self._over = error
        for row in rows:
            if not row.line.done():
                row.line.set_exception(error)

    # --- leaving ---

    async def withdraw(self, seconds: float = CANCEL_SECONDS) -> None:
        """Nothing more is sent; batches of ours are cancelled, and rows that they have finished get their lines.

        The others wait on. Returns when that is done, or after so many seconds.
        """
        self._leaving.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.cancel_batches(seconds)
                if tasks := list(self._tasks):
                    await asyncio.wait(tasks)
                await self._all_read.wait()

    async def cancel_batches(self, seconds: float = LEAVE_SECONDS) -> None:
        """Has the provider cancel the batches that rows wait for: what it has finished is kept there."""
        waited = [one for one in self._known.values() if one.rows and one.lines is None and one.record.batch_id]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # A provider that is away has cancelled nothing: the next run waits for what it goes on with.
                await asyncio.gather(*map(self._cancel, waited), return_exceptions=True)
