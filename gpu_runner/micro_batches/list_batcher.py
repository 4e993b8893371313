"""Requests of many callers as lists to one engine: the asyncio shell of buffer, limits and bisection.

Each caller gets its own outcome. A caller who leaves is left out of the list, and a request for which nobody waits any
more is cancelled. While `calls` requests are under way the buffer fills further: to wait costs nothing then.
One batcher is one shard: it belongs to one event loop and shares nothing, so there is no lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from gpu_runner.due_timer import DueTimer
from gpu_runner.micro_batches.bisection import RefusedList, halves
from gpu_runner.micro_batches.list_buffer import ListBuffer, WaitPolicy
from gpu_runner.micro_batches.list_limits import ListLimits, ListSize

In = TypeVar("In")
Out = TypeVar("Out")


class BatcherFull(Exception):
    """So many requests wait already that one more would only wait longer."""


class BatcherClosed(Exception):
    """The batcher ended before this request was answered."""


class ListRefused(Exception):
    """Raised by `send` for a list, or a single input, that the engine refuses for good. `cause`: for the caller."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class BatchObserver(Protocol):
    """What is measured. Seconds; `size`: inputs of one request to the engine; `waited`: of its first input."""

    def sent(self, size: int, waited: float) -> None: ...
    def answered(self, seconds: float) -> None: ...
    def depth(self, waiting: int) -> None: ...


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """`calls`: requests to the engine at once. `waiting`: inputs that wait here, at most."""

    limits: ListLimits = field(default_factory=ListLimits)
    wait: WaitPolicy = field(default_factory=WaitPolicy)
    calls: int = 16
    waiting: int = 4096


@dataclass(slots=True, eq=False)
class _Entry(Generic[In, Out]):
    value: In
    size: int
    came: float
    outcome: asyncio.Future[Out]
    request: _Request[In, Out] | None = None


@dataclass(slots=True, eq=False)
class _Request(Generic[In, Out]):
    """A list on its way, with the parts into which it was cut."""

    entries: list[_Entry[In, Out]]
    task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it who has no outcome yet."""
        return not all(entry.outcome.done() for entry in self.entries)


class ListBatcher(Generic[In, Out]):
    """`send` asks the engine for a list and returns as many answers, in order. It raises ListRefused for a list that is
    to be cut, and anything else for one that failed: that is the outcome of each of its inputs.
    """

    def __init__(
        self,
        send: Callable[[Sequence[In]], Awaitable[Sequence[Out]]],
        size_of: Callable[[In], int],
        policy: BatchPolicy = BatchPolicy(),
        observer: BatchObserver | None = None,
    ) -> None:
        self._send, self._size_of, self._policy, self._observer = send, size_of, policy, observer
        self._loop = asyncio.get_running_loop()
        self._size = ListSize(policy.limits)
        self._buffer: ListBuffer[_Entry[In, Out]] = ListBuffer(self._size, policy.wait)
        self._full: deque[list[_Entry[In, Out]]] = deque()
        self._waiting = 0
        self._requests: set[_Request[In, Out]] = set()
        self._timer = DueTimer(self._move)
        self._closed = False

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._waiting and not self._requests

    async def ask(self, value: In) -> Out:
        """The answer to one input. Raises BatcherFull, BatcherClosed, what `send` raised, or the cause of a refusal."""
        if self._closed:
            raise BatcherClosed
        if self._waiting >= self._policy.waiting:
            raise BatcherFull
        now = self._loop.time()
        entry: _Entry[In, Out] = _Entry(value, self._size_of(value), now, self._loop.create_future())
        self._count(1)
        self._full.extend(self._buffer.add(entry, entry.size, now))
        self._move()
        try:
            return await entry.outcome
        except asyncio.CancelledError:
            self._leave(entry)
            raise

    async def close(self) -> None:
        """Ends all requests; whoever waits gets BatcherClosed."""
        self._closed = True
        for entry in [*self._buffer.take(), *(entry for each in self._full for entry in each)]:
            self._settle(entry, BatcherClosed())
        self._full.clear()
        self._count(-self._waiting)
        self._arm()
        tasks = [request.task for request in self._requests if request.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- movement ---

    def _move(self) -> None:
        """Sends what is full or due, while requests may be sent."""
        while len(self._requests) < self._policy.calls:
            if self._full:
                entries = self._full.popleft()
            elif self._buffer.due is not None and self._buffer.due <= self._loop.time():
                entries = self._buffer.take()
            else:
                break
            self._start([entry for entry in entries if not entry.outcome.done()], len(entries))
        self._arm()

    def _arm(self) -> None:
        self._timer.set(None if len(self._requests) >= self._policy.calls else self._buffer.due)

    def _start(self, entries: list[_Entry[In, Out]], taken: int) -> None:
        self._count(-taken)
        if not entries:
            return
        request: _Request[In, Out] = _Request(entries)
        for entry in entries:
            entry.request = request
        self._requests.add(request)
        request.task = self._loop.create_task(self._run(request))

    async def _run(self, request: _Request[In, Out]) -> None:
        try:
            await self._ask(request.entries, None)
        except asyncio.CancelledError:
            for entry in request.entries:
                self._settle(entry, BatcherClosed())
            raise
        finally:
            self._requests.discard(request)
            if not self._closed:
                self._move()

    async def _ask(self, entries: list[_Entry[In, Out]], refused: RefusedList | None) -> None:
        """One request, and those for its parts when it is refused."""
        began = self._loop.time()
        if self._observer is not None:
            self._observer.sent(len(entries), began - entries[0].came)
        try:
            answers = await self._send([entry.value for entry in entries])
            if len(answers) != len(entries):
                raise ValueError(f"expected {len(entries)} answers, found {len(answers)}")
        except ListRefused as error:
            if len(entries) == 1:
                if refused is not None:
                    refused.refused_alone()
                self._settle(entries[0], error.cause)
                return
        except Exception as error:
            if refused is not None:
                refused.failed(len(entries))
            for entry in entries:
                self._settle(entry, error)
            return
        else:
            if self._observer is not None:
                self._observer.answered(self._loop.time() - began)
            for entry, answer in zip(entries, answers, strict=True):
                if not entry.outcome.done():
                    entry.outcome.set_result(answer)
            if refused is not None:
                refused.answered(len(entries))
                if refused.most_taken is not None:
                    self._size.refuses_more_than(refused.most_taken)
            return
        refused = refused or RefusedList(len(entries))
        for part in halves(entries):
            wanted = [entry for entry in part if not entry.outcome.done()]
            refused.failed(len(part) - len(wanted))
            if wanted:
                await self._ask(wanted, refused)

    def _settle(self, entry: _Entry[In, Out], error: Exception) -> None:
        if not entry.outcome.done():
            entry.outcome.set_exception(error)

    def _leave(self, entry: _Entry[In, Out]) -> None:
        """A caller waits no more."""
        if self._buffer.discard(entry):
            self._count(-1)
            self._arm()
        elif entry.request is not None and entry.request.task is not None and not entry.request.wanted:
            entry.request.task.cancel()

    def _count(self, more: int) -> None:
        self._waiting += more
        if self._observer is not None:
            self._observer.depth(self._waiting)
