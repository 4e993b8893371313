"""What is checked of a Redis server before it is used: that it keeps what it accepts, and that it is used alone.

With `appendfsync always` Redis answers after its log is on the disk, one fsync for all commands of a turn of its event
loop. With `everysec` it answers before, and for up to two seconds may not even have written the log: then, where the
server has WAITAOF (Redis 7.2, Valkey), appends wait for it (https://redis.io/docs/latest/commands/waitaof/).

Versions before spread the queue over several servers. A key of each said which of how many it was, so a service of that
version does not take a server that is used alone for one of its list, and this one takes none of a list.
"""

from __future__ import annotations

import contextlib
import enum
import re
from typing import Any, cast

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from batch_assets.api.online.queues.queue_protocol import QueueAway

PLACE, ALONE = "batch-assets:online:place", "1 of 1"
DURABLE_MS = 1500  # less than an answer may take: a slow disk is not a server that is away
_SHARD_KEY = re.compile(rb"batch-assets:\{online:([0-9a-f]{2})\}:(.*)", re.DOTALL)


class RedisNotUsable(QueueAway):
    """The server would lose what it has accepted, or has only a part of it. The message says why."""


class Durability(enum.Enum):
    """When what Redis has accepted is on its disk."""

    ALWAYS = "always"  # before it answers
    WAITED = "waited"  # everysec, and WAITAOF


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


async def take(server: redis.Redis, durability: Durability) -> None:
    """Write down durably that the server has all of the queue. Raises RedisNotUsable, RedisError."""
    async with server.pipeline(transaction=False) as pipeline:
        pipeline.eval(_TAKE, 1, PLACE, ALONE)
        if durability is Durability.WAITED:
            pipeline.execute_command("WAITAOF", 1, 0, DURABLE_MS)
        found, *synced = await pipeline.execute()
    if found != ALONE.encode():
        raise RedisNotUsable(
            f"expected `{ALONE}`, found `{found.decode(errors='replace'):.20}` in its key {PLACE}: it is one of "
            "several servers of a version before. End the services with that list, then delete the key on each of its "
            "servers (docs/online.md, From several Redis servers to one)"
        )
    if synced and synced[0][0] < 1:
        raise RedisNotUsable(f"its log was not synced within {DURABLE_MS / 1000} s")


def shard_in(name: bytes) -> int | None:
    """The shard of a key of the queue; None for what is none."""
    found = _SHARD_KEY.fullmatch(name)
    return None if found is None else int(found[1], 16)
