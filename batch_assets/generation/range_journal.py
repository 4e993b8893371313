"""Finished rows of a run's open batches on their way into the journal of the store, and the segments written so far.

Rows of a write that failed or was cancelled wait for the next one; a segment may hold a row that another one holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager

from batch_assets.generation.range_plan import RunIdentity
from gpu_runner.inference.answer_memory import bytes_of
from gpu_runner.rows import Outcome, Task
from resources.store.dataset_store import DatasetStore

CLOSE_SECONDS = 2.0
# A segment is written from a copy of its rows.
SEGMENT_BYTES = 16 << 20


class RangeJournal:
    """Of one run. `writing` guards each write to the store; it is entered in a thread of `pool`.

    `waiting`: rows that no segment holds yet, by batch. `sequence`: number of the last segment that was begun.
    """

    def __init__(
        self,
        store: DatasetStore,
        identity: RunIdentity,
        task: Task,
        pool: Executor,
        writing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.waiting: dict[str, list[Outcome]] = defaultdict(list)
        self.sequence = 0
        self._store, self._identity, self._task, self._pool, self._writing = store, identity, task, pool, writing
        self._segments: list[tuple[str, frozenset[str]]] = []
        self._flushes = 0
        self._last_write: Future[None] | None = None

    @property
    def flushing(self) -> bool:
        """A flush is under way, and has taken what waited."""
        return self._flushes > 0

    def found(self, path: str, keys: frozenset[str]) -> None:
        """A segment of an earlier run, with rows of these batches: ours to drop when they are committed."""
        self._segments.append((path, keys))

    async def flush(self, committed: Set[str]) -> None:
        """Writes what waits, without rows of committed batches."""
        waiting, self.waiting = self.waiting, defaultdict(list)
        open_rows = {key: rows for key, rows in waiting.items() if key not in committed}
        if not open_rows:
            return
        self._flushes += 1
        try:
            await self._write_portions(list(_portions(open_rows)))
        finally:
            self._flushes -= 1

    async def _write_portions(self, portions: list[dict[str, list[Outcome]]]) -> None:
        while portions:
            self.sequence += 1
            self._last_write = self._pool.submit(self._write_segment, self.sequence, portions[0])
            try:
                await asyncio.wrap_future(self._last_write)
            except BaseException:
                for portion in reversed(portions):
                    for key, rows in portion.items():
                        self.waiting[key][:0] = rows
                raise
            del portions[0]

    def _write_segment(self, sequence: int, batches: Mapping[str, Sequence[Outcome]]) -> None:
        identity = self._identity
        with self._writing():
            path = self._store.journal.append(
                identity.key_range, identity.intent.purpose, identity.run_id, sequence, batches, self._task
            )
        self._segments.append((path, frozenset(batches)))

    def drop_finished(self, committed: Set[str], allowed: Callable[[], bool]) -> None:
        """Deletes segments whose batches are all committed, where that is allowed; for any thread."""
        finished = [segment for segment in list(self._segments) if segment[1] <= committed]
        if not finished or not allowed():
            return
        self._store.objects.delete(path for path, _ in finished)
        for segment in finished:
            with contextlib.suppress(ValueError):  # close() may come while a thread is at this
                self._segments.remove(segment)

    def wait_for_write(self) -> None:
        """Waits some seconds for a write under way: a cancelled flush leaves its thread at work."""
        if self._last_write is not None:
            wait([self._last_write], CLOSE_SECONDS)


def _portions(batches: Mapping[str, Sequence[Outcome]]) -> Iterator[dict[str, list[Outcome]]]:
    """The rows in parts that each make one segment, in order."""
    portion: dict[str, list[Outcome]] = {}
    held = 0
    for key, rows in batches.items():
        for row in rows:
            portion.setdefault(key, []).append(row)
            held += bytes_of(row)[0]
            if held >= SEGMENT_BYTES:
                yield portion
                portion, held = {}, 0
    if portion:
        yield portion
