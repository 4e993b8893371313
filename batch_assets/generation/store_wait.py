"""Work that stands on a store, given up when the store has not answered for as long as a run waits for it.

A call of a store that hangs, as one of a network folder whose server is gone, cannot be ended: it is left to a thread
that ends with the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from batch_assets.generation.pending_lease import BackgroundTask
from resources.objects.store_health import GIVE_UP_SILENT_SECONDS, SAY_SILENT_SECONDS, Probe, StoreAway, StoreHealth

WAIT_SECONDS = 0.2
ASK_SECONDS = 5.0

Result = TypeVar("Result")


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
