"""Which batch is next, of one tenant and between several."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from support.api_service import CHAT
from support.timing import PATIENCE

from batch_assets.api.database.batch_records import BatchRecord
from batch_assets.api.execution import batch_queue
from batch_assets.api.execution.batch_queue import BatchQueue
from batch_assets.api.execution.batch_run import BatchRun
from gpu_runner.rows import Batch, Row, Urgency
from resources.objects.opening import LocalObjects

from .test_model_feed import run_of


@dataclass
class Rows:
    """A batch of that many rows, 250 to a part, without a store."""

    record: BatchRecord
    rows: int
    priority: int = 0
    over: bool = False
    unread: bool = True
    away: bool = False  # its store

    @property
    def name(self) -> str:
        return self.record.id

    @property
    def batch_id(self) -> str:
        return self.record.id

    @property
    def urgency(self) -> Urgency:
        return Urgency(self.priority, self.record.tenant, float(self.record.expires_at))

    def batches(self) -> Iterator[Batch]:
        if self.away:
            raise OSError("the store is away")
        for start in range(0, self.rows, 250):
            self.unread = start + 250 < self.rows
            numbers = range(start, min(start + 250, self.rows))
            yield Batch(self.name, tuple(Row(str(number), "k", self.name, b"") for number in numbers))


def waiting(queue: BatchQueue, name: str, tenant: str, rows: int, ends: int = 100, priority: int = 0) -> Rows:
    record = BatchRecord(name, tenant, CHAT, "file-1", "24h", 1, ends, "d")
    run = Rows(record, rows, priority)
    queue.add(cast(BatchRun, run))
    return run


def taken(queue: BatchQueue, parts: int) -> list[tuple[str, int]]:
    return [(batch.key, len(batch.rows)) for batch in (next(queue) for _ in range(parts))]


def test_within_a_tenant_the_window_that_ends_first_is_first() -> None:
    queue = BatchQueue()
    waiting(queue, "long", "a", 500, ends=300)
    assert taken(queue, 1) == [("long", 250)]
    waiting(queue, "short", "a", 300, ends=200)
    assert taken(queue, 3) == [("short", 250), ("short", 50), ("long", 250)]


def test_the_urgency_of_what_is_read_next() -> None:
    queue = BatchQueue()
    assert queue.next_urgency() is None
    waiting(queue, "long", "a", 300, ends=300)
    assert queue.next_urgency() == Urgency(0, "a", 300.0)
    waiting(queue, "short", "a", 300, ends=200)
    assert queue.next_urgency() == Urgency(0, "a", 200.0)
    assert taken(queue, 2) == [("short", 250), ("short", 50)]
    assert queue.next_urgency() == Urgency(0, "a", 300.0), "one that was read to its end is not next"
    taken(queue, 2)
    assert queue.next_urgency() is None and queue.empty


def test_what_was_set_aside_is_said_to_be_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "RETRY_SECONDS", 0.05)
    queue = BatchQueue()
    broken = waiting(queue, "broken", "a", 250, ends=10)
    waiting(queue, "other", "a", 250, ends=20)
    broken.away = True
    assert taken(queue, 1) == [("other", 250)] and not queue.take_back()
    broken.away = False
    time.sleep(0.06)
    assert queue.take_back() and not queue.take_back()
    assert queue.next_urgency() == Urgency(0, "a", 10.0)


def test_ten_rows_do_not_wait_for_another_tenants_hundred_thousand() -> None:
    queue = BatchQueue()
    waiting(queue, "large", "a", 100_000, ends=90)
    taken(queue, 50)
    waiting(queue, "small", "b", 10)
    assert ("small", 10) in taken(queue, 2)


def test_tenants_have_equal_shares_of_rows_whatever_the_size_of_their_batches() -> None:
    queue = BatchQueue()
    waiting(queue, "large", "a", 100_000)
    for number in range(500):
        waiting(queue, f"small{number}", "b", 20)
    waiting(queue, "third", "c", 100_000)
    rows: Counter[str] = Counter()
    while rows["s"] < 5_000:
        ((name, number),) = taken(queue, 1)
        rows[name[0]] += number
    assert max(rows.values()) - min(rows.values()) <= 250, rows


def test_nobody_saves_up_a_share_while_away() -> None:
    queue = BatchQueue()
    waiting(queue, "a", "a", 50_000)
    waiting(queue, "b", "b", 10)
    taken(queue, 100)
    waiting(queue, "late", "b", 50_000)
    rows = Counter(name for name, _ in taken(queue, 20))
    assert rows == {"a": 10, "late": 10}


def test_a_share_that_was_had_is_not_had_again_by_coming_anew() -> None:
    queue = BatchQueue()
    waiting(queue, "a", "a", 50_000)
    rows: Counter[str] = Counter()
    for number in range(20):
        waiting(queue, f"b{number}", "b", 250)  # each is gone before the next one comes
        for name, _ in taken(queue, 2):
            rows[name[0]] += 1
    assert abs(rows["a"] - rows["b"]) <= 1


def test_a_higher_priority_comes_before_all_shares() -> None:
    queue = BatchQueue()
    waiting(queue, "a", "a", 500)
    waiting(queue, "b", "b", 500)
    waiting(queue, "urgent", "a", 500, ends=900, priority=1)
    assert taken(queue, 2) == [("urgent", 250), ("urgent", 250)]


def test_a_batch_that_is_over_gives_no_rows() -> None:
    queue = BatchQueue()
    waiting(queue, "a", "a", 500).over = True
    waiting(queue, "b", "b", 250)
    assert taken(queue, 1) == [("b", 250)]


def test_rows_that_are_put_back_while_the_rest_is_read_are_read_once_more(tmp_path: Path) -> None:
    objects, queue = LocalObjects(tmp_path), BatchQueue()
    run = run_of(objects, lines=251)
    queue.add(run)
    assert next(queue).key == "00000"
    run.put_back("00000")  # a budget has held some of them back, and those that it let through have their answers
    queue.add(run)
    with ThreadPoolExecutor(1) as pool:
        try:
            read = [pool.submit(next, queue).result(4 * PATIENCE).key[-5:] for _ in range(2)]
            assert read == ["00001", "00000"]
            after = pool.submit(next, queue, None)
        finally:
            queue.close()
        assert after.result() is None  # each once


def test_a_batch_that_cannot_be_read_holds_up_no_other_and_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_queue, "RETRY_SECONDS", 0.01)
    objects, queue = LocalObjects(tmp_path), BatchQueue()
    torn, whole = run_of(objects), run_of(objects, "batch_2")
    shard = tmp_path / torn.store.snapshot_path("input", "prompts-00000.parquet")
    shard.rename(tmp_path / "away")
    queue.add(torn)
    queue.add(whole)
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(next, queue).result(4 * PATIENCE).job.startswith("batch_2")
            assert not queue.empty
            (tmp_path / "away").rename(shard)
            assert pool.submit(next, queue).result(4 * PATIENCE).job.startswith("batch_1")
        finally:
            queue.close()
