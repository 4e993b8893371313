"""What the log says again and again is counted."""

from __future__ import annotations

import logging

from batch_assets.api.telemetry.repeated_lines import MOST_LINES, RepeatedLines, counted_repeated_lines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def said(lines: RepeatedLines, text: str, *args: object) -> str | None:
    """What is written of a line; None: nothing."""
    record = logging.LogRecord("batch_assets.x", logging.WARNING, "x.py", 1, text, args, None)
    return record.getMessage() if lines.filter(record) else None


def test_a_line_a_second_is_one_a_minute_with_its_count() -> None:
    clock = Clock()
    lines = RepeatedLines(clock)
    written = []
    for second in range(181):
        clock.now = float(second)
        written.append(said(lines, "model %s: no engine", "m"))
    assert [one for one in written if one] == [
        "model m: no engine",
        *["model m: no engine (59 times more in the 60 s before)"] * 3,
    ]


def test_lines_that_differ_are_all_written_and_few_are_remembered() -> None:
    lines = RepeatedLines(Clock())
    texts = [f"batch {number}" for number in range(2 * MOST_LINES)]
    assert [said(lines, "%s", text) for text in texts] == texts
    assert len(lines._lines) == MOST_LINES
    assert said(lines, "100 % of it") == "100 % of it" and said(lines, "100 % of it") is None


def test_a_line_that_came_once_is_written_without_a_count() -> None:
    clock = Clock()
    lines = RepeatedLines(clock)
    assert said(lines, "a") == "a"
    clock.now = 61.0
    assert said(lines, "a") == "a"


def test_a_service_that_has_ended_leaves_the_handlers_of_its_process_as_they_were() -> None:
    before = [list(handler.filters) for handler in logging.getLogger().handlers]
    assert before
    with counted_repeated_lines():
        assert all(isinstance(handler.filters[-1], RepeatedLines) for handler in logging.getLogger().handlers)
    assert [list(handler.filters) for handler in logging.getLogger().handlers] == before
