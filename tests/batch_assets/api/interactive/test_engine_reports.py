"""Reading engines' loads: once a second, one task for each, and none that is left over."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web
from support.http_server import http_server
from support.timing import PATIENCE

from batch_assets.api.interactive import engine_reports
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.interactive.engine_reports import EnginePoller, EngineReading, LoadReader, PollPolicy
from gpu_runner.client.engine_load import EngineLoad

LOAD = EngineLoad(running=3, waiting=1, kv_usage=0.5, generated_tokens=10, preemptions=0)
ONE, TWO = EngineTarget("http://one", "m"), EngineTarget("http://two", "m")


class SimulatedPoller:
    """A poller in simulated time: each second of it passes when everybody sleeps."""

    def __init__(self, policy: PollPolicy | None = None) -> None:
        self.now, self.read, self.told, self.ended = 100.0, Counter[str](), Counter[str](), 0
        self.silent, self.gone, self.keys = set[str](), set[str](), list[str | None]()
        self._ticks = asyncio.Condition()
        self.poller = EnginePoller(
            self._read,
            self._tell,
            served=lambda engine: engine.url not in self.gone,
            over=self._over,
            clock=lambda: self.now,
            sleep=self._sleep,
            policy=policy or PollPolicy(),
        )

    async def pass_seconds(self, count: int) -> None:
        for _ in range(count):
            for _ in range(5):
                await asyncio.sleep(0)  # all that can run has run
            self.now += 1.0
            async with self._ticks:
                self._ticks.notify_all()
        for _ in range(5):
            await asyncio.sleep(0)

    async def _read(self, engine: EngineTarget) -> EngineReading:
        self.read[engine.url] += 1
        self.keys.append(engine.api_key)
        return EngineReading() if engine.url in self.silent else EngineReading(LOAD, 0.01)

    def _tell(self, engine: EngineTarget, reading: EngineReading) -> None:
        if reading.load is not None:
            self.told[engine.url] += 1

    async def _sleep(self, seconds: float) -> None:
        until = self.now + seconds
        async with self._ticks:
            await self._ticks.wait_for(lambda: self.now >= until)

    def _over(self) -> None:
        self.ended += 1


def test_an_engine_is_read_once_a_second_by_one_task_however_often_it_is_asked() -> None:
    async def scenario() -> None:
        site = SimulatedPoller()
        for _ in range(50):
            site.poller.watch(ONE)
        await site.pass_seconds(5)
        assert site.read["http://one"] == site.told["http://one"] == 6
        await site.poller.close()
        assert site.poller.watched == frozenset() and site.ended == 1

    asyncio.run(scenario())


def test_an_engine_at_the_address_of_one_that_is_gone_is_read_with_its_own_key() -> None:
    async def scenario() -> None:
        site = SimulatedPoller()
        for key in ("old", "new"):
            site.poller.watch(EngineTarget("http://one", "m", key))
            await site.pass_seconds(2)
        assert site.keys[0] == "old" and site.keys[-1] == "new"
        await site.poller.close()

    asyncio.run(scenario())


def test_an_engine_that_says_nothing_is_asked_on_and_nothing_is_told_of_it() -> None:
    async def scenario() -> None:
        site = SimulatedPoller()
        site.poller.watch(ONE)
        await site.pass_seconds(2)
        site.silent.add("http://one")
        told = site.told["http://one"]
        await site.pass_seconds(3)
        assert site.told["http://one"] == told and site.read["http://one"] == told + 3
        site.silent.clear()
        await site.pass_seconds(1)
        assert site.told["http://one"] == told + 1
        await site.poller.close()

    asyncio.run(scenario())


def test_reading_ends_when_the_engine_is_withdrawn_or_nobody_asks_for_it() -> None:
    async def scenario() -> None:
        site = SimulatedPoller(PollPolicy(idle=10.0))
        site.poller.watch(ONE)
        site.poller.watch(TWO)
        await site.pass_seconds(3)
        site.gone.add("http://one")
        await site.pass_seconds(1)
        assert site.poller.watched == {"http://two"} and site.ended == 1
        await site.pass_seconds(8)
        assert site.poller.watched == frozenset() and site.ended == 2
        read = site.read["http://two"]
        await site.pass_seconds(3)
        assert site.read["http://two"] == read <= 11

    asyncio.run(scenario())


def test_no_more_engines_are_read_than_the_bound() -> None:
    async def scenario() -> None:
        site = SimulatedPoller(PollPolicy(most=3))
        for number in range(10):
            site.poller.watch(EngineTarget(f"http://{number}", "m"))
        assert len(site.poller.watched) == 3
        await site.poller.close()

    asyncio.run(scenario())


def test_a_page_is_read_with_the_engines_key_and_within_bounds_of_bytes_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_reports, "ASK_SECONDS", 30 * PATIENCE)

    async def scenario() -> None:
        keys = []

        async def good(request: web.Request) -> web.Response:
            keys.append(request.headers.get("Authorization"))
            return web.Response(text='vllm:num_requests_running{m="x"} 3.0\nvllm:num_requests_waiting{m="x"} 1.0\n')

        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"# " + b"x" * 100_000 + b"\n")

        async def silent(request: web.Request) -> web.Response:
            await asyncio.sleep(3600)
            raise AssertionError

        async def wrong(request: web.Request) -> web.Response:
            return web.Response(text="vllm:num_requests_running NaN\n")

        reader = LoadReader()
        try:
            async with http_server({"/metrics": good}, shutdown_timeout=0.1) as url:
                load = (await reader.read(EngineTarget(url, "m", "engine-key"))).load
                assert load is not None and (load.running, load.waiting) == (3, 1)
                assert keys == ["Bearer engine-key"]
                elsewhere = url.replace("127.0.0.1", "0.0.0.0")
                assert await reader.read(EngineTarget(elsewhere, "m", "engine-key")) == EngineReading()
                assert keys == ["Bearer engine-key"], "no engine has such an address"
            for bad in (endless, wrong, silent):
                if bad is silent:
                    monkeypatch.setattr(engine_reports, "ASK_SECONDS", 0.3)
                async with http_server({"/metrics": bad}, shutdown_timeout=0.1) as url:
                    assert (await reader.read(EngineTarget(url, "m"))).load is None
            gone = await reader.read(EngineTarget(url, "m"))
            assert gone == EngineReading(), "nobody listens there any more"
        finally:
            await reader.close()

    asyncio.run(scenario())


def test_the_round_trip_is_that_of_a_request_on_an_open_connection_whatever_is_answered() -> None:
    async def scenario() -> None:
        async def far(request: web.Request) -> web.Response:
            await asyncio.sleep(0.2)
            return web.Response(status=404)

        reader = LoadReader()
        try:
            async with http_server({"/metrics": far}) as url:
                for _ in range(2):
                    reading = await reader.read(EngineTarget(url, "m"))
                    assert reading.load is None
                    assert reading.round_trip is not None and 0.19 < reading.round_trip < 0.2 + 0.3 * PATIENCE
        finally:
            await reader.close()

    asyncio.run(scenario())
