"""Client and feed together, over HTTP, against a server that never answers one request of forty."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import orjson
from aiohttp import web
from support.fake_engine import ORIGIN, Sink
from support.http_server import ANSWER, http_server, models
from support.timing import PATIENCE

from gpu_runner.client.engine_client import EngineClient
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.inference.late_rows import HedgePolicy
from gpu_runner.rows import Batch, Generation, Row

ROWS = 40
# A minute is 0.3 s here.
POLICY = replace(FeedPolicy(), poll_seconds=0.05, hedging=HedgePolicy(floor_seconds=0.3))


def test_the_row_is_answered_by_a_second_request_and_the_first_connection_is_closed() -> None:
    asked: Counter[str] = Counter()
    left = asyncio.Event()

    async def chat(request: web.Request) -> web.Response:
        text = orjson.loads(await request.read())["messages"][0]["content"]
        asked[text] += 1
        if text == "question 7" and asked[text] == 1:
            try:
                await asyncio.sleep(3600)
            finally:
                left.set()
        return web.json_response(ANSWER)

    async def main() -> None:
        routes = {"/v1/models": models({"id": "m"}), "/v1/chat/completions": chat}
        prompts = [orjson.dumps([{"role": "user", "content": f"question {number}"}]) for number in range(ROWS)]
        rows = tuple(Row("b", f"{number}", f"key-{number}", prompt) for number, prompt in enumerate(prompts))
        sink = Sink()
        feed = Feed(
            iter([Batch("b", rows)]), on_row=sink.on_row, on_batch=sink.on_batch, policy=POLICY, rng=random.Random(0)
        )
        async with (
            asyncio.timeout(20 * PATIENCE),
            http_server(routes, handler_cancellation=True) as url,
            EngineClient(url, Generation("chat", "m")) as engine,
        ):
            await engine.info()
            await feed.serve(engine, ORIGIN, 8)
            await left.wait()
        assert len(sink.rows) == len(sink.outcomes()) == ROWS and not sink.dead()
        assert asked["question 7"] == 2 and feed.counts.hedges >= 1 and feed.counts.failures == 0

    asyncio.run(main())
