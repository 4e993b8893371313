"""How full engines count for online requests, while batches of the same service have rows there."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from support.fake_engine import ORIGIN, FakeEngine, Sink, batches
from support.http_server import http_server
from support.timing import PATIENCE

from batch_assets.api.execution.engines.engine_supply import EndpointSupply
from batch_assets.api.interactive.engine_directory import EngineDirectory
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.api.interactive.shared_supply import SharedSupply
from batch_assets.api.online.admission import SLOW_FROM, EnginePressure
from batch_assets.api.online.online_service import EnginePressures
from gpu_runner.bounded_http.bounded_read import Admit
from gpu_runner.client.protocol import Completion, Repair
from gpu_runner.inference.feed import Feed
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy

SLOTS = 20
ROWS = 4 * SLOTS  # that a feed has in flight at an engine of so many slots
CONCURRENCY = 16


class CountedEngine(FakeEngine):
    """`sent` is released for each row that comes."""

    sent: asyncio.Semaphore

    async def generate(
        self,
        prompt: bytes,
        *,
        repair: Repair | None = None,
        admit: Admit | None = None,
        fields: bytes = b"",
        max_tokens: int | None = None,
        free: bool = False,
        user: bool = False,
    ) -> Completion:
        self.sent.release()
        return await super().generate(prompt, repair=repair, admit=admit)


class SharedEngine:
    """An engine whose answers never come. `others`: requests there that no feed of ours has sent, which all wait."""

    def __init__(self) -> None:
        self.rows = CountedEngine(slots=SLOTS, seconds=1e6)
        self.rows.sent = asyncio.Semaphore(0)
        self.others, self.kv_usage = 0, 0.1
        self.directory = EngineDirectory(lambda: 0.0)

    async def metrics(self, request: web.Request) -> web.Response:
        running = self.rows.running or min(SLOTS, self.others)
        waiting = self.rows.open + self.others - running
        page = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
        return web.Response(text=f"{page}vllm:kv_cache_usage_perc {self.kv_usage}\n")

    async def pressure(self, model: str = "m") -> EnginePressure:
        pressures = EnginePressures(self.directory, CONCURRENCY)
        try:
            return (await pressures.look())[model]
        finally:
            await pressures.close()

    @contextlib.asynccontextmanager
    async def feed(self, url: str, model: str = "m") -> AsyncIterator[None]:
        """A feed of this model that has filled its window at the engine."""
        first_tokens = FirstTokens(lambda: 0.0)
        supply = SharedSupply(EndpointSupply(url, None, SLOTS), self.directory, first_tokens, FirstTokenPolicy())
        sink = Sink()
        feed = Feed(iter(batches(2 * ROWS)), on_row=sink.on_row, on_batch=sink.on_batch, rng=random.Random(0))
        async with supply.engine(model, "chat") as engine:
            serving = asyncio.create_task(feed.serve(self.rows, ORIGIN, SLOTS, share=engine.share))
            try:
                async with asyncio.timeout(PATIENCE):
                    for _ in range(ROWS):
                        await self.rows.sent.acquire()
                yield
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("others", [0, SLOTS])
def test_rows_of_batches_that_wait_in_an_engine_do_not_fill_it(others: int) -> None:
    async def scenario() -> None:
        engine = SharedEngine()
        async with http_server({"/metrics": engine.metrics}) as url, engine.feed(url):
            engine.others = others
            assert (await engine.pressure()).most == 0.1, "the KV cache's part"

    asyncio.run(scenario())


def test_rows_of_all_feeds_on_one_engine_are_left_out() -> None:
    async def scenario() -> None:
        engine = SharedEngine()
        async with http_server({"/metrics": engine.metrics}) as url, engine.feed(url), engine.feed(url, "other"):
            assert (await engine.pressure("m")).queue == (await engine.pressure("other")).queue == 0.0
            engine.others = 2 * SLOTS
            assert (await engine.pressure("m")).queue == 1.0

    asyncio.run(scenario())


def test_other_requests_that_wait_fill_an_engine_beside_rows_of_batches_and_without() -> None:
    async def scenario() -> None:
        engine = SharedEngine()
        async with http_server({"/metrics": engine.metrics}) as url:
            async with engine.feed(url):
                engine.others = SLOTS + 2 * SLOTS
                assert (await engine.pressure()).queue == 2.0 > SLOW_FROM
                engine.others, engine.kv_usage = 0, 0.95
                assert (await engine.pressure()).most == 0.95, "whose blocks they are no engine says"
            engine.others, engine.kv_usage = SLOTS + 2 * SLOTS, 0.1
            supply = SharedSupply(
                EndpointSupply(url, None, SLOTS), engine.directory, FirstTokens(lambda: 0.0), FirstTokenPolicy()
            )
            async with supply.engine("m", "chat"):
                assert (await engine.pressure()).queue == 2.0, "no rows of a feed that has ended are left out"

    asyncio.run(scenario())
