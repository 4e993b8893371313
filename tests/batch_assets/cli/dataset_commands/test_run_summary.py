"""The last lines of `batch-assets run`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batch_assets.cli.dataset_commands.run_summary import success


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
    runner = SimpleNamespace(generated=rows, seconds=3.0)
    assert success(status, runner)[1] == expected  # type: ignore[arg-type]
