"""One SSH connection per host and process, in an event loop of its own thread.

A keep-alive every KEEPALIVE_SECONDS (`login`) finds a host that is silent: what waits for it fails after at most four.
Whatever fails before a request's text is sent is certain to have done nothing (ProviderError); after that the outcome
is not known (ProviderUnclear).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import asyncssh

from gpu_runner.providers.base import ProviderUnclear
from gpu_runner.providers.ssh.host_requests import (
    LONGEST_REPLY,
    BadReply,
    HostReply,
    HostRequest,
    has_begun,
    parse_reply,
)
from gpu_runner.providers.ssh.host_silence import HostSilence
from gpu_runner.providers.ssh.login import HostAddress, NotConnected, connect

REQUEST_SECONDS = 10.0  # a silent host is found earlier, by the keep-alive
RETRY_SECONDS = 3.0  # a host that did not answer is not asked again before
COMMANDS_AT_ONCE = 8  # sshd's MaxSessions is 10
HEALTH_SECONDS = 2.0
SHELL_HANGS = (
    "it let us in, but its login shell has not started sh: what the shell's startup files (~/.bashrc) start may hang"
)

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread that ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="ssh", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it; the future's `cancel` cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for its result; it is cancelled when the waiting is broken off. Not to be called in the loop's thread.

        Whatever is run bounds its own time.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class HostConnection:
    """The connection to a host, made when it is first needed and anew after it broke. For the loop's thread only."""

    def __init__(self, address: HostAddress) -> None:
        self.address = address
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting = asyncio.Lock()
        self._commands = asyncio.Semaphore(COMMANDS_AT_ONCE)
        self._failed: tuple[float, NotConnected] | None = None
        self._reached_at = time.monotonic()  # the last moment at which something may have come to the host
        self._answers = True
        self.silence = HostSilence(time.monotonic)

    @property
    def silent_seconds(self) -> float:
        """For how long nothing of ours can have reached the host; 0 while it answers."""
        return 0.0 if self._answers else time.monotonic() - self._reached_at

    async def connected(self) -> asyncssh.SSHClientConnection:
        """The connection. Raises NotConnected."""
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed():
                return self._connection
            self._connection = None
            if self._failed is not None and time.monotonic() - self._failed[0] < RETRY_SECONDS:
                raise self._failed[1]
            try:
                self._connection = await connect(self.address, self.silence)
            except NotConnected as error:
                self._failed, self._answers = (time.monotonic(), error), False
                raise
            self._failed = None
            self.silence.connected()
            return self._connection

    async def ask(self, request: HostRequest) -> HostReply:
        """Have a request done. Raises NotConnected, ProviderUnclear. Within sixteen seconds at the worst."""
        connection = await self.connected()
        output = bytearray()
        process: asyncssh.SSHClientProcess[bytes] | None = None
        try:
            async with asyncio.timeout(REQUEST_SECONDS), self._commands:
                process = await connection.create_process("exec /bin/sh", encoding=None, stderr=asyncssh.DEVNULL)
                try:
                    self._reached_at = time.monotonic()
                    process.stdin.write(request.text)
                    process.stdin.write_eof()
                    while len(output) <= LONGEST_REPLY and (part := await process.stdout.read(1 << 16)):
                        output += part
                finally:
                    self._reached_at = time.monotonic()
                    process.close()
            reply = parse_reply(request.nonce, bytes(output))
        except (OSError, asyncssh.Error) as error:
            self._answers = False
            said = f"{self.address.text} did not answer: {type(error).__name__}"
            if process is not None and not connection.is_closed() and not has_begun(request.nonce, bytes(output)):
                said += f"; {SHELL_HANGS}"
            raise ProviderUnclear(said) from error
        except BadReply as error:
            raise ProviderUnclear(f"{self.address.text}: {error}") from None
        self._answers = True
        return reply

    async def engine_answers(self, port: int) -> bool:
        """Whether /health on this port of the host's loopback answers 200."""
        connection = await self.connected()
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                reader, writer = await connection.open_connection("127.0.0.1", port, encoding=None)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                    return bool((await reader.readexactly(12))[8:] == b" 200")
                finally:
                    writer.close()
        except (OSError, EOFError, asyncssh.Error):
            return False

    async def close(self) -> None:
        """End the connection; the next request makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await connection.wait_closed()


class Connections:
    """The connections of this process."""

    def __init__(self) -> None:
        self.thread = LoopThread()
        self._guard = threading.Lock()
        self._hosts: dict[HostAddress, HostConnection] = {}

    def host(self, address: HostAddress) -> HostConnection:
        """The connection to a host, which may not be made yet."""
        with self._guard:
            if address not in self._hosts:
                self._hosts[address] = HostConnection(address)
            return self._hosts[address]

    def close(self) -> None:
        """End all connections."""
        with self._guard:
            hosts = list(self._hosts.values())
            self._hosts.clear()

        async def close_all() -> None:
            await asyncio.gather(*(host.close() for host in hosts))

        self.thread.run(close_all())


_ours: tuple[int, Connections] | None = None
_guard = threading.Lock()


def connections() -> Connections:
    """Those of this process; a fork makes its own."""
    global _ours
    with _guard:
        if _ours is None or _ours[0] != os.getpid():
            _ours = os.getpid(), Connections()
        return _ours[1]
