"""What is kept of a batch: the journal of its rows, and an object for each part of 250 rows.

The store says what is done: a row is done when the journal or an object has it. Whoever takes a batch over reads
both. Methods block unless they say otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from batch_assets.api.batches.snapshot import SNAPSHOT, batch_store
from batch_assets.api.billing.answer_usage import object_tokens, tokens_of
from batch_assets.api.billing.usage import Tokens
from batch_assets.api.database.batch_records import BatchRecord, Held
from batch_assets.api.execution.storage.local_journal import Rows
from batch_assets.api.execution.storage.read_ahead import read_ahead
from batch_assets.worker.part_journal import JournalWriter, PartJournal
from gpu_runner.rows import Outcome, Task
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore

log = logging.getLogger(__name__)

Found = TypeVar("Found")

KEYS = ("00000", "99999")
GENERATIONS = 3  # of an object: where all of them are lost its lines are not asked for once more
READINGS = 2  # of an object before it counts as damaged or gone
_COLUMNS: Task = "chat"  # outputs are text, whatever the endpoint: the whole answer


class KeptRows:
    """`held` is the right to write it. `completed` and `failed` count lines that are kept: they survive a kill."""

    def __init__(self, objects: Objects, record: BatchRecord, held: Held, holder: str) -> None:
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

    def read_kept(self, left: Rows, *, counted: bool) -> dict[str, Tokens]:
        """Read the snapshot's index and what is done. Raises CorruptObject for the index, or what the store raises.

        A part whose object is damaged or gone is not done: those of its rows that the journal has are kept, the others
        are left, unless it was their last generation. `left`: rows that the journal may not have yet; it has them then.
        Returns the tokens of what is kept, by key, where they are `counted`.
        """
        entries = self.store.entries(SNAPSHOT)
        self._entries = {entry.key: entry for entry in entries}
        if self.record.epoch <= 1 and not self.record.completed + self.record.failed:
            found: dict[str, BatchObject] = {}
        else:
            found = self.store.current_objects(entries)
        used: dict[str, Tokens] = {}
        committed_as = partial(self._committed, counted=counted)
        for (key, part), committed in zip(found.items(), read_ahead(committed_as, found.values()), strict=True):
            if committed is None:
                self._lose(part)
                continue
            footer, tokens = committed
            self._objects[key] = part
            self._count(key, footer.ok, footer.dead, committed=True)
            used[key] = tokens
        segments = self._journal.unread() if self.held.epoch > 1 else []
        for path, outcomes in zip(segments, read_ahead(self._segment, segments), strict=True):
            self._journal.take_in(path, outcomes)
            self._keep_open(outcomes)
        self._keep_open(dict.fromkeys(self._journaled, ()))  # read by a call that the store broke off: counted again
        self._take_over(left)
        if counted:
            used |= {key: tokens_of(kept.values()) for key, kept in self._journaled.items()}
        return used

    def _segment(self, path: str) -> dict[str, list[Outcome]]:
        try:
            return self.store.journal.read(path)
        except (CorruptObject, FileNotFoundError):  # deleted by whoever has committed its parts
            return {}

    def _committed(self, part: BatchObject, *, counted: bool) -> tuple[BatchFooter, Tokens] | None:
        """What an object says of itself, with its tokens where they are counted; None: it is damaged or gone."""
        footer = self._whole(part, self.store.footer)
        if footer is None:
            return None
        tokens = object_tokens(footer) if counted else Tokens()
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

    def lose(self, keys: Collection[str]) -> list[str]:
        """These objects are damaged or gone. Returns the keys of those whose rows are left: of the others that was the
        last generation.
        """
        with self._guard:
            return [key for key in keys if self._lose(self._objects[key])]

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

    def keep_soon(self, key: str, outcome: Outcome) -> None:
        """The next `write_journal` writes this row to the journal. Not blocking."""
        self._journal.note(key, outcome)

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
        """Write the object of a part, create-only. In place of a damaged one comes the next generation."""
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
