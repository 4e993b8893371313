"""Who wants the dataset: asks for more rows while there is little left to do, and again when a request is used up."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from batch_assets.catalog.backfills import UNFINISHED
from e2e.harness import Platform

STUCK_SECONDS = 30.0


@dataclass(eq=False)
class Customer:
    """Lets the source grow by `rows_more` rows whenever fewer than `rows_ahead` are missing."""

    site: Platform
    source: Path
    rows_more: int
    rows_ahead: int
    rows: int = 0
    requests: int = 0
    _idle_since: float = field(default_factory=time.time)

    def grow(self) -> None:
        """Append rows to the source and ask for them."""
        numbers = range(self.rows, self.rows + self.rows_more)
        with self.source.open("a") as file:
            file.writelines(json.dumps({"id": f"r{number:06d}", "number": number}) + "\n" for number in numbers)
        self.rows += self.rows_more
        self._ask()

    def tend(self, *, grow: bool) -> None:
        """More rows if it is time and they may be had; a new request when nothing happens any more."""
        unfinished = self.site.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
        if unfinished:
            self._idle_since = time.time()
        asking = any(run.job_name == f"{self.site.name}_refresh" for run in unfinished)
        missing, behind = self._missing(), self._behind()
        if grow and not asking and not behind and missing < self.rows_ahead:
            self.grow()
        elif (missing or behind) and time.time() - self._idle_since > STUCK_SECONDS:
            self._ask()

    def _ask(self) -> None:
        with contextlib.suppress(OSError, AssertionError, KeyError):  # the code server may be down: again, later
            self.site.launch_job(f"{self.site.name}_refresh")
            self.requests += 1
            self._idle_since = time.time()

    def _missing(self) -> int:
        """Rows of the current snapshot whose batch has no object."""
        store = self.site.store
        snapshot = store.current_snapshot()
        entries = [] if snapshot is None else store.entries(snapshot)
        current = store.current_objects(entries)
        return sum(entry.rows for entry in entries if entry.key not in current)

    def _behind(self) -> bool:
        """The snapshot does not hold all rows of the source yet."""
        snapshot = self.site.store.current_snapshot()
        return snapshot is None or self.site.store.manifest(snapshot).rows < self.rows
