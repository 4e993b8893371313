"""The journal of interactive usage: a kill between file and table neither loses nor doubles."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pytest
from support.timing import PATIENCE

from batch_assets.api.billing import usage_journal as module
from batch_assets.api.billing.usage import Kind, TaskUsage, UsageKey, Used, day_of
from batch_assets.api.billing.usage_journal import FOLDER, LINES_TOGETHER, UsageJournal, added_up, apply_left_behind
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.service_database import Records

NOON = 1_800_000_000.0


def opened(folder: Path) -> UsageLedger:
    return UsageLedger(Records(f"sqlite:///{folder}/api.db"))


def write(journal: UsageJournal, tokens: int, tenant: str = "acme", task_id: str | None = None) -> None:
    used = Used(requests=1, input_tokens=tokens, output_tokens=1, amount=tokens * 3)
    journal.write(NOON, tenant, "interactive", "m", Kind.COMPLETIONS, used, task_id)


def sums(folder: Path) -> tuple[int, int, int]:
    """(requests, input tokens, amount) of the ledger."""
    with contextlib.closing(opened(folder)) as ledger:
        whole = Used()
        for line in ledger.lines():
            whole = whole.plus(line.used)
    return whole.requests, whole.input_tokens, whole.amount


def test_what_is_written_is_in_the_ledger_when_the_journal_ends_and_no_file_is_left(tmp_path: Path) -> None:
    with UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path)) as journal:
        for tokens in range(100):
            write(journal, tokens, f"tenant-{tokens % 3}")
    assert sums(tmp_path) == (100, 4950, 3 * 4950)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_full_files_are_followed_by_others_and_deleted(tmp_path: Path) -> None:
    with UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path), segment_bytes=300) as journal:
        for _ in range(50):
            write(journal, 2)
        assert len(list((tmp_path / FOLDER).iterdir())) > 5
    assert sums(tmp_path) == (50, 100, 300)
    assert list((tmp_path / FOLDER).iterdir()) == []


class Killed(BaseException):
    """The process ends here."""


class KilledLedger(UsageLedger):
    """Dies before or after the transaction that adds what the journal says."""

    def __init__(self, records: Records, *, after: bool) -> None:
        super().__init__(records)
        self._after = after

    def apply(
        self, journal: str, begin: int, end: int, found: Mapping[UsageKey, Used], tasks: Sequence[TaskUsage] = ()
    ) -> bool:
        if self._after:
            super().apply(journal, begin, end, found, tasks)
        raise Killed


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_between_journal_and_table_neither_loses_nor_doubles(tmp_path: Path, after: bool) -> None:
    journal = UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path))
    for _ in range(10):
        write(journal, 7)
    records = Records(f"sqlite:///{tmp_path}/api.db")
    with contextlib.closing(KilledLedger(records, after=after)) as ledger, pytest.raises(Killed):
        journal._apply_own(ledger)
    with contextlib.closing(opened(tmp_path)) as ledger:
        assert apply_left_behind(tmp_path / FOLDER, ledger) == 0, "its process lives"
        journal._segment.close()  # with the lock, as a kill does
        assert apply_left_behind(tmp_path / FOLDER, ledger) == 1
        assert apply_left_behind(tmp_path / FOLDER, ledger) == 0
    assert sums(tmp_path) == (10, 70, 210)


class UnsureLedger(UsageLedger):
    """The first answer of the database is lost: before its transaction, or after it."""

    def __init__(self, records: Records, *, after: bool) -> None:
        super().__init__(records)
        self._after, self._lost = after, False

    def apply(
        self, journal: str, begin: int, end: int, found: Mapping[UsageKey, Used], tasks: Sequence[TaskUsage] = ()
    ) -> bool:
        if self._lost:
            return super().apply(journal, begin, end, found, tasks)
        self._lost = True
        if self._after:
            super().apply(journal, begin, end, found, tasks)
        raise OSError


@pytest.mark.parametrize("after", [False, True])
def test_a_lost_answer_of_the_database_neither_loses_nor_doubles(tmp_path: Path, after: bool) -> None:
    journal = UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path))
    with contextlib.closing(UnsureLedger(Records(f"sqlite:///{tmp_path}/api.db"), after=after)) as ledger:
        write(journal, 7)
        with pytest.raises(OSError):
            journal._apply_own(ledger)
        write(journal, 5)
        journal._apply_own(ledger)
        write(journal, 1)
        journal._apply_own(ledger)
    journal._segment.close()
    assert sums(tmp_path) == (3, 13, 39)


def test_adding_up_pauses_now_and_then_and_asks_the_ledger_for_nothing_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(module, "_give_way", lambda: calls.append("pause"))
    monkeypatch.setattr(UsageLedger, "applied", lambda ledger, journal: calls.append("asked") or 0)
    journal = UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path))
    with contextlib.closing(opened(tmp_path)) as ledger:
        for _ in range(2):
            for _ in range(3 * LINES_TOGETHER):
                write(journal, 2)
            journal._apply_own(ledger)
    journal._segment.close()
    assert calls == 6 * ["pause"]
    assert sums(tmp_path) == (6 * LINES_TOGETHER, 12 * LINES_TOGETHER, 36 * LINES_TOGETHER)


def test_lines_are_added_up_by_each_part_of_their_heading() -> None:
    first = (NOON, "acme", "interactive", "m", "completions")
    others = [
        (NOON + 86_400, *first[1:]),
        (NOON, "other", *first[2:]),
        (*first[:2], "online", *first[3:]),
        (*first[:3], "other", first[4]),
        (*first[:4], "embeddings"),
    ]
    headings = [first, *others]
    bad = [(NOON, "nul\0", *first[2:]), (NOON, "t" * 301, *first[2:]), (*first[:4], "none")]
    lines, task_lines = [], []
    for heading in [*headings, *bad, *reversed(headings)]:
        for number in (1, 2):
            lines.append(orjson.dumps([*heading, 1, 0, number, 0, 1, 0, 3 * number]))
            task_lines.append(orjson.dumps([*heading, 1, 0, number, 0, 1, 0, 3 * number, f"task_{number}"]))
    keys = [UsageKey(day_of(at), *texts, Kind(kind)) for at, *texts, kind in headings]
    twice = Used(requests=4, input_tokens=6, output_tokens=4, amount=18)
    found, tasks = added_up(b"\n".join(lines))
    assert found == dict.fromkeys(keys, twice) and not tasks
    found, tasks = added_up(b"\n".join(task_lines))
    assert not found
    assert [(task.key, task.task_id) for task in tasks] == [
        (key, f"task_{number}") for key in [*keys, *reversed(keys)] for number in (1, 2)
    ]


def test_the_last_moment_of_a_day_makes_nothing_of_it_the_next_days() -> None:
    midnight = NOON // 86_400 * 86_400 + 86_400
    lines = [orjson.dumps([at, "a", "b", "m", "completions", 1, 0, 1, 0, 1, 0, 0]) for at in (midnight - 2e-7, NOON)]
    ((key, used),) = added_up(b"\n".join(lines))[0].items()
    assert key.day == day_of(NOON) and used.requests == 2


def test_the_answer_of_a_killed_consumer_and_that_of_its_follower_are_charged_as_one(tmp_path: Path) -> None:
    killed = UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path))
    write(killed, 7, task_id="task_1")
    killed._segment.close()
    with UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path)) as journal:
        write(journal, 7, task_id="task_1")
        write(journal, 5, task_id="task_2")
        write(journal, 1)
    with contextlib.closing(opened(tmp_path)) as ledger:
        apply_left_behind(tmp_path / FOLDER, ledger)
    assert sums(tmp_path) == (3, 13, 39)


def test_a_line_that_a_power_cut_tore_is_left_out(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path))
    write(journal, 7)
    os.write(journal._segment._file, b'[1800000000,"acme","inter')
    journal._segment.close()
    with contextlib.closing(opened(tmp_path)) as ledger:
        assert apply_left_behind(tmp_path / FOLDER, ledger) == 1
    assert sums(tmp_path) == (1, 7, 21)


@pytest.mark.parametrize("count", ["-1", "1.5", "true", "null", '"1"', "9223372036854775808"])
def test_what_is_no_count_is_left_out(count: str) -> None:
    line = f'[1800000000,"acme","interactive","m","completions",1,0,{count},0,1,0,6]\n'
    assert added_up(line.encode()) == ({}, [])


def test_lines_that_cannot_be_read_are_left_out() -> None:
    assert added_up(b'[]\nnonsense\n[1e99,"a","b","c","completions",1,0,1,0,1,0,0]\n["x"]\n') == ({}, [])


@pytest.mark.slow
def test_lines_that_no_database_takes_keep_nothing_else_out(tmp_path: Path, url: str) -> None:
    with UsageJournal(tmp_path / FOLDER, lambda: UsageLedger(Records(url))) as journal:
        write(journal, 7)
        for model in ("nul\0", "m" * 301):
            journal.write(NOON, "acme", "interactive", model, Kind.COMPLETIONS, Used(requests=1))
        journal.write(NOON, "acme", "interactive", "m", Kind.COMPLETIONS, Used(requests=1, amount=1 << 63))
        write(journal, 5)
    assert list((tmp_path / FOLDER).iterdir()) == []
    with contextlib.closing(UsageLedger(Records(url))) as ledger:
        assert [(line.used.requests, line.used.input_tokens) for line in ledger.lines()] == [(2, 12)]


def test_a_ledger_that_is_away_makes_the_journal_full_and_loses_nothing(tmp_path: Path) -> None:
    away = [True]

    def ledger() -> UsageLedger:
        if away[0]:
            raise OSError("away")
        return opened(tmp_path)

    journal = UsageJournal(tmp_path / FOLDER, ledger, most_bytes=500)
    while not journal.full:
        write(journal, 1)
    written = journal._segment.written
    away[0] = False
    with journal:
        deadline = time.monotonic() + 20 * PATIENCE
        while journal.full and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not journal.full and written > 500
    assert sums(tmp_path)[0] == sums(tmp_path)[1] > 5


def test_what_cannot_be_written_down_is_counted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_full(file: int, line: bytes) -> int:
        return real(file, line[:20])

    real = os.write
    with UsageJournal(tmp_path / FOLDER, lambda: opened(tmp_path)) as journal:
        write(journal, 7)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half_full)
            write(journal, 9)
        write(journal, 1)
    assert journal.lost == 1 and sums(tmp_path) == (2, 8, 24)


WRITER = """
import sys, time
from pathlib import Path
from batch_assets.api.billing.usage_journal import FOLDER, UsageJournal
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.billing.usage import Kind, Used
from batch_assets.api.database.service_database import Records
folder = Path(sys.argv[1])
ledger = lambda: UsageLedger(Records(f"sqlite:///{folder}/api.db"))
with UsageJournal(folder / FOLDER, ledger, segment_bytes=20000) as journal:
    for number in range(10**6):
        used = Used(requests=1, input_tokens=number, output_tokens=1, amount=number * 3)
        journal.write(1.8e9, "acme", "interactive", "m", Kind.COMPLETIONS, used)
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
        time.sleep(0.0005)
"""


@pytest.mark.slow
def test_processes_that_are_killed_at_any_moment_are_added_up_to_the_token(tmp_path: Path) -> None:
    """What a writer said aloud it had written down before: so it is in the ledger. One more line may be in flight."""
    said = tokens = kills = 0
    for number in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 400 + 211 * number:
                process.send_signal(signal.SIGKILL)
                break
        numbers = [int(line), *(int(one) for one in process.stdout.read().split())]
        process.wait()
        process.stdout.close()
        kills += 1
        said += max(numbers) + 1
        tokens += max(numbers) * (max(numbers) + 1) // 2
    with contextlib.closing(opened(tmp_path)) as ledger:
        apply_left_behind(tmp_path / FOLDER, ledger)
    requests, counted, amount = sums(tmp_path)
    assert said <= requests <= said + kills
    assert amount == 3 * counted and tokens <= counted <= tokens + kills * 3000
    assert [path for path in (tmp_path / FOLDER).iterdir() if path.suffix == ".jsonl"] == []
