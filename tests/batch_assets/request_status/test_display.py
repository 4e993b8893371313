"""Progress in a log: lines while something changes, few while nothing does."""

from __future__ import annotations

import io

from rich.console import Console

from batch_assets.catalog.progress import Figures
from batch_assets.request_status.display import Lines
from batch_assets.request_status.request_monitor import ProgressUpdate

FAILS = "run 1a2b3c4d: every request fails since 12:00:00: http_429: Rate limit reached"


def lines_of(seconds: int, rows_per_second: float) -> list[str]:
    """What is printed of a request that is looked at each second."""
    console, now = Console(file=io.StringIO(), width=300), 0.0
    lines = Lines(console, "d", lambda: now)
    for second in range(seconds):
        now, done = float(second), int(second * rows_per_second)
        lines.show(ProgressUpdate("rows", FAILS, Figures(5000, done, done, 0, 20, 0, 0, 0)))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_line_that_stays_as_it_was_comes_ever_more_seldom_and_says_for_how_long() -> None:
    found = lines_of(900, 0)
    assert len(found) == 7 and found[0].endswith("Rate limit reached")
    assert [line.rpartition(" (unchanged for ")[2] for line in found[1:]] == [
        "10 s)", "30 s)", "1 min 10 s)", "2 min 30 s)", "5 min 10 s)", "10 min 10 s)"
    ]  # fmt: skip


def test_while_rows_are_answered_there_is_a_line_every_ten_seconds() -> None:
    assert len(lines_of(100, 1)) == 10
