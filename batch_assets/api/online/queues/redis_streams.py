"""The queue that several processes share: Redis Streams in 16 shards, one consumer group.

A task is a hash and an entry of its shard's stream. The entry is acknowledged (XACK) in the transaction that stores the
result. Entries of a consumer that is silent are taken over by XAUTOCLAIM.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from batch_assets.api.online.queues import redis_scripts as scripts
from batch_assets.api.online.queues.queue_protocol import (
    DEAD_LETTER_SECONDS,
    RESULT_SECONDS,
    SHARDS,
    Appended,
    Claim,
    DeadLetter,
    KeyReused,
    OnceKey,
    QueueAway,
    QueueDepth,
    StoredTask,
    dead_letter,
    new_task_id,
    shard_of,
)
from batch_assets.api.online.queues.redis_checks import shard_in
from batch_assets.api.online.queues.redis_commands import RedisCommands, client
from batch_assets.api.online.queues.redis_scripts import GROUP
from batch_assets.api.online.queues.redis_wakeups import AGAIN_SECONDS, CHANNELS, Wakeups
from batch_assets.api.online.queues.tasks import OnlineTask, TaskResult, read_task

LONGEST_BLOCK = 5.0  # seconds of one XREADGROUP
MOST_SWEPT = 500  # of one shard at a time
FORGET_EVERY = 60.0  # seconds between two looks for consumers that are gone, and at the server's settings
GONE_SECONDS = 600.0  # a consumer that lives asks every few seconds
_NEW, _REPEATED, _REUSED = 0, 1, 2


def key(shard: int, name: str) -> str:
    """A key of a shard; all of a shard are in one slot of a cluster."""
    return f"batch-assets:{{online:{shard:02x}}}:{name}"


def _keys(shard: int, *names: str) -> list[str]:
    return [key(shard, name) for name in names]


class RedisQueue:
    """`url`: redis:// or rediss://; it may hold a password and is never shown. `clock`: Unix seconds."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.commands = RedisCommands(url)
        self._reader = client(url, answer_seconds=LONGEST_BLOCK + 2)
        self._wakeups, self._clock = Wakeups(url), clock
        self._grouped = False
        self._forgot_at = -math.inf  # by the loop's clock

    async def append(self, task: OnlineTask, once: OnceKey | None = None) -> Appended:
        """Keep a task."""
        shard = _shard(task.task_id)
        keys = _keys(shard, "stream", f"task:{task.task_id}", "tenants")
        keys.append("" if once is None else key(shard, f"once:{once.name}"))
        fingerprint = "" if once is None else once.fingerprint
        words = (task.task_id, task.tenant, task.packed(), repr(task.created_at), fingerprint)
        task_id, outcome = await self.commands.run(scripts.APPEND, keys, *words, durable=True)
        if outcome == _REUSED:
            raise KeyReused
        return Appended(task_id.decode(), outcome == _REPEATED)

    async def known(self, tenant: str, once: OnceKey) -> str | None:
        """The task that came with this key."""
        keys = _keys(_shard(new_task_id(tenant, once)), f"once:{once.name}")
        found = await self.commands.run(scripts.KNOWN, keys, once.fingerprint, durable=True)
        if found is None:
            return None
        if found[1] == _REUSED:
            raise KeyReused
        return str(found[0].decode())

    async def claim(self, consumer: str, most: int, wait: float) -> Sequence[Claim]:
        """Tasks for this consumer: as many of each shard, so up to one less than there are shards more than asked."""
        self.commands.check()
        await self._make_groups()
        try:
            found: Any = await self._reader.xreadgroup(
                GROUP,
                consumer,
                {key(shard, "stream"): ">" for shard in range(SHARDS)},
                count=math.ceil(most / SHARDS),
                block=max(1, int(1000 * min(wait, LONGEST_BLOCK))),
            )
        except (RedisError, OSError, TimeoutError) as error:
            self._grouped = False
            raise self.commands.away(error) from None
        entries = [
            (shard, entry.decode(), fields[b"id"].decode())
            for name, listed in found or ()
            if (shard := shard_in(name)) is not None
            for entry, fields in listed
        ]
        return await self._deliver(consumer, entries)

    async def _deliver(self, consumer: str, entries: Sequence[tuple[int, str, str]]) -> Sequence[Claim]:
        """Read what claimed entries stand for. Those whose answer is lost here are reclaimed later."""
        shards: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        for shard, entry, task_id in entries:
            shards[shard].append((entry, task_id))
        found = await asyncio.gather(
            *(
                self.commands.run(
                    scripts.DELIVER,
                    _keys(shard, "stream", *(f"task:{task_id}" for _, task_id in listed)),
                    GROUP,
                    consumer,
                    *(entry for entry, _ in listed),
                )
                for shard, listed in shards.items()
            )
        )
        claims = []
        for listed, delivered in zip(shards.values(), found, strict=True):
            for (entry, task_id), fields in zip(listed, delivered, strict=True):
                if fields is not None and (task := read_task(task_id, fields[0])) is not None:
                    failures, returned, deliveries = (int(field) for field in fields[1:4])
                    expires = float(fields[4]) + task.lifetime
                    claims.append(Claim(task, consumer, entry, failures, returned, deliveries, expires))
        return claims

    async def extend(self, claims: Sequence[Claim]) -> None:
        """The consumers of these claims are alive."""
        entries: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
        for claim in claims:
            entries[_shard(claim.task.task_id), claim.consumer].append(claim.receipt)
        await asyncio.gather(
            *(
                self.commands.run(scripts.EXTEND, _keys(shard, "stream"), GROUP, consumer, *receipts)
                for (shard, consumer), receipts in entries.items()
            )
        )

    async def acknowledge(self, claim: Claim, result: TaskResult) -> bool:
        """Store the result, then XACK."""
        task_id = claim.task.task_id
        keys = _keys(_shard(task_id), "stream", f"task:{task_id}", "tenants")
        words = (GROUP, claim.receipt, task_id, result.packed(), int(RESULT_SECONDS), CHANNELS)
        return bool(await self.commands.run(scripts.ACKNOWLEDGE, keys, *words, durable=True))

    async def retry(self, claim: Claim, seconds: float, *, charged: bool) -> bool:
        """Give a task back."""
        task_id = claim.task.task_id
        keys = _keys(_shard(task_id), "stream", f"task:{task_id}", "delayed")
        words = (
            GROUP,
            claim.receipt,
            claim.consumer,
            task_id,
            repr(self._clock() + seconds),
            "failures" if charged else "returned",
        )
        return bool(await self.commands.run(scripts.RETRY, keys, *words, durable=True))

    async def bury(self, claim: Claim, result: TaskResult) -> bool:
        """Make a task a dead letter."""
        task_id = claim.task.task_id
        keys = _keys(_shard(task_id), "stream", f"task:{task_id}", "tenants", "dead", "dead-ids")
        code = "" if result.error is None else result.error.code
        words = (GROUP, claim.receipt, claim.consumer, task_id, result.packed(), int(RESULT_SECONDS), CHANNELS)
        more = (code, result.tries, repr(result.finished_at))
        return bool(await self.commands.run(scripts.BURY, keys, *words, *more, durable=True))

    async def reclaim(self, consumer: str, silent: float, most: int) -> Sequence[Claim]:
        """Take over what is idle for long."""
        words = (GROUP, consumer, int(1000 * silent), math.ceil(most / SHARDS))
        found = await self._every_group(scripts.RECLAIM, ("stream",), *words)
        entries = [
            (shard, listed[number].decode(), listed[number + 1].decode())
            for shard, listed in enumerate(found)
            for number in range(0, len(listed), 2)
        ]
        return await self._deliver(consumer, entries)

    async def look(self, task_id: str, wait: float = 0.0, tenant: str | None = None) -> StoredTask | None:
        """The task and its result."""
        shard = shard_of(task_id)
        if shard is None:
            return None
        keys = _keys(shard, f"task:{task_id}")
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        with self._wakeups.waiting(task_id) if wait > 0 else contextlib.nullcontext() as ended:
            while True:
                left = until - loop.time()
                waiter = self._wakeups.name if left > 0 else ""
                found = await self.commands.run(scripts.LOOK, keys, waiter, tenant or "")
                if found is None:
                    return None
                stored = StoredTask(task_id, found[0].decode(), float(found[1]), found[2])
                if stored.result is not None or left <= 0 or ended is None:
                    return stored
                if (result := await ended.wait(min(left, AGAIN_SECONDS))) is not None:
                    return replace(stored, result=result)

    def depth_now(self) -> QueueDepth | None:
        """Redis would have to be asked."""
        return None

    async def depth(self) -> QueueDepth:
        """How much there is, in all shards."""
        found = await self._every_group(scripts.DEPTH, ("stream", "delayed", "dead", "tenants"), GROUP)
        tenants: Counter[str] = Counter()
        for *_, counts in found:
            for number in range(0, len(counts), 2):
                tenants[counts[number].decode()] += int(counts[number + 1])
        there, claimed, delayed, dead = (sum(shard[number] for shard in found) for number in range(4))
        return QueueDepth(there - claimed, claimed, delayed, dead, +tenants)

    async def dead_letters(self, most: int) -> Sequence[DeadLetter]:
        """Dead letters, newest first."""
        letters: list[DeadLetter] = []
        for listed in await self._every_shard(scripts.DEAD_LETTERS, ("dead",), most):
            for task_id, head, code, failures, died in listed:
                if (task := read_task(task_id.decode(), head)) is not None:
                    letters.append(dead_letter(task, code.decode(), int(failures), float(died)))
        return sorted(letters, key=lambda letter: -letter.died_at)[:most]

    async def redrive(self, task_ids: Sequence[str]) -> int:
        """Put dead letters back."""
        known = [(shard, task_id) for task_id in dict.fromkeys(task_ids) if (shard := shard_of(task_id)) is not None]
        found = await asyncio.gather(
            *(
                self.commands.run(
                    scripts.REDRIVE,
                    _keys(shard, "stream", f"task:{task_id}", "tenants", "dead", "dead-ids"),
                    task_id,
                    repr(self._clock()),
                    durable=True,
                )
                for shard, task_id in known
            )
        )
        return sum(found)

    async def sweep(self) -> None:
        """Make delayed tasks due; forget old dead letters and consumers that are gone. Redis forgets results itself."""
        now = self._clock()
        oldest = int(1000 * (now - DEAD_LETTER_SECONDS))
        await self._every_shard(scripts.SWEEP, ("stream", "delayed", "dead", "dead-ids"), repr(now), MOST_SWEPT, oldest)
        looked_at = asyncio.get_running_loop().time()
        if looked_at - self._forgot_at >= FORGET_EVERY:
            self.commands.check_server_again()  # whoever uses it as one of a list is found in a minute
            await self._every_group(scripts.FORGET_CONSUMERS, ("stream",), GROUP, int(1000 * GONE_SECONDS))
            self._forgot_at = looked_at

    async def close(self) -> None:
        """Close all connections."""
        await self._wakeups.close()
        with contextlib.suppress(RedisError, OSError):
            await self._reader.aclose()
        await self.commands.close()

    async def _every_shard(self, script: Any, names: Sequence[str], *words: Any) -> list[Any]:
        return await asyncio.gather(
            *(self.commands.run(script, _keys(shard, *names), *words) for shard in range(SHARDS))
        )

    async def _every_group(self, script: Any, names: Sequence[str], *words: Any) -> list[Any]:
        """Of each shard, whose consumer group is made anew the next time where it is gone: the server was emptied."""
        await self._make_groups()
        try:
            return await self._every_shard(script, names, *words)
        except QueueAway:
            self._grouped = False
            self.commands.check_server_again()
            raise

    async def _make_groups(self) -> None:
        """The consumer group of each shard, of a server that was checked."""
        if self._grouped and self.commands.durability is not None:
            return
        await self._every_shard(scripts.MAKE_GROUP, ("stream",), GROUP)
        self._grouped = True


def _shard(task_id: str) -> int:
    shard = shard_of(task_id)
    if shard is None:
        raise QueueAway
    return shard
