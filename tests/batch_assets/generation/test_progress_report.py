"""When a run says how far it is: at growing intervals, with the rate since it last did."""

from __future__ import annotations

import itertools

import pytest

from batch_assets.generation.progress_report import LONGEST_SECONDS, ProgressReport, RunProgress, late_words


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def reports(seconds: int, rows: int, rate: float, known: int = 0) -> list[tuple[float, RunProgress]]:
    clock, found = Clock(), []
    report = ProgressReport(rows, clock)
    for second in range(seconds):
        clock.now = 100.0 + second
        if said := report.due(min(rows, known + int(rate * second))):
            found.append((clock.now - 100.0, said))
    return found


def test_intervals_grow_and_a_long_run_says_little() -> None:
    said = reports(3 * 3600, 500_000, 46.0)
    assert [at for at, _ in said][:6] == [5, 15, 35, 75, 155, 315]
    assert max(later - at for (at, _), (later, _) in itertools.pairwise(said)) == LONGEST_SECONDS
    assert len(said) < 45


def test_rate_and_time_left_are_those_since_the_last_report() -> None:
    (_, first), (_, second), *_ = reports(60, 6000, 10.0, known=1000)
    assert first == RunProgress(1050, 6000, 10.0, 495.0)
    assert second.rows_per_second == pytest.approx(10.0)  # what an earlier run finished is no speed
    assert first.sentence() == "1,050 of 6,000 rows, 10.0 rows/s, about 8 min 15 s left"


def test_what_a_run_waits_for_is_said_while_nothing_moves() -> None:
    clock = Clock()
    report = ProgressReport(100, clock)
    assert report.due(0) is None
    clock.now += 5
    said = report.due(0, "waits for an instance")
    assert said is not None and said.seconds_left is None
    assert said.sentence() == "0 of 100 rows; none finished lately: waits for an instance"


def test_late_rows_are_named_while_others_are_answered() -> None:
    clock = Clock()
    report = ProgressReport(100, clock)
    assert report.due(0) is None
    clock.now += 5
    said = report.due(50, late_words(2))
    assert said is not None
    assert said.sentence() == "50 of 100 rows, 10.0 rows/s, about 5 s left; 2 rows are late and are asked for once more"


def test_the_end_has_the_rate_of_the_whole_run() -> None:
    clock = Clock()
    report = ProgressReport(100, clock)
    assert report.due(20) is None
    clock.now += 4
    assert report.last(100).sentence() == "100 of 100 rows, 20.0 rows/s"


def test_the_dollars_of_the_request_are_said_once_there_are_some() -> None:
    running = RunProgress(50, 100, 10.0, 5.0, "", 1.25)
    assert running.sentence() == "50 of 100 rows, 10.0 rows/s, about 5 s left; 1.25 $ spent by its request"
    assert RunProgress(50, 100, 10.0, 5.0, "", 0.0).sentence() == "50 of 100 rows, 10.0 rows/s, about 5 s left"
