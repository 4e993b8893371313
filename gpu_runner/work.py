"""The rows that a feed still has to bring through an engine, and the batches they belong to.

Plain bookkeeping on the event loop's thread: no tasks, no clock, no I/O. A row is in exactly one place: ready,
waiting for its next try, among the suspects, or held by a lane.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpu_runner.answer_memory import AnswerMemory, BatchBytes, bytes_of
from gpu_runner.rows import Batch, Outcome, Row
from gpu_runner.suspects import Group, Suspects
from gpu_runner.vector_length import VectorLength
from gpu_runner.wire import Repair

CANCEL_AGAIN_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch between being read and being committed. `left` counts rows without an outcome."""

    key: str
    outcomes: list[Outcome | None]
    left: int
    bytes: BatchBytes


@dataclass(slots=True, eq=False)
class Item:
    """One row on its way.

    `tries` are charged failures, `voids` failures that nobody charged, `deaths` engine deaths it was in
    flight at, `alone_deaths` those with nothing else in flight. Tokens and seconds add up over requests. `kept` are the
    bytes of an answer that is to be repaired, `reading` those of one that is being read; `answered`: it waits to be.
    """

    row: Row
    batch: OpenBatch
    index: int
    order: int
    tries: int = 0
    voids: int = 0
    deaths: int = 0
    alone_deaths: int = 0
    repair: Repair | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sent: float = 0.0
    started_at: float = 0.0
    seconds: float = 0.0
    group: Group[Item] | None = None
    kept: int = 0
    reading: int = 0
    answered: bool = False


@dataclass(slots=True)
class Counts:
    """What happened so far. `requests` counts row requests, not canaries; `seconds` adds up those of all outcomes."""

    known: int = 0
    ok: int = 0
    dead: int = 0
    batches: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    failures: int = 0
    charged: int = 0
    voided: int = 0
    repairs: int = 0
    canaries: int = 0
    engine_deaths: int = 0
    seconds: float = 0.0


