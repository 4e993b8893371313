"""Reads of a store that may go away for a while: they wait for it, and an absence is believed only while it is there.

A folder whose mount is gone answers as if nothing had ever been written: no file, no listing. Taken for an absence,
that would have rows asked again that are paid. S3 raises instead, and would end the run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from resources.objects.opening import CorruptObject, StoreError
from resources.objects.store_health import StoreHealth, is_store_trouble

POLL_SECONDS = 0.5

Result = TypeVar("Result")


class StoreReads:
    """Reads for one run. For several threads. `is_there` asks the store something small that it must have."""

    def __init__(self, health: StoreHealth, is_there: Callable[[], bool]) -> None:
        self._health, self._is_there = health, is_there
        self._closed = threading.Event()

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._closed.set()

    def read(self, question: Callable[[], Result]) -> Result:
        """What `question` returns. Blocks while the store is away, and asks again when it is back.

        Raises the question's error when it fails twice in a row with the store there: then it is about one object.
        Raises StoreError when closed meanwhile.
        """
        failed = False
        while True:
            try:
                with self._health.call("read"):
                    return question()
            except Exception as error:
                if not (is_store_trouble(error) or isinstance(error, CorruptObject)):
                    raise
                waited = self._wait()
                if self._closed.is_set():
                    raise StoreError("the run ended while its store was away") from error
                if failed and not waited:
                    raise
                failed = not waited

    def look(self, question: Callable[[], Result]) -> Result:
        """`read` for a question whose answer may be an absence, as that of a listing."""

        def answered() -> Result:
            found = question()
            self._check()
            return found

        return self.read(answered)

    def _check(self) -> None:
        if not self._is_there():
            raise StoreError("the store has not what it had")

    def _wait(self) -> bool:
        """Until the store answers, or we are closed. False: it does at once."""
        waited = False
        while not self._closed.is_set():
            with contextlib.suppress(Exception), self._health.call("read"):
                self._check()
                return waited
            waited = True
            self._closed.wait(POLL_SECONDS)
        return waited
