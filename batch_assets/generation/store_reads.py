"""Reads of a store that may go away for a while: they wait for it, and an absence is believed only while it is there.

A folder whose mount is gone answers as if nothing had ever been written: no file, no listing. Taken for an absence,
that would have rows asked again that are paid. S3 raises instead, and would end the run. A call of a store that hangs,
as one of a network folder whose server is gone, cannot be ended: it is left to a thread that ends with the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from batch_assets.generation.loop_thread import BackgroundTask
from resources.objects.opening import CorruptObject, StoreError
from resources.objects.store_health import (
    GIVE_UP_SILENT_SECONDS,
    SAY_SILENT_SECONDS,
    Probe,
    StoreAway,
    StoreHealth,
    is_store_trouble,
)

WAIT_SECONDS = 0.2
ASK_SECONDS = 5.0
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


def silence(health: StoreHealth) -> str:
    """Since when the store does not answer; "" while it does. Raises StoreAway when that is too long."""
    silent = health.silent_seconds()
    if silent < SAY_SILENT_SECONDS:
        return ""
    words = health.words(time.time())
    if silent >= GIVE_UP_SILENT_SECONDS:
        raise StoreAway(f"{words}; start it again when the store is back")
    return words


def while_store_answers(
    work: Callable[[], Result],
    ask: Callable[[], bool],
    *,
    note: Callable[[str], None],
    health: StoreHealth | None = None,
) -> Result:
    """What `work` returns or raises, done in another thread. Raises StoreAway.

    `ask` asks the store something small every few seconds, and is False when it has not what it had; `note` is told of
    its silence, and with "" of its end.
    """
    health, told = health or StoreHealth(), ""
    with Probe(health, ask, lambda: None, ASK_SECONDS):
        task = BackgroundTask(work)
        while not task.wait(WAIT_SECONDS):
            if (words := silence(health)) != told:
                note(words)
                told = words
    if task.error is not None:
        raise task.error
    assert task.result is not None
    return task.result
