"""The buckets of all tenants: in this process, or shared by all replicas over the database.

One process has them in memory. Replicas share them over Postgres without a transaction for each request: a replica
draws a *share* of a tenant's bucket (a twentieth of a minute's worth), spends it in memory, and gives back after a few
seconds what it did not use. So replicas together grant no more than the limit, and few requests wait for the database.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import sqlalchemy as sa

from batch_assets.api.access.token_bucket import Decision, Level, settle, take
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.tables import RATE_BUCKETS

MOST_BUCKETS = 20_000
SHARES = 20
SHARE_SECONDS = 3.0
REFUSED_SECONDS = 1.0  # how long a refusal of the table is repeated without asking it

Bucket = tuple[str, str]  # tenant, kind


class RateLimiter(Protocol):
    """Where a request asks for its part of a tenant's limit a minute."""

    async def take(self, bucket: Bucket, per_minute: int, amount: float) -> Decision: ...
    async def settle(self, bucket: Bucket, per_minute: int, more: float) -> None: ...


class LocalLimiter:
    """Buckets of one process. The one that was used longest ago is forgotten first. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float], most: int = MOST_BUCKETS) -> None:
        self._clock, self._most = clock, most
        self._levels: OrderedDict[Bucket, Level] = OrderedDict()

    async def take(self, bucket: Bucket, per_minute: int, amount: float) -> Decision:
        """Ask for `amount`."""
        decision = take(self._levels.get(bucket), per_minute, amount, self._clock())
        self._keep(bucket, decision.level)
        return decision

    async def settle(self, bucket: Bucket, per_minute: int, more: float) -> None:
        """Take what was used beyond what was asked for; below 0: give it back."""
        self._keep(bucket, settle(self._levels.get(bucket), per_minute, more, self._clock()))

    def _keep(self, bucket: Bucket, level: Level) -> None:
        self._levels[bucket] = level
        self._levels.move_to_end(bucket)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)


class BucketTable:
    """The levels that replicas share. Safe to use from several threads. `clock`: Unix seconds."""

    def __init__(self, records: Records, clock: Callable[[], float]) -> None:
        self._records, self._clock = records, clock

    def take(self, bucket: Bucket, per_minute: int, amount: float, wanted: float) -> tuple[Decision, float]:
        """Ask for `amount`, and for `wanted` in its place where the bucket has it. Returns what was granted, too."""
        with self._records.writing() as connection:
            level = self._read(connection, bucket)
            now = self._now(level)
            held = take(level, per_minute, 0, now).level.tokens
            granted = max(amount, min(wanted, held))
            decision = take(level, per_minute, granted, now)
            self._write(connection, bucket, decision.level)
        return decision, granted if decision.granted else 0.0

    def settle(self, bucket: Bucket, per_minute: int, more: float) -> None:
        """Take `more`, or give it back."""
        with self._records.writing() as connection:
            level = self._read(connection, bucket)
            self._write(connection, bucket, settle(level, per_minute, more, self._now(level)))

    def _now(self, level: Level | None) -> float:
        """Clocks of replicas differ: time never goes back for a bucket."""
        return self._clock() if level is None else max(self._clock(), level.at)

    def _read(self, connection: sa.Connection, bucket: Bucket) -> Level | None:
        where = (RATE_BUCKETS.c.tenant == bucket[0]) & (RATE_BUCKETS.c.kind == bucket[1])
        if connection.dialect.name == "postgresql":
            key = sa.func.hashtextextended(f"{bucket[0]} {bucket[1]}", 7305813)
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
        row = connection.execute(sa.select(RATE_BUCKETS.c.tokens, RATE_BUCKETS.c.at).where(where)).first()
        return None if row is None else Level(row.tokens, row.at)

    def _write(self, connection: sa.Connection, bucket: Bucket, level: Level) -> None:
        where = (RATE_BUCKETS.c.tenant == bucket[0]) & (RATE_BUCKETS.c.kind == bucket[1])
        change = RATE_BUCKETS.update().where(where).values(tokens=level.tokens, at=level.at)
        if connection.execute(change).rowcount == 0:
            row = {"tenant": bucket[0], "kind": bucket[1], "tokens": level.tokens, "at": level.at}
            connection.execute(RATE_BUCKETS.insert().values(**row))


@dataclass(slots=True)
class _Share:
    """What this replica may still grant of a bucket, and what the table said when it drew that."""

    left: float = 0.0
    asked: float = 0.0
    drawn_at: float = 0.0
    table: Decision | None = None


class SharedLimiter:
    """Buckets that all replicas share. Lives on one event loop; `clock`: monotonic seconds of this process."""

    def __init__(self, table: BucketTable, clock: Callable[[], float], most: int = MOST_BUCKETS) -> None:
        self._table, self._clock, self._most = table, clock, most
        self._shares: OrderedDict[Bucket, _Share] = OrderedDict()
        self._locks: dict[Bucket, asyncio.Lock] = {}

    async def take(self, bucket: Bucket, per_minute: int, amount: float) -> Decision:
        """Ask for `amount`: of this replica's share, else of the table."""
        share = self._shares.setdefault(bucket, _Share())
        self._shares.move_to_end(bucket)
        if (decision := self._spend(share, per_minute, amount)) is not None:
            return decision
        lock = self._locks.setdefault(bucket, asyncio.Lock())
        async with lock:  # one draw at a time: the others find what it brought
            if (decision := self._spend(share, per_minute, amount)) is None:
                decision = await self._draw(bucket, share, per_minute, amount)
        self._forget()
        return decision

    async def settle(self, bucket: Bucket, per_minute: int, more: float) -> None:
        """Take what was used beyond what was asked for; below 0: give it back."""
        share = self._shares.get(bucket)
        if share is not None and 0 <= share.left - more <= per_minute / SHARES:
            share.left -= more
        else:
            await asyncio.to_thread(self._table.settle, bucket, per_minute, more)

    def _spend(self, share: _Share, per_minute: int, amount: float) -> Decision | None:
        """From what is at hand; None when the table must be asked, also because what it said is old."""
        age = self._clock() - share.drawn_at
        if share.table is None or age > SHARE_SECONDS:
            return None
        if amount > share.left:
            wait = share.table.wait_seconds - age
            if share.table.granted or amount < share.asked or age > REFUSED_SECONDS or wait <= 0:
                return None
            return replace(share.table, wait_seconds=wait)
        share.left -= amount
        remaining = int(share.table.level.tokens + share.left)
        return Decision(True, share.table.level, max(0, remaining), (per_minute - remaining) * 60 / per_minute, 0.0)

    async def _draw(self, bucket: Bucket, share: _Share, per_minute: int, amount: float) -> Decision:
        unused, share.left = share.left, 0.0
        if unused:
            await asyncio.to_thread(self._table.settle, bucket, per_minute, -unused)
        wanted = amount + per_minute / SHARES
        decision, granted = await asyncio.to_thread(self._table.take, bucket, per_minute, amount, wanted)
        share.left, share.asked = max(0.0, granted - amount), amount
        share.drawn_at, share.table = self._clock(), decision
        return decision

    def _forget(self) -> None:
        while len(self._shares) > self._most:
            bucket, _ = self._shares.popitem(last=False)  # its share is lost for this minute
            self._locks.pop(bucket, None)
