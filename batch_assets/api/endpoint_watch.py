"""Whether the configured engines answer: looked at every few seconds, told in the log and by `/readyz`.

An engine that is away takes nothing from the service's own readiness: batches are taken, and their lines wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from batch_assets.api.models import ServedModel

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0


class Server(Protocol):
    """One engine; `EndpointModels` is one."""

    async def ask(self) -> Sequence[ServedModel] | None:
        """Its models now; None: it gives no list of models, or does not answer."""


class EndpointWatch:
    """A context: while it is open, `servers` (by address) are looked at every `seconds`. Lives on one event loop."""

    def __init__(self, servers: Mapping[str, Server], seconds: float = LOOK_SECONDS) -> None:
        self._servers, self._seconds = servers, seconds
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.away: tuple[str, ...] = ()  # addresses, as of the last look

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look_often())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def first_look(self) -> None:
        """Wait until all were looked at once."""
        await self._looked.wait()

    async def _look_often(self) -> None:
        while True:
            said = await asyncio.gather(*(server.ask() for server in self._servers.values()))
            away = tuple(url for url, models in zip(self._servers, said, strict=True) if models is None)
            for url in away:
                if url not in self.away:
                    log.warning("engine %s gives no list of models: what is asked of it waits until it does", url)
            for url in self.away:
                if url not in away:
                    log.warning("engine %s answers again", url)
            self.away = away
            self._looked.set()
            await asyncio.sleep(self._seconds)
