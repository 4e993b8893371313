"""Two engines of different speed behind the service: both are used; what becomes of one that says nothing, or ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.asgi_calls import AsgiCall
from support.front_doors import front_door_alone
from support.http_server import http_server
from support.simulated_engine import simulated_engine
from support.timing import PATIENCE, SOAK

from batch_assets.api.front_door import FrontDoor
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.settings import ApiSettings

pytestmark = pytest.mark.soak("online")

CHAT = "/v1/chat/completions"
QUICK, SLOW = ("--weights-ms", "3", "--token-us", "30"), ("--weights-ms", "12", "--token-us", "120")
WAY_SECONDS = 0.3


class Way:
    """The way to an engine. Its requests are counted; `silent`: its metrics do not come through; `seconds`: how long
    each request is on its way.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.chats, self.pages, self.silent, self.seconds = 0, 0, False, 0.0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.chats += 1
        await asyncio.sleep(self.seconds)
        async with self._session.post(self._url + CHAT, data=await request.read()) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    async def metrics(self, request: web.Request) -> web.Response:
        self.pages += 1
        await asyncio.sleep(self.seconds)
        if self.silent:
            return web.Response(status=503)
        async with self._session.get(f"{self._url}/metrics") as answer:
            return web.Response(body=await answer.read())


class RoutedService:
    """The service, and the ways to two engines, a fast and a slow one or a near and a far one."""

    def __init__(self, door: FrontDoor, fast: Way, slow: Way, targets: list[EngineTarget]) -> None:
        self.door, self.fast, self.slow, self.targets = door, fast, slow, targets
        self.near, self.far = fast, slow
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
async def site_of(
    home: Path, quick: Sequence[str] = QUICK, slow: Sequence[str] = SLOW, regions: Sequence[str] = ("", "")
) -> AsyncIterator[RoutedService]:
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        ways, urls = [], []
        for model in (quick, slow):
            engine: Any = stack.enter_context(simulated_engine(*model, "--max-num-seqs", "16"))
            ways.append(Way(engine.url, session))
            routes = {CHAT: ways[-1].chat, "/metrics": ways[-1].metrics}
            urls.append(await stack.enter_async_context(http_server(routes, shutdown_timeout=0.5)))
        door = front_door_alone(ApiSettings(home, "", f"sqlite:///{home / 'api.db'}"))
        targets = [
            EngineTarget(url, "tiny", places=16, region=region) for url, region in zip(urls, regions, strict=True)
        ]
        for target in targets:
            door.inner.state.proxy.directory.announce(target)
        await stack.enter_async_context(door.inner.router.lifespan_context(door.inner))
        yield RoutedService(door, ways[0], ways[1], targets)


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


def test_an_engine_of_another_region_gets_requests_only_while_the_wait_here_is_longer_than_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_REGION", "here")

    async def scenario() -> None:
        async with site_of(tmp_path, SLOW, SLOW, ("here", "there")) as site:
            site.far.seconds = WAY_SECONDS
            await site.ask()
            async with asyncio.timeout(20 * PATIENCE):
                while site.figure("round_trip_seconds", region="there") < WAY_SECONDS:
                    await site.ask()
                    await asyncio.sleep(0.2)
            assert site.figure("round_trip_seconds", region="here") < WAY_SECONDS / 2
            async with asyncio.timeout(120 * PATIENCE):
                while not site.figure("choices_total", reason="predicted"):
                    await site.load(24)
            taught = site.far.chats
            assert taught >= 10, "too little was known of it before"

            await site.load(40, at_once=2)
            assert site.far.chats <= taught + 10, "there is hardly a wait here"
            before = site.near.chats, site.far.chats
            await site.load(160, at_once=80)
            near, far = site.near.chats - before[0], site.far.chats - before[1]
            # How many more go near depends on the wait there, which a busy machine makes longer than the way.
            assert far >= 20 and near >= (far + 1 if SOAK else 40), (near, far)
            assert site.figure("region_choices_total", region="there") == site.far.chats

    asyncio.run(scenario())
