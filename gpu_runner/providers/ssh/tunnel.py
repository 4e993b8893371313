"""A local port that leads to a port of a host's loopback.

The address stays the same until `close`: a socket that is bound but does not listen keeps the port (SO_REUSEPORT), so
that clients are refused at once while the connection is broken, and nobody else gets the port. Each client has an SSH
channel of its own; what is not read on one side is not read on the other. The listener has a backlog of BACKLOG, since
with asyncio's 100 a burst of clients waits a second for its second SYN.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import asyncssh

from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.ssh.connections import HostConnection
from gpu_runner.reachability import Reachability

BACKLOG = 1024
RETRY_SECONDS = 1.0
CHUNK = 1 << 16


class Tunnel:
    """For the loop's thread only."""

    def __init__(self, host: HostConnection, port: int) -> None:
        self._host = host
        self._port = port
        self._held = _bound(0)
        self._kept: asyncio.Task[None] | None = None
        self._clients: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """The address of the local end."""
        return f"http://127.0.0.1:{self._held.getsockname()[1]}"

    @property
    def reachability(self) -> Reachability:
        """What is known of the way to the host. Any thread may ask."""
        return self._host.silence.reachability

    async def open(self) -> None:
        """Connect and listen. Raises ProviderError."""
        try:
            connection = await self._host.connected()
            server = await self._listen(connection)
        except BaseException:
            self._held.close()
            raise
        self._kept = asyncio.create_task(self._keep(connection, server))

    async def close(self) -> None:
        """End it and everything that goes through it."""
        if self._kept is not None:
            self._kept.cancel()
            await asyncio.wait([self._kept])
        self._held.close()

    async def _listen(self, connection: asyncssh.SSHClientConnection) -> asyncio.Server:
        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._carry(connection, reader, writer))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

        listening = _bound(self._held.getsockname()[1])
        try:
            return await asyncio.start_server(serve, sock=listening, backlog=BACKLOG, limit=CHUNK)
        except BaseException:
            listening.close()
            raise

    async def _keep(self, connection: asyncssh.SSHClientConnection, server: asyncio.Server) -> None:
        while True:
            try:
                await connection.wait_closed()
                self._host.silence.broken()
            finally:
                server.close()
                await self._end_clients()
            while True:
                with contextlib.suppress(ProviderError, OSError):
                    connection = await self._host.connected()
                    server = await self._listen(connection)
                    break
                await asyncio.sleep(RETRY_SECONDS)

    async def _end_clients(self) -> None:
        if clients := list(self._clients):
            for task in clients:
                task.cancel()
            await asyncio.wait(clients)

    async def _carry(
        self, connection: asyncssh.SSHClientConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One client, until both sides have said all, or one is gone."""
        far: Any = None
        try:
            far_reader, far = await connection.open_connection("127.0.0.1", self._port, encoding=None, window=1 << 20)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, far))
                group.create_task(_copy(far_reader, writer))
            writer.close()
            far.close()
        except* (OSError, asyncssh.Error):
            writer.transport.abort()  # the client sees its connection end
        finally:
            if not writer.is_closing():  # cancelled
                writer.transport.abort()
            if far is not None and not far.is_closing():
                far.channel.abort()


async def _copy(reader: Any, writer: Any) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _bound(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setblocking(False)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind(("127.0.0.1", port))
    return found
