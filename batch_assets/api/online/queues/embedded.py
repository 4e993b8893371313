"""The queue of one process: a SQLite file in DAGSTER_HOME. Who holds the file's lock has the queue.

The file (`task_table`) has what must survive: tasks, tries, results. Which task is whose turn is in memory, tenant by
tenant, and made again from the file when a process opens it: whatever was claimed by a process that died waits again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import heapq
import itertools
import logging
import os
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from batch_assets.api.online.queues import task_table as table
from batch_assets.api.online.queues.group_commit import GroupCommit
from batch_assets.api.online.queues.queue_protocol import (
    Appended,
    Claim,
    DeadLetter,
    OnceKey,
    QueueAway,
    QueueDepth,
    StoredTask,
)
from batch_assets.api.online.queues.tasks import OnlineTask, TaskResult

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE, LOCK = "online.db", "online.lock"
FORGET_SECONDS = 5.0


@dataclass(slots=True)
class _Held:
    """A claimed task: by which delivery, and when its consumer was last heard of."""

    receipt: str
    tenant: str
    seen_at: float


class _Turns:
    """Waiting tasks, tenants in turn."""

    def __init__(self) -> None:
        self._tenants: dict[str, deque[str]] = {}
        self._order: deque[str] = deque()
        self.length = 0

    def add(self, tenant: str, task_id: str, *, first: bool = False) -> None:
        tasks = self._tenants.get(tenant)
        if tasks is None:
            tasks = self._tenants[tenant] = deque()
            self._order.append(tenant)
        (tasks.appendleft if first else tasks.append)(task_id)
        self.length += 1

    def take(self, most: int) -> list[tuple[str, str]]:
        """(tenant, task) of the next ones."""
        found: list[tuple[str, str]] = []
        while self._order and len(found) < most:
            tenant = self._order.popleft()
            tasks = self._tenants[tenant]
            found.append((tenant, tasks.popleft()))
            if tasks:
                self._order.append(tenant)
            else:
                del self._tenants[tenant]
        self.length -= len(found)
        return found


class EmbeddedQueue:
    """`clock`: Unix seconds; it must not be set back while tasks wait. Lives on one event loop."""

    def __init__(self, home: Path, clock: Callable[[], float]) -> None:
        self._home, self._clock = home, clock
        self._writer = GroupCommit(home / FILE, table.SCHEMA)
        self._lock: int | None = None
        self._ready = False
        self._turns, self._delayed = _Turns(), list[tuple[float, str, str]]()
        self._held: dict[str, _Held] = {}
        self._tenants: Counter[str] = Counter()
        self._dead = 0
        self._receipts = itertools.count(1)
        self._arrived = asyncio.Event()
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._forgot_at = 0.0
        self._said: int | None = None  # why its folder cannot be used, as the log has it

    async def open(self) -> None:
        """Take the lock and read what waits. Raises QueueAway while another process has it, or no file opens."""
        if self._ready:
            return
        if self._lock is None:
            try:
                lock = os.open(self._home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno != self._said:  # it is tried ten times a second
                    self._said = error.errno
                    log.error("online queue: its folder cannot be used: %s", os.strerror(error.errno or 0))
                raise QueueAway from None
            self._said = None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise QueueAway from None
            self._lock = lock
            self._writer.start()
        rows, dead = await self._writer.run(table.unanswered)
        for task_id, tenant, due in rows:
            self._tenants[tenant] += 1
            self._wait(tenant, task_id, due)
        self._dead, self._ready = dead, True

    async def append(self, task: OnlineTask, once: OnceKey | None = None) -> Appended:
        """Keep a task."""
        packed = task.packed()

        def insert(db: sqlite3.Connection) -> Appended:
            if once is not None and (known := table.known(db, once, self._clock())) is not None:
                return Appended(known, True)
            table.insert(db, task, packed, once)
            return Appended(task.task_id, False)

        def after(found: object) -> None:
            if isinstance(found, Appended) and not found.repeated:
                self._tenants[task.tenant] += 1
                self._wait(task.tenant, task.task_id, 0.0)

        return await self._run(insert, after)

    async def known(self, tenant: str, once: OnceKey) -> str | None:
        """The task that came with this key."""
        return await self._run(lambda db: table.known(db, once, self._clock()))

    async def claim(self, consumer: str, most: int, wait: float) -> Sequence[Claim]:
        """Tasks for this consumer."""
        self._check()
        if not self._turns.length:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._arrived.wait()
        return await self._deliver(consumer, self._turns.take(most))

    async def _deliver(self, consumer: str, wanted: list[tuple[str, str]]) -> Sequence[Claim]:
        if not wanted:
            return ()
        receipts = {task_id: f"{next(self._receipts)}" for _, task_id in wanted}
        now = self._clock()

        def mark(db: sqlite3.Connection) -> list[Claim]:
            marked = (table.mark_delivered(db, consumer, task_id, receipt) for task_id, receipt in receipts.items())
            return [claim for claim in marked if claim is not None]

        def after(found: object) -> None:
            if isinstance(found, list):
                for claim in found:
                    self._held[claim.task.task_id] = _Held(claim.receipt, claim.task.tenant, now)
                return
            for tenant, task_id in reversed(wanted):
                self._turns.add(tenant, task_id, first=True)

        return await self._run(mark, after)

    async def extend(self, claims: Sequence[Claim]) -> None:
        """The consumers of these claims are alive."""
        now = self._clock()
        for claim in claims:
            if (held := self._owned(claim)) is not None:
                held.seen_at = now

    async def acknowledge(self, claim: Claim, result: TaskResult) -> bool:
        """Store the result."""
        task, packed = claim.task, result.packed()
        return await self._run(
            lambda db: table.store_result(db, task.task_id, result.finished_at, packed),
            lambda found: self._ended(task, found),
        )

    async def retry(self, claim: Claim, seconds: float, *, charged: bool) -> bool:
        """Give a task back."""
        if self._owned(claim) is None:
            return False
        task, due = claim.task, self._clock() + seconds

        def after(found: object) -> None:
            if found is True and self._owned(claim) is not None:
                del self._held[task.task_id]
                self._wait(task.tenant, task.task_id, due)

        return await self._run(lambda db: table.give_back(db, task.task_id, due, charged=charged), after)

    async def bury(self, claim: Claim, result: TaskResult) -> bool:
        """Make a task a dead letter."""
        if self._owned(claim) is None:
            return False
        task, packed = claim.task, result.packed()

        def after(found: object) -> None:
            self._dead += found is True
            self._ended(task, found)

        return await self._run(lambda db: table.bury(db, task.task_id, result, packed), after)

    async def reclaim(self, consumer: str, silent: float, most: int) -> Sequence[Claim]:
        """Take over tasks of consumers that are silent."""
        self._check()
        before = self._clock() - silent
        lost = [(held.tenant, task_id) for task_id, held in self._held.items() if held.seen_at <= before][:most]
        for _, task_id in lost:
            del self._held[task_id]
        return await self._deliver(consumer, lost)

    async def look(self, task_id: str, wait: float = 0.0, tenant: str | None = None) -> StoredTask | None:
        """The task and its result."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        ended: asyncio.Future[None] = loop.create_future()
        self._waiters.setdefault(task_id, set()).add(ended)  # before the look: no end is missed
        try:
            while True:
                found = await self._run(lambda db: table.stored(db, task_id, self._clock()))
                left = until - loop.time()
                if found is not None and tenant is not None and found.tenant != tenant:
                    return None
                if found is None or found.result is not None or left <= 0:
                    return found
                await asyncio.wait((ended,), timeout=left)
        finally:
            waiters = self._waiters[task_id]
            waiters.discard(ended)
            ended.cancel()
            if not waiters:
                del self._waiters[task_id]

    def depth_now(self) -> QueueDepth:
        """By state; not by tenant. What is being claimed counts as claimed."""
        waiting, delayed = self._turns.length, len(self._delayed)
        return QueueDepth(waiting, max(0, sum(list(self._tenants.values())) - waiting - delayed), delayed, self._dead)

    async def depth(self) -> QueueDepth:
        """How much there is."""
        self._check()
        tenants = {tenant: count for tenant, count in self._tenants.items() if count > 0}
        return replace(self.depth_now(), tenants=tenants)

    async def dead_letters(self, most: int) -> Sequence[DeadLetter]:
        """Dead letters, newest first."""
        return await self._run(lambda db: table.dead_letters(db, most))

    async def redrive(self, task_ids: Sequence[str]) -> int:
        """Put dead letters back."""
        now = self._clock()

        def after(found: object) -> None:
            if isinstance(found, list):
                self._dead -= len(found)
                for tenant, task_id in found:
                    self._tenants[tenant] += 1
                    self._wait(tenant, task_id, 0.0)

        return len(await self._run(lambda db: table.revive(db, task_ids, now), after))

    async def sweep(self) -> None:
        """Make delayed tasks due, and forget what is old."""
        await self.open()
        now = self._clock()
        while self._delayed and self._delayed[0][0] <= now:
            _, tenant, task_id = heapq.heappop(self._delayed)
            self._wait(tenant, task_id, 0.0)
        if now - self._forgot_at >= FORGET_SECONDS:
            self._dead, more = await self._run(lambda db: table.forget(db, now))
            self._forgot_at = 0.0 if more else now
            self._tenants = +self._tenants

    async def close(self) -> None:
        """Close the file and give up the lock."""
        if self._lock is not None:
            await asyncio.to_thread(self._writer.close)
            os.close(self._lock)
            self._lock, self._ready = None, False

    def _check(self) -> None:
        if not self._ready:
            raise QueueAway

    async def _run(self, call: Callable[[sqlite3.Connection], T], after: Callable[[Any], None] | None = None) -> T:
        self._check()
        return await self._writer.run(call, after)

    def _owned(self, claim: Claim) -> _Held | None:
        held = self._held.get(claim.task.task_id)
        return held if held is not None and held.receipt == claim.receipt else None

    def _wait(self, tenant: str, task_id: str, due: float) -> None:
        if due > self._clock():
            heapq.heappush(self._delayed, (due, tenant, task_id))
            return
        self._turns.add(tenant, task_id)
        self._arrived.set()

    def _ended(self, task: OnlineTask, found: object) -> None:
        if not isinstance(found, bool):
            return
        self._held.pop(task.task_id, None)
        if found:
            self._tenants[task.tenant] -= 1
            for waiter in self._waiters.get(task.task_id, ()):
                if not waiter.done():
                    waiter.set_result(None)
