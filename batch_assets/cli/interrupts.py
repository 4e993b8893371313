"""Ctrl-C and SIGTERM: the first asks us to give up in good order, the second insists."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

EXIT_STATUS = 130


class Interrupted(BaseException):
    """Stop now. Not an Exception, so that no library swallows it."""


class Signals:
    """Handles SIGINT and SIGTERM while the context is open.

    Outside of `deferred` a signal raises Interrupted. Inside, the first only sets `asked`, and the second raises.
    """

    def __init__(self) -> None:
        self.asked = False
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}  # what signal.signal returned

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._deferred and not self.asked:
            self.asked = True
            return
        self.asked = True
        raise Interrupted

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While the body runs, a first signal waits until the body asks for it."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
