"""Who may write a batch, and that counts and states go one way only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.fleet_databases import postgres_url, sqlite_url

from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, Held, KeyReused, OpenBatch, new_batch_id
from batch_assets.api.database.file_records import FileRecord, FileRecords, UnknownCursor
from batch_assets.api.database.service_database import Records, RecordsError
from batch_assets.api.database.states import (
    ACCEPT,
    COMPLETE,
    END_CANCEL,
    FINALIZE,
    OPEN,
    REFUSE,
    TERMINAL,
    TRANSITIONS,
    BatchStatus,
)
from batch_assets.api.database.tables import BATCHES
from batch_assets.api.execution.local_journal import began, gone, own_name


@pytest.fixture(params=["sqlite", "postgres"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Records]:
    sqlite = request.param == "sqlite"
    with sqlite_url(tmp_path) if sqlite else postgres_url(request.getfixturevalue("server")) as url:
        opened = Records(url)
        yield opened
        opened.close()


def added(records: Records) -> str:
    batch = BatchRecord(new_batch_id(), "t", "/v1/embeddings", "file-1", "24h", 100, 200, "digest")
    BatchRecords(records).create(batch)
    return batch.id


def claimed(records: Records, batch_id: str, holder: str, now: float = 0.0) -> Held:
    held = BatchRecords(records).claim(batch_id, holder, now, 5.0)
    assert held is not None
    return held


def test_one_worker_at_a_time_holds_a_batch_and_a_silent_one_loses_it(records: Records) -> None:
    batches, batch_id = BatchRecords(records), added(records)
    first = claimed(records, batch_id, "a", 10.0)
    assert batches.claim(batch_id, "b", 12.0, 5.0) is None
    batches.renew("a", 14.0, 5.0)
    assert batches.claim(batch_id, "b", 18.0, 5.0) is None
    second = claimed(records, batch_id, "b", 19.5)
    assert second.epoch == first.epoch + 1
    assert batches.current(first) is None and batches.current(second) is not None
    assert batches.move(first, ACCEPT, 20) is False
    assert batches.free(20.0) == [] and batches.free(20.0, ["b"]) == batches.free(25.0) == [batch_id]
    assert batches.claim(batch_id, "c", 20.0, 5.0, gone=["b"]) is not None


def test_who_is_fenced_off_changes_nothing(records: Records) -> None:
    batches, batch_id = BatchRecords(records), added(records)
    old = claimed(records, batch_id, "a", 0.0)
    new = claimed(records, batch_id, "b", 100.0)
    file = FileRecord("file-2", "t", "batch_output", "x", 1, 1)
    batches.count(old, 5, 5)
    assert batches.move(old, ACCEPT, 1, [file]) is False
    assert FileRecords(records).get("t", "file-2", 0.0) is None
    found = batches.current(new)
    assert found is not None and (found.completed, found.failed, found.status) == (0, 0, "validating")


def test_counts_never_fall(records: Records) -> None:
    batches, batch_id = BatchRecords(records), added(records)
    held = claimed(records, batch_id, "a")
    for completed, failed in ((3, 1), (2, 2), (5, 0)):
        batches.count(held, completed, failed)
    found = batches.current(held)
    assert found is not None and (found.completed, found.failed) == (5, 2)


def test_counts_of_a_batch_that_has_ended_are_those_of_its_end(records: Records) -> None:
    """A worker's last look may be written after the end, which counts lines of damaged objects as failed."""
    batches, batch_id = BatchRecords(records), added(records)
    held = claimed(records, batch_id, "a")
    assert batches.move(held, ACCEPT, 11, total=3) and batches.move(held, FINALIZE, 12)
    assert batches.move(held, COMPLETE, 13, completed=1, failed=2)
    batches.count(held, 3, 0)
    found = batches.get("t", batch_id)
    assert found is not None and (found.completed, found.failed) == (1, 2)


