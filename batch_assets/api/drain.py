"""The end of a process that others send requests to: first it says so, then it ends.

At SIGTERM `/readyz` answers 503 for `seconds` while everything is still served, so that whoever distributes requests
stops sending them here. Then uvicorn closes its sockets and gives requests under way their time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

from batch_assets.api.health import Readiness
from batch_assets.settings import SettingError

DRAIN = "BATCH_ASSETS_API_DRAIN_SECONDS"
MOST_SECONDS = 3600.0


def drain_seconds() -> float:
    """How long the process goes on after SIGTERM: none on one machine, longer than a readiness probe's period behind a
    balancer. Raises SettingError.
    """
    text = os.environ.get(DRAIN, "").strip() or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_SECONDS:
        raise SettingError(f"{DRAIN}: expected seconds, 0 to {MOST_SECONDS:g}, found {text!r:.40}")
    return seconds


class DrainingServer(uvicorn.Server):
    """A uvicorn that says that it ends before it does. A second signal ends it at once, SIGINT without waiting."""

    def __init__(
        self,
        config: uvicorn.Config,
        readiness: Readiness,
        seconds: float,
        begun: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`begun`: called once it listens; nothing waits for it."""
        super().__init__(config)
        self._readiness, self._seconds, self._begun = readiness, seconds, begun
        self._telling: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self._begun is not None and self.started:
            self._telling = asyncio.ensure_future(self._begun())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls at a signal, in the main thread."""
        waits = sig == signal.SIGTERM and self._seconds > 0 and not self._readiness.draining
        self._readiness.draining = True
        if not waits:
            super().handle_exit(sig, frame)
            return
        end = super().handle_exit
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: loop.call_later(self._seconds, end, sig, frame))
