"""Tells those who wait for results in this process, by one channel of Redis (Pub/Sub).

A message is the id of a task and, after a line feed, its result where that is not large: who gets it need not look
again. It is lost while the connection is broken: whoever waits looks again when it is there again, and every ten
seconds, which is no load when thousands wait.
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
AGAIN_SECONDS = 10.0
CONNECT_AGAIN_SECONDS = 1.0
LISTEN_SECONDS = 2.0  # without a message; then the connection has as long again to show that it lives


class Waiter:
    """Somebody who waits for the end of a task."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._result: bytes | None = None

    def wake(self, result: bytes | None) -> None:
        """The task may have ended, with this result where it is known."""
        self._result = result or self._result
        self._ended.set()

    async def wait(self, seconds: float) -> bytes | None:
        """The result; None: look now, or it has been so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        self._ended.clear()
        return self._result


class Wakeups:
    """`name`: of this process among those that wait. Lives on one event loop."""

    def __init__(self, url: str) -> None:
        self.name = secrets.token_hex(6)
        self._client = client(url, answer_seconds=LISTEN_SECONDS + 2)
        self._waiting: dict[str, set[Waiter]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def waiting(self, task_id: str) -> Iterator[Waiter]:
        """Is woken when the task may have ended. Enter it before the look that it follows."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen())
        waiter = Waiter()
        self._waiting.setdefault(task_id, set()).add(waiter)
        try:
            yield waiter
        finally:
            waiters = self._waiting[task_id]
            waiters.discard(waiter)
            if not waiters:
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
                async with self._client.pubsub() as channel:
                    await channel.subscribe(CHANNELS + self.name)
                    asked = False  # for a sign of life
                    while True:
                        raise_if_cancelled()
                        message = await channel.get_message(timeout=LISTEN_SECONDS)
                        if message is None and asked:
                            raise TimeoutError("no answer to PING")  # its packets vanish: nothing else would end it
                        if message is None:
                            await channel.ping()
                        elif message["type"] == "message":
                            self._wake(message["data"])
                        elif message["type"] == "subscribe":  # nobody was told of what ended before
                            self._wake_all()
                        asked = message is None
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("wake-ups: %s", type(error).__name__)
                await asyncio.sleep(CONNECT_AGAIN_SECONDS)

    def _wake_all(self) -> None:
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.wake(None)

    def _wake(self, message: bytes) -> None:
        name, _, result = message.partition(b"\n")
        for waiter in self._waiting.get(name.decode(errors="replace"), ()):
            waiter.wake(result or None)
