"""Work that is done again and again in a thread of its own: now and then, when somebody wakes it, and at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RepeatedTask:
    """Calls `work` every `seconds` (None: not by itself) and after each `wake`, `pause` seconds apart at least, until
    `end`. `last`: then it is called once more. `work` may set `seconds`; what it raises ends the thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        seconds: float | None = None,
        *,
        pause: float = 0.0,
        last: bool = False,
    ) -> None:
        self.seconds = seconds
        self._work, self._pause, self._last = work, pause, last
        self._woken, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to wait for the first call."""
        self._thread.start()

    def wake(self) -> None:
        """Call it soon. From any thread, also before `start`."""
        self._woken.set()

    @property
    def ended(self) -> bool:
        """Whether `end` was called: a call that is under way is the last one, or is to stop."""
        return self._ended.is_set()

    def end(self, seconds: float | None = None) -> None:
        """Stop, and wait so long for the end of the thread (None: for ever)."""
        self._ended.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._woken.wait(self.seconds)
            self._woken.clear()
            ending = self._ended.is_set()  # asked after that: `end` sets it before it wakes
            if ending and not self._last:
                return
            self._work()
            if ending:
                return
            self._ended.wait(self._pause)
