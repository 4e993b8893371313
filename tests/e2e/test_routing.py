"""Two engines of different speed behind the service: both are used; what becomes of one that says nothing, or ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.asgi_calls import AsgiCall
from support.front_doors import front_door_alone
from support.http_server import http_server
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE

from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.settings import ApiSettings

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


class Way:
    """The way to an engine. Its requests are counted; `silent`: its metrics do not come through."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.chats, self.pages, self.silent = 0, 0, False

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.chats += 1
        async with self._session.post(self._url + CHAT, data=await request.read()) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    async def metrics(self, request: web.Request) -> web.Response:
        self.pages += 1
        if self.silent:
            return web.Response(status=503)
        async with self._session.get(f"{self._url}/metrics") as answer:
            return web.Response(body=await answer.read())


class Site:
    """The service, and the ways to a fast and to a slow engine."""

    def __init__(self, door: FrontDoor, fast: Way, slow: Way, targets: list[EngineTarget]) -> None:
        self.door, self.fast, self.slow, self.targets = door, fast, slow, targets
        self._number = 0

    async def ask(self, **headers: str) -> AsgiCall:
        self._number += 1
        text = f"{self._number} " + "word " * (20 + 37 * self._number % 400)
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "stream": True}
        call = await AsgiCall(self.door.app, CHAT, body, headers).run()
        assert call.status == 200 and call.body.rstrip().endswith(b"[DONE]"), call.body[:300]
        return call

    async def load(self, requests: int, at_once: int = 8) -> None:
        left = iter(range(requests))

        async def caller() -> None:
            for _ in left:
                await self.ask()

        await asyncio.gather(*(caller() for _ in range(at_once)))

    def figure(self, name: str, **labels: str) -> float:
        return self.door.metrics.registry.get_sample_value(f"batch_assets_routing_{name}", labels) or 0.0

    async def until(self, name: str, value: float, **labels: str) -> None:
        async with asyncio.timeout(20 * PATIENCE):
            while True:
                if self.figure(name, **labels) == value:
                    return
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def site_of(home: Path) -> AsyncIterator[Site]:
    quick, slow = ("--weights-ms", "3", "--token-us", "30"), ("--weights-ms", "12", "--token-us", "120")
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        ways, urls = [], []
        for model in (quick, slow):
            engine: Any = stack.enter_context(simulated_engine(*model, "--max-num-seqs", "16"))
            ways.append(Way(engine.url, session))
            routes = {CHAT: ways[-1].chat, "/metrics": ways[-1].metrics}
            urls.append(await stack.enter_async_context(http_server(routes, shutdown_timeout=0.5)))
        door = front_door_alone(ApiSettings(home, "", f"sqlite:///{home / 'api.db'}"))
        targets = [EngineTarget(url, "tiny", places=16) for url in urls]
        for target in targets:
            door.inner.state.proxy.directory.announce(target)
        await stack.enter_async_context(door.inner.router.lifespan_context(door.inner))
        yield Site(door, ways[0], ways[1], targets)


def test_two_engines_of_different_speed_behind_the_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site_of(tmp_path) as site:
            await site.ask()
            await site.until("engines", 2, report="fresh")
            async with asyncio.timeout(60 * PATIENCE):
                while not site.figure("choices_total", reason="predicted"):
                    await site.load(24)
            assert site.fast.chats >= 30 and site.slow.chats >= 30, "both have taught before predictions count"
            await site.until("engines", 2, report="fresh")
            before = site.figure("choices_total", reason="predicted")
            call = await site.ask(**{"x-target-ttft-seconds": "60"})
            assert site.figure("choices_total", reason="predicted") == before + 1
            assert 0 < float(call.headers["x-target-headroom-seconds"]) < 60

            site.slow.silent = True
            await site.until("engines", 1, report="stale")
            before = site.figure("choices_total", reason="fewest_requests")
            call = await site.ask(**{"x-target-ttft-seconds": "60"})
            assert site.figure("choices_total", reason="fewest_requests") == before + 1
            assert "x-target-headroom-seconds" not in call.headers, "one engine of the model is unknown"
            site.slow.silent = False
            await site.until("engines", 2, report="fresh")

            site.door.inner.state.proxy.directory.withdraw(site.targets[0])
            chats = site.fast.chats
            await site.load(20)
            assert site.fast.chats == chats, "an engine that is withdrawn gets nothing"
            await site.until("engines", 1, report="fresh")
            pages = site.fast.pages
            await site.until("engines", 0, report="stale")
            assert site.fast.pages == pages
        assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()

    asyncio.run(scenario())
