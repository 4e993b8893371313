"""The last lines of `batch-assets run`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batch_assets.cli.dataset_commands.run import Request
from batch_assets.cli.dataset_commands.run_summary import dead_lines, success
from batch_assets.publishing.dead_letters import DeadLetterExample


@pytest.mark.parametrize(
    ("rows", "table_rows", "batches", "expected"),
    [
        (5000, 5000, 20, "5,000 rows in 20 batches: 4,999 ok, 1 dead, 7 completion tokens"),
        (12, 12, 1, "12 rows in 1 batch: 11 ok, 1 dead, 7 completion tokens"),
        (8, 40, 1, "40 rows in 1 batch, 8 of them asked, the others ask the same: 7 ok, 1 dead, 7 completion tokens"),
    ],
)
def test_rows_that_ask_the_same_are_told_from_those_that_were_asked(
    rows: int, table_rows: int, batches: int, expected: str
) -> None:
    counts = {"ok": rows - 1, "dead": 1, "completion_tokens": 7}
    status = SimpleNamespace(
        dataset="d", rows=rows, table_rows=table_rows, batches=batches, table="t", simulated=False, **counts
    )
    runner = SimpleNamespace(generated=rows, seconds=3.0, request=Request("d"))
    assert success(status, runner)[1] == expected  # type: ignore[arg-type]


def test_a_redrive_says_how_many_dead_letters_are_answered_now() -> None:
    counts = {"ok": 998, "dead": 2, "completion_tokens": 7}
    status = SimpleNamespace(dataset="d", rows=1000, table_rows=1000, batches=4, table="t", simulated=False, **counts)
    runner = SimpleNamespace(generated=0, seconds=3.0, request=Request("d", redrive_error=""), dead_before=680)
    assert success(status, runner)[0] == "d: 678 of 680 dead letters are answered now"  # type: ignore[arg-type]


def test_dead_letters_are_counted_by_error_with_an_example() -> None:
    dead = [DeadLetterExample("rejected_402", 680, "r1", "no credit"), DeadLetterExample("timeout", 2, "r9", "")]
    assert dead_lines("d", dead) == [
        "dead letters:",
        "  680 rejected_402, as row r1: no credit",
        "    2 timeout, as row r9",
        "batch-assets redrive d [--error CODE]: tries them again, and nothing else",
    ]
