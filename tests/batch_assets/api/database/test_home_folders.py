"""Several services on one DAGSTER_HOME: each takes up what its own processes have left, and loses nothing of others."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch_assets.api.billing import usage_journal
from batch_assets.api.billing.usage import Kind, Used
from batch_assets.api.billing.usage_journal import UsageJournal, apply_left_behind
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.home_folders import NOTE, own_folder
from batch_assets.api.database.service_database import Records
from batch_assets.api.execution import local_journal
from batch_assets.api.execution.local_journal import LeftRows, LocalJournal, began, own_name
from gpu_runner.rows import Origin, Outcome

DEAD = own_name().replace(f"/{began(os.getpid())}/", "/1/")  # of a process that is no more
ORIGIN = Origin("tiny", "e", "p", "i", False, "r")
ROW = Outcome("a", "k", "{}", "stop", 1, 1, 1, None, None, ORIGIN, 0.0, 1.0)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Records]]:
    """The records of two services."""
    with contextlib.ExitStack() as stack:
        urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
        yield [stack.enter_context(contextlib.closing(Records(url))) for url in urls]


def leave_usage(folder: Path, tokens: int) -> None:
    """What a killed process had written down."""
    killed = UsageJournal(folder, lambda: pytest.fail("it was killed before"))
    killed.write(1.8e9, "acme", "interactive", "m", Kind.COMPLETIONS, Used(requests=1, input_tokens=tokens))
    killed._segment.close()


def leave_row(folder: Path, batch_id: str) -> None:
    rows = LocalJournal(folder, DEAD, lambda call: call())
    rows.note(batch_id, "00000", ROW)
    rows.close()


def tokens(records: Records) -> int:
    return UsageLedger(records).totals().used.input_tokens


def test_usage_of_a_killed_service_is_added_by_the_next_with_its_records(
    tmp_path: Path, services: list[Records], caplog: pytest.LogCaptureFixture
) -> None:
    base, (one, two) = tmp_path / "usage", services
    leave_usage(own_folder(base, one, usage_journal.left_file), 100)
    leave_usage(own_folder(base, two, usage_journal.left_file), 7)
    caplog.clear()
    assert apply_left_behind(own_folder(base, two, usage_journal.left_file), UsageLedger(two)) == 1
    assert (tokens(one), tokens(two)) == (0, 7)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "1 files" in said and "one.db" in said and one.identity in said
    assert apply_left_behind(own_folder(base, one, usage_journal.left_file), UsageLedger(one)) == 1
    assert (tokens(one), tokens(two)) == (100, 7)


def test_rows_of_a_killed_service_wait_for_the_next_with_its_records(tmp_path: Path, services: list[Records]) -> None:
    base, (one, two) = tmp_path / "api_rows", services
    leave_row(own_folder(base, one, local_journal.left_file), "batch_1")
    other = LeftRows(own_folder(base, two, local_journal.left_file))
    other.scan()
    other.settle(open_batches=[])
    assert not other.waiting and other.of("batch_1") == {}
    left = LeftRows(own_folder(base, one, local_journal.left_file))
    left.scan()
    assert left.of("batch_1") == {"00000": {"a": ROW}}


def test_files_of_a_service_that_runs_are_not_spoken_of(
    tmp_path: Path, services: list[Records], caplog: pytest.LogCaptureFixture
) -> None:
    base, (one, two) = tmp_path / "usage", services
    running = UsageJournal(own_folder(base, one, usage_journal.left_file), lambda: UsageLedger(one))
    own_folder(base, two, usage_journal.left_file)
    running._segment.close()
    assert caplog.records == []


def test_files_of_an_earlier_version_are_taken_over_by_the_only_service(
    tmp_path: Path, services: list[Records]
) -> None:
    base, (one, _) = tmp_path / "usage", services
    leave_usage(base, 5)
    for _ in range(2):
        apply_left_behind(own_folder(base, one, usage_journal.left_file), UsageLedger(one))
    assert tokens(one) == 5 and [path.name for path in base.iterdir()] == [one.identity]


def test_files_of_an_earlier_version_stay_and_are_told_where_two_services_are(
    tmp_path: Path, services: list[Records], caplog: pytest.LogCaptureFixture
) -> None:
    base, (one, two) = tmp_path / "usage", services
    for records in services:
        own_folder(base, records, usage_journal.left_file)
    leave_usage(base, 5)
    apply_left_behind(own_folder(base, two, usage_journal.left_file), UsageLedger(two))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "1 files of an earlier version" in said and (tokens(one), tokens(two)) == (0, 0)
    (left,) = base.glob("*.jsonl")
    left.rename(base / one.identity / left.name)  # as it says
    apply_left_behind(own_folder(base, one, usage_journal.left_file), UsageLedger(one))
    assert (tokens(one), tokens(two)) == (5, 0)


def test_a_file_of_an_earlier_version_that_lives_stays_where_it_is(tmp_path: Path, services: list[Records]) -> None:
    base, (one, _) = tmp_path / "usage", services
    running = UsageJournal(base, lambda: UsageLedger(one))
    own_folder(base, one, usage_journal.left_file)
    assert running._segment.path.exists()
    running._segment.close()


def test_usage_of_an_earlier_version_that_ends_while_this_one_runs_is_added(
    tmp_path: Path, services: list[Records]
) -> None:
    base, (one, _) = tmp_path / "usage", services
    running = UsageJournal(base, lambda: UsageLedger(one))  # of an earlier version, in a rolling upgrade
    running.write(1.8e9, "acme", "interactive", "m", Kind.COMPLETIONS, Used(requests=1, input_tokens=5))
    own = own_folder(base, one, usage_journal.left_file)
    assert apply_left_behind(own, UsageLedger(one)) == 0 and tokens(one) == 0
    running._segment.close()  # a kill
    assert apply_left_behind(own, UsageLedger(one)) == 1 and tokens(one) == 5
    assert [path.name for path in base.iterdir()] == [one.identity]


def test_rows_of_an_earlier_version_that_ends_while_this_one_runs_are_found(
    tmp_path: Path, services: list[Records]
) -> None:
    base, (one, _) = tmp_path / "api_rows", services
    left = LeftRows(own_folder(base, one, local_journal.left_file))
    left.scan()
    leave_row(base, "batch_1")
    left.scan()
    assert left.of("batch_1") == {"00000": {"a": ROW}}
    left.settle(open_batches=[])
    assert list(base.glob("**/*.rows")) == []


def test_a_running_service_leaves_files_of_an_earlier_version_alone_where_two_services_are(
    tmp_path: Path, services: list[Records]
) -> None:
    base, (one, two) = tmp_path / "usage", services
    folders = [own_folder(base, records, usage_journal.left_file) for records in services]
    leave_usage(base, 5)
    assert [apply_left_behind(folder, UsageLedger(one)) for folder in folders] == [0, 0]
    assert len(list(base.glob("*.jsonl"))) == 1 and (tokens(one), tokens(two)) == (0, 0)


def test_a_disk_that_fails_while_a_service_runs_is_told_and_stops_nothing(
    tmp_path: Path, services: list[Records], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, (one, _) = tmp_path / "usage", services
    own = own_folder(base, one, usage_journal.left_file)
    leave_usage(base, 5)
    leave_usage(own, 7)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", refuse)
    assert apply_left_behind(own, UsageLedger(one)) == 1 and tokens(one) == 7
    assert [record.getMessage() for record in caplog.records] == [
        "usage cannot be used on this disk: Read-only file system"
    ]


def test_a_folder_says_whose_it_is_without_a_secret(tmp_path: Path, url: str) -> None:
    with contextlib.closing(Records(url)) as records:
        folder = own_folder(tmp_path / "usage", records, usage_journal.left_file)
        note = (folder / NOTE).read_text()
        user, password = records.engine.url.username, records.engine.url.password
    assert note.startswith(("sqlite:///", "postgresql")) and "@" not in note and "?" not in note
    assert not (user and f"{user}:" in note) and not (password and password in note)


def test_a_disk_that_cannot_be_written_is_told_and_stops_nothing(
    tmp_path: Path, services: list[Records], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = own_folder(tmp_path / "file" / "api_rows", services[0], local_journal.left_file)
    assert folder.name == services[0].identity
    assert [record.getMessage() for record in caplog.records] == [
        "api_rows cannot be used on this disk: Not a directory"
    ]


def test_all_processes_find_the_same_identity(url: str) -> None:
    with contextlib.ExitStack() as stack:
        found = {stack.enter_context(contextlib.closing(Records(url))).identity for _ in range(3)}
    assert len(found) == 1 and len(found.pop()) == 16
