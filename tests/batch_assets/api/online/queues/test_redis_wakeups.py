"""Wake-ups over a connection of Redis whose packets vanish: no reset and no end tells of it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from batch_assets.api.online.queues import redis_wakeups
from batch_assets.api.online.queues.redis_wakeups import Wakeups

SUBSCRIBED = b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%s\r\n:1\r\n"
PONG = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
MESSAGE = b"*3\r\n$7\r\nmessage\r\n$%d\r\n%s\r\n$8\r\ntask\nyes\r\n"


class PubSubServer:
    """A server of RESP that knows SUBSCRIBE and PING. `silent`: connections that it answers no more, by number."""

    def __init__(self, *silent: int) -> None:
        self.connections = self.pings = 0
        self._silent = silent
        self._tell: list[tuple[asyncio.StreamWriter, bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                if words[0].upper() == b"SUBSCRIBE":
                    self._tell.append((writer, words[1]))
                    writer.write(SUBSCRIBED % (len(words[1]), words[1]))
                elif words[0].upper() != b"PING":
                    writer.write(b"+OK\r\n")
                elif number not in self._silent:
                    self.pings += 1
                    writer.write(PONG)
        writer.close()

    def publish(self) -> None:
        """The end of `task` to whoever subscribed last."""
        writer, channel = self._tell[-1]
        writer.write(MESSAGE % (len(channel), channel))


@contextlib.asynccontextmanager
async def listening(server: PubSubServer):
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    wakeups = Wakeups(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0?protocol=2")
    try:
        yield wakeups
    finally:
        await wakeups.close()
        listener.close()


async def until(check) -> None:
    for _ in range(3000):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 30 s")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_wakeups, "LISTEN_SECONDS", 0.1)
    monkeypatch.setattr(redis_wakeups, "CONNECT_AGAIN_SECONDS", 0.05)


def test_a_connection_that_answers_no_ping_is_made_anew_and_who_waits_looks_again() -> None:
    async def main() -> None:
        server = PubSubServer(0)
        async with listening(server) as wakeups:
            with wakeups.waiting("task") as waiter:
                await until(lambda: server.connections == 1)
                assert await waiter.wait(5.0) is None, "subscribed: it may have ended before"
                assert await waiter.wait(20.0) is None, "subscribed again"
                assert server.connections == 2
                server.publish()
                assert await waiter.wait(20.0) == b"yes"

    asyncio.run(main())


def test_a_quiet_connection_that_answers_stays_and_wakes_nobody() -> None:
    async def main() -> None:
        server = PubSubServer()
        async with listening(server) as wakeups:
            with wakeups.waiting("task") as waiter:
                await waiter.wait(5.0)
                woken = asyncio.create_task(waiter.wait(60.0))
                await until(lambda: server.pings >= 3)
                assert server.connections == 1 and not woken.done()
                server.publish()
                assert await woken == b"yes"

    asyncio.run(main())
