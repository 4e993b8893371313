"""Sends scripts to Redis, all that came meanwhile in one round trip, so that one fsync of its log serves them all.

While calls come one by one, each is sent at once. While several come at a time, a round trip waits two milliseconds for
more of them, as Postgres does with `commit_delay`: system calls and syncs are most of what such a small call costs.

What must be durable is answered when it is on Redis' disk (`redis_checks`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from batch_assets.api.online.queues.queue_protocol import QueueAway
from batch_assets.api.online.queues.redis_checks import (
    DURABLE_MS,
    Durability,
    RedisNotUsable,
    durability_of,
    take,
)

log = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0
AWAY_SECONDS = 0.5  # how long it is not asked again after it did not answer
MOST_COMMANDS = 512  # of one round trip
PIPELINES = 2  # under way at the same time
GATHER_SECONDS = 0.002  # how long a round trip waits for more calls, where the one before had several
MOST_CONNECTIONS = 64  # of one client
SAY_SECONDS = 60.0  # between two lines of the log on the same refusal


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: one transaction of Redis."""

    text: str
    sha: str


def script(text: str) -> Script:
    """A script by its text."""
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def client(url: str, *, answer_seconds: float = ANSWER_SECONDS) -> redis.Redis:
    """A client that gives up soon and repeats nothing by itself."""
    found: redis.Redis = redis.Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=answer_seconds,
        retry=Retry(NoBackoff(), 0),
        max_connections=MOST_CONNECTIONS,
        protocol=2,
    )
    return found


@dataclass(slots=True)
class _Call:
    script: Script
    keys: Sequence[str]
    arguments: Sequence[Any]
    durable: bool
    answer: asyncio.Future[Any]


class RedisCommands:
    """Lives on one event loop. `close` ends its tasks and connections."""

    def __init__(self, url: str) -> None:
        self.client = client(url)
        self.durability: Durability | None = None
        self._calls: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._gathers = self._several = self._closed = False
        self._away_until = 0.0
        self._said = ""
        self._refusals: dict[str, float] = {}  # when it was said, by the code of Redis

    async def run(self, script: Script, keys: Sequence[str], *arguments: Any, durable: bool = False) -> Any:
        """What the script returns. `durable`: only when that is on Redis' disk. Raises QueueAway."""
        self.check()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.append(_Call(script, keys, arguments, durable, answer))
        if not self._gathers and len(self._tasks) < PIPELINES:
            self._tasks.add(asyncio.create_task(self._send_all()))
        return await answer

    def check(self) -> None:
        """Raises QueueAway while Redis was found to be away just now, and after the end."""
        if self._closed or asyncio.get_running_loop().time() < self._away_until:
            raise QueueAway

    def away(self, error: BaseException) -> QueueAway:
        """Redis did not answer: do not ask it for a moment."""
        self._away_until = asyncio.get_running_loop().time() + AWAY_SECONDS
        self.check_server_again()  # what answers next may be another one
        self._say(f"Redis: {error if isinstance(error, RedisNotUsable) else type(error).__name__}")
        return QueueAway()

    def check_server_again(self) -> None:
        """Before the next command: its settings, and that it is used alone."""
        self.durability = None

    def _say(self, text: str) -> None:
        """Once, until it answers again: it is asked several times a second."""
        if text != self._said:
            self._said = text
            log.warning("%s", text)

    async def close(self) -> None:
        """End what is under way, and close the connections."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._calls:
            _refuse(call, QueueAway())
        with contextlib.suppress(RedisError, OSError):
            await self.client.aclose()

    async def _send_all(self) -> None:
        """Until no call waits. Who calls after that finds this task no longer among those that send."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._send()
        finally:
            self._tasks.discard(task)

    async def _send(self) -> None:
        while self._calls:
            if self._several:
                if self._gathers:
                    return  # another pipeline waits for calls: it takes these
                await self._gather()
            calls, self._calls = self._calls[:MOST_COMMANDS], self._calls[MOST_COMMANDS:]
            self._several = len(calls) > 1
            try:
                await self._check_server()
                answers = await self._round_trip(calls)
                self._said = ""
            except Exception as error:  # also what the library raises of an answer that it does not understand
                answers = [self.away(error)] * len(calls)
            except BaseException:
                for call in calls:
                    _refuse(call, QueueAway())
                raise
            for call, answer in zip(calls, answers, strict=True):
                if isinstance(answer, BaseException):
                    _refuse(call, answer if isinstance(answer, QueueAway) else self._failed(answer))
                elif not call.answer.done():
                    call.answer.set_result(answer)

    async def _gather(self) -> None:
        """Let more calls come."""
        self._gathers = True
        try:
            await asyncio.sleep(GATHER_SECONDS)
        finally:
            self._gathers = False

    def _failed(self, error: BaseException) -> QueueAway:
        """One command was refused: out of memory, read-only replica, still loading."""
        code = error.status_code if isinstance(error, ResponseError) else None
        said, now = code or type(error).__name__, asyncio.get_running_loop().time()
        if now - self._refusals.get(said, -math.inf) >= SAY_SECONDS:  # a full Redis refuses thousands a second
            self._refusals[said] = now
            log.warning("Redis refused a command: %s", said)
        return QueueAway()

    async def _round_trip(self, calls: Sequence[_Call]) -> list[Any]:
        waits = self.durability is Durability.WAITED and any(call.durable for call in calls)
        async with self.client.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.arguments)
            if waits:
                pipeline.execute_command("WAITAOF", 1, 0, DURABLE_MS)
            answers = await pipeline.execute(raise_on_error=False)
            unknown = [number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if unknown:
                for number in unknown:
                    call = calls[number]
                    pipeline.eval(call.script.text, len(call.keys), *call.keys, *call.arguments)
                if waits:
                    pipeline.execute_command("WAITAOF", 1, 0, DURABLE_MS)
                again = await pipeline.execute(raise_on_error=False)
                for number, answer in zip(unknown, again, strict=False):
                    answers[number] = answer
                answers[len(calls) :] = again[len(unknown) :]
        if waits and (isinstance(answers[-1], BaseException) or answers[-1][0] < 1):
            log.warning("Redis: its log was not synced within %.1f s", DURABLE_MS / 1000)
            return [QueueAway() if call.durable else answers[number] for number, call in enumerate(calls)]
        return answers[: len(calls)]

    async def _check_server(self) -> None:
        if self.durability is None:
            found = await durability_of(self.client)
            await take(self.client, found)
            self.durability = found


def _refuse(call: _Call, error: BaseException) -> None:
    if not call.answer.done():
        call.answer.set_exception(error)
