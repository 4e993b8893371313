"""Progress in a log: lines while something changes, few while nothing does."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from batch_assets.catalog.progress import Figures
from batch_assets.request_status.display import Lines, filter_lines
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


@pytest.mark.parametrize(
    ("passed", "wanted", "fallen", "expected"),
    [
        (5, 8, {"a": 25, "b": 1}, ", 8 are wanted: 3 are missing (fell out: a 25, b 1, some by several of these)"),
        (5, 5, {"accept": 24, "long": 1}, ", 5 are wanted (fell out: accept 24, long 1)"),
        (5, None, {"accept": 25}, " (fell out: accept 25)"),
    ],
)  # fmt: skip
def test_rows_that_are_wanted_and_missing_are_said_beside_those_that_pass(
    passed: int, wanted: int | None, fallen: dict[str, int], expected: str
) -> None:
    status = SimpleNamespace(dataset="d", rows_passed=passed, rows_fallen=25, rows_wanted=wanted, fallen_by_rule=fallen)
    assert filter_lines(status) == [f"d: 5 of 30 rows pass the filter{expected}"]  # type: ignore[arg-type]
