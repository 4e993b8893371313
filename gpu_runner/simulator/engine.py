"""The scheduler's model driven by the wall clock: simulated time = wall time x speed.

A timer cannot wake more often than about once a millisecond, and a simulated step may be far shorter. So each
wake-up moves the model to where the wall clock says it should be, however many steps that is, and a wake-up that
comes late costs nothing but its own delay: there is no sum of sleeps that could drift.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gpu_runner.due_timer import DueTimer
from gpu_runner.simulator.scheduler import Scheduler, Sequence, StepModel
from gpu_runner.simulator.vllm_metrics import Histograms

# How long to sleep between wake-ups: epoll counts in milliseconds; a stream wants news at least this often.
SHORTEST_SLEEP = 0.001
LONGEST_SLEEP = 0.05


class EngineDead(Exception):
    """The engine died with this request in it."""


class SimulatedClock:
    """Simulated seconds; the rate may change, also to 0, and time never jumps."""

    def __init__(self, rate: float, wall: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._wall = wall
        self._anchor = wall()
        self._passed = 0.0

    def now(self) -> float:
        """Simulated seconds since the start."""
        return self._passed + (self._wall() - self._anchor) * self.rate

    def change_rate(self, rate: float) -> None:
        """From now on `rate` simulated seconds pass per second."""
        self._passed, self._anchor = self.now(), self._wall()
        self.rate = rate


class Engine:
    """Generates for the server. Lives on one event loop."""

    def __init__(self, model: StepModel, speed: float) -> None:
        self.scheduler = Scheduler(model)
        self.clock = SimulatedClock(speed)
        self.histograms = Histograms()
        self.dead = False
        self._timer = DueTimer(self._wake)
        self._inside: dict[Sequence, asyncio.Future[None]] = {}
        self._watchers: list[asyncio.Future[None]] = []

    def submit(self, prompt_tokens: int, output_tokens: int, priority: int = 0) -> Sequence:
        """Queue one sequence; `wait` for it or `abort` it afterwards. Raises EngineDead."""
        if self.dead:
            raise EngineDead
        sequence = self.scheduler.submit(prompt_tokens, output_tokens, self.clock.now(), priority)
        loop = asyncio.get_running_loop()
        self._inside[sequence] = loop.create_future()
        if self.clock.rate and (self._timer.due is None or self._timer.due > loop.time() + SHORTEST_SLEEP):
            self._wake_in(SHORTEST_SLEEP)
        return sequence

    async def wait(self, sequence: Sequence) -> None:
        """Return when the sequence has all its tokens; frees its slot when cancelled. Raises EngineDead."""
        try:
            await self._inside[sequence]
        finally:
            self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not."""
        if self._inside.pop(sequence, None) is not None:
            self.scheduler.abort(sequence)

    async def progress(self, sequence: Sequence) -> bool:
        """Wait for the engine's next wake-up; True when the sequence has all its tokens. Raises EngineDead."""
        done = self._inside[sequence]
        if not done.done():
            watcher = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            await asyncio.wait((watcher, done), return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
        return done.done()

    def finished(self, sequence: Sequence) -> bool:
        """Whether the sequence has all its tokens."""
        return self._inside[sequence].done()

    def catch_up(self) -> None:
        """Bring the model to the present and answer whoever is finished."""
        for sequence in self.scheduler.advance(self.clock.now()):
            self.histograms.observe(sequence)
            done = self._inside.get(sequence)
            if done is not None and not done.done():
                done.set_result(None)

    def change_rate(self, rate: float) -> None:
        """Let simulated time run at `rate` from now on; 0 stalls the engine."""
        self.catch_up()
        self.clock.change_rate(rate)
        self._sleep()

    def die(self) -> None:
        """Fail everything inside and refuse everything new."""
        self.dead = True
        self._timer.set(None)
        for sequence, done in list(self._inside.items()):
            self.scheduler.abort(sequence)
            if not done.done():
                done.set_exception(EngineDead())
                done.exception()  # its waiter may be gone already

    def _wake(self) -> None:
        self.catch_up()
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)
        self._sleep()

    def _sleep(self) -> None:
        """Sleep until the model expects news; not at all while idle or stalled."""
        event = self.scheduler.next_event()
        if event is None or not self.clock.rate or self.dead:
            self._timer.set(None)
            return
        delay = (event - self.clock.now()) / self.clock.rate
        self._wake_in(min(max(delay, SHORTEST_SLEEP), LONGEST_SLEEP))

    def _wake_in(self, delay: float) -> None:
        self._timer.set(asyncio.get_running_loop().time() + delay)
