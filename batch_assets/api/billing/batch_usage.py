"""Usage of batches, on its way into the ledger: by part while a batch is under way, the rest when it ends.

A part is durable before it is told here, and the end of a batch settles whatever is missing, in the transaction
that ends it. So the queue is bounded, and what a kill takes of it is lost to nobody.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import sqlalchemy as sa

from batch_assets.api.billing.answer_usage import object_tokens
from batch_assets.api.billing.price_list import PriceList, TokenPrices, charged
from batch_assets.api.billing.spending import (
    BUDGET,
    BatchBudget,
    Spending,
    SpendingRecords,
    parse_budget,
    write_spending,
)
from batch_assets.api.billing.usage import Kind, Tokens, UsageKey, Used, day_of
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.spec.deadline import parse_seconds
from resources.store.dataset_store import BatchFooter

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
RETRY_SECONDS = 2.0
EMBEDDINGS = "/v1/embeddings"

Settle = Callable[[sa.Connection], None]  # what goes into the transaction that ends a batch


@dataclass(frozen=True, slots=True)
class BatchCharges:
    """Under which class a batch is charged, and by which prices."""

    prices: PriceList

    def prices_of(self, record: BatchRecord) -> TokenPrices | None:
        """What its tokens cost; None: nobody has said."""
        return self.prices.batch_prices(record.model or "", window_seconds(record))

    def key(self, record: BatchRecord, now: float) -> UsageKey:
        """The heading of what it uses today."""
        model = record.model or ""
        service_class = self.prices.batch_class(model, window_seconds(record))
        return UsageKey(day_of(now), record.tenant, service_class, model, kind_of(record.endpoint))

    def used(self, record: BatchRecord, tokens: Tokens, answers: int) -> Used:
        """What tokens of this batch cost."""
        return charged(self.prices_of(record), tokens, answers)


def window_seconds(record: BatchRecord) -> float:
    """The completion window."""
    return parse_seconds(record.completion_window.strip()) or float(record.expires_at - record.created_at)


def kind_of(endpoint: str) -> Kind:
    """What requests to an endpoint are counted as."""
    return Kind.EMBEDDINGS if endpoint == EMBEDDINGS else Kind.COMPLETIONS


class BatchUsage:
    """`committed` may be called from any thread and never waits. `clock`: Unix seconds."""

    def __init__(
        self, ledger: UsageLedger, charges: BatchCharges, spending: SpendingRecords, clock: Callable[[], float]
    ) -> None:
        self._ledger, self.charges, self.spending, self._clock = ledger, charges, spending, clock
        self._queue: queue.Queue[tuple[BatchRecord, BatchFooter] | None] = queue.Queue(MOST_WAITING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-usage", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self, seconds: float = 3.0) -> None:
        """End; what is left is settled with the end of its batch."""
        self._closed.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def committed(self, record: BatchRecord, footer: BatchFooter) -> None:
        """A part was written. One of an earlier version, which does not say what it is charged, is settled with
        the end of its batch.
        """
        if object_tokens(footer) is None:
            return
        try:
            self._queue.put_nowait((record, footer))
        except queue.Full:
            log.warning("usage: %d batch objects wait; those of %s are settled at its end", MOST_WAITING, record.id)

    def settle(self, record: BatchRecord, tokens: Tokens, answers: int, *, paused: bool = False) -> Settle:
        """All that a batch used, to be called in the transaction that ends it. `paused`: it waited for its budget."""
        key, used = self.charges.key(record, self._clock()), self.charges.used(record, tokens, answers)

        def settle(connection: sa.Connection) -> None:
            UsageLedger.settle(connection, record.id, key, used)
            if BUDGET in record.metadata_values():
                write_spending(connection, record.id, Spending(used.amount, paused))

        return settle

    def budget(self, record: BatchRecord, context: int | None = None) -> BatchBudget | None:
        """The budget of a batch; None: it has none, or its tokens have no price (`unpriced`)."""
        limit, prices = parse_budget(record.metadata_values()), self.charges.prices_of(record)
        return None if limit is None or prices is None else BatchBudget(limit, prices, context)

    def unpriced(self, record: BatchRecord, model: str) -> bool:
        """Whether the batch has a budget that nobody can keep to."""
        known = replace(record, model=model)
        return BUDGET in record.metadata_values() and self.charges.prices_of(known) is None

    def _run(self) -> None:
        while not self._closed.is_set():
            if (found := self._queue.get()) is not None:
                self._write(*found)

    def _write(self, record: BatchRecord, footer: BatchFooter) -> None:
        if (tokens := object_tokens(footer)) is None:
            return
        key, used = self.charges.key(record, self._clock()), self.charges.used(record, tokens, footer.ok)
        while not self._closed.is_set():
            try:
                self._ledger.add_part(record.id, footer.key, key, used)
                return
            except sa.exc.SQLAlchemyError as error:
                log.warning("usage: the ledger cannot be written now: %s", type(error).__name__)
                self._closed.wait(RETRY_SECONDS)
