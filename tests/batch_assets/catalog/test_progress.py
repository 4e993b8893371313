"""Figures of a dataset under way: counted once, measured from the first row on, and honest about a dead end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batch_assets.catalog.catalog_reader import BatchReport
from batch_assets.catalog.ledger import LedgerVersion
from batch_assets.catalog.progress import Meter, dead_end, eta_seconds, figures, named, recent_rate
from batch_assets.catalog.ranges import KeyRange, RangeRunRecord, RunOutcome
from batch_assets.durations import duration
from resources.store.dataset_store import BatchEntry

ENTRIES = [BatchEntry(f"{i:05d}", 250, f"{i:016x}", 0, i) for i in range(4)]


def report(*, author: str = "run", reporter: str | None = None, at: float = 0.0, dead: int = 0) -> BatchReport:
    version = LedgerVersion("0" * 16, 0)
    return BatchReport(version, None, 250, 250 - dead, dead, 0, 1000, 2000, author, reporter or author, at)


def run(
    number: int, outcome: RunOutcome, first: str, last: str, *, request: str = "r", root: str = ""
) -> RangeRunRecord:
    return RangeRunRecord(f"run{number}", KeyRange(first, last), outcome, request, root)


def test_committed_rows_are_not_counted_again_as_open_rows_of_their_run():
    current = {"00000": report(dead=2), "00001": report(author="earlier")}
    found = figures(ENTRIES, current, {"run": 420, "other": 30})
    assert (found.rows, found.batches, found.batches_done) == (1000, 4, 2)
    assert (found.rows_committed, found.ok, found.dead) == (500, 498, 2)
    assert found.open_rows == (420 - 250) + 30
    assert found.rows_done == 700
    assert (found.prompt_tokens, found.completion_tokens, found.tokens_per_row) == (2000, 4000, 8.0)
    assert not found.complete


def test_committed_rows_are_those_of_the_run_that_asked_for_them():
    taken = replace(report(author="second"), journaled={"first": 40, "third": 10}, reused=20)
    found = figures(ENTRIES, {"00000": report(author="first"), "00001": taken}, {})
    assert found.asked_by == {"first": 290, "second": 180, "third": 10}


def test_rows_done_never_pass_the_rows_there_are():
    found = figures(ENTRIES, dict.fromkeys(("00000", "00001", "00002", "00003"), report()), {"late": 500})
    assert found.complete
    assert found.rows_done == found.rows == 1000


def test_the_meter_starts_with_the_first_row_and_forgets_what_is_old():
    meter = Meter(window=10)
    for second in range(5):
        meter.note(second, 0)
    assert meter.rate() == 0
    for second in range(5, 40):
        meter.note(second, (second - 4) * 100)
    assert meter.rate() == pytest.approx(100)
    for second in range(40, 46):
        meter.note(second, 3500)
    assert 0 < meter.rate() < 60
    meter.note(60, 200)
    assert meter.rate() == 0


def test_the_recent_rate_leaves_out_reports_of_batches_that_were_committed_before():
    reports = [report(at=95), report(at=99), report(at=99, reporter="again"), report(at=10)]
    assert recent_rate(reports, now=100, working_since=90) == pytest.approx(50)
    assert recent_rate(reports, now=100, working_since=None) == 0


@pytest.mark.parametrize(("left", "rate", "expected"), [(100, 50, 2), (100, 0, None), (0, 0, 0)])
def test_the_eta_is_unknown_while_nothing_moves(left: int, rate: float, expected: float | None):
    assert eta_seconds(left, rate) == expected


def test_a_run_that_goes_on_is_no_dead_end():
    runs = [run(1, "canceled", "00000", "00001"), run(2, "unfinished", "00002", "00003")]
    assert dead_end(["00000"], runs, "r", backfill_open=False) == ""


def test_a_canceled_run_ends_the_request():
    assert dead_end(["00001"], [run(1, "canceled", "00000", "00003")], "r", backfill_open=False) == (
        "canceled: batch 00001 is not committed"
    )
    foreign = [run(1, "canceled", "00000", "00003", request="another")]
    assert dead_end(["00001"], foreign, "r", backfill_open=False) == ""


def test_a_run_that_its_engine_refused_ends_the_request():
    refused = [run(1, "refused", "00000", "00001")]
    assert dead_end(["00001", "00003"], refused, "r", backfill_open=False) == (
        "refused by the engine: 2 batches (00001, 00003) are not committed"
    )
    assert dead_end(["00003"], [*refused, run(2, "unfinished", "00002", "00003")], "r", backfill_open=False) == ""


def test_three_failed_runs_of_every_missing_batch_are_a_dead_end():
    failed = [run(number, "failed", "00000", "00001") for number in range(3)]
    said = dead_end(["00000", "00001"], failed, "r", backfill_open=False)
    assert said == "failed 3 times: 2 batches (00000, 00001) are not committed"
    assert dead_end(["00000", "00002"], failed, "r", backfill_open=False) == ""
    assert dead_end(["00000"], failed, "r", backfill_open=True) == ""
    retries = [run(number, "failed", "00000", "00001", root="run0") for number in range(3)]
    assert dead_end(["00000"], retries, "r", backfill_open=False) == ""


def test_many_batches_are_named_by_the_first_of_them():
    assert named([f"{i:05d}" for i in range(30)], most=2) == "30 batches (00000, 00001, …) are"


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "?"), (4.4, "4 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (59.6, "1 min 00 s")]
)
def test_durations_are_for_people(seconds: float | None, words: str):
    assert duration(seconds) == words
