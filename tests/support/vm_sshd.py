"""sshd of a rented VM: an SSH server in a thread, with the keys that EC2's user data gives it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncssh


class _Forwards(asyncssh.SSHServer):
    """Leads clients to the engine, and nowhere else. `alive`: connections that stand."""

    def __init__(self, vm: VmSshd) -> None:
        self._vm = vm
        self._connection: Any = None

    def connection_made(self, conn: Any) -> None:
        self._connection = conn
        self._vm.alive.append(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._vm.alive.remove(self._connection)

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:
        if (dest_host, dest_port) != ("127.0.0.1", self._vm.engine_port):
            return False
        return self._connection.forward_connection("127.0.0.1", self._vm.leads_to)


class _Loop(asyncio.SelectorEventLoop):
    """Knows the connections to the engine that were made in it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()

    async def create_connection(self, *arguments: Any, **named: Any) -> Any:
        transport, protocol = await super().create_connection(*arguments, **named)
        self.made.add(transport)
        return transport, protocol


class VmSshd:
    """Listens until `close`. `engine_port`: the one port of the VM's loopback that may be reached; it is `leads_to`.

    `authorized`: the file of keys that are let in. `says`: what a command of the client prints.
    """

    def __init__(
        self,
        host_key: str,
        authorized: Path,
        engine_port: int,
        leads_to: int | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        says: Callable[[], str] = str,
    ) -> None:
        self.engine_port, self.leads_to = engine_port, leads_to or engine_port
        self.alive: list[Any] = []
        self._says = says
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._server = self._run(self._listening(host_key, str(authorized), address, port))
        except BaseException:
            self._end_loop()
            raise
        self.port = self._server.get_port()

    async def _listening(self, host_key: str, authorized: str, address: str, port: int) -> Any:
        return await asyncssh.create_server(
            lambda: _Forwards(self),
            address,
            port,
            server_host_keys=[asyncssh.import_private_key(host_key)],
            authorized_client_keys=authorized,
            process_factory=self._answer,
        )

    async def _answer(self, process: Any) -> None:
        process.stdout.write(self._says())
        process.exit(0)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def close(self) -> None:
        """Ends all connections at once."""

        async def end() -> None:
            self._server.close()
            for connection in list(self.alive):
                connection.abort()
            await self._server.wait_closed()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:  # on the way to the engine
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for transport in list(self._loop.made):
                transport.abort()
            await asyncio.sleep(0)  # in which they are closed

        if self._thread.is_alive():
            self._run(end())
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
