"""Does the store answer? Known from what is asked of it anyway, and from a small question now and then.

A call that failed, or that has no answer for some seconds, is silence; the next one of its kind that succeeds ends it.
Reads and writes count apart: a full disk, or keys that may only read, let the one succeed and not the other.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from gpu_runner.repeated_task import RepeatedTask
from resources.objects.opening import CorruptObject, StoreError

CallKind = Literal["read", "write"]
JOIN_SECONDS = 1.0
# A store that does not answer: when it is said, when leases are given back, when what waits for it ends. A restart of a
# store or a fail-over takes less than a minute; a run without a lease costs no GPU, and holds what is finished in its
# memory.
SAY_SILENT_SECONDS, RELEASE_SILENT_SECONDS, GIVE_UP_SILENT_SECONDS = 10.0, 60.0, 1800.0
PATIENCE_SECONDS = 5.0  # a call that takes longer counts as unanswered from its start


class StoreAway(StoreError):
    """The store has not answered for longer than anybody waits for it."""


def is_store_trouble(error: BaseException) -> bool:
    """The store refused or did not answer, whatever was asked; not: an object of it is damaged."""
    if isinstance(error, CorruptObject):
        return False
    return isinstance(error, OSError | StoreError) or _is_of_obstore(error)


def _is_of_obstore(error: BaseException) -> bool:
    if "obstore" not in sys.modules:  # not imported for the question: a store on disk needs none of it
        return False
    from obstore.exceptions import BaseError

    return isinstance(error, BaseError)


class StoreHealth:
    """Since when a store is silent. For several threads. `clock`: seconds that never run back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, float] = {}
        self._failing: dict[CallKind, tuple[float, str]] = {}

    @contextlib.contextmanager
    def call(self, kind: CallKind) -> Iterator[None]:
        """A call of the store is made in the body; its error is noted and raised."""
        number, began = next(self._numbers), self._clock()
        with self._guard:
            self._pending[number] = began
        try:
            yield
        except Exception as error:
            if is_store_trouble(error) or isinstance(error, CorruptObject):
                with self._guard:
                    first = self._failing.get(kind, (began, ""))[0]
                    self._failing[kind] = (first, type(error).__name__)
            raise
        else:
            with self._guard:
                self._failing.pop(kind, None)
        finally:
            with self._guard:
                self._pending.pop(number, None)

    def silent_seconds(self) -> float:
        """How long the store has not answered; 0.0 while it does."""
        now = self._clock()
        with self._guard:
            failing = [now - since for since, _ in self._failing.values()]
            waiting = [now - began for began in self._pending.values() if now - began > PATIENCE_SECONDS]
        return max([0.0, *failing, *waiting])

    def fails(self, kind: CallKind) -> bool:
        """The last call of this kind that has ended failed."""
        with self._guard:
            return kind in self._failing

    def words(self, wall: float) -> str:
        """One sentence for people. `wall`: Unix seconds now."""
        since = time.strftime("%H:%M:%S", time.localtime(wall - self.silent_seconds()))
        with self._guard:
            why = ", ".join(sorted({name for _, name in self._failing.values()})) or "no reply"
        return f"the store does not answer since {since} ({why})"


class Probe:
    """Asks the store something small every few seconds in a thread of its own, also while nothing is written.

    A write that failed is silence until one succeeds. Once reads answer, `write` is called to make one, since perhaps
    nobody else does: a run without a lease has no rows to write.
    """

    def __init__(
        self, health: StoreHealth, ask: Callable[[], bool], write: Callable[[], None], seconds: float = 5.0
    ) -> None:
        self._health, self._ask, self._write = health, ask, write
        self._task = RepeatedTask("store-probe", self._look, seconds)

    def __enter__(self) -> Probe:
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.end(JOIN_SECONDS)

    def _look(self) -> None:
        with contextlib.suppress(Exception):
            with self._health.call("read"):
                if not self._ask():
                    raise StoreError("the store has not what it had")
            if self._health.fails("write") and not self._task.ended:
                self._write()
