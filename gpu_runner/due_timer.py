"""A callback of the event loop at a moment that is moved now and then. It remembers the moment itself.

uvloop gives a plain handle, without `when()`, for a moment that is less than a millisecond away or over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DueTimer:
    """Lives on the event loop that runs when it is set. Times are seconds of that loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._handle: asyncio.Handle | None = None
        self.due: float | None = None

    def set(self, due: float | None) -> None:
        """Call at this time, and at no other that was set before; None: not at all."""
        if due == self.due:
            return
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self.due = due
        if due is not None:
            self._handle = asyncio.get_running_loop().call_at(due, self._expired)

    def _expired(self) -> None:
        self._handle = self.due = None
        self._callback()
