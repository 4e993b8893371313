"""The work of a whole dataset, with the lengths of a few answers in place of assumed ones."""

from __future__ import annotations

from batch_assets.capacity_planning.preview_rows import Answer, PreviewRow, measured_work
from gpu_runner.client.protocol import Completion
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Assumption, Subject, Workload


def test_measured_lengths_replace_assumed_ones_and_leave_what_is_assumed_of_the_rows():
    rows = Assumption(Subject.ROWS, "about 9 lines of various lengths")
    lengths = Assumption(Subject.LENGTHS, "those of all rows")
    work = Workload(5, 9, LengthMix(1, 1), 2, "estimated", "assumed", (lengths, rows))
    answer = Answer(0.1, Completion("hi", "stop", 10, 20))
    found = measured_work(work, [PreviewRow("f", 1, b'"a"', answer=answer), PreviewRow("f", 2, None, "empty")])
    assert found is not None
    assert found.assumptions == (rows, Assumption(Subject.LENGTHS, "lengths are those of 1 rows"))
    assert (found.rows, found.mix, found.prompt_basis) == (9, LengthMix(10, 20), "measured")


def test_without_an_answer_nothing_is_measured():
    assert measured_work(Workload(5, 9, LengthMix(1, 1), 2, "estimated", "assumed"), []) is None
