"""One batch under way: the lines that are left of it, as its feed takes them, within its budget.

What is done says the store (`kept_rows`): no row that is done is asked for again. Methods block unless they say
otherwise; `note` is called on the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from batch_assets.api.access.request_access import Trace
from batch_assets.api.batches.create import priority_of
from batch_assets.api.batches.snapshot import SNAPSHOT
from batch_assets.api.billing.answer_usage import answer_usage, object_tokens
from batch_assets.api.billing.spending import BatchBudget, BudgetHolds
from batch_assets.api.billing.usage import Tokens
from batch_assets.api.database.batch_records import BatchRecord, Held
from batch_assets.api.execution.storage.kept_rows import KeptRows
from batch_assets.api.execution.storage.local_journal import Rows
from gpu_runner.rows import Batch, Outcome, Row, Urgency
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchFooter

NOTHING_LEFT: Rows = {}


class BatchRun(KeptRows):
    """`budget`: what its lines may cost, where that is bounded."""

    def __init__(
        self, objects: Objects, record: BatchRecord, held: Held, holder: str, budget: BatchBudget | None = None
    ) -> None:
        super().__init__(objects, record, held, holder)
        self.budget = budget
        self.trace: Trace | None = None  # of its calls of engines, where somebody collects them
        self.over = False  # cancelled or expired: what comes now is not kept
        self.lines_damaged = False  # its lines could not be read, and are to be written again
        self.on_lines_damaged: Callable[[], None] = lambda: None  # called in the thread that reads
        self._read: set[str] = set()

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

    def load(self, left: Rows = NOTHING_LEFT) -> None:
        """Read what is done, as `read_kept`, and what that has cost."""
        used = self.read_kept(left, counted=self.budget is not None)
        if self.budget is not None:
            for key, tokens in used.items():
                self.budget.set_part(key, tokens)

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

    def ask_again(self, keys: Collection[str]) -> list[str]:
        """Objects of parts are damaged or gone, found when nothing of this batch is under way: their rows are left.

        Returns the keys of those: what was lost as the last of its GENERATIONS is given up. Neither costs anything.
        """
        again = self.lose(keys)
        self._read.difference_update(again)
        if self.budget is not None:
            for key in keys:
                self.budget.set_part(key, Tokens())
        self.over = self.over and not again
        return again

    @property
    def unread(self) -> bool:
        """Whether another call of `batches` has something."""
        return any(key not in self._read and key not in self._objects for key in self._entries)

    def note(self, key: str, outcome: Outcome) -> None:
        """A row has its outcome. Not blocking."""
        if not self.over:
            self.keep_soon(key, outcome)
            if self.budget is not None:
                self.budget.settle(key, outcome.row_id, answer_usage(outcome).tokens)

    def commit(self, key: str, outcomes: Sequence[Outcome]) -> BatchFooter:
        """Write the object of a part, as `KeptRows.commit`, and what it has cost."""
        written = super().commit(key, outcomes)
        if self.budget is not None and (tokens := object_tokens(written)) is not None:
            self.budget.set_part(key, tokens)  # another's object, where that was there first
        return written