class Work:
    """All open rows. `on_row` hears of every outcome that an engine gave."""

    def __init__(self, on_row: Callable[[str, Outcome], None], memory: AnswerMemory, vectors: VectorLength) -> None:
        self.memory, self.vectors = memory, vectors
        self.ready: deque[Item] = deque()
        self.suspects: Suspects[Item] = Suspects()
        self.trial: object | None = None  # the lane that tries suspects now: one at a time
        self.complete: deque[OpenBatch] = deque()
        self.open_batches = 0
        self.open_rows = 0
        self.counts = Counts()
        self._later: list[tuple[float, int, Item]] = []
        self.low = 0  # fewer ready rows than this call `on_low` at every take
        self.on_low: Callable[[], None] = _nothing
        self._order = 0
        self._on_row = on_row

    @property
    def queued(self) -> int:
        """Rows that no lane holds."""
        return len(self.ready) + len(self._later) + self.suspects.size

    def open(self, batch: Batch) -> None:
        """Takes a batch in; one without unknown rows is complete at once."""
        outcomes = [batch.known.get(row.row_id) for row in batch.rows]
        opened = OpenBatch(batch.key, outcomes, outcomes.count(None), self.memory.open(len(outcomes)))
        for outcome in outcomes:
            if outcome is not None:
                self.memory.keep(opened.bytes, *bytes_of(outcome))
                if self.vectors.expected is None and isinstance(outcome.output, tuple):
                    self.vectors.expected = len(outcome.output)
        for index, row in enumerate(batch.rows):
            if outcomes[index] is None:
                self.ready.append(Item(row, opened, index, self._order))
                self._order += 1
        self.counts.known += len(outcomes) - opened.left
        self.open_batches += 1
        self.open_rows += len(outcomes)
        if opened.left == 0:
            self.complete.append(opened)

    def close(self, batch: OpenBatch) -> None:
        """The batch is committed."""
        self.memory.close(batch.bytes)
        self.open_batches -= 1
        self.open_rows -= len(batch.outcomes)
        self.counts.batches += 1

    def settle(self, item: Item, outcome: Outcome) -> None:
        """The row has its outcome, unless `on_row` raises: then it has none."""
        self._on_row(item.batch.key, outcome)
        batch = item.batch
        batch.outcomes[item.index] = outcome
        self.memory.keep(batch.bytes, -item.kept)
        self.memory.keep(batch.bytes, *bytes_of(outcome))
        batch.left -= 1
        counts = self.counts
        if outcome.error is None:
            counts.ok += 1
        else:
            counts.dead += 1
        counts.seconds += outcome.seconds
        counts.prompt_tokens += outcome.prompt_tokens
        counts.completion_tokens += outcome.completion_tokens
        if batch.left == 0:
            self.complete.append(batch)

    def take(self) -> Item | None:
        """The next ready row; while the memory is full, the next one of the oldest batch."""
        item = self._take_of_the_oldest() if self.memory.full else self._take_first()
        if len(self.ready) < self.low:
            self.on_low()
        return item

    def _take_first(self) -> Item | None:
        return self.ready.popleft() if self.ready else None

    def _take_of_the_oldest(self) -> Item | None:
        for place, item in enumerate(self.ready):
            if self.memory.is_oldest(item.batch.bytes):
                del self.ready[place]
                return item
        return None

    def repair(self, item: Item, repair: Repair, held: int) -> None:
        """The row is to be asked again, with its answer of so many bytes."""
        self.memory.keep(item.batch.bytes, held - item.kept)
        item.repair, item.kept = repair, held
        self.counts.repairs += 1
        self.soon(item)

    def later(self, item: Item, due: float) -> None:
        """The row is to be tried again at `due`."""
        heapq.heappush(self._later, (due, item.order, item))

    def soon(self, item: Item) -> None:
        """The row is to be tried again before all others."""
        if item.group is not None:
            item.group.waiting.appendleft(item)
        else:
            self.ready.appendleft(item)

    def promote(self, now: float) -> None:
        """Makes the rows ready whose time has come."""
        while self._later and self._later[0][0] <= now:
            self.soon(heapq.heappop(self._later)[2])

    @property
    def next_due(self) -> float | None:
        """When `promote` has something to do."""
        return self._later[0][0] if self._later else None

    def give_back(self, items: Iterable[Item]) -> None:
        """Rows of an engine that serves no longer: to the front, in their order."""
        for item in sorted(items, key=lambda item: item.order, reverse=True):
            item.group = None
            self.ready.appendleft(item)

    def suspect(self, items: Iterable[Item]) -> None:
        """Rows that are to be tried alone, as one group."""
        rows = sorted(items, key=lambda item: item.order)
        for item in rows:
            item.group = None
        self.suspects.add(rows)

    def next_group(self) -> Group[Item]:
        """The suspects to try next, with nothing else in flight."""
        group = self.suspects.next()
        for item in group.waiting:
            item.group = group
        return group

    def leave_group(self, group: Group[Item]) -> list[Item]:
        """Takes a group's rows out of everything but the lane; returns those that were not submitted."""
        rows = list(group.waiting)
        group.waiting.clear()
        rows += [item for _, _, item in self._later if item.group is group]
        self._later = [entry for entry in self._later if entry[2].group is not group]
        heapq.heapify(self._later)
        return sorted(rows, key=lambda item: item.order)


def _nothing() -> None:
    return None


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits until all are gone, also when the waiting itself is cancelled meanwhile.

    A task that swallowed its cancel (asyncio.wait_for does so before Python 3.12) is cancelled again.
    """
    pending = set(tasks)
    cancelled: asyncio.CancelledError | None = None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
        except asyncio.CancelledError as error:
            cancelled = error
        pending = {task for task in pending if not task.done()}
    if cancelled is not None:
        raise cancelled
