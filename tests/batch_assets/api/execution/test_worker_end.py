"""The end of a worker: no feed begins, no engine is leased, and all feeds have ended before batches are released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from support.api_service import jsonl, line
from support.timing import PATIENCE

from batch_assets.api.execution import worker as worker_module
from batch_assets.api.execution.engines.engine_supply import Awaited, ServingEngine, Waits, for_ever
from batch_assets.api.execution.model_feed import ModelFeed
from batch_assets.api.execution.worker import Worker
from gpu_runner.rows import Task
from resources.objects.opening import LocalObjects

from .test_worker import added, held_until, site_of


class WaitingSupply:
    """Nobody gets an engine. `asked` and `left`: models for which one was waited for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []
        self.waits = asyncio.Event()

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        self.asked.append(model)
        self.waits.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError
            yield
        finally:
            self.left.append(model)

    def running(self, model: str) -> list[ServingEngine]:
        return []

    def awaited(self, model: str, task: Task) -> Awaited | None:
        return None


class HeldInput(LocalObjects):
    """A store whose input files are read when the test says so."""

    loop: asyncio.AbstractEventLoop
    read: asyncio.Event
    go: asyncio.Event

    def open(self, path: str) -> BinaryIO:
        if "files/" in path:
            self.loop.call_soon_threadsafe(self.read.set)
            asyncio.run_coroutine_threadsafe(self.go.wait(), self.loop).result(4 * PATIENCE)
        return super().open(path)


def test_a_batch_that_is_ready_while_the_worker_ends_gets_no_feed_and_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving: list[str] = []
    ended: list[str] = []
    idle: list[asyncio.Event] = []
    serve = ModelFeed.serve

    async def served(feed: ModelFeed) -> None:
        serving.append(feed.model)
        try:
            await serve(feed)
            if feed.model == "other":  # a request in flight outlasts the drain
                await idle[0].wait()
        finally:
            ended.append(feed.model)

    async def works(folder: Path) -> None:
        with site_of(folder) as made:
            objects, supply = HeldInput(folder / "store"), WaitingSupply()
            objects.loop, objects.read, objects.go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
            idle.append(asyncio.Event())
            site = replace(made, objects=objects, engines=supply)
            worker = Worker(site)
            running = asyncio.create_task(worker.run())
            worker._keep("other", "chat", 100.0)
            await asyncio.wait_for(supply.waits.wait(), 4 * PATIENCE)
            batch = added(site, jsonl([line("a")]))
            await asyncio.wait_for(objects.read.wait(), 4 * PATIENCE)
            (carried,) = [one.task for one in worker._carried.values()]
            assert carried is not None
            running.cancel()
            while not worker._ending:  # noqa: ASYNC110
                await asyncio.sleep(0)
            objects.go.set()
            await asyncio.wait([carried], timeout=4 * PATIENCE)
            idle[0].set()
            await asyncio.gather(running, return_exceptions=True)
            assert serving == ended == supply.asked == supply.left == ["other"]
            found = site.batches.get("t", batch.id)
            assert found is not None and found.status == "in_progress" and held_until(site, batch) is None

    monkeypatch.setattr(ModelFeed, "serve", served)
    monkeypatch.setattr(worker_module, "DRAIN_SECONDS", 8.0 * PATIENCE)
    asyncio.run(works(tmp_path))


def test_who_waits_for_an_engine_stops_waiting_when_the_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def works(folder: Path) -> None:
        with site_of(folder) as made:
            supply = WaitingSupply()
            worker = Worker(replace(made, engines=supply))
            running = asyncio.create_task(worker.run())
            worker._keep("tiny", "chat", 100.0)
            await asyncio.wait_for(supply.waits.wait(), 4 * PATIENCE)
            running.cancel()
            async with asyncio.timeout(4 * PATIENCE):
                await asyncio.gather(running, return_exceptions=True)
            assert supply.asked == supply.left == ["tiny"]

    monkeypatch.setattr(worker_module, "DRAIN_SECONDS", 1e6)  # the end is not for want of time
    asyncio.run(works(tmp_path))
