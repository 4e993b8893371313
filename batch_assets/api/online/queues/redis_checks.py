"""What is checked of a Redis server before it is used: that it keeps what it accepts, and which shards it has.

With `appendfsync always` Redis answers after its log is on the disk, one fsync for all commands of a turn of its event
loop. With `everysec` it answers before, and for up to two seconds may not even have written the log: then, where the
server has WAITAOF (Redis 7.2, Valkey), appends wait for it (https://redis.io/docs/latest/commands/waitaof/).

The shards are dealt to the servers of a list in turn. Services with different lists would not see each other's tasks,
so a key of each server says which of how many it is. Who finds another place there does not use the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from batch_assets.api.online.queues.protocol import SHARDS, QueueAway

PLACE = "batch-assets:online:place"
DURABLE_MS = 1500  # less than an answer may take: a slow disk is not a server that is away
SCAN_SECONDS, SCANNED = 1.0, 10_000  # keys of one SCAN
_STREAMS = (b"}:stream", b"}:dead")  # stay when they are empty; what they have is in other keys of the shard, too
_SHARD_KEY = re.compile(rb"batch-assets:\{online:([0-9a-f]{2})\}:(.*)", re.DOTALL)


class RedisNotUsable(QueueAway):
    """The server would lose what it has accepted, or others would not see it. The message says why."""


class RedisMisplaced(RedisNotUsable):
    """The server is used by a list of other servers than this process has."""


class Durability(enum.Enum):
    """When what Redis has accepted is on its disk."""

    ALWAYS = "always"  # before it answers
    WAITED = "waited"  # everysec, and WAITAOF


@dataclass(frozen=True, slots=True)
class Place:
    """Which server of the list this is, from 1, and how many there are."""

    number: int = 1
    servers: int = 1

    def __str__(self) -> str:
        return f"{self.number} of {self.servers}"

    @property
    def shards(self) -> range:
        """Those that are kept there."""
        return range(self.number - 1, SHARDS, self.servers)


ALONE = Place()


async def durability_of(server: redis.Redis) -> Durability:
    """What this server promises. Raises RedisNotUsable where it would forget what it accepted, RedisError."""
    info = await server.info("everything")
    if int(info.get("loading", 0)):
        raise RedisNotUsable("still loading")
    if info.get("role") != "master":
        raise RedisNotUsable("expected a master, found a replica")
    if not int(info.get("aof_enabled", 0)):
        raise RedisNotUsable("expected `appendonly yes`, found no append-only file")
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        raise RedisNotUsable("expected `maxmemory-policy noeviction`, found one that evicts")
    with contextlib.suppress(RedisError):  # a managed server may not show its settings
        if (await server.config_get("appendfsync")).get("appendfsync") == "always":
            return Durability.ALWAYS
    with contextlib.suppress(ResponseError):  # a server without it
        await cast(Any, server).execute_command("WAITAOF", 0, 0, 1)
        return Durability.WAITED
    raise RedisNotUsable("expected `appendfsync always` or a server with WAITAOF (Redis 7.2, Valkey)")


# KEYS place. ARGV ours. Sets it where there is none, and returns what is there. A server whose memory is full takes it,
# too: it has to drain.
_TAKE = """#!lua flags=allow-oom
local found = redis.call('GET', KEYS[1])
if found then return found end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""


async def take_place(server: redis.Redis, place: Place, durability: Durability) -> None:
    """Write down durably which part of the queue the server has. Raises RedisMisplaced where it has another one,
    RedisNotUsable, RedisError.
    """
    if place.servers > 1 and await server.get(PLACE) is None:
        await _check_other_shards(server, place)
    async with server.pipeline(transaction=False) as pipeline:
        pipeline.eval(_TAKE, 1, PLACE, str(place))
        if durability is Durability.WAITED:
            pipeline.execute_command("WAITAOF", 1, 0, DURABLE_MS)
        found, *synced = await pipeline.execute()
    if found != str(place).encode():
        raise RedisMisplaced(
            f"expected the place `{place}`, found `{found.decode(errors='replace'):.20}` in its key {PLACE}: it is "
            "used with another list of servers. Give all services the same list, in the same order. To change the "
            "list, let the queue drain with the old one, end all services, then delete the key"
        )
    if synced and synced[0][0] < 1:
        raise RedisNotUsable(f"its log was not synced within {DURABLE_MS / 1000} s")


async def _check_other_shards(server: redis.Redis, place: Place) -> None:
    """A server that nobody has marked may have been used alone. Raises RedisMisplaced where it has anything of shards
    that will be looked for on other servers.
    """
    loop = asyncio.get_running_loop()
    until, cursor = loop.time() + SCAN_SECONDS, 0
    while True:
        found: Any = await server.scan(cursor, "batch-assets:{online:*", SCANNED)
        cursor, names = found
        for name in names:
            shard = shard_in(name)
            if shard is not None and shard not in place.shards and not name.endswith(_STREAMS):
                raise RedisMisplaced(
                    f"expected its own shards only, found keys of shard {shard}: it was used with another list of "
                    "servers. Let the queue drain with that one (results are kept for ten minutes, dead letters for a "
                    "week)"
                )
        if not cursor:
            return
        if loop.time() >= until:
            raise RedisNotUsable(
                f"expected a key {PLACE} or names of keys that can be read within {SCAN_SECONDS} s, found more. If it "
                f"was used as server {place} before, set that key to `{place}`"
            )


def shard_in(name: bytes) -> int | None:
    """The shard of a key of the queue; None for what is none."""
    found = _SHARD_KEY.fullmatch(name)
    return None if found is None else int(found[1], 16)
