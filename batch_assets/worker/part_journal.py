"""Finished rows of open parts on their way into the journal of the store, and the segments that are there.

A part is up to 250 rows that are committed as one object. Rows of a write that failed wait for the next one; a segment
may hold a row that another one holds, as a conversation is written again with each turn that was answered.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from gpu_runner.inference.answer_memory import bytes_of
from gpu_runner.rows import Outcome, Task
from resources.store.dataset_store import DatasetStore

SEGMENT_BYTES = 16 << 20  # a segment is written from a copy of its rows

Rows = Mapping[str, Sequence[Outcome]]  # by key of their part


@dataclass(frozen=True, slots=True)
class JournalWriter:
    """Who writes segments: a run, or a hold of an OpenAI batch. Others of the same purpose whose range overlaps read
    them.
    """

    run_id: str
    key_range: tuple[str, str]
    purpose: str = ""


class PartJournal:
    """Of one writer. For several threads; methods that write, delete or list block.

    `closed(key)`: the part is committed, and needs no journal. `writing` guards each write to the store. `written`
    hears of the rows of each segment, once they are there.
    """

    def __init__(
        self,
        store: DatasetStore,
        writer: JournalWriter,
        task: Task,
        *,
        closed: Callable[[str], bool],
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
        written: Callable[[Rows], None] = lambda rows: None,
    ) -> None:
        self.sequence = 0  # of the last segment that was begun
        self._store, self._writer, self._task = store, writer, task
        self._closed, self._guarded, self._written = closed, writing, written
        self._waiting: dict[str, list[Outcome]] = defaultdict(list)
        self._on_their_way: dict[str, list[Outcome]] = {}
        self._segments: dict[str, frozenset[str]] = {}  # path: keys of the parts that it has rows of
        self._guard = threading.Lock()  # of what waits
        self._flush = threading.Lock()  # who flushes waits for a flush that is under way

    def note(self, key: str, outcome: Outcome) -> None:
        """The next `flush` writes this row. Not blocking."""
        with self._guard:
            self._waiting[key].append(outcome)

    def unwritten(self, key: str) -> list[Outcome]:
        """Rows of a part that were noted and that no segment has."""
        with self._guard:
            return [*self._on_their_way.get(key, ()), *self._waiting.get(key, ())]

    @property
    def pending(self) -> bool:
        """Rows wait to be written, or are on their way."""
        with self._guard:  # a flush moves them from the one to the other, and back
            return bool(self._waiting or self._on_their_way)

    @property
    def flushing(self) -> bool:
        """A flush is under way, and has taken what waited."""
        return self._flush.locked()

    def forget(self, key: str) -> None:
        """A part is committed: what waits of it need not be written."""
        with self._guard:
            self._waiting.pop(key, None)

    def flush(self) -> None:
        """Write what waits. What cannot be written waits for the next time.

        On return all that was noted before the call is in the store, whoever wrote it. Raises what the store raises.
        """
        with self._flush:
            with self._guard:
                waiting, self._waiting = self._waiting, defaultdict(list)
                self._on_their_way = {key: _newest(rows) for key, rows in waiting.items() if not self._closed(key)}
            try:
                for portion in list(_portions(self._on_their_way)):
                    self._write(portion)
                    with self._guard:
                        for key, rows in portion.items():
                            del self._on_their_way[key][: len(rows)]
            finally:
                with self._guard:
                    for key, left in self._on_their_way.items():
                        if left:
                            self._waiting[key][:0] = left
                    self._on_their_way = {}

    def append(self, rows: Rows) -> None:
        """Write these rows now, beside what waits. Raises what the store raises."""
        with self._flush:
            self._write(rows)

    def _write(self, rows: Rows) -> None:
        writer = self._writer
        self.sequence += 1
        with self._guarded():
            path = self._store.journal.append(
                writer.key_range, writer.purpose, writer.run_id, self.sequence, rows, self._task
            )
        with self._guard:
            self._segments[path] = frozenset(rows)
        self._written(rows)

    def unread(self) -> list[str]:
        """Paths of segments, of this writer's range and purpose, that it has neither written nor taken in.

        Who reads one decides what its absence means.
        """
        found = self._store.journal.segments(self._writer.key_range, self._writer.purpose)
        return [path for path in found if path not in self._segments]

    def take_in(self, path: str, rows: Rows) -> None:
        """A segment of an earlier writer is this one's to delete, when the parts that it has rows of are committed.

        One of the same writer, before its process was started again, keeps its place: numbers go on after it.
        """
        with self._guard:
            self._segments[path] = frozenset(rows)
            run_id, _, number = path.rpartition("/")[2].removesuffix(".arrow").rpartition("-")
            if run_id == self._writer.run_id and number.isdecimal():
                self.sequence = max(self.sequence, int(number))

    def drop_finished(self, done: Callable[[str], bool], allowed: Callable[[], bool] = lambda: True) -> None:
        """Delete segments whose parts are all `done`, where that is allowed."""
        with self._guard:
            finished = [path for path, keys in self._segments.items() if all(map(done, keys))]
        if finished and allowed():
            self._delete(finished)

    def drop_all(self) -> None:
        """Delete all segments: nobody needs them any more."""
        with self._flush:
            self._delete(list(self._segments))

    def _delete(self, paths: Sequence[str]) -> None:
        self._store.objects.delete(paths)
        with self._guard:
            for path in paths:
                self._segments.pop(path, None)

    def wait_for_write(self, seconds: float) -> None:
        """Wait so long for a write that is under way."""
        if self._flush.acquire(timeout=seconds):
            self._flush.release()


def _newest(rows: Sequence[Outcome]) -> list[Outcome]:
    """Of each row the last one: each turn of a conversation has those before it."""
    return list({row.row_id: row for row in rows}.values())


def _portions(parts: Rows) -> Iterator[dict[str, list[Outcome]]]:
    """The rows in portions that each make one segment, in order."""
    portion: dict[str, list[Outcome]] = {}
    held = 0
    for key, rows in parts.items():
        for row in rows:
            portion.setdefault(key, []).append(row)
            held += bytes_of(row)[0]
            if held >= SEGMENT_BYTES:
                yield portion
                portion, held = {}, 0
    if portion:
        yield portion
