"""What the commands to Redis promise: durability by WAITAOF, and a log that says why a server is not used."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from support.redis_server import needs_redis, redis_server

from batch_assets.api.online.queues import redis_commands
from batch_assets.api.online.queues.queue_protocol import QueueAway, new_task_id
from batch_assets.api.online.queues.redis_checks import Durability
from batch_assets.api.online.queues.redis_streams import RedisQueue
from batch_assets.api.online.queues.tasks import OnlineTask, TaskKind

EVERY_SECOND = ("--appendonly", "yes", "--appendfsync", "everysec")


def task() -> OnlineTask:
    task_id = new_task_id("acme", None)
    return OnlineTask(task_id, "acme", "client", "tiny", TaskKind.CHAT, b"{}", time.time(), 60.0, False, 10, "00-x")


async def _value(reader: asyncio.StreamReader) -> bytes:
    """One value of RESP2, as it is (https://redis.io/docs/latest/develop/reference/protocol-spec/)."""
    line = await reader.readuntil(b"\r\n")
    number = int(line[1:]) if line[:1] in b"$*" else 0
    if line[:1] == b"$" and number >= 0:
        return line + await reader.readexactly(number + 2)
    if line[:1] == b"*":
        return line + b"".join([await _value(reader) for _ in range(number)])
    return line


@contextlib.asynccontextmanager
async def before(port: int, waitaof: Callable[[], bytes]) -> AsyncIterator[str]:
    """A relay to a server that has no WAITAOF itself, and its address: what `waitaof` says is the answer to that."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, sink = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(sink), contextlib.closing(writer), contextlib.suppress(OSError, EOFError):
            while True:
                command = await _value(reader)
                if b"\r\nWAITAOF\r\n" in command:
                    writer.write(waitaof())
                    continue
                sink.write(command)
                writer.write(await _value(server))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as relay:
        yield f"redis://127.0.0.1:{relay.sockets[0].getsockname()[1]}/0"


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(url, time.time)
    try:
        yield queue
    finally:
        await queue.close()


@needs_redis
@pytest.mark.parametrize("said", [b"*2\r\n:0\r\n:0\r\n", b"-ERR appendonly was turned off\r\n"])
def test_an_append_waits_for_the_sync_and_is_not_accepted_without_it(tmp_path: Path, said: bytes) -> None:
    async def scenario(port: int) -> None:
        answers = [b"*2\r\n:1\r\n:0\r\n"] * 4
        async with before(port, lambda: answers.pop()) as url, opened(url) as queue:
            first = task()
            assert (await queue.append(first)).task_id == first.task_id  # two checks; two trips: a new script
            assert queue.commands.durability is Durability.WAITED and answers == []
            answers.append(said)
            with pytest.raises(QueueAway):
                await queue.append(task())
            found = await queue.look(first.task_id)  # it asks for no sync: the list is empty
            assert found is not None and answers == []

    with redis_server(tmp_path, *EVERY_SECOND) as server:
        asyncio.run(scenario(server.port))


@pytest.mark.skipif(shutil.which("valkey-server") is None, reason="valkey-server is not installed: no WAITAOF")
def test_a_server_with_waitaof_is_asked_for_the_sync(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as queue:
            appended = await asyncio.gather(*(queue.append(task()) for _ in range(50)))
            assert queue.commands.durability is Durability.WAITED
            assert {one.task_id for one in appended if not one.repeated} == {one.task_id for one in appended}
            calls = (await queue.commands.client.info("commandstats"))["cmdstat_waitaof"]["calls"]
            assert 3 <= calls <= 52, "for whether there is such a command, for its place, and one of each round trip"

    with redis_server(tmp_path, *EVERY_SECOND, program="valkey-server") as server:
        asyncio.run(scenario(server.url))


@needs_redis
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("--appendonly", "no"), "appendonly"),
        (EVERY_SECOND, "appendfsync"),
        (("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "allkeys-lru"), "maxmemory-policy"),
    ],
)
def test_why_a_server_is_not_used_is_said_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: Sequence[str],
    why: str,
) -> None:
    monkeypatch.setattr(redis_commands, "AWAY_SECONDS", 0.0)

    async def scenario(url: str) -> None:
        async with opened(url) as queue:
            for _ in range(3):
                with pytest.raises(QueueAway):
                    await queue.append(task())

    with caplog.at_level(logging.WARNING), redis_server(tmp_path, *settings, program="redis-server") as server:
        asyncio.run(scenario(server.url))
    (record,) = caplog.records
    assert f"expected `{why}" in record.getMessage()
