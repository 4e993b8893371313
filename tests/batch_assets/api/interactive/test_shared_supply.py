"""Engines that batches give back while interactive requests are under way there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from support.timing import PATIENCE

from batch_assets.api.execution.engines.engine_supply import Awaited, ServingEngine, Waits, for_ever
from batch_assets.api.interactive import shared_supply
from batch_assets.api.interactive.engine_directory import EngineDirectory, EngineTarget
from batch_assets.api.interactive.first_tokens import FirstTokens
from batch_assets.api.interactive.shared_supply import SharedSupply
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy
from gpu_runner.reachability import Reachability, always_open
from gpu_runner.rows import Task


def tunnel() -> Reachability:
    return Reachability.OPEN


class OneEngine:
    """A supply whose way to its engine is closed when it is given back."""

    def __init__(self, reachability: Callable[[], Reachability]) -> None:
        self.closed = False
        self._engine = ServingEngine("http://e", None, 1, "p", "i", leased=True, reachability=reachability)

    @contextlib.asynccontextmanager
    async def engine(self, model: str, task: Task, waits: Waits = for_ever) -> AsyncIterator[ServingEngine]:
        try:
            yield self._engine
        finally:
            self.closed = True

    def running(self, model: str) -> Sequence[ServingEngine]:
        return [self._engine]

    def awaited(self, model: str, task: Task) -> Awaited | None:
        return None


@contextlib.asynccontextmanager
async def given_back(engines: OneEngine) -> AsyncIterator[tuple[EngineDirectory, EngineTarget, asyncio.Task[None]]]:
    """The engine is given back while a chat is under way there."""
    directory = EngineDirectory(lambda: 0.0)
    supply = SharedSupply(engines, directory, FirstTokens(lambda: 0.0), FirstTokenPolicy())
    ends = asyncio.Event()

    async def hold() -> None:
        async with supply.engine("m", "chat"):
            await ends.wait()

    holding = asyncio.create_task(hold())
    async with asyncio.timeout(30 * PATIENCE):
        while not directory.targets():  # noqa: ASYNC110
            await asyncio.sleep(0)
        (target,) = directory.targets()
        assert not directory.begin(target)
        ends.set()
        while directory.targets():  # noqa: ASYNC110
            await asyncio.sleep(0)
        yield directory, target, holding
        await asyncio.gather(holding, return_exceptions=True)


def test_a_tunnel_is_closed_when_the_requests_under_way_there_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_supply, "LOOK_SECONDS", 0.001)

    async def scenario() -> None:
        engines = OneEngine(tunnel)
        async with given_back(engines) as (directory, target, _):
            await asyncio.sleep(0.05)
            assert not engines.closed, "a chat would be cut"
            directory.end(target, reached=True)
        assert engines.closed

    asyncio.run(scenario())


def test_a_request_that_does_not_end_holds_no_engine_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_supply, "LEAVE_SECONDS", 0.01)

    async def scenario() -> None:
        engines = OneEngine(tunnel)
        async with given_back(engines) as (directory, target, _):
            assert directory.in_flight(target)
        assert engines.closed

    asyncio.run(scenario())


def test_what_is_cancelled_or_needs_no_tunnel_is_given_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        direct, tunnelled = OneEngine(always_open), OneEngine(tunnel)
        async with given_back(direct):
            pass
        async with given_back(tunnelled) as (_, _, holding):
            holding.cancel()
        assert direct.closed and tunnelled.closed

    monkeypatch.setattr(shared_supply, "LEAVE_SECONDS", 600 * PATIENCE)
    asyncio.run(scenario())
