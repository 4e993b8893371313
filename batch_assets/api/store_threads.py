"""Threads for calls of the store, apart from those for all other calls: a store that is slow holds up what needs it.

The event loop's own threads are few, and calls of the records, of readiness and of keys wait for one of them, too.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from resources.objects.opening import StoreError

REQUESTS = 32  # uploads and contents at once
WAIT_SECONDS = 10.0  # of a request for a thread

P = ParamSpec("P")
Result = TypeVar("Result")


class StoreBusy(StoreError):
    """All threads are held by calls of the store that have no answer."""


class StoreThreads:
    """So many calls of the store at once. For any event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def call(self, call: Callable[P, Result], /, *arguments: P.args, **named: P.kwargs) -> Result:
        """The call in a thread, when one is free. A call that has begun ends by itself, whoever is cancelled."""
        context = contextvars.copy_context()
        return await asyncio.wrap_future(self._pool.submit(lambda: context.run(call, *arguments, **named)))

    async def call_soon(
        self, seconds: float, call: Callable[P, Result], /, *arguments: P.args, **named: P.kwargs
    ) -> Result:
        """The same for who waits so many seconds at most for a thread. Raises StoreBusy, and as the call."""
        loop, begun, context = asyncio.get_running_loop(), asyncio.Event(), contextvars.copy_context()

        def run() -> Result:
            loop.call_soon_threadsafe(begun.set)
            return context.run(call, *arguments, **named)

        future = self._pool.submit(run)
        try:
            async with asyncio.timeout(seconds):
                await begun.wait()
        except TimeoutError:
            if future.cancel():
                raise StoreBusy(f"{self._threads} calls of the store have no answer; try again later") from None
        except asyncio.CancelledError:
            future.cancel()
            raise
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Calls that wait for a thread are cancelled; those that have begun end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
