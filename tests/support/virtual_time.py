"""Runs a test's coroutine on a clock that jumps to the next timer instead of waiting for it.

Minutes of back-off and watchdogs pass in milliseconds, in the same order on a slow machine as on a fast one.
For code without network; the feed's reader thread is replaced by a read on the spot.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any
from unittest import mock


class _Selector(selectors.DefaultSelector):
    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(0)
        if not events:
            self.skipped += timeout
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Selector()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.skipped


class _Inline:
    """A thread pool without threads."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True) -> None: ...


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs to the end; no task may be left then."""

    async def whole() -> None:
        async with asyncio.timeout(1_000_000):
            await main()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with (
        mock.patch("gpu_runner.inference.feed.ThreadPoolExecutor", _Inline),
        asyncio.Runner(loop_factory=_Loop) as runner,
    ):
        runner.run(whole())
