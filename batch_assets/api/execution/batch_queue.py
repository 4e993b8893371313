"""The rows of many batches in one line: which of them an engine gets next.

Higher priority first. Within one priority tenants have equal shares, counted in rows, whatever each of them has waiting
(start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996, of equal weights); within a tenant the batch whose window
ends first.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Iterator

from batch_assets.api.billing.spending import BudgetHolds
from batch_assets.api.execution.batch_run import BatchRun
from gpu_runner.rows import Batch, Urgency

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
BUDGET_SECONDS = 0.25

Waiting = tuple[int, int, BatchRun]  # end of its window, order of coming


class TenantShares:
    """Rows that each tenant has had. One that comes has had as much as those that are there: nobody saves up."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._now = 0.0  # what the tenant had whose turn it was last

    def come(self, tenant: str) -> None:
        """A tenant that had nothing waiting has something."""
        self._had[tenant] = max(self._had.get(tenant, 0.0), self._now)

    def leave(self, tenant: str) -> None:
        """A tenant has nothing waiting. What it had beyond its share is remembered until the others have had it too."""
        self._had = {name: had for name, had in self._had.items() if name != tenant or had > self._now}

    def had(self, tenant: str) -> float:
        """The one that had least is next."""
        return self._had[tenant]

    def take(self, tenant: str, rows: int) -> None:
        """These rows go to an engine."""
        self._now = max(self._now, self._had[tenant])
        self._had[tenant] += rows


class BatchQueue:
    """An iterator for a feed, read by one thread; the other methods are for any thread.

    A batch whose rows cannot be read now is set aside for a second, and the others go on.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[int, dict[str, list[Waiting]]] = {}  # by priority and tenant: a heap
        self._shares: dict[int, TenantShares] = {}
        self._aside: list[tuple[float, int, Waiting]] = []  # until a time of the monotonic clock; priority
        self._order = 0
        self._reading: dict[str, Iterator[Batch]] = {}
        self._closed = False

    def add(self, run: BatchRun) -> None:
        """One more batch; again where more of it is to be read."""
        priority = run.urgency.priority
        with self._condition:
            if any(one[2] is run for one in self._waiting.get(priority, {}).get(run.record.tenant, ())):
                return
            self._aside = [one for one in self._aside if one[2][2] is not run]
            self._order += 1
            self._push(priority, (run.record.expires_at, self._order, run))
            self._condition.notify()

    def _push(self, priority: int, entry: Waiting) -> None:
        tenants = self._waiting.setdefault(priority, {})
        tenant = entry[2].record.tenant
        if tenant not in tenants:
            tenants[tenant] = []
            self._shares.setdefault(priority, TenantShares()).come(tenant)
        heapq.heappush(tenants[tenant], entry)

    def close(self) -> None:
        """Nothing comes any more."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    @property
    def empty(self) -> bool:
        """No batch has rows that were not read."""
        with self._condition:
            return not self._waiting and not self._aside

    def next_urgency(self) -> Urgency | None:
        """The urgency of the batch whose rows are next; None: there is none."""
        with self._condition:
            return self._first()[1].urgency if self._waiting else None

    def take_back(self) -> bool:
        """Whether batches that were set aside are to be read again from now on."""
        with self._condition:
            aside = len(self._aside)
            self._take_back()
            return len(self._aside) < aside

    def __iter__(self) -> BatchQueue:
        return self

    def __next__(self) -> Batch:
        while True:
            with self._condition:
                wait = self._take_back()
                while not self._waiting and not self._closed:
                    self._condition.wait(wait)
                    wait = self._take_back()
                if self._closed:
                    raise StopIteration
                priority, run = self._first()
            if (batch := self._next_of(run, priority)) is not None:
                return batch

    def _first(self) -> tuple[int, BatchRun]:
        priority = max(self._waiting)
        tenants, shares = self._waiting[priority], self._shares[priority]
        tenant = min(tenants, key=lambda name: (shares.had(name), tenants[name][0][:2]))
        return priority, tenants[tenant][0][2]

    def _next_of(self, run: BatchRun, priority: int) -> Batch | None:
        """The next rows of this batch; None: try again, it may have no more."""
        rows = self._reading.get(run.name)
        if rows is None:
            rows = self._reading[run.name] = run.batches()
        try:
            batch = None if run.over else next(rows, None)
        except BudgetHolds:  # until lines that are under way have cost less than they might have
            self._set_aside(run, priority, BUDGET_SECONDS)
            return None
        except Exception as error:  # the store is away, or the lines are damaged: they are written again meanwhile
            log.warning("batch %s: its rows cannot be read now: %s", run.batch_id, type(error).__name__)
            self._set_aside(run, priority, RETRY_SECONDS)
            return None
        with self._condition:
            if batch is not None:
                self._shares[priority].take(run.record.tenant, len(batch.rows) - len(batch.known))
                if not run.unread:
                    self._leave(run, priority)
            elif run.unread and not run.over:  # put back since the reading began, when `add` found it here
                del self._reading[run.name]
            else:
                self._leave(run, priority)
        return batch

    def _set_aside(self, run: BatchRun, priority: int, seconds: float) -> None:
        with self._condition:
            left = self._leave(run, priority)
            self._aside.append((time.monotonic() + seconds, priority, left))

    def _leave(self, run: BatchRun, priority: int) -> Waiting:
        """Take a batch out of the queue; returns its entry."""
        del self._reading[run.name]
        with self._condition:
            tenants, tenant = self._waiting[priority], run.record.tenant
            left = next(one for one in tenants[tenant] if one[2] is run)
            tenants[tenant].remove(left)
            heapq.heapify(tenants[tenant])
            if not tenants[tenant]:
                del tenants[tenant]
                self._shares[priority].leave(tenant)
            if not tenants:
                del self._waiting[priority]
            return left

    def _take_back(self) -> float | None:
        """Batches whose time aside is over are read again. Returns seconds until the next one's, or None."""
        now = time.monotonic()
        for one in [one for one in self._aside if one[0] <= now]:
            self._aside.remove(one)
            self._push(one[1], one[2])
        return min((until - now for until, _, _ in self._aside), default=None)
