"""The queue over several Redis servers: shard s is on server s mod n. A task's calls go to the server of its shard.

Redis does all commands of a server in one thread: several servers do more. One that is away takes its shards with it
and nothing else: it is looked at again four times a second, and no call of all servers asks it until it is back.

Claims are one read of each server, under way at the same time. A call returns what came first and leaves the other
reads to the next call: cancelling a read could drop what its server has delivered, and nobody would have that until its
consumer is held to be dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from batch_assets.api.online.cancellation import raise_if_cancelled
from batch_assets.api.online.queues.protocol import (
    SHARDS,
    Appended,
    Claim,
    DeadLetter,
    OnceKey,
    QueueAway,
    QueueDepth,
    StoredTask,
    new_task_id,
    shard_of,
)
from batch_assets.api.online.queues.redis_checks import Place
from batch_assets.api.online.queues.redis_streams import RedisQueue
from batch_assets.api.online.queues.tasks import OnlineTask, TaskResult

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.25  # between looks at a server that is away
ANSWER_SECONDS = 0.05  # how much longer than asked a claim waits for servers to say that they have nothing
END_SECONDS = 2.0  # for giving back what was claimed and not returned

T = TypeVar("T")
Read = asyncio.Task[Sequence[Claim]]


@dataclass(slots=True, eq=False)
class _Server:
    """`depth`: the last one known. `looks`: until it is back. `back_at`: when it was, by the loop's clock."""

    queue: RedisQueue
    shards: Sequence[int]
    depth: QueueDepth = field(default_factory=QueueDepth)
    looks: asyncio.Task[None] | None = None
    back_at: float = -math.inf


