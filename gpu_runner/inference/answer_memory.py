"""How many bytes of answers a feed holds, and who has to wait when that is enough.

An answer stays in memory until its batch is committed. Beyond `limit` bytes no new row is asked for, and no large
answer read, except for the oldest open batch: it always moves, so it gets committed, and its memory is free again.
Plain bookkeeping on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from sys import getsizeof

from gpu_runner.answers import NO_PARTS
from gpu_runner.client.protocol import Completion
from gpu_runner.rows import Outcome, Turn

# A float object and its place in a tuple; in the store it is a float32.
NUMBER_BYTES, STORED_NUMBER_BYTES = 32, 4
# What the rows of a batch may have in the store on average, where that is more than `batch_bytes` for all of them.
ROW_BYTES = 64 * 1024

# The other fields of an outcome are what the row was answered with.
_BESIDE = {"row_id", "row_key", "finish_reason", "prompt_tokens", "completion_tokens", "tries", "error"}
_BESIDE |= {"error_message", "origin", "started_at", "seconds", "usd", "parts", "turns"}
_ANSWER_FIELDS = tuple(field.name for field in fields(Outcome) if field.name not in _BESIDE)


@dataclass(slots=True, eq=False)
class BatchBytes:
    """One open batch: bytes in memory, those that it will take in the store, those being read; `most` may be stored."""

    most: int
    held: int = 0
    stored: int = 0
    reading: int = 0


@dataclass(slots=True, eq=False)
class _Reader:
    """An answer that waits to be read."""

    batch: BatchBytes
    size: int
    go: asyncio.Future[None]


def bytes_of(answer: Outcome | Completion) -> tuple[int, int]:
    """(bytes in memory, bytes in the store before compression) of an answer."""
    held, stored = bytes_of_turns(answer.turns) if isinstance(answer, Outcome) and answer.turns else (0, 0)
    for name in _ANSWER_FIELDS:
        value = getattr(answer, name, None)
        if type(value) is str:
            held += getsizeof(value)
            stored += len(value)
        elif type(value) is tuple:
            held += NUMBER_BYTES * len(value)
            stored += STORED_NUMBER_BYTES * len(value)
    if answer.parts is NO_PARTS:
        return held, stored
    beside = answer.parts.bytes
    return held + beside, stored + beside


def bytes_of_turns(turns: Sequence[Turn]) -> tuple[int, int]:
    """As `bytes_of`, of turns of a conversation."""
    return sum([turn.bytes for turn in turns]), sum([turn.stored_bytes for turn in turns])


class AnswerMemory:
    """The bytes of all open batches. A batch's answers may have `batch_bytes` in the store, or ROW_BYTES a row."""

    def __init__(self, limit: int, batch_bytes: int) -> None:
        self._limit, self._batch_bytes = limit, batch_bytes
        self._open: dict[BatchBytes, None] = {}  # in the order in which they were opened
        self._waiting: list[_Reader] = []
        self.held = self.reading = 0

    @property
    def full(self) -> bool:
        """Only rows of the oldest batch may be asked for."""
        return bool(self._waiting) or self.held + self.reading >= self._limit

    def is_oldest(self, batch: BatchBytes) -> bool:
        """Whether this batch moves also when the memory is full."""
        return batch is next(iter(self._open), None)

    def open(self, rows: int) -> BatchBytes:
        """A batch was opened. One that may be large raises the limit: it has to fit."""
        batch = BatchBytes(max(self._batch_bytes, rows * ROW_BYTES))
        self._limit = max(self._limit, batch.most)
        self._open[batch] = None
        return batch

    def close(self, batch: BatchBytes) -> None:
        """Forget the answers of a batch that was committed."""
        self.held -= batch.held
        del self._open[batch]
        self._let_in()

    def keep(self, batch: BatchBytes, held: int, stored: int = 0) -> None:
        """An answer is in memory (or, with less than 0, no longer)."""
        self.held += held
        batch.held += held
        batch.stored += stored

    async def admit(self, batch: BatchBytes, size: int, *, at_once: bool = False) -> None:
        """Waits until `size` bytes may be read; `done_reading` must follow. `at_once`: waits for nobody."""
        if at_once or self._may_read(batch, size):
            self._begin(batch, size)
            return
        reader = _Reader(batch, size, asyncio.get_running_loop().create_future())
        self._waiting.append(reader)
        try:
            await reader.go
        except asyncio.CancelledError:
            if reader in self._waiting:
                self._waiting.remove(reader)
            else:
                self.done_reading(batch, size)
            raise

    def fits(self, batch: BatchBytes, stored: int) -> bool:
        """Whether the batch, which is written and read as a whole, may hold one more answer of this size."""
        return batch.stored + stored <= batch.most

    def done_reading(self, batch: BatchBytes, size: int) -> None:
        """The answer is no longer a body that is being read."""
        self.reading -= size
        batch.reading -= size
        self._let_in()

    def let_all_in(self) -> None:
        """Nobody waits any longer: what the oldest batch waits for is not asked for before these are read."""
        waiting, self._waiting = self._waiting, []
        for reader in waiting:
            self._let(reader)

    def _let(self, reader: _Reader) -> None:
        self._begin(reader.batch, reader.size)
        if not reader.go.done():
            reader.go.set_result(None)

    def _begin(self, batch: BatchBytes, size: int) -> None:
        self.reading += size
        batch.reading += size

    def _may_read(self, batch: BatchBytes, size: int) -> bool:
        if self.held + self.reading + size <= self._limit:
            return True
        return self.is_oldest(batch) and (not batch.reading or batch.held + batch.reading + size <= self._limit)

    def _let_in(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for reader in waiting:
            if self._may_read(reader.batch, reader.size):
                self._let(reader)
            else:
                self._waiting.append(reader)
