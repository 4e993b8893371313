"""What the page of a run shows of its progress: rows, rate and time left, at growing intervals.

A run of three hours makes some forty entries, so that 20 million rows in forty runs make fewer than their batches do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batch_assets.catalog.progress import eta_seconds
from batch_assets.durations import duration
from gpu_runner.money import format_usd

FIRST_SECONDS = 5.0
LONGEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run stands. `rows_per_second` since the last report; `seconds_left`: None while nothing moves.

    `note`: what the run does or waits for, as it says itself. `usd_spent`: US dollars of its whole request so far, on
    all of its instances; None: not known.
    """

    rows_done: int
    rows: int
    rows_per_second: float
    seconds_left: float | None
    note: str = ""
    usd_spent: float | None = None

    def sentence(self) -> str:
        """In one line, for people."""
        return self._figures() + (f"; {format_usd(self.usd_spent)} $ spent by its request" if self.usd_spent else "")

    def _figures(self) -> str:
        said = f"{self.rows_done:,} of {self.rows:,} rows"
        if self.rows_done >= self.rows:
            return f"{said}, {self.rows_per_second:,.1f} rows/s"
        if self.seconds_left is None:
            return f"{said}; none finished lately" + (f": {self.note}" if self.note else "")
        left = f"{said}, {self.rows_per_second:,.1f} rows/s, about {duration(self.seconds_left)} left"
        return left + (f"; {self.note}" if self.note else "")


def late_words(late: int) -> str:
    """What a run says of so many rows that take far longer than others did (gpu_runner/inference/late_rows)."""
    if not late:
        return ""
    rows = "1 row is late and is" if late == 1 else f"{late:,} rows are late and are"
    return f"{rows} asked for once more"


class ProgressReport:
    """When to say how far a run is, and what: `clock` in seconds."""

    def __init__(self, rows: int, clock: Callable[[], float]) -> None:
        self._rows, self._clock = rows, clock
        self._interval = FIRST_SECONDS
        self._began = self._said_at = clock()
        self._said: int | None = None
        self._first: int | None = None

    def due(self, rows_done: int, note: str = "") -> RunProgress | None:
        """What is to be said now; None: nothing yet."""
        if self._first is None:  # what was finished before this run is no speed
            self._first = self._said = rows_done
        now = self._clock()
        if now - self._said_at < self._interval:
            return None
        before = self._said or 0
        rate = max(0, rows_done - before) / (now - self._said_at)
        self._said, self._said_at = rows_done, now
        self._interval = min(LONGEST_SECONDS, 2 * self._interval)
        return RunProgress(rows_done, self._rows, rate, eta_seconds(self._rows - rows_done, rate), note)

    def last(self, rows_done: int, note: str = "") -> RunProgress:
        """What is said when the run ends: with the rate of the whole run."""
        seconds = self._clock() - self._began
        rate = max(0, rows_done - (self._first or 0)) / seconds if seconds > 0 else 0.0
        return RunProgress(rows_done, self._rows, rate, eta_seconds(self._rows - rows_done, rate), note)