def test_a_transition_needs_its_state_and_sets_its_time(records: Records) -> None:
    batches, batch_id = BatchRecords(records), added(records)
    held = claimed(records, batch_id, "a")
    assert not batches.move(held, COMPLETE, 1) and not batches.move(held, END_CANCEL, 1)
    assert batches.move(held, ACCEPT, 11, total=3, model="m")
    assert not batches.move(held, REFUSE, 12)
    assert batches.move(held, FINALIZE, 13) and batches.move(held, COMPLETE, 14)
    found = batches.get("t", batch_id)
    assert found is not None and found.state is BatchStatus.COMPLETED
    assert (found.in_progress_at, found.finalizing_at, found.completed_at, found.total) == (11, 13, 14, 3)
    assert batches.claim(batch_id, "b", 1e9, 5.0) is None and batches.open_batches() == []


def test_a_look_at_all_open_batches_reads_no_more_than_it_compares(records: Records) -> None:
    """Metadata and errors of a batch may be hundreds of kilobytes, and there are thousands of batches."""
    batches, batch_id, ended = BatchRecords(records), added(records), added(records)
    held = claimed(records, batch_id, "a")
    assert batches.move(claimed(records, ended, "a"), REFUSE, 1)
    asked: list[str] = []
    sa.event.listen(records.engine, "before_cursor_execute", lambda *sent: asked.append(sent[2].partition("FROM")[0]))
    assert batches.open_batches() == [OpenBatch(batch_id, held.epoch, "validating")]
    assert [one.count(",") for one in asked if one.startswith("SELECT")] == [2]
    assert batches.open_records() == [batches.current(held)]


def test_a_sign_of_life_does_not_write_to_batches_that_have_ended(records: Records) -> None:
    batches, ended, open_one = BatchRecords(records), added(records), added(records)
    assert batches.move(claimed(records, ended, "a"), REFUSE, 1)
    claimed(records, open_one, "a")
    batches.renew("a", 50.0, 5.0)
    with records.reading() as connection:
        until = dict(connection.execute(sa.select(BATCHES.c.id, BATCHES.c.held_until)).tuples().all())
    assert until == {ended: 5.0, open_one: 55.0}


def test_nothing_follows_on_an_end_and_every_open_state_has_a_way_out() -> None:
    sources = frozenset(state for transition in TRANSITIONS for state in transition.sources)
    assert sources == OPEN and not sources & TERMINAL


def test_an_expired_file_is_kept_while_a_batch_is_yet_to_read_it(records: Records) -> None:
    files, batches = FileRecords(records), BatchRecords(records)
    files.add(FileRecord("file-1", "t", "batch", "a", 1, 0, 50))
    batch_id = added(records)
    assert files.get("t", "file-1", 60.0) is None
    assert files.expired(60.0) == []
    batches.move(claimed(records, batch_id, "a"), ACCEPT, 60)
    assert [file.id for file in files.expired(60.0)] == ["file-1"]


def test_only_a_process_that_is_surely_gone_counts_as_gone() -> None:
    own = own_name()
    host, pid, since, number = own.split("/")
    assert not gone(own)
    assert gone(f"{host}/{pid}/1/{number}")  # the process id was used again
    assert gone(f"{host}/99999999/{since}/{number}")
    assert not gone(f"other-{host}/99999999/{since}/{number}") and not gone("nonsense")
    assert began(99999999) == ""


def test_a_database_that_cannot_be_opened_is_an_error_without_its_address(tmp_path: Path) -> None:
    with pytest.raises(RecordsError) as refused:
        Records(f"sqlite:///{tmp_path}/nowhere/secret.db")
    assert "secret" not in str(refused.value)


def test_a_batch_created_twice_at_once_with_one_key_is_one(records: Records) -> None:
    batches = BatchRecords(records)

    def create(number: int) -> str:
        asked = BatchRecord(f"batch_{number}", "t", "/v1/embeddings", "f", "24h", 1, 2, "d", idempotency_key="k")
        return batches.create(asked).id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(16)))) == 1
    with pytest.raises(KeyReused):
        batches.create(BatchRecord("batch_x", "t", "/v1/embeddings", "f", "1h", 1, 2, "e", idempotency_key="k"))


