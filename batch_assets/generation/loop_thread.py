"""What must not block a thread: work done in another one, and the event loop, in a thread of its own, so that the op's
main thread stays interruptible.

Dagster turns a cancel into an exception in the main thread. Under `asyncio.run` in a busy main thread that exception
lands in a random task and is lost; with the loop elsewhere it arrives within one short wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Self, TypeVar

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """Something that may take long, done in a thread that ends with the process."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.result: Result | None = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="background-task", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error

    @property
    def done(self) -> bool:
        """Whether the task has its result or an error."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """True when done within this time."""
        self._thread.join(seconds)
        return self.done


class Running(Generic[Result]):
    """A coroutine on the loop, as seen from other threads: done only when its clean-up is done too."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[Result] | None = None
        self._ended = threading.Event()
        self._canceled = False

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        """On the loop: make the task."""
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(lambda _: self._ended.set())

    def wait(self, seconds: float) -> bool:
        """True when it has ended within this time."""
        return self._ended.wait(seconds)

    def result(self) -> Result:
        """What it returned, or the exception it ended with. Only after `wait` said True."""
        assert self._task is not None and self._task.done()
        return self._task.result()

    def cancel(self, seconds: float) -> bool:
        """Cancel it unless it has ended, and wait for its clean-up. False when that took longer.

        Only the first call cancels: a second one would cut the clean-up short.
        """
        if not self._ended.is_set() and not self._canceled:
            self._canceled = True
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        return self._ended.wait(seconds)


class LoopThread:
    """An event loop in a thread. Leaving the context cancels every task, waits for them, and ends the thread."""

    def __init__(self, join_seconds: float = 3.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._join_seconds = join_seconds
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Running[Result]:
        """Start a coroutine on the loop."""
        running: Running[Result] = Running(self._loop)
        self._loop.call_soon_threadsafe(running.start, coroutine)
        return running

    def call(self, callback: Callable[[], None]) -> None:
        """Run a short function on the loop."""
        self._loop.call_soon_threadsafe(callback)

    def __exit__(self, *_: object) -> None:
        self.submit(self._cancel_all()).wait(self._join_seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=self._join_seconds)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
