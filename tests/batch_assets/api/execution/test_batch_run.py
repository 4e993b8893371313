"""What is kept of a batch under way, whoever writes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO

import pytest
from support.open_batch import KEY, answered, run_of
from support.timing import PATIENCE

from batch_assets.api.billing.price_list import TokenPrices
from batch_assets.api.billing.spending import BatchBudget
from batch_assets.api.database.batch_records import Held
from batch_assets.api.execution.batch_run import BatchRun
from batch_assets.api.execution.results import write_results
from resources.objects.opening import LocalObjects, StoreError


class HeldStore(LocalObjects):
    """A store whose writes of the journal wait for `go`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.go = threading.Event(), threading.Event()

    def put(self, path: str, data: bytes) -> None:
        if "journal" in path:
            self.begun.set()
            assert self.go.wait(4 * PATIENCE)
        super().put(path, data)


class AwayOnce(LocalObjects):
    """A store whose next opening of a batch object, or writing of the journal, fails after `left` of them."""

    left = 10**9

    def _use(self, path: str) -> None:
        if "/journal/" in path or "/batches/0" in path:
            self.left -= 1
            if self.left == -1:
                raise StoreError("away")

    def open(self, path: str) -> BinaryIO:
        self._use(path)
        return super().open(path)

    def put(self, path: str, data: bytes) -> None:
        self._use(path)
        super().put(path, data)


@pytest.fixture
def held_store(tmp_path: Path) -> Iterator[HeldStore]:
    store = HeldStore(tmp_path / "store")
    yield store
    store.go.set()


def test_a_flush_waits_for_the_rows_of_a_flush_that_is_under_way(held_store: HeldStore) -> None:
    run = run_of(held_store, "a", "b")
    run.note(KEY, answered("a"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run.write_journal)
        assert held_store.begun.wait(4 * PATIENCE)
        assert run.unwritten  # a kill now: only this computer's disk has the row
        run.over = True  # cancelled while the journal is being written
        second = pool.submit(lambda: (run.write_journal(), write_results(run, "batch_cancelled", 1, 2))[1])
        try:
            with pytest.raises(TimeoutError):  # before: it returned at once, and the row was lost
                second.result(0.2)
        finally:
            held_store.go.set()
        first.result()
        assert (second.result().completed, second.result().failed) == (1, 1)
    assert (run.completed, run.failed) == (1, 0) and not run.unwritten


@pytest.mark.parametrize("left", [0, 1, 2, 10**9])
def test_who_takes_a_batch_over_counts_all_that_is_kept_once_into_its_budget(tmp_path: Path, left: int) -> None:
    objects = AwayOnce(tmp_path)
    first = run_of(objects, *(f"{number}" for number in range(600)))
    parts = list(first.batches())
    for part in parts[:2]:
        rows = [replace(answered(row.row_id), row_key=row.row_key) for row in part.rows]
        first.commit(part.key, rows)
    first.note("00002", answered("500"))
    first.write_journal()
    on_this_disk = {"00002": {"501": answered("501"), "502": answered("502")}}
    budget = BatchBudget(10**12, TokenPrices(input=Decimal(1), output=Decimal(1)))
    again = BatchRun(objects, replace(first.record, epoch=2), Held(first.batch_id, 2), "other", budget)
    objects.left = left
    with contextlib.suppress(StoreError):  # two objects are opened, one segment is written
        again.load(on_this_disk)
    if left < 3:
        assert budget.spent == 0
        again.load(on_this_disk)
    assert budget.spent == 503 * 2 * 10**6, "a token in and one out of each line"


@pytest.mark.parametrize("left", [0, 1, 2, 3, 10**9])
def test_who_takes_a_batch_over_counts_what_the_journal_has_of_a_lost_part_whenever_the_store_was_away(
    tmp_path: Path, left: int
) -> None:
    objects = AwayOnce(tmp_path)
    first = run_of(objects, *(f"{number}" for number in range(300)))
    (part, _) = first.batches()
    rows = [replace(answered(row.row_id), row_key=row.row_key) for row in part.rows]
    for row in rows[:7]:
        first.note(KEY, row)
    first.write_journal()
    first.commit(KEY, rows)
    (stored,) = (info.path for info in objects.list("") if "/batches/0" in info.path)
    objects.put(stored, b"damaged")
    on_this_disk = {"00001": {"251": answered("251")}}
    again = BatchRun(objects, replace(first.record, epoch=2), Held(first.batch_id, 2), "other")
    objects.left = left
    with contextlib.suppress(StoreError):
        again.load(on_this_disk)
    if left < 3:
        again.load(on_this_disk)
    assert (again.completed, again.failed) == (8, 0)