@pytest.mark.parametrize("end", ["cancel", "refuse"])
def test_a_repeated_create_returns_no_batch_that_is_cancelled_or_has_ended_long_ago(records: Records, end: str) -> None:
    batches, first = BatchRecords(records), added(records)
    again = BatchRecord(new_batch_id(), "t", "/v1/embeddings", "file-1", "24h", 110, 210, "digest")
    assert batches.create(again, retried_since=50.0).id == first
    if end == "cancel":
        batches.cancel("t", first, 1)
    else:
        assert batches.move(claimed(records, first, "a"), REFUSE, 1)
        assert batches.create(again, retried_since=50.0).id == first
        again = replace(again, created_at=again.created_at + 3600)
    assert batches.create(again, retried_since=50.0).id == again.id


def right_after(records: Records, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """`act` comes when the next transaction that may write has ended."""
    writing = records.writing

    @contextlib.contextmanager
    def written() -> Iterator[sa.Connection]:
        with writing() as connection:
            yield connection
        monkeypatch.setattr(records, "writing", writing)
        act()

    monkeypatch.setattr(records, "writing", written)


@pytest.mark.parametrize("before", ["validating", "in_progress", "finalizing"])
def test_the_answer_to_a_cancel_does_not_depend_on_how_fast_it_ends(
    records: Records, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    batches, batch_id = BatchRecords(records), added(records)
    held = claimed(records, batch_id, "a")
    moves = {"validating": (), "in_progress": (ACCEPT,), "finalizing": (ACCEPT, FINALIZE)}
    assert all(batches.move(held, transition, 1) for transition in moves[before])
    right_after(records, monkeypatch, lambda: batches.move(held, END_CANCEL, 8))
    answer = batches.cancel("t", batch_id, 7)
    assert answer is not None and (answer.state, answer.cancelling_at) == (BatchStatus.CANCELLING, 7)
    ended = batches.get("t", batch_id)
    assert ended is not None and (ended.status, ended.cancelling_at, ended.cancelled_at) == ("cancelled", 7, 8)
    assert batches.cancel("t", batch_id, 9) == ended, "it has ended: nothing changes"
    assert batches.cancel("other", batch_id, 9) is None and batches.cancel("t", "batch_x", 9) is None


def test_a_cancel_meets_the_end_of_a_batch_and_one_of_both_is_first(records: Records) -> None:
    """Eight times: what the cancel is told is what became of the batch."""
    batches = BatchRecords(records)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            batch_id = added(records)
            held = claimed(records, batch_id, "a")
            assert batches.move(held, ACCEPT, 1) and batches.move(held, FINALIZE, 1)
            together = threading.Barrier(2)

            def met(call: Callable[[], Any], together: threading.Barrier = together) -> Any:
                together.wait()
                return call()

            cancel = pool.submit(met, partial(batches.cancel, "t", batch_id, 2))
            completed = pool.submit(met, partial(batches.move, held, COMPLETE, 2)).result()
            answer, found = cancel.result(), batches.get("t", batch_id)
            assert found is not None and answer.status == found.status == ("completed" if completed else "cancelling")


def test_pages_are_of_one_tenant_and_a_foreign_cursor_is_unknown(records: Records) -> None:
    files = FileRecords(records)
    for number in range(5):
        files.add(FileRecord(f"file-{number}", "ab"[number % 2], "batch", "n", 1, 1))
    page = files.page("a", 5.0, purpose=None, after=None, limit=2, order="desc")
    assert [file.id for file in page.files] == ["file-4", "file-2"] and page.has_more
    with pytest.raises(UnknownCursor):
        files.page("b", 5.0, purpose=None, after="file-4", limit=2, order="desc")
