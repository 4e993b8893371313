"""What may take long and must not block the supervisor: a background task, and a lease that is being asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from resources.fleet.resource import LeasedEngine

Result = TypeVar("Result")


class GivenUp(Exception):
    """Nobody waits for this lease any more."""


class BackgroundTask(Generic[Result]):
    """Something that may take long, done in a thread that ends with the process."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.result: Result | None = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="background-task", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error

    @property
    def done(self) -> bool:
        """Whether the task has its result or an error."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """True when done within this time."""
        self._thread.join(seconds)
        return self.done


class PendingLease:
    """A lease that is being asked for. `drop` gives back one that nobody takes any more."""

    def __init__(
        self,
        ask: Callable[[Callable[[float], None]], LeasedEngine],
        drop: Callable[[LeasedEngine], None],
    ) -> None:
        self.leased: LeasedEngine | None = None
        self._ask, self._drop = ask, drop
        self._given_up = threading.Event()
        self._guard = threading.Lock()
        self._task = BackgroundTask(self._run)

    def _run(self) -> None:
        try:
            leased = self._ask(self._pause)
        except GivenUp:
            return
        with self._guard:
            if not self._given_up.is_set():
                self.leased = leased
                return
        self._drop(leased)

    def _pause(self, seconds: float) -> None:
        if self._given_up.wait(seconds):
            raise GivenUp

    @property
    def done(self) -> bool:
        """Whether the request has its lease, or an error, or was given up."""
        return self._task.done

    @property
    def error(self) -> Exception | None:
        """Why there is no lease."""
        return self._task.error

    def wait(self, seconds: float) -> bool:
        """True when done within this time."""
        return self._task.wait(seconds)

    def cancel(self) -> LeasedEngine | None:
        """Give it up. Returns the lease if it was there already; a later one is given back by itself."""
        with self._guard:
            self._given_up.set()
            leased, self.leased = self.leased, None
        return leased
