"""A timer that is moved: on asyncio's loop and on uvloop, which the service runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from support.timing import PATIENCE

from gpu_runner.due_timer import DueTimer

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(params=list(LOOPS))
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def scenario(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(coroutine)

    return scenario


@pytest.mark.parametrize("ahead", [-1.0, 0.0, 0.0004, 0.01])
def test_it_calls_once_also_for_a_moment_that_is_over_or_about_to_come(
    run: Callable[[Coroutine[Any, Any, None]], None], ahead: float
) -> None:
    async def scenario() -> None:
        calls: list[float | None] = []
        called = asyncio.Event()

        def callback() -> None:
            calls.append(timer.due)
            called.set()

        timer = DueTimer(callback)
        due = asyncio.get_running_loop().time() + ahead
        for _ in range(3):
            timer.set(due)
        assert timer.due == due
        async with asyncio.timeout(10 * PATIENCE):
            await called.wait()
        await asyncio.sleep(0.02)
        assert calls == [None]

    run(scenario())


def test_it_is_moved_and_cancelled(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        called = asyncio.Event()
        timer, loop = DueTimer(called.set), asyncio.get_running_loop()
        timer.set(loop.time())
        timer.set(None)
        await asyncio.sleep(0.01)
        assert not called.is_set() and timer.due is None
        timer.set(loop.time() + 3600)
        timer.set(loop.time() + 0.0001)
        async with asyncio.timeout(10 * PATIENCE):
            await called.wait()

    run(scenario())
