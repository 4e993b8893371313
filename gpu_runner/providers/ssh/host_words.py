"""What rented hosts say of themselves: the one command that our key may run there, asked for in the background.

`gpu_runner.providers.cloud.tunnels.HostWords`. A host is asked at most every ASK_SECONDS, over a connection of its own
that ends with the answer; one that does not answer has said nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import asyncssh

from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.cloud.tunnels import TunnelTarget
from gpu_runner.providers.ssh.connections import connections
from gpu_runner.providers.ssh.engine_tunnel import address_of
from gpu_runner.providers.ssh.host_silence import HostSilence
from gpu_runner.providers.ssh.login import connect

ASK_SECONDS = 30.0
ANSWER_SECONDS = 5.0
LONGEST = 4096
KEPT = 1000  # machines


class LatestWords:
    """The last words of each machine, by its id. `ask`: starts asking a host."""

    def __init__(
        self,
        ask: Callable[[TunnelTarget], Future[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._clock = ask, clock
        self._guard = threading.Lock()
        self._said: dict[str, str] = {}
        self._asked: dict[str, tuple[float, Future[str]]] = {}

    def __call__(self, machine_id: str, target: TunnelTarget) -> str:
        """The last words. When they are old, the host is asked, and the next call hears what it says."""
        now = self._clock()
        with self._guard:
            before = self._asked.get(machine_id)
            if before is not None and before[1].done():
                with contextlib.suppress(Exception):  # no answer changes nothing
                    self._said[machine_id] = before[1].result()
            if before is None or (before[1].done() and now - before[0] >= ASK_SECONDS):
                self._asked.pop(machine_id, None)
                self._asked[machine_id] = now, self._ask(target)
            while len(self._asked) > KEPT:
                oldest = next(iter(self._asked))
                del self._asked[oldest]
                self._said.pop(oldest, None)
            return self._said.get(machine_id, "")


async def _words(target: TunnelTarget) -> str:
    """What the host prints. Raises ProviderError, TimeoutError, asyncssh.Error."""
    async with asyncio.timeout(ANSWER_SECONDS):
        connection = await connect(address_of(target), HostSilence(time.monotonic))
        try:
            process = await connection.create_process("", encoding=None, stderr=asyncssh.DEVNULL)
            found = bytearray()
            while len(found) <= LONGEST and (part := await process.stdout.read(LONGEST)):
                found += part
        finally:
            connection.abort()
    if len(found) > LONGEST:
        raise ProviderError(f"{target.host}: expected at most {LONGEST} bytes from its command, found more")
    return bytes(found).decode(errors="replace")


@functools.cache
def latest_words() -> LatestWords:
    """Those of this process."""
    return LatestWords(lambda target: connections().thread.submit(_words(target)))
