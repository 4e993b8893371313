"""The calls of a Batch API as somebody makes them who has hours: what fails for a moment is asked again.

A provider that is silent is waited for, one that has too much to do for longer. What it has just made may not be shown
at once: a batch that is not found, a file that is not there, is looked for again before it counts as gone, because
its rows would be paid a second time. Raises EngineLost, EngineRefused, and RequestDenied where the account cannot pay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpu_runner.batch_api.batch_calls import KEY, BatchCalls, BatchState, QueueFull
from gpu_runner.batch_api.submitted_batches import SubmittedBatch
from gpu_runner.client.protocol import EngineError, EngineLost, EngineRefused, RequestDenied, RowRejected, Transient
from gpu_runner.client.server_sentence import says
from gpu_runner.request_limits import BatchLimits

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.5
SILENT_SECONDS = 900.0  # without an answer of the provider, until it counts as lost
LONGEST_WAIT_SECONDS = 600.0  # that a Retry-After may ask for
GONE_SECONDS = 120.0  # what is not there so long is gone
UNREAD_SECONDS = 3600.0  # until a provider has read an input file
LOOK_AFTER_SECONDS = (0.0, 5.0, 20.0)  # a batch whose creation was not answered may be listed a little later
GONE = frozenset({400, 404, 410})
NOT_THERE = frozenset({404, 410})
NO_ACCESS = frozenset({401, 403})
BEING_MADE = 409  # the same creation is under way, or was made
HINTS = {
    401: ": check the engine's key",
    403: ": check the engine's key, and what it may do",
    404: ": check the engine's address, and that its provider has a Batch API",
    405: ": check the engine's address, and that its provider has a Batch API",
    413: ": lower batch.max_file_bytes of the engine",
}


class PatientCalls:
    """Of one provider. `limits`: of its batches."""

    def __init__(self, calls: BatchCalls, limits: BatchLimits) -> None:
        self._calls, self._limits = calls, limits

    async def upload(self, file: Path, name: str, since: float) -> str:
        """The id of a new input file, of which a batch may be made. Of an upload whose answer was lost none is left.
        `since`: when it was first tried (Unix seconds).
        """
        lost = False

        async def upload() -> tuple[str, bool]:
            nonlocal lost
            try:
                return await self._calls.upload(file, name)
            except Transient as error:
                lost = lost or error.taken
                raise

        file_id, is_read = await self._repeat("take the input file", upload)
        if lost:
            await self.delete_named(name, since, but=file_id)
        loop = asyncio.get_running_loop()
        wait, until = FIRST_WAIT_SECONDS, loop.time() + UNREAD_SECONDS
        while not is_read:
            if loop.time() > until:
                raise EngineLost("not_ready", f"the Batch API has not read its input file in {UNREAD_SECONDS:.0f} s")
            await asyncio.sleep(wait)
            wait = self._longer(wait)
            is_read = await self._repeat("take the input file", lambda: self._calls.is_read(file_id), gone=GONE_SECONDS)
        return file_id

    async def delete_named(self, name: str, since: float, *, but: str = "") -> None:
        """The account has no input file of this name, as far as its provider lists files. `but`: the one that stays."""
        with suppress(EngineError):
            for file_id in await self._calls.files_named(name, since):
                if file_id != but:
                    await self._calls.delete(file_id)

    async def create(self, record: SubmittedBatch, path: str, *, unclear: bool) -> BatchState:
        """The batch of the record, made where it is not. `unclear`: it may be there already, or be made by another run;
        it is looked for, as it is when an answer to its creation was lost. Raises QueueFull, too: it is not there.
        """
        look_first = unclear

        async def create() -> BatchState:
            nonlocal look_first
            if look_first and (found := await self._find(record)) is not None:
                return found
            look_first = True
            metadata = {**record.labels, KEY: record.key}
            try:
                return await self._calls.create(record.input_file_id, path, self._limits.completion_window, metadata)
            except Transient as error:
                look_first = unclear or error.taken
                raise
            except RequestDenied as error:
                if error.status != BEING_MADE or error.of_account:
                    raise
                raise Transient("http_409", error.message, status=BEING_MADE) from error

        return await self._repeat("create the batch", create)

    async def _find(self, record: SubmittedBatch) -> BatchState | None:
        refused: RequestDenied | None = None
        for pause in LOOK_AFTER_SECONDS:
            await asyncio.sleep(pause)
            try:
                found = await self._calls.find(record.key, record.input_file_id, record.created_at)
            except RequestDenied as error:
                if error.of_account or error.status in NO_ACCESS:
                    raise
                found, refused = None, error
            if found is not None:
                return found
        if refused is not None:
            log.warning("batches are not listed (status %s): one is created again, with the same key", refused.status)
        return None

    async def look(self, batch_id: str) -> BatchState:
        """The batch as it is now."""
        return await self._repeat("show the batch", lambda: self._calls.look(batch_id), gone=GONE_SECONDS)

    async def cancel(self, batch_id: str) -> None:
        """No further row of it is begun. One that has ended, or is about to, is left as it is."""
        try:
            await self._repeat("cancel the batch", lambda: self._calls.cancel(batch_id))
        except EngineRefused as error:
            log.info("batch %s is not cancelled: status %s", batch_id, error.status)

    async def download(self, file_id: str, into: Path, most: int) -> bool | None:
        """What a file holds, but no more than `most` bytes. Returns whether that is all of it; None: there is no such
        file.
        """
        try:
            whole = await self._repeat(
                "give an output file", lambda: self._calls.download(file_id, into, most), gone=GONE_SECONDS
            )
        except EngineRefused as error:
            if error.status not in GONE:
                raise
            return None
        if not whole:
            log.warning("file %s has more than %s bytes; the rest is left", file_id, most)
        return whole

    async def delete(self, *file_ids: str) -> None:
        """The account has the files no longer, if its provider does so at once."""
        for file_id in file_ids:
            with suppress(EngineError):
                await self._calls.delete(file_id)

    async def _repeat(self, what: str, call: Callable[[], Awaitable[T]], *, gone: float = 0.0) -> T:
        """`gone`: so many seconds, something that is not there is asked for again."""
        loop = asyncio.get_running_loop()
        began, since, wait = loop.time(), 0.0, FIRST_WAIT_SECONDS
        busy: bool | None = None
        while True:
            try:
                return await call()
            except QueueFull:
                raise
            except Transient as error:
                if busy is not (error.code == "http_429"):
                    busy, since = error.code == "http_429", loop.time()
                    log.info("the Batch API does not %s: %s", what, error.code)
                longest = max(SILENT_SECONDS, self._limits.window_seconds) if busy else SILENT_SECONDS
                if loop.time() - since > longest:
                    lost = f"the Batch API did not {what} for {longest:.0f} s: {error.code}"
                    raise EngineLost("unreachable", lost) from error
                asked = error.retry_after or 0.0
            except RowRejected as error:
                raise EngineRefused(f"expected the Batch API to {what}, found {error.code}") from error
            except RequestDenied as error:
                if error.of_account:
                    raise
                if error.status not in NOT_THERE or loop.time() - began > gone:
                    raise _refused(what, error) from error
                asked = 0.0
            await asyncio.sleep(max(wait, min(asked, LONGEST_WAIT_SECONDS)))
            wait = self._longer(wait)

    def _longer(self, wait: float) -> float:
        return min(self._limits.poll_seconds, wait * 2)


def _refused(what: str, error: RequestDenied) -> EngineRefused:
    status = error.status or 0
    hint = HINTS.get(status, "")
    refused = EngineRefused(f"expected the Batch API to {what}, found status {status}{hint}.{says(error.message)}")
    refused.status = error.status
    return refused