class ShardedRedisQueue:
    """`urls`: of the servers, in the order that all processes have. `clock`: Unix seconds. Lives on one event loop."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float]) -> None:
        places = [Place(number, len(urls)) for number in range(1, len(urls) + 1)]
        self._servers = [
            _Server(RedisQueue(url, clock, place), place.shards) for url, place in zip(urls, places, strict=True)
        ]
        self._reads: defaultdict[str, dict[_Server, Read]] = defaultdict(dict)  # by consumer
        self._closed = False

    async def append(self, task: OnlineTask, once: OnceKey | None = None) -> Appended:
        """Keep a task."""
        self._check_places()
        return await self._of(task.task_id).queue.append(task, once)

    async def known(self, tenant: str, once: OnceKey) -> str | None:
        """The task that came with this key."""
        self._check_places()
        return await self._of(new_task_id(tenant, once)).queue.known(tenant, once)

    async def claim(self, consumer: str, most: int, wait: float) -> Sequence[Claim]:
        """Tasks for this consumer. Each server is asked for its part of `most`; reads of earlier calls that return at
        the same time may make it nearly twice as many.
        """
        loop = asyncio.get_running_loop()
        until, reads = loop.time() + wait, self._reads[consumer]
        self._read_all(consumer, most, wait)
        while True:
            raise_if_cancelled()
            if self._closed:
                raise QueueAway
            if claims := _taken(reads):
                return claims
            left = until - loop.time()
            if left > 0:
                self._read_all(consumer, most, left)
            if not self._there():
                raise QueueAway
            if not reads or left <= -ANSWER_SECONDS:
                return ()
            await asyncio.wait(reads.values(), timeout=left + ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    def _read_all(self, consumer: str, most: int, wait: float) -> None:
        """A read of each server that is there and has none under way."""
        there, reads = self._there(), self._reads[consumer]
        for server in there:
            if server not in reads and not self._closed:
                part = max(1, math.ceil(most / len(there)))
                reads[server] = asyncio.create_task(self._read(server, consumer, part, wait))

    async def _read(self, server: _Server, consumer: str, most: int, wait: float) -> Sequence[Claim]:
        try:
            return await server.queue.claim(consumer, most, wait)
        except QueueAway:
            self._lost(server)
            return ()

    async def extend(self, claims: Sequence[Claim]) -> None:
        """The consumers of these claims are alive, and of those that the next call of `claim` returns."""
        parts: defaultdict[_Server, list[Claim]] = defaultdict(list)
        for claim in (*claims, *self._not_returned()):
            parts[self._of(claim.task.task_id)].append(claim)
        await self._all(
            lambda server: server.queue.extend(parts[server]), [server for server in self._there() if server in parts]
        )

    async def acknowledge(self, claim: Claim, result: TaskResult) -> bool:
        """Store the result."""
        return await self._of(claim.task.task_id).queue.acknowledge(claim, result)

    async def retry(self, claim: Claim, seconds: float, *, charged: bool) -> bool:
        """Give a task back."""
        return await self._of(claim.task.task_id).queue.retry(claim, seconds, charged=charged)

    async def bury(self, claim: Claim, result: TaskResult) -> bool:
        """Make a task a dead letter."""
        return await self._of(claim.task.task_id).queue.bury(claim, result)

    async def reclaim(self, consumer: str, silent: float, most: int) -> Sequence[Claim]:
        """Take over tasks of consumers that are silent; not of a server that was away just now: nobody could say there
        that he lives.
        """
        now = asyncio.get_running_loop().time()
        asked = [server for server in self._there() if now >= server.back_at + 2 * silent]
        part = max(1, math.ceil(most / max(1, len(asked))))
        found = await self._all(lambda server: server.queue.reclaim(consumer, silent, part), asked)
        return [claim for _, claims in found for claim in claims]

    async def look(self, task_id: str, wait: float = 0.0, tenant: str | None = None) -> StoredTask | None:
        """The task and its result."""
        if shard_of(task_id) is None:
            return None
        return await self._of(task_id).queue.look(task_id, wait, tenant)

    def depth_now(self) -> QueueDepth | None:
        """Redis would have to be asked."""
        return None

    async def depth(self) -> QueueDepth:
        """How much there is; on servers that are away, how much there was."""
        found = await self._all(lambda server: server.queue.depth(), self._there())
        self._check_places()
        for server, depth in found:
            server.depth = depth
        tenants: Counter[str] = Counter()
        for server in self._servers:
            tenants.update(server.depth.tenants)
        waiting, claimed, delayed, dead = (
            sum(getattr(server.depth, state) for server in self._servers)
            for state in ("waiting", "claimed", "delayed", "dead")
        )
        away = 1.0 - sum(len(server.shards) for server, _ in found) / SHARDS
        return QueueDepth(waiting, claimed, delayed, dead, tenants, away)

    async def dead_letters(self, most: int) -> Sequence[DeadLetter]:
        """Dead letters, newest first, of the servers that are there."""
        found = await self._all(lambda server: server.queue.dead_letters(most), self._there())
        letters = [letter for _, listed in found for letter in listed]
        return sorted(letters, key=lambda letter: -letter.died_at)[:most]

    async def redrive(self, task_ids: Sequence[str]) -> int:
        """Put dead letters back. To call it again does no harm."""
        parts: defaultdict[_Server, list[str]] = defaultdict(list)
        for task_id in task_ids:
            if shard_of(task_id) is not None:
                parts[self._of(task_id)].append(task_id)
        found = await asyncio.gather(
            *(server.queue.redrive(part) for server, part in parts.items()), return_exceptions=True
        )
        counts = [_no_error(one) for one in found]
        return sum(counts)

    async def sweep(self) -> None:
        """Make delayed tasks due, and forget what is old."""
        await self._all(lambda server: server.queue.sweep(), self._there())

    async def close(self) -> None:
        """End all that is under way, give back what was claimed and not returned, and close all connections."""
        self._closed = True
        reads = [read for reads in self._reads.values() for read in reads.values()]
        looks = [server.looks for server in self._servers if server.looks is not None]
        for task in (*reads, *looks):
            task.cancel()
        try:
            await asyncio.gather(*reads, *looks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    again = (self.retry(claim, 0.0, charged=False) for claim in self._not_returned())
                    await asyncio.gather(*again, return_exceptions=True)
        finally:
            await asyncio.gather(*(server.queue.close() for server in self._servers))

    def _of(self, task_id: str) -> _Server:
        """The server of a task's shard."""
        shard = shard_of(task_id)
        if shard is None:
            raise QueueAway
        return self._servers[shard % len(self._servers)]

    def _there(self) -> list[_Server]:
        """The servers that are not away."""
        return [server for server in self._servers if server.looks is None]

    def _check_places(self) -> None:
        """Raises QueueAway where others have another list of servers: they would not see what is accepted here."""
        if any(server.queue.commands.misplaced for server in self._servers):
            raise QueueAway

    def _not_returned(self) -> list[Claim]:
        """What was claimed for the next call."""
        ended = (read for reads in self._reads.values() for read in reads.values() if _has_ended(read))
        return [claim for read in ended for claim in read.result()]

    async def _all(
        self, call: Callable[[_Server], Awaitable[T]], servers: Iterable[_Server]
    ) -> list[tuple[_Server, T]]:
        """What these servers say, without those that are away. Raises QueueAway where all of the queue is."""

        async def ask(server: _Server) -> list[tuple[_Server, T]]:
            try:
                return [(server, await call(server))]
            except QueueAway:
                self._lost(server)
                return []

        found = await asyncio.gather(*(ask(server) for server in servers))
        if not self._there():
            raise QueueAway
        return [one for answers in found for one in answers]

    def _lost(self, server: _Server) -> None:
        """A server is away: look at it until it is back."""
        if server.looks is None and not self._closed:
            server.looks = asyncio.create_task(self._look_again(server))

    async def _look_again(self, server: _Server) -> None:
        while True:
            raise_if_cancelled()
            await asyncio.sleep(AGAIN_SECONDS)
            try:
                server.depth = await server.queue.depth()
                break
            except QueueAway:
                pass
            except Exception as error:  # a defect must not end all that comes after it
                log.error("online queue: %s", type(error).__name__, exc_info=error)
        server.looks, server.back_at = None, asyncio.get_running_loop().time()


def _has_ended(read: Read) -> bool:
    """With claims, or without."""
    return read.done() and not read.cancelled() and read.exception() is None


def _taken(reads: dict[_Server, Read]) -> list[Claim]:
    """What ended reads have claimed; they make room for others. Raises what has ended one, where there is nothing."""
    claims: list[Claim] = []
    for server in [server for server, read in reads.items() if _has_ended(read)]:
        claims += reads.pop(server).result()
    if not claims:
        for server in [server for server, read in reads.items() if read.done()]:
            reads.pop(server).result()
    return claims


def _no_error(found: T | BaseException) -> T:
    """What a call has said. Raises what has ended it."""
    if isinstance(found, BaseException):
        raise found
    return found
