"""How many engines a feed has at once: one loop for each, more or fewer of them while the feed works.

An engine that is to end leaves by itself. Of what is too many after that, loops that wait for an engine leave first,
and those that got theirs last next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

SURPLUS_SECONDS = 5.0  # an instance that the plan gives up has ended its session by then


class EngineSlot:
    """One loop of a feed. `serving`: it has an engine."""

    def __init__(self, slots: EngineSlots) -> None:
        self._slots = slots
        self.serving = False

    @property
    def needed(self) -> bool:
        """Whether the loop is to get another engine."""
        return not self._slots.too_many

    @property
    def leaves(self) -> bool:
        """Whether its engine is to be given back, although it could work on."""
        return self._slots.leaves(self)


class EngineSlots:
    """As many loops as are wanted, at least one. For one event loop. `clock`: monotonic seconds."""

    def __init__(self, wanted: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted = max(1, wanted)
        self._clock = clock
        self._loops: dict[EngineSlot, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._serve: Callable[[EngineSlot], Awaitable[None]] | None = None
        self._too_many_since: float | None = None

    @property
    def too_many(self) -> int:
        """Loops beyond what is wanted."""
        return max(0, len(self._loops) - self.wanted)

    async def run(self, serve: Callable[[EngineSlot], Awaitable[None]]) -> None:
        """Until all loops have ended. Raises what the first of them raised."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._serve = serve
                self._fill()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None

    def want(self, number: int) -> None:
        """So many engines from now on."""
        self.wanted = max(1, number)
        if self._group is None:
            return
        self._fill()
        waiting = [slot for slot in reversed(self._loops) if not slot.serving]
        for slot in waiting[: self.too_many]:
            self._loops.pop(slot).cancel()
        self._note()

    def end_waiting(self) -> None:
        """Loops that have no engine end; none gets one any more."""
        for slot in [slot for slot in self._loops if not slot.serving]:
            self._loops.pop(slot).cancel()

    def leaves(self, slot: EngineSlot) -> bool:
        """Whether this one is among the last that are too many, and has been for a while."""
        since = self._too_many_since
        if since is None or self._clock() - since < SURPLUS_SECONDS:
            return False
        return slot in list(self._loops)[len(self._loops) - self.too_many :]

    def _fill(self) -> None:
        while self._group is not None and len(self._loops) < self.wanted:
            slot = EngineSlot(self)
            self._loops[slot] = self._group.create_task(self._run(slot))

    async def _run(self, slot: EngineSlot) -> None:
        assert self._serve is not None
        try:
            await self._serve(slot)
        finally:
            self._loops.pop(slot, None)
            self._note()

    def _note(self) -> None:
        if not self.too_many:
            self._too_many_since = None
        elif self._too_many_since is None:
            self._too_many_since = self._clock()
