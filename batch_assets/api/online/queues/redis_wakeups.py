"""Tells those who wait for results in this process, by one channel of Redis (Pub/Sub).

A message may be lost, for instance when the connection breaks: whoever waits looks again every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterator

from redis.exceptions import RedisError

from batch_assets.api.online.cancellation import raise_if_cancelled
from batch_assets.api.online.queues.redis_commands import client

log = logging.getLogger(__name__)

CHANNELS = "batch-assets:online:ended:"
AGAIN_SECONDS = 1.0
LISTEN_SECONDS = 5.0


class Wakeups:
    """`name`: of this process among those that wait. Lives on one event loop."""

    def __init__(self, url: str) -> None:
        self.name = secrets.token_hex(6)
        self._client = client(url, answer_seconds=LISTEN_SECONDS + 2)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def waiting(self, task_id: str) -> Iterator[asyncio.Event]:
        """Set when the task may have ended. Enter it before the look that it follows."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen())
        event = asyncio.Event()
        self._waiting.setdefault(task_id, set()).add(event)
        try:
            yield event
        finally:
            events = self._waiting[task_id]
            events.discard(event)
            if not events:
                del self._waiting[task_id]

    async def close(self) -> None:
        """End the task and its connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    async def _listen(self) -> None:
        while True:
            raise_if_cancelled()
            try:
                async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(CHANNELS + self.name)
                    while True:
                        raise_if_cancelled()
                        message = await channel.get_message(timeout=LISTEN_SECONDS)
                        if message is not None:
                            self._wake(message["data"].decode(errors="replace"))
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("wake-ups: %s", type(error).__name__)
                await asyncio.sleep(AGAIN_SECONDS)

    def _wake(self, task_id: str) -> None:
        for event in self._waiting.get(task_id, ()):
            event.set()
