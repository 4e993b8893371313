"""Usage of interactive requests, on its way into the ledger: first a line in a file on this computer, then the table.

A line is one `write` to a file that is open for appending: a few microseconds, and what was written survives a kill of
this process at any moment. A thread adds what is new to the ledger, together with how far it has read, in one
transaction: after a kill between the two nothing is missing, and nothing is counted twice. Each process has a file of
its own, locked while it lives; the lines of processes that are gone are added by whoever is there.

The file is the queue. When more than `most_bytes` of it wait, because the database is away, `full` says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import orjson

from batch_assets.api.billing.usage import Kind, TaskUsage, UsageKey, Used, day_of
from batch_assets.api.billing.usage_ledger import COUNTS, UsageLedger, counts_fit, texts_fit, used_of
from batch_assets.api.database.home_folders import take_over
from gpu_runner.repeated_task import RepeatedTask

log = logging.getLogger(__name__)

FOLDER = "usage"
SUFFIX = ".jsonl"
APPLY_SECONDS = 2.0  # each time the event loop waits for this thread
LINES_TOGETHER, GIVE_WAY_SECONDS = 64, 0.001
LOOK_SECONDS = 30.0
READ_BYTES = 4 << 20
SEGMENT_BYTES = 16 << 20
MOST_WAITING = 256 << 20
_DAY_SECONDS = 86_400


class UsageJournal:
    """The file of this process. Safe to use from several threads. `ledger` opens the database, in the thread."""

    def __init__(
        self,
        folder: Path,
        ledger: Callable[[], UsageLedger],
        *,
        most_bytes: int = MOST_WAITING,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder, self._ledger = folder, ledger
        self._most_bytes, self._segment_bytes = most_bytes, segment_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._segment = _Segment.new(folder)
        self._before: list[_Segment] = []  # full ones that are not in the ledger as a whole
        self._open: UsageLedger | None = None
        self._look_at = 0.0  # monotonic: for files of processes that are gone
        self.lost = 0  # answers that could not be written down: a full disk
        self._task = RepeatedTask("usage", self._apply, LOOK_SECONDS, pause=APPLY_SECONDS, last=True)

    def __enter__(self) -> Self:
        self._task.wake()
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.end()
        with self._lock:
            for segment in (*self._before, self._segment):
                segment.close()

    @property
    def full(self) -> bool:
        """The ledger cannot be reached for so long that nothing more is taken on."""
        return sum(one.written - one.applied for one in (*self._before, self._segment)) > self._most_bytes

    def write(
        self,
        at: float,
        tenant: str,
        service_class: str,
        model: str,
        kind: Kind,
        used: Used,
        task_id: str | None = None,
    ) -> None:
        """Append what one answer used at a Unix time. Never raises for the disk: what is not written counts as lost.

        `task_id`: of an online request, which may be written several times and is charged once.
        """
        fields = [at, tenant, service_class, model, kind.value, *(getattr(used, name) for name in COUNTS)]
        if task_id is not None:
            fields.append(task_id)
        line = orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            try:
                if self._segment.written >= self._segment_bytes:
                    full, self._segment = self._segment, _Segment.new(self._folder)
                    self._before = [*self._before, full]
                self._segment.write(line)
            except OSError as error:
                self.lost += 1
                log.error("usage: an answer could not be written down (%s)", type(error).__name__)
                return
        self._task.wake()

    def _apply(self) -> None:
        ending = self._task.ended
        try:
            ledger = self._open = self._open or self._ledger()
            self._apply_own(ledger)
            if time.monotonic() >= self._look_at and not ending:
                self._look_at = time.monotonic() + LOOK_SECONDS
                apply_left_behind(self._folder, ledger)
            if ending:
                self._segment.delete_if_applied(ledger)
        except Exception as error:  # the database is away: all is in the file
            log.warning("usage: the ledger cannot be written now: %s", type(error).__name__)
            self._task.wake()
        if ending and self._open is not None:
            self._open.close()  # what is left is added by whoever starts next

    def _apply_own(self, ledger: UsageLedger) -> None:
        with self._lock:
            before, segment = list(self._before), self._segment
        for one in before:
            one.apply(ledger)
            one.delete(ledger)
            with self._lock:
                self._before = [other for other in self._before if other is not one]
        segment.apply(ledger)


class _Segment:
    """One file, open and locked. `written`, `applied`: bytes. `known`: `applied` is what the ledger has; else it
    is read there first.
    """

    def __init__(self, path: Path, file: int, *, known: bool = False) -> None:
        self.path, self._file, self._known = path, file, known
        self.written = os.fstat(file).st_size
        self.applied = 0

    @classmethod
    def new(cls, folder: Path) -> Self:
        path = folder / f"{secrets.token_hex(16)}{SUFFIX}"
        # Under a name that nobody looks at until it is locked: else it could look left behind.
        hidden = path.with_suffix(".new")
        file = os.open(hidden, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        hidden.rename(path)
        return cls(path, file, known=True)

    @classmethod
    def left_behind(cls, path: Path) -> Self | None:
        """A file whose process is gone; None: it lives, or somebody else has just taken it."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        if not path.exists():  # added and deleted while we opened it
            os.close(file)
            return None
        return cls(path, file)

    def write(self, line: bytes) -> None:
        """Append. Raises OSError; then nothing of the line is left."""
        written = os.write(self._file, line)
        if written != len(line):
            os.ftruncate(self._file, self.written)
            raise OSError("short write")
        self.written += written

    def apply(self, ledger: UsageLedger) -> None:
        """Bring what is written into the ledger. Raises what the database raises."""
        if self.applied >= self.written:
            return
        os.fsync(self._file)
        while self.applied < self.written:
            if not self._known:
                self.applied = ledger.applied(self.path.stem)
            begin = self.applied
            data = os.pread(self._file, min(READ_BYTES, self.written - begin), begin)
            end = begin + data.rfind(b"\n") + 1
            if end == begin:  # what a machine that lost its power did not finish
                self.applied = self.written
                return
            self._known = False  # a commit that failed may have been done
            if ledger.apply(self.path.stem, begin, end, *added_up(data[: end - begin], _give_way)):
                self.applied, self._known = end, True

    def delete(self, ledger: UsageLedger) -> None:
        """Delete the file, then what the ledger knows of it: the other way round it would be added again."""
        self.path.unlink(missing_ok=True)
        ledger.forget(self.path.stem)
        self.close()

    def delete_if_applied(self, ledger: UsageLedger) -> None:
        """At the end of a process that has nothing more to say."""
        if self.applied >= self.written:
            self.delete(ledger)

    def close(self) -> None:
        """Give the lock up."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def added_up(
    lines: bytes, give_way: Callable[[], object] = lambda: None
) -> tuple[dict[UsageKey, Used], list[TaskUsage]]:
    """Lines of a journal, added up by heading, and those of online requests one by one. A line that cannot be read, or
    that no ledger takes, is left out, and said.

    `give_way` is called after every LINES_TOGETHER lines: adding up holds Python's lock, for which the event loop of
    the service waits.
    """
    found: dict[UsageKey, list[int]] = {}
    keys: dict[tuple[object, ...], UsageKey | None] = {}
    tasks: list[TaskUsage] = []
    for number, line in enumerate(lines.splitlines(), 1):
        if number % LINES_TOGETHER == 0:
            give_way()
        try:
            at, tenant, service_class, model, kind, *counts = orjson.loads(line)
            task_id = str(counts.pop()) if len(counts) > len(COUNTS) else None
            day = at // _DAY_SECONDS
            heading = (day, tenant, service_class, model, kind)
            if heading not in keys:
                key = UsageKey(day_of(day * _DAY_SECONDS), str(tenant), str(service_class), str(model), Kind(kind))
                keys[heading] = key if texts_fit(key) else None
            if (known := keys[heading]) is None or not counts_fit(counts):  # it would keep all after it out
                log.error("usage: a line of the journal does not fit into the ledger")
            elif task_id is None:
                sums = found.get(known) or [0] * len(COUNTS)
                found[known] = [before + more for before, more in zip(sums, counts, strict=True)]
            else:
                tasks.append(TaskUsage(task_id, float(at), known, used_of(counts)))
        except (ValueError, TypeError, OverflowError):
            log.error("usage: a line of the journal cannot be read")
    return {key: used_of(sums) for key, sums in found.items()}, tasks


def _give_way() -> None:
    time.sleep(GIVE_WAY_SECONDS)


@contextlib.contextmanager
def left_file(path: Path) -> Iterator[bool]:
    """Whether a process that is gone has left this file; then nobody else takes it while the body runs."""
    segment = _Segment.left_behind(path) if path.suffix == SUFFIX else None
    try:
        yield segment is not None
    finally:
        if segment is not None:
            segment.close()


def apply_left_behind(folder: Path, ledger: UsageLedger) -> int:
    """Add the lines of processes that are gone, and delete their files. Returns how many files."""
    take_over(folder, left_file)
    found = 0
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        segment = _Segment.left_behind(path)
        if segment is None:
            continue
        with contextlib.closing(segment):
            segment.apply(ledger)
            segment.delete(ledger)
        found += 1
    return found
