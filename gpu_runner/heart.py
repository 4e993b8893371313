"""A run's heartbeat: a thread that says "I live" and keeps the lease, whatever the rest of the run does."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import sqlalchemy as sa

from gpu_runner.fleet import FleetBook, Lease, RunState

log = logging.getLogger(__name__)


class Heart:
    """Beats for one run from its first second to its last; renews the lease that is `held`.

    A lease counts as lost when the book refuses to renew it, or when no renewal succeeded for `ttl - margin` seconds on
    our own monotonic clock: after that somebody else may hold the instance (a stopped process that wakes up is one).
    `ended` is set when the run was declared dead while it was silent: it has lost its lease, and gets no other.
    """

    def __init__(
        self,
        book: FleetBook,
        run_id: str,
        *,
        ttl: float = 10.0,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.book, self.run_id, self.ttl, self.interval = book, run_id, ttl, interval
        self.state: RunState = "waiting"
        self.note = ""
        self.rows_done: Callable[[], int] = lambda: 0
        self.lost = threading.Event()
        self.ended = threading.Event()
        self._clock = clock
        self._lease: Lease | None = None
        self._renewed_at = 0.0
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heart", daemon=True)

    @contextlib.contextmanager
    def beating(self, dataset: str, first_key: str, last_key: str) -> Iterator[Heart]:
        """Beat while the body runs; afterwards the run is marked as ended."""
        self.book.begin_run(self.run_id, dataset, first_key, last_key)
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(timeout=5)
            self.book.end_run(self.run_id)

    def now(self) -> float:
        """Our own clock, by which a lease is counted."""
        return self._clock()

    def hold(self, lease: Lease, asked_at: float) -> None:
        """Keep this lease alive. Its time runs from when it was asked for: we may have been stopped since."""
        with self._guard:
            self._lease, self._renewed_at = lease, asked_at
            self.lost.clear()
            self.state = "leased"

    def let_go(self) -> None:
        """Stop renewing: the lease is given back or lost."""
        with self._guard:
            self._lease = None
            self.state = "waiting"

    def check(self) -> bool:
        """True while the lease may be relied on, by our own clock."""
        with self._guard:
            if self._lease is None:
                return False
            if self._clock() - self._renewed_at > self.ttl - self.interval:
                self.lost.set()
            return not self.lost.is_set()

    def _loop(self) -> None:
        while not self._stop.wait(self.interval) and not self.ended.is_set():
            try:
                self._beat()
            except sa.exc.SQLAlchemyError as error:
                log.warning("heartbeat of run %s not written: %s", self.run_id, type(error).__name__)
            self.check()

    def _beat(self) -> None:
        with self._guard:
            lease = self._lease
        asked_at = self._clock()
        if lease is not None and not self.lost.is_set():
            renewed = self.book.renew(lease, self.ttl)
            with self._guard:
                if self._lease is lease:
                    if renewed:
                        self._renewed_at = asked_at
                    else:
                        self.lost.set()
        if not self.book.beat(self.run_id, self.state, self.note, self.rows_done()):
            self.ended.set()
            self.lost.set()
