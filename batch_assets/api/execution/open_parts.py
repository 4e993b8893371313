"""Batches of 250 rows on their way through a feed: which of them it has read and not handed on, by `BatchRun`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from batch_assets.api.execution.batch_run import BatchRun
from gpu_runner.rows import Batch


class OpenParts:
    """An iterator for a feed, read by one thread; the other methods are for the event loop of the feed.

    `parts`: what there is to read, each with the key `NAME OF RUN/KEY`. `run_of`: the run of a name, None: it is gone.
    What a run that is over had on its way here is left out.
    """

    def __init__(self, parts: Iterator[Batch], run_of: Callable[[str], BatchRun | None]) -> None:
        self._parts, self._run_of = parts, run_of
        self._lock = threading.Lock()  # of `over` of a run together with its open parts
        self._open: dict[str, set[str]] = {}

    def __iter__(self) -> OpenParts:
        return self

    def __next__(self) -> Batch:
        while True:
            batch = next(self._parts)
            name = batch.key.partition("/")[0]
            with self._lock:
                run = self._run_of(name)
                if run is not None and not run.over:
                    self._open.setdefault(name, set()).add(batch.key)
                    return batch

    def end(self, run: BatchRun) -> bool:
        """No more of this run is read. Returns whether something of it is open."""
        with self._lock:
            run.over = True
            return run.name in self._open

    def handed_on(self, key: str) -> bool:
        """The feed has handed this one on. Returns whether something of its run is open still."""
        name = key.partition("/")[0]
        with self._lock:
            left = self._open.get(name, set())
            left.discard(key)
            if not left:
                self._open.pop(name, None)
            return bool(left)
