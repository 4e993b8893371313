"""A bounded number of calls of the store at once, and nobody waits for ever for one of them."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
from support.timing import PATIENCE

from batch_assets.api.store_threads import StoreBusy, StoreThreads
from resources.objects.store_health import is_store_trouble


def test_so_many_calls_run_at_once_and_the_next_one_waits() -> None:
    async def scenario() -> None:
        threads, go, running, most = StoreThreads(2, "store"), threading.Event(), [], []

        def call(number: int) -> int:
            running.append(number)
            most.append(len(running))
            assert go.wait(4 * PATIENCE)
            running.remove(number)
            return number

        calls = [asyncio.create_task(threads.call(call, number)) for number in range(4)]
        async with asyncio.timeout(4 * PATIENCE):
            while len(running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        assert await asyncio.gather(*calls) == [0, 1, 2, 3] and max(most) == 2
        threads.close()

    asyncio.run(scenario())


def test_who_does_not_get_a_thread_in_time_is_told_and_its_call_is_never_made() -> None:
    async def scenario() -> None:
        threads, go, made = StoreThreads(1, "store"), threading.Event(), []
        stuck = asyncio.create_task(threads.call(go.wait))
        await asyncio.sleep(0)  # it has the thread
        with pytest.raises(StoreBusy) as raised:
            await threads.call_soon(0.01, made.append, 1)
        assert is_store_trouble(raised.value)
        waiting = asyncio.create_task(threads.call_soon(60.0, made.append, 2))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        go.set()
        await stuck
        await threads.call_soon(60.0, made.append, 3)
        assert made == [3]
        threads.close()

    asyncio.run(scenario())


def test_a_call_that_has_begun_is_waited_for_and_sees_the_context_of_its_caller() -> None:
    said = contextvars.ContextVar("said", default="")

    async def scenario() -> str:
        threads, go = StoreThreads(1, "store"), threading.Event()
        said.set("caller")

        def call() -> str:
            assert go.wait(4 * PATIENCE)
            return said.get()

        answer = asyncio.create_task(threads.call_soon(0.01, call))
        await asyncio.sleep(0.05)
        go.set()
        try:
            return await answer
        finally:
            threads.close()

    assert asyncio.run(scenario()) == "caller"
