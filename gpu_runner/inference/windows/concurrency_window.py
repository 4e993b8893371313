"""How many rows to keep submitted to one engine. Pure: fed with load readings and refusals, no clock, no I/O.

An engine that always has three times as many rows waiting as running refills every freed slot at once.
Where `max_num_seqs` is unknown the window finds that point itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.inference.failures.overload import OverloadBackoff, RefusalPolicy
from gpu_runner.inference.windows.first_token_window import FirstTokenBackoff, InteractiveShare
from gpu_runner.inference.windows.row_pacing import RowPacing


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """Rows, and shares of 1. `blind` is the fixed window for servers that show no load."""

    per_slot: int = 4
    start: int = 64
    blind: int = 64
    largest: int = 8192
    kv_limit: float = 0.9
    shrink: float = 0.7
    grow: float = 1.15
    refusal: RefusalPolicy = field(default_factory=RefusalPolicy)


class Window:
    """The window of one engine; `size` is what holds now. `most` is what this process can hold. `share`: interactive
    requests on the same engine, which come first.
    """

    def __init__(
        self,
        policy: WindowPolicy,
        max_num_seqs: int | None,
        most: int | None = None,
        share: InteractiveShare | None = None,
    ) -> None:
        self._policy = policy
        self._most = policy.largest if most is None else min(most, policy.largest)
        self._known = max_num_seqs is not None
        first = policy.per_slot * max_num_seqs if max_num_seqs is not None else policy.start
        self._wanted = max(1, min(first, self._most))
        self._pressure: float | None = None  # while the KV cache is too full
        self._running: deque[int] = deque(maxlen=10)
        self._preemptions: int | None = None
        self.refusals = OverloadBackoff(policy.refusal)
        self._share = share
        self._yielding = None if share is None else FirstTokenBackoff(share.policy, max_num_seqs)
        self._pacing = RowPacing()
        self.size = 0
        self._apply()

    @property
    def most(self) -> int:
        """Rows that may be in flight in any case."""
        return self._most

    def on_refused(self, in_flight: int, *, first: bool) -> bool:
        """One row was refused with 429 or 503. True while the window is held down for that."""
        running = self._running[-1] if self._running else 0
        throttled = self.refusals.on_refused(self.size, in_flight, running, first=first)
        self._apply()
        return throttled

    def on_tick(self, load: EngineLoad | None, in_flight: int) -> None:
        """Once a second or so, with the engine's load where it shows one."""
        self.refusals.on_tick(self._wanted)
        if self._share is not None and self._yielding is not None:
            running, waiting = (in_flight, 0) if load is None else (load.running, load.waiting)
            self._yielding.on_tick(self._share.look(), running, waiting, in_flight)
        if load is not None:
            self._on_load(load, in_flight)
        elif not self._known:
            self._wanted = min(self._policy.blind, self._most)
        self._apply()

    def on_answer(self, seconds: float) -> None:
        """A row was answered so long after it was sent."""
        self._pacing.on_answer(seconds)

    def on_sent(self) -> None:
        """A row is being sent."""
        self._pacing.on_sent()

    def wait_to_send(self, now: float) -> float:
        """Seconds until the next row may be sent, where there is a place for it; 0.0 unless interactive requests come.

        `now`: monotonic seconds.
        """
        if self._yielding is None or self._yielding.cap is None:
            return 0.0
        return self._pacing.wait(now, self.size)

    def _on_load(self, load: EngineLoad, in_flight: int) -> None:
        self._running.append(load.running)
        if not self._known:
            self._find(load, in_flight)
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        if load.kv_usage > self._policy.kv_limit and preempted:
            self._pressure = max(float(load.running), self.size * self._policy.shrink, 1.0)
        elif self._pressure is not None and not preempted:
            self._pressure = self._pressure * self._policy.grow + 1
            if self._pressure >= self._wanted:
                self._pressure = None

    def _find(self, load: EngineLoad, in_flight: int) -> None:
        """Doubles while nothing waits, then settles at `per_slot` times what runs."""
        used = in_flight >= 0.8 * self.size
        if load.waiting == 0:
            if used and load.running >= 0.5 * self.size:
                self._wanted = min(self._most, self._wanted * 2)
            return
        target = self._policy.per_slot * max(self._running)
        if target > self._wanted:
            self._wanted = min(self._most, self._wanted * 2, target)
        elif len(self._running) == self._running.maxlen and used:
            self._wanted = max(self._policy.start, target, int(self._wanted * 0.8))

    def _apply(self) -> None:
        yielded = None if self._yielding is None else self._yielding.cap
        limits = [float(self._wanted), *(x for x in (self.refusals.cap, self._pressure, yielded) if x is not None)]
        self.size = max(1, int(min(limits)))
