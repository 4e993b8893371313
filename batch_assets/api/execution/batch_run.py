"""One batch under way: what is kept of it, and the lines that are left, as its feed takes them, within its budget.

The store says what is done: a row is done when the journal, or the object of its part of 250 rows, has it. Whoever
takes a batch over reads both, and asks for no such row again. Methods block unless they say otherwise.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from batch_assets.api.access.request_access import Trace
from batch_assets.api.batches.create import priority_of
from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.billing.answer_usage import answer_usage, object_tokens, tokens_of
from batch_assets.api.billing.spending import BatchBudget, BudgetHolds
from batch_assets.api.billing.usage import Tokens
from batch_assets.api.database.batch_records import BatchRecord, Held
from batch_assets.api.execution.local_journal import Rows
from batch_assets.worker.part_journal import JournalWriter, PartJournal
from gpu_runner.rows import Batch, Outcome, Row, Task, Urgency
from resources.objects.object_read_ahead import read_ahead
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore

log = logging.getLogger(__name__)

Found = TypeVar("Found")

NOTHING_LEFT: Rows = {}
KEYS = ("00000", "99999")
GENERATIONS = 3  # of an object: where all of them are lost its lines are not asked for once more
READS = 16  # at once, of objects and of segments
READINGS = 2  # of an object before it counts as damaged or gone
_COLUMNS: Task = "chat"  # outputs are text, whatever the endpoint: the whole answer


class BatchRun:
    """`held` is the right to write it, `budget` what its lines may cost, where that is bounded.

    `completed` and `failed` count lines that are kept: they survive a kill.
    """

    def __init__(
        self, objects: Objects, record: BatchRecord, held: Held, holder: str, budget: BatchBudget | None = None
    ) -> None:
        self.record, self.held = record, held
        self.store: DatasetStore = batch_store(objects, record.id)
        self.completed = self.failed = 0
        self.given_up: set[str] = set()  # keys of objects whose last generation is damaged or gone
        self._run_id = f"{held.epoch:06d}_{holder}"[:60]
        self._entries: dict[str, BatchEntry] = {}
        self._objects: dict[str, BatchObject] = {}
        self._journaled: dict[str, dict[str, Outcome]] = defaultdict(dict)
        self._counted: dict[str, tuple[int, int]] = {}
        self._generations: dict[str, int] = {}  # of objects to come, where that is not the first one
        self._guard = threading.RLock()  # of what is known
        writer = JournalWriter(self._run_id, KEYS)
        self._journal = PartJournal(
            self.store, writer, _COLUMNS, closed=self._objects.__contains__, written=self._keep_open
        )
        self.budget = budget
        self.trace: Trace | None = None  # of its calls of engines, where somebody collects them
        self.over = False  # cancelled or expired: what comes now is not kept
        self.lines_damaged = False  # its lines could not be read, and are to be written again
        self.on_lines_damaged: Callable[[], None] = lambda: None  # called in the thread that reads
        self._read: set[str] = set()

    @property
    def batch_id(self) -> str:
        """The id of its batch."""
        return self.record.id

    @property
    def done(self) -> bool:
        """The objects of all parts are written."""
        return len(self._objects) == len(self._entries)

    @property
    def objects(self) -> Mapping[str, BatchObject]:
        """The objects so far, by key."""
        return self._objects

    @property
    def entries(self) -> Sequence[BatchEntry]:
        """All parts, in order."""
        return list(self._entries.values())

    def load(self, left: Rows = NOTHING_LEFT) -> None:
        """Read the snapshot's index and what is done. Raises CorruptObject for the index, or what the store raises.

        A part whose object is damaged or gone is not done: those of its rows that the journal has are kept, the others
        are left, unless it was their last generation. `left`: rows that the journal may not have yet; it has them then.
        """
        entries = self.store.entries(SNAPSHOT)
        self._entries = {entry.key: entry for entry in entries}
        if self.record.epoch <= 1 and not self.record.completed + self.record.failed:
            found: dict[str, BatchObject] = {}
        else:
            found = self.store.current_objects(entries)
        used: dict[str, Tokens] = {}
        for (key, part), committed in zip(
            found.items(), read_ahead(self._committed, found.values(), READS), strict=True
        ):
            if committed is None:
                self._lose(part)
                continue
            footer, used[key] = committed
            self._objects[key] = part
            self._count(key, footer.ok, footer.dead, committed=True)
        segments = self._journal.unread() if self.held.epoch > 1 else []
        for path, outcomes in zip(segments, read_ahead(self._segment, segments, READS), strict=True):
            self._journal.take_in(path, outcomes)
            self._keep_open(outcomes)
        self._keep_open(dict.fromkeys(self._journaled, ()))  # read by a call that the store broke off: counted again
        self._take_over(left)
        if self.budget is not None:
            used |= {key: tokens_of(kept.values()) for key, kept in self._journaled.items()}
            for key, tokens in used.items():
                self.budget.set_part(key, tokens)

    def _segment(self, path: str) -> dict[str, list[Outcome]]:
        try:
            return self.store.journal.read(path)
        except (CorruptObject, FileNotFoundError):  # deleted by whoever has committed its parts
            return {}

    def _committed(self, part: BatchObject) -> tuple[BatchFooter, Tokens] | None:
        """What an object says of itself, with its tokens where a budget counts them; None: it is damaged or gone."""
        footer = self._whole(part, self.store.footer)
        if footer is None:
            return None
        tokens = object_tokens(footer) if self.budget is not None else Tokens()
        if tokens is not None:
            return footer, tokens
        outcomes = self._whole(part, self.store.outcomes)  # an earlier version has written it
        return None if outcomes is None else (footer, tokens_of(outcomes))

    def _whole(self, part: BatchObject, read: Callable[[BatchObject], Found]) -> Found | None:
        """What is read of an object; None: it is damaged, or is not in the store. Raises as a store that is away.

        It is read again before that is believed: what was wrong may have been the way from the store.
        """
        for _ in range(READINGS):
            try:
                return read(part)
            except CorruptObject:
                found = "is damaged"
            except FileNotFoundError:
                found = "is gone"
        log.error("batch %s: object %s %s", self.batch_id, part.name, found)
        return None

    def ask_again(self, keys: Collection[str]) -> list[str]:
        """Objects of parts are damaged or gone, found when nothing of this batch is under way: their rows are left.

        Returns the keys of those: what was lost as the last of its GENERATIONS is given up. Neither costs anything.
        """
        with self._guard:
            again = [key for key in keys if self._lose(self._objects[key])]
        self._read.difference_update(again)
        if self.budget is not None:
            for key in keys:
                self.budget.set_part(key, Tokens())
        self.over = self.over and not again
        return again

    def _lose(self, part: BatchObject) -> bool:
        """An object is damaged or gone. Its rows are left; False: they are not, that was its last generation.

        What the journal has of them is kept in both cases.
        """
        key = part.key
        self.given_up.discard(key)
        self._objects.pop(key, None)
        self._count(key, 0, 0)
        if part.generation + 1 < GENERATIONS:
            self._generations[key] = part.generation + 1
            return True
        log.error("batch %s: %d generations of object %s are lost: its lines fail", self.batch_id, GENERATIONS, key)
        self._objects[key] = part
        self.given_up.add(key)
        self._count(key, 0, self._entries[key].rows, committed=True)
        return False

    def _is_open(self, key: str) -> bool:
        """Whether what is kept of a part is what the journal has."""
        return key in self._entries and (key not in self._objects or key in self.given_up)

    def _take_over(self, left: Rows) -> None:
        rows = {
            key: [row for name, row in found.items() if name not in self._journaled.get(key, {})]
            for key, found in left.items()
            if self._is_open(key)
        }
        if rows := {key: found for key, found in rows.items() if found}:
            self._journal.append(rows)

    def _keep_open(self, rows: Mapping[str, Sequence[Outcome]]) -> None:
        """The journal has these rows, too: of a part that is committed it is not asked any more."""
        with self._guard:
            for key, found in rows.items():
                if self._is_open(key):
                    self._keep(key, found)

    def _keep(self, key: str, rows: Sequence[Outcome]) -> None:
        with self._guard:
            self._journaled[key].update({row.row_id: row for row in rows})
            kept = self._journaled[key].values()
            ok, rest = sum(row.ok for row in kept), sum(not row.ok for row in kept)
            if key in self.given_up:
                rest = self._entries[key].rows - ok
            self._count(key, ok, rest, committed=key in self.given_up)

    def _count(self, key: str, ok: int, dead: int, *, committed: bool = False) -> None:
        with self._guard:
            if key in self._objects and not committed:
                return
            before = self._counted.get(key, (0, 0))
            self._counted[key] = (ok, dead)
            self.completed += ok - before[0]
            self.failed += dead - before[1]

    @property
    def open_entries(self) -> list[BatchEntry]:
        """Parts without an object, in order."""
        return [entry for key, entry in self._entries.items() if key not in self._objects]

    def known(self, key: str) -> dict[str, Outcome]:
        """Outcomes of a part that no engine is to be asked for, in the journal or on their way there."""
        new = {row.row_id: row for row in self._journal.unwritten(key)}  # first: rows go from here to there
        with self._guard:
            return {**self._journaled.get(key, {}), **new}

    @property
    def unwritten(self) -> bool:
        """Rows wait for the journal, or are on their way there."""
        return self._journal.pending

    def write_journal(self) -> None:
        """Write what waits to the journal. What cannot be written waits for the next time.

        On return all that was noted before the call is in the journal, whoever wrote it.
        """
        self._journal.flush()

    def commit(self, key: str, outcomes: Sequence[Outcome]) -> BatchFooter:
        """Write the object of a part, create-only, and what it has cost. In place of a damaged one comes the next
        generation.
        """
        while True:
            part = BatchObject(key, self._entries[key].data_version, self._generations.get(key, 0))
            try:
                written = self._create(part, outcomes)
                break
            except CorruptObject:
                if not self.store.objects.exists(self.store.batch_path(part)):
                    raise  # not of an object that is there: these are outcomes of other rows
                log.error("batch %s: object %s is damaged", self.batch_id, part.name)
                self._generations[key] = part.generation + 1
        with self._guard:
            self._count(key, written.ok, written.dead, committed=True)
            self._objects[key] = part
            self._journaled.pop(key, None)
        self._journal.forget(key)
        if self.budget is not None and (tokens := object_tokens(written)) is not None:
            self.budget.set_part(key, tokens)  # another's object, where that was there first
        return written

    def _create(self, part: BatchObject, outcomes: Sequence[Outcome]) -> BatchFooter:
        """Write it, or adopt the one that is there. Raises CorruptObject for that, and for outcomes of other rows."""
        footer = BatchFooter.of(
            self.store.dataset,
            self._entries[part.key],
            outcomes,
            snapshot=SNAPSHOT,
            generation=part.generation,
            epoch=self.held.epoch,
            run_id=self._run_id,
            root_run_id=self.batch_id,
            cached_tokens=tokens_of(outcomes).cached_tokens,
        )
        return self.store.commit(footer, outcomes, _COLUMNS)[0]

    def tidy(self) -> None:
        """Delete segments of the journal whose rows are all in objects."""
        self._journal.drop_finished(lambda key: key in self._objects and key not in self.given_up)

    def drop_journal(self) -> None:
        """Delete all segments of the journal: the batch is over."""
        self._journal.drop_all()

    def outcomes(self, key: str) -> Mapping[str, Outcome] | None:
        """What is kept of a part, by row id; None: its object is damaged or gone."""
        with self._guard:  # a commit moves rows from the one to the other
            part = self._objects.get(key)
            if part is None:
                return dict(self._journaled.get(key, {}))
        outcomes = self._whole(part, self.store.outcomes)
        return None if outcomes is None else {outcome.row_id: outcome for outcome in outcomes}

    def journaled(self, key: str) -> Mapping[str, Outcome]:
        """What the journal has of a part whose object is damaged or gone."""
        return self._journaled.get(key, {})

    # what its feed takes

    @property
    def name(self) -> str:
        """Its batch and the hold: what is left in a feed of an earlier hold is another's."""
        return f"{self.record.id}.{self.held.epoch}"

    @functools.cached_property
    def urgency(self) -> Urgency:
        """Its place among the batches of its model: priority, tenant, end of its window."""
        record = self.record
        return Urgency(priority_of(record.metadata_values()), record.tenant, float(record.expires_at))

    @property
    def paused(self) -> bool:
        """Its budget is used up, and none of its lines is under way. That is so until its window ends."""
        return self.budget is not None and self.budget.paused

    def batches(self) -> Iterator[Batch]:
        """What is left to do, as the feed takes it, in order, each once. Rows that the budget does not pay for
        now are left out: `put_back` has them read again.

        Raises as the store, BudgetHolds, and CorruptObject, which sets `lines_damaged`; call again to go on.
        """
        try:
            yield from self._batches()
        except CorruptObject:
            self.lines_damaged = True
            self.on_lines_damaged()
            raise

    def _batches(self) -> Iterator[Batch]:
        if self.budget is not None:
            self.budget.check()
        left = [entry for entry in self.open_entries if entry.key not in self._read]
        for entry, rows in self.store.rows(self.store.manifest(SNAPSHOT), left):
            known = self.known(entry.key)
            admitted = rows if self.budget is None else self._admitted(self.budget, rows, known)
            self._read.add(entry.key)
            yield Batch(entry.key, tuple(admitted), known, self.urgency, self.name)

    def _admitted(self, budget: BatchBudget, rows: Sequence[Row], known: Mapping[str, Outcome]) -> Sequence[Row]:
        """Without the rows that the budget does not pay for now; raises BudgetHolds when that is all that are left."""
        left = [row for row in rows if row.row_id not in known]
        admitted = budget.admit([(row.row_id, row.prompt) for row in left])
        if left and not admitted:
            raise BudgetHolds
        later = {row.row_id for row in left[admitted:]}
        return [row for row in rows if row.row_id not in later]

    def is_whole(self, key: str, outcomes: Sequence[Outcome]) -> bool:
        """Whether these are all rows of a part: no budget has left some out."""
        return len(outcomes) == self._entries[key].rows

    def put_back(self, key: str) -> None:
        """Rows of this part were left out: it is to be read again, by the next call of `batches`."""
        self._read.discard(key)

    @property
    def unread(self) -> bool:
        """Whether another call of `batches` has something."""
        return any(key not in self._read and key not in self._objects for key in self._entries)

    def note(self, key: str, outcome: Outcome) -> None:
        """A row has its outcome. Not blocking."""
        if not self.over:
            self._journal.note(key, outcome)
            if self.budget is not None:
                self.budget.settle(key, outcome.row_id, answer_usage(outcome).tokens)
