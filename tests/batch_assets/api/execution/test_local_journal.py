"""Rows on this computer's disk that the store's journal does not have yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.open_batch import KEY, answered, run_of

from batch_assets.api.execution.local_journal import LeftRows, LocalJournal, began, own_name
from gpu_runner.rows import Outcome
from resources.objects.opening import LocalObjects

DEAD = own_name().replace(f"/{began(os.getpid())}/", "/1/")  # of a process that is no more


def now(call: Callable[[], None]) -> None:
    call()


def left_by(folder: Path, *rows: tuple[str, Outcome], worker: str = DEAD) -> LeftRows:
    journal = LocalJournal(folder, worker, now)
    for batch_id, outcome in rows:
        journal.note(batch_id, KEY, outcome)
    journal.close()
    left = LeftRows(folder)
    left.scan()
    return left


def test_rows_of_a_worker_that_is_gone_are_found_as_they_were(tmp_path: Path) -> None:
    wrong = replace(answered("b"), output=None, error="rejected_400", error_message='{"x": "ü"}')
    left = left_by(tmp_path, ("batch_1", answered("a")), ("batch_1", wrong), ("batch_2", answered("c")))
    assert left.of("batch_1") == {KEY: {"a": answered("a"), "b": wrong}}
    assert left.of("batch_2") == {KEY: {"c": answered("c")}} and left.of("batch_3") == {}


def test_rows_of_a_worker_that_lives_are_its_own(tmp_path: Path) -> None:
    left = left_by(tmp_path, ("batch_1", answered("a")), worker=own_name())
    assert left.of("batch_1") == {} and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("torn", [lambda text: text[:-10], lambda text: text.replace(b'"b"', b'"x"')])
def test_a_torn_row_is_asked_again(tmp_path: Path, torn: object) -> None:
    journal = LocalJournal(tmp_path, DEAD, now)
    for name in "ab":
        journal.note("batch_1", KEY, answered(name))
    (file,) = tmp_path.iterdir()
    assert callable(torn)
    file.write_bytes(torn(file.read_bytes()))
    left = LeftRows(tmp_path)
    left.scan()
    assert left.of("batch_1") == {KEY: {"a": answered("a")}}


def test_rows_that_come_together_are_written_together(tmp_path: Path) -> None:
    later: list[Callable[[], None]] = []
    journal = LocalJournal(tmp_path, DEAD, later.append)
    journal.note("batch_1", KEY, answered("a"))
    journal.note("batch_1", KEY, answered("b"))
    assert len(later) == 1 and list(tmp_path.iterdir()) == []
    later.pop()()
    journal.note("batch_1", KEY, answered("c"))
    journal.close()
    left = LeftRows(tmp_path)
    left.scan()
    assert set(left.of("batch_1")[KEY]) == {"a", "b", "c"}


def test_a_file_goes_when_no_batch_needs_it(tmp_path: Path) -> None:
    left = left_by(tmp_path, *((f"batch_{number}", answered("a")) for number in range(3)))
    left.settle(["batch_0"])
    assert left.waiting and left.of("batch_0") == {}
    left.settle(open_batches=["batch_2"])  # batch_1 has ended
    assert left.waiting and left.of("batch_1") == {} and left.of("batch_2")
    left.settle(["batch_2"])
    assert not left.waiting and list(tmp_path.iterdir()) == []


def test_rows_that_the_store_has_are_dropped_here(tmp_path: Path) -> None:
    journal = LocalJournal(tmp_path, own_name(), now)
    journal.note("batch_1", KEY, answered("a"))
    journal.turn()
    journal.note("batch_1", KEY, answered("b"))
    journal.turn()  # the first file is not in the store yet: the second one goes on
    assert len(list(tmp_path.iterdir())) == 2
    journal.drop_closed()
    (file,) = tmp_path.iterdir()
    assert b'"b"' in file.read_bytes() and file.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    journal = LocalJournal(tmp_path / "file" / "folder", "me", now)
    journal.note("batch_1", KEY, answered("a"))
    journal.note("batch_1", KEY, answered("b"))
    journal.turn()
    journal.drop_closed()
    journal.close()
    assert [one.getMessage() for one in caplog.records] == ["rows are not kept on this disk any more: Not a directory"]


def test_rows_that_were_left_are_in_the_journal_once_a_batch_is_loaded(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "store")
    left = left_by(tmp_path / "left", ("batch_1", answered("a")), ("batch_1", answered("b")))
    first = run_of(objects, "a", "b", "c")
    first.load(left.of("batch_1"))
    first.load(left.of("batch_1"))  # tried again after an answer that was lost
    assert first.completed == 2
    (batch,) = first.batches()
    assert set(batch.known) == {"a", "b"}
    journal = first.store.journal
    (path,) = journal.segments((KEY, KEY))
    assert {row.row_id for row in journal.read(path)[KEY]} == {"a", "b"}
