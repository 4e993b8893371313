"""A local port of our own that hands each connection on to another one, which changes when a tunnel is opened again.

kubectl listens by itself and lets its port go whenever it ends: while it starts again, another program could take the
port and be sent prompts and the engine's key. So the port that clients know is listened on here for as long as the
tunnel is wanted, and kubectl takes any free one. Connections that come while it starts again are held back; when it
could not start, they are broken off at once. Whether anything still comes from behind it shows here, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable

HELD_SECONDS = 5.0  # a connection waits so long for the way behind it, then it is broken off
PART = 1 << 16


class PortRelay:
    """Listens on 127.0.0.1 until `close`, in a thread of its own. Its methods may be called from any thread."""

    def __init__(self, held_seconds: float = HELD_SECONDS) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self._held_seconds = held_seconds
        self._loop = asyncio.new_event_loop()
        self._decided = asyncio.Event()  # where new connections go, or that they go nowhere
        self._closed = asyncio.Event()
        self._target: int | None = None
        self._unanswered_since: float | None = None  # monotonic: bytes went in, and none came back since
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="port-relay", daemon=True)
        self._thread.start()

    def lead_to(self, port: int) -> None:
        """New connections go to this port of 127.0.0.1."""
        self._call(lambda: self._decide(port))

    def hold(self) -> None:
        """New connections wait: there will be a way soon."""
        self._call(self._decided.clear)

    def break_off(self) -> None:
        """New connections are ended at once, and those that wait: there is no way."""
        self._call(lambda: self._decide(None))

    def cut(self) -> None:
        """As `break_off`, and connections that stand are ended, too."""

        def end_all() -> None:
            self._decide(None)
            for task in self._tasks:
                task.cancel()

        self._call(end_all)

    def quiet_seconds(self) -> float:
        """For how long nothing has come back on any connection, although something was sent; 0.0: it has."""
        since = self._unanswered_since
        return 0.0 if since is None or not self._tasks else time.monotonic() - since

    def close(self) -> None:
        """End all connections and let the port go."""
        self._call(self._closed.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the relay
            self._loop.call_soon_threadsafe(work)

    def _decide(self, port: int | None) -> None:
        self._target = port
        self._decided.set()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._socket.close()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=PART)
        await self._closed.wait()
        # Connections that just come in are asyncio's own tasks: cancelled before their first step, or with their server
        # closed, they would never close their sockets. `_accept` ends them.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        server.close()
        await asyncio.sleep(0)  # what was broken off is closed

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed.is_set():
            writer.transport.abort()
            return
        task = asyncio.create_task(self._hand_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also where it was cancelled before its first step

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._held_seconds):
                await self._decided.wait()
                if self._target is None:
                    raise ConnectionError
                onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._target, limit=PART)
        except OSError:  # TimeoutError is one
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, onward_writer, self._sent))
                both.create_task(_copy(onward_reader, writer, self._heard))
        except* OSError:
            pass  # one end is gone, so is the other
        finally:
            onward_writer.transport.abort()

    def _sent(self) -> None:
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()

    def _heard(self) -> None:
        self._unanswered_since = None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[], None]) -> None:
    """Bytes of one direction to their end, all of them sent; no more is read than the other side takes.

    `note` is called for each part.
    """
    while part := await reader.read(PART):
        note()
        writer.write(part)
        await writer.drain()
    writer.transport.set_write_buffer_limits(0)  # from now on `drain` waits until nothing is left
    await writer.drain()
    writer.write_eof()
