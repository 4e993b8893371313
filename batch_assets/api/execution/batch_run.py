"""One batch under way: what is left of it, its journal, and its batch objects of 250 rows each.

The store says what is done: a row is done when the journal or a batch object has it. Whoever takes a batch over reads
both, so no row that is done is asked for again. Methods block unless they say otherwise; `note` is called on the loop.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from batch_assets.api.access.request_access import Trace
from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.billing.spending import BatchBudget, BudgetHolds
from batch_assets.api.billing.usage import Tokens
from batch_assets.api.execution.local_journal import Rows
from batch_assets.api.execution.read_ahead import read_ahead
from batch_assets.api.execution.stops import STOPPED, marked
from batch_assets.api.records.batches import BatchRecord, Held
from gpu_runner.rows import Batch, Origin, Outcome, Row, Task
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore

log = logging.getLogger(__name__)

HELD_BACK = "budget_held_back"
_NOBODY = Origin("", "", "", "", False, "")

KEYS = ("00000", "99999")
NOTHING_LEFT: Rows = {}
_COLUMNS: Task = "chat"  # outputs are text, whatever the endpoint: the whole answer


def held_back(row: Row) -> Outcome:
    """In place of the outcome of a row that the budget does not pay for now. Never kept."""
    return Outcome(row.row_id, row.row_key, None, None, 0, 0, 0, HELD_BACK, None, _NOBODY, 0.0, 0.0)


class BatchRun:
    """`held` is the right to write it. `completed` and `failed` count lines that are kept: they survive a kill."""

    def __init__(
        self, objects: Objects, record: BatchRecord, held: Held, holder: str, budget: BatchBudget | None = None
    ) -> None:
        self.record, self.held, self.budget = record, held, budget
        self.store: DatasetStore = batch_store(objects, record.id)
        self.trace: Trace | None = None  # of its calls of engines, where somebody collects them
        self.over = False  # cancelled or expired: what comes now is not kept
        self.completed = self.failed = 0
        self._run_id = f"{held.epoch:06d}_{holder}"[:60]
        self._entries: dict[str, BatchEntry] = {}
        self._objects: dict[str, BatchObject] = {}
        self._journaled: dict[str, dict[str, Outcome]] = defaultdict(dict)
        self._segments: list[tuple[str, frozenset[str]]] = []
        self._waiting: dict[str, list[Outcome]] = defaultdict(list)
        self._flushing: Mapping[str, Sequence[Outcome]] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        self._read: set[str] = set()
        self._sequence = 0
        self._guard = threading.RLock()  # of what is known
        self._writing = threading.Lock()  # of the journal: who flushes waits for a flush that is under way

    @property
    def batch_id(self) -> str:
        """The id of its batch."""
        return self.record.id

    @property
    def name(self) -> str:
        """Its batch and the hold: what is left in a feed of an earlier hold is another's."""
        return f"{self.record.id}.{self.held.epoch}"

    @property
    def done(self) -> bool:
        """All batch objects are written."""
        return len(self._objects) == len(self._entries)

    @property
    def paused(self) -> bool:
        """Its budget is used up, and none of its lines is under way. That is so until its window ends."""
        return self.budget is not None and self.budget.paused

    @property
    def objects(self) -> Mapping[str, BatchObject]:
        """The batch objects so far, by key."""
        return self._objects

    @property
    def entries(self) -> Sequence[BatchEntry]:
        """All batches of 250 rows, in order."""
        return list(self._entries.values())

    def load(self, left: Rows = NOTHING_LEFT) -> None:
        """Read the snapshot's index and what is done. Raises CorruptObject, or what the store raises.

        `left`: rows that the journal may not have yet; it has them then.
        """
        entries = self.store.entries(SNAPSHOT)
        self._entries = {entry.key: entry for entry in entries}
        if self.record.epoch <= 1 and not self.record.completed + self.record.failed:
            found: dict[str, BatchObject] = {}
        else:
            found = self.store.current_objects(entries)
        segments = self.store.journal.segments(KEYS) if self.held.epoch > 1 else []
        for path, outcomes in zip(segments, read_ahead(self._segment, segments), strict=True):
            self._take_in(path, outcomes, found)
        used = []
        for (key, batch), footer in zip(found.items(), read_ahead(self.store.footer, found.values()), strict=True):
            self._objects[key] = batch
            self._count(key, footer.ok, footer.dead, committed=True)
            used.append(Tokens(footer.prompt_tokens, 0, footer.completion_tokens))
        self._take_over(left)
        if self.budget is not None:  # last: nothing is counted twice when a call that failed is made again
            kept = [row for rows in self._journaled.values() for row in rows.values()]
            for tokens in [*used, *(Tokens(row.prompt_tokens, 0, row.completion_tokens) for row in kept)]:
                self.budget.add(tokens)

    def _take_over(self, left: Rows) -> None:
        rows = {
            key: [row for name, row in found.items() if name not in self._journaled.get(key, {})]
            for key, found in left.items()
            if key in self._entries and key not in self._objects
        }
        if rows := {key: found for key, found in rows.items() if found}:
            with self._writing:
                self._sequence += 1
                self._write_segment(rows)

    def _segment(self, path: str) -> Mapping[str, list[Outcome]]:
        try:
            return self.store.journal.read(path)
        except FileNotFoundError:
            return {}

    def _take_in(self, path: str, outcomes: Mapping[str, list[Outcome]], committed: Mapping[str, BatchObject]) -> None:
        self._segments.append((path, frozenset(outcomes)))
        for key, rows in outcomes.items():
            if key in self._entries and key not in committed:
                self._journaled[key].update({row.row_id: row for row in rows})
                kept = self._journaled[key].values()
                self._count(key, sum(row.ok for row in kept), sum(not row.ok for row in kept))

    def _count(self, key: str, ok: int, dead: int, *, committed: bool = False) -> None:
        with self._guard:
            if key in self._objects and not committed:
                return
            before = self._counted.get(key, (0, 0))
            self._counted[key] = (ok, dead)
            self.completed += ok - before[0]
            self.failed += dead - before[1]

    def batches(self) -> Iterator[Batch]:
        """What is left to do, as the feed takes it, in order, each once.

        Raises as the store, and BudgetHolds; call again to go on.
        """
        if self.budget is not None:
            self.budget.check()
        done = self._objects.keys() | self._read
        left = [entry for key, entry in self._entries.items() if key not in done]
        for entry, rows in self.store.rows(self.store.manifest(SNAPSHOT), left):
            key = f"{self.name}/{entry.key}"
            asked = tuple(replace(row, batch=key, prompt=marked(self.name, row.prompt)) for row in rows)
            known = self._known(entry.key)
            if self.budget is not None:
                self._hold_back(self.budget, rows, known)
            self._read.add(entry.key)
            yield Batch(key, asked, known)

    def _known(self, key: str) -> dict[str, Outcome]:
        """Outcomes of a batch of 250 rows that no engine is to be asked for, in the journal or on their way there."""
        with self._guard:
            new = [*self._flushing.get(key, ()), *self._waiting.get(key, ())]
            return {**self._journaled.get(key, {}), **{row.row_id: row for row in new}}

    def _hold_back(self, budget: BatchBudget, rows: Sequence[Row], known: dict[str, Outcome]) -> None:
        """Mark the rows that the budget does not pay for now; raises BudgetHolds when that is all of them."""
        left = [row for row in rows if row.row_id not in known]
        admitted = budget.admit([(row.row_id, row.prompt) for row in left])
        if left and not admitted:
            raise BudgetHolds
        known |= {row.row_id: held_back(row) for row in left[admitted:]}

    def put_back(self, key: str) -> None:
        """Rows of this batch of 250 were held back: it is to be read again, by the next call of `batches`."""
        self._read.discard(key)

    @property
    def unread(self) -> bool:
        """Whether another call of `batches` has something."""
        return any(key not in self._read and key not in self._objects for key in self._entries)

    # on the loop

    def note(self, key: str, outcome: Outcome) -> None:
        """A row has its outcome. Not blocking."""
        if not self.over and outcome.error != STOPPED:
            with self._guard:
                self._waiting[key].append(outcome)
            if self.budget is not None:
                tokens = Tokens(outcome.prompt_tokens, 0, outcome.completion_tokens)
                self.budget.settle(outcome.row_id, tokens)

    @property
    def unwritten(self) -> bool:
        """Rows wait for the journal, or are on their way there."""
        return bool(self._waiting or self._flushing)

    # in threads

    def flush(self) -> None:
        """Write what waits to the journal. What cannot be written waits for the next time.

        On return all that was noted before the call is in the journal, whoever wrote it.
        """
        with self._writing:
            with self._guard:
                waiting, self._waiting = self._waiting, defaultdict(list)
                rows = {key: list(found) for key, found in waiting.items() if key not in self._objects}
                self._sequence += 1
                self._flushing = rows
            try:
                if rows:
                    self._append(rows)
            finally:
                self._flushing = {}

    def _append(self, rows: Mapping[str, list[Outcome]]) -> None:
        try:
            self._write_segment(rows)
        except BaseException:
            with self._guard:
                for key, found in rows.items():
                    self._waiting[key][:0] = found
            raise

    def _write_segment(self, rows: Mapping[str, list[Outcome]]) -> None:
        path = self.store.journal.append(KEYS, "", self._run_id, self._sequence, rows, _COLUMNS)
        self._segments.append((path, frozenset(rows)))
        with self._guard:
            for key, found in rows.items():
                if key not in self._objects:
                    self._journaled[key].update({row.row_id: row for row in found})
                    kept = self._journaled[key].values()
                    self._count(key, sum(row.ok for row in kept), sum(not row.ok for row in kept))

    def commit(self, key: str, outcomes: Sequence[Outcome]) -> BatchFooter:
        """Write the object of 250 rows, create-only."""
        entry = self._entries[key]
        footer = BatchFooter.of(
            self.store.dataset,
            entry,
            outcomes,
            snapshot=SNAPSHOT,
            generation=0,
            epoch=self.held.epoch,
            run_id=self._run_id,
            root_run_id=self.batch_id,
        )
        written, _ = self.store.commit(footer, outcomes, _COLUMNS)
        with self._guard:
            self._count(key, written.ok, written.dead, committed=True)
            self._objects[key] = BatchObject(key, entry.data_version, 0)
            self._waiting.pop(key, None)
            self._journaled.pop(key, None)
        return written

    def drop_segments(self, *, all_of_them: bool = False) -> None:
        """Delete segments of the journal whose rows are all in batch objects."""
        with self._writing:
            done = [one for one in self._segments if all_of_them or one[1] <= self._objects.keys()]
            self.store.objects.delete(path for path, _ in done)
            self._segments = [one for one in self._segments if one not in done]

    def outcomes(self, key: str) -> Mapping[str, Outcome]:
        """What is kept of a batch of 250 rows, by row id."""
        with self._guard:  # a commit moves rows from the one to the other
            batch = self._objects.get(key)
            if batch is None:
                return dict(self._journaled.get(key, {}))
        try:
            return {outcome.row_id: outcome for outcome in self.store.outcomes(batch)}
        except CorruptObject:
            log.error("batch %s: object %s is damaged", self.batch_id, batch.name)
            raise
