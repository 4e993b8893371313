"""What engines say of their load: their `/metrics`, read once a second while requests go to them.

One task for each engine. It ends by itself when the engine is withdrawn, or nobody has asked for it for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from batch_assets.api.interactive.engine_directory import EngineTarget
from gpu_runner.bounded_http.bounded_read import PAGE_BYTES, BodyTooLarge, UnaskedEncoding, read_body
from gpu_runner.bounded_http.tls_files import ssl_of
from gpu_runner.client.engine_connections import KEEP_ALIVE_SECONDS, watched_socket
from gpu_runner.client.engine_load import EngineLoad, MalformedMetrics, parse_metrics
from gpu_runner.client.request_progress import RequestProgress, request_trace

ASK_SECONDS = 1.0
MOST_ENGINES = 100


@dataclass(frozen=True, slots=True)
class EngineReading:
    """`load`: None where the engine does not tell it now. `round_trip`: seconds from the request to the first byte of
    the answer, on an open connection; None where there was no answer.
    """

    load: EngineLoad | None = None
    round_trip: float | None = None


ReadLoad = Callable[[EngineTarget], Awaitable[EngineReading]]


class LoadReader:
    """Asks engines for their load: at most a second, at most a page. Lives on one event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def read(self, engine: EngineTarget) -> EngineReading:
        """What it says, and how long that took."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=watched_socket),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[request_trace()],
            )
        headers = {"Accept-Encoding": "identity"}
        if engine.api_key:
            headers["Authorization"] = f"Bearer {engine.api_key}"
        progress, round_trip = RequestProgress(), None
        try:
            async with (
                asyncio.timeout(ASK_SECONDS),
                self._session.get(
                    f"{engine.url}/metrics",
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=progress,
                    ssl=ssl_of(engine.tls),
                ) as answer,
            ):
                if progress.sent_at is not None:
                    round_trip = asyncio.get_running_loop().time() - progress.sent_at
                load = parse_metrics(await read_body(answer, PAGE_BYTES)) if answer.status == 200 else None
                return EngineReading(load, round_trip)
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            BodyTooLarge,
            UnaskedEncoding,
            MalformedMetrics,
            ValueError,
        ):
            return EngineReading(round_trip=round_trip)

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@dataclass(frozen=True, slots=True)
class PollPolicy:
    """Seconds: `every`, between two readings; `idle`, after the last request of an engine. `most`: engines."""

    every: float = 1.0
    idle: float = 60.0
    most: int = MOST_ENGINES


class EnginePoller:
    """Reads engines that are watched. `tell` hears what was read, `over` of an engine that is read no more. `served`:
    whether an engine is still there. `clock`: monotonic seconds, as `sleep` counts them.
    """

    def __init__(
        self,
        read: ReadLoad,
        tell: Callable[[EngineTarget, EngineReading], None],
        *,
        served: Callable[[EngineTarget], bool],
        over: Callable[[], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        policy: PollPolicy = PollPolicy(),
    ) -> None:
        self._read, self._tell, self._served, self._over = read, tell, served, over
        self._clock, self._sleep, self._policy = clock, sleep, policy
        self._asked: dict[str, tuple[EngineTarget, float]] = {}  # by address: what was asked for last, and when
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def watched(self) -> frozenset[str]:
        """Addresses that are read now."""
        return frozenset(self._tasks)

    def watch(self, engine: EngineTarget) -> None:
        """A request may go to this engine: read its load for a while."""
        if engine.url in self._tasks:
            self._asked[engine.url] = engine, self._clock()
        elif len(self._tasks) < self._policy.most:
            self._asked[engine.url] = engine, self._clock()
            self._tasks[engine.url] = asyncio.create_task(self._poll(engine.url))

    async def close(self) -> None:
        """End all readings."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, url: str) -> None:
        try:
            while True:
                engine, asked_at = self._asked[url]  # another engine may have the address by now, with a key of its own
                if self._clock() - asked_at >= self._policy.idle or not self._served(engine):
                    break
                reading = await self._read(engine)
                if self._served(engine):
                    self._tell(engine, reading)
                await self._sleep(self._policy.every)
        finally:
            del self._tasks[url], self._asked[url]
            self._over()
