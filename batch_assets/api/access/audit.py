"""The audit log: one JSON line for each change, each refusal and each read of contents. Ids only, never contents.

A line is one `write` to a file that is open for appending: a few microseconds, and what was written survives a kill of
this process at any moment. A thread brings it to the disk (`fsync`), off the path of requests. The file is the queue:
its size is bounded, when it is full the oldest of `files` is dropped. What ships it elsewhere reads the files.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import orjson

from gpu_runner.repeated_task import RepeatedTask

log = logging.getLogger(__name__)

FILE = "audit.jsonl"
MOST_BYTES = 64 << 20
MOST_FILES = 8
SYNC_SECONDS = 1.0
# Longer than any id that we give: what a stranger puts in its place is not written down.
_ID = re.compile(r"[A-Za-z]{1,16}[-_][A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One request. `route`: its template, as `/v1/files/{file_id}`. `objects`: ids that its path names.

    `reason` of a refusal: what is wrong with the key or token, which its caller is not told, or the error's code.
    """

    at: float
    request_id: str
    tenant: str | None
    key_id: str | None
    method: str
    route: str
    objects: tuple[str, ...]
    status: int
    seconds: float
    reason: str | None = None


def worth_keeping(method: str, route: str, status: int) -> bool:
    """Whether an audit wants it: all but reads of states and lists that were allowed."""
    return route.startswith("/v1/") and (method not in ("GET", "HEAD") or status >= 400 or route.endswith("/content"))


def known_ids(values: list[str]) -> tuple[str, ...]:
    """Those of the values that have the form of an id."""
    return tuple(value for value in values if _ID.fullmatch(value))


class AuditLog:
    """The file. Safe to use from several threads. `sync_seconds`: how often what is new goes to the disk."""

    def __init__(
        self,
        path: Path,
        *,
        most_bytes: int = MOST_BYTES,
        files: int = MOST_FILES,
        sync_seconds: float = SYNC_SECONDS,
        sync: Callable[[int], None] = os.fsync,
    ) -> None:
        self._path, self._most_bytes, self._files = path, most_bytes, files
        self._sync = sync
        self._lock = threading.Lock()
        self._file, self._size = self._open()
        self.lost = 0  # lines that could not be written: a full disk
        self._task = RepeatedTask("audit", self._bring_to_disk, pause=sync_seconds, last=True)

    def __enter__(self) -> Self:
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.end()
        os.close(self._file)

    def write(self, event: AuditEvent) -> None:
        """Append a line. Never raises for the disk: what cannot be written is counted in `lost`."""
        line = orjson.dumps(event) + b"\n"
        with self._lock:
            try:
                if self._size + len(line) > self._most_bytes:
                    self._rotate()
                written = os.write(self._file, line)
                self._size += written
                if written != len(line):
                    raise OSError("short write")
            except OSError as error:
                self.lost += 1
                if self.lost == 1:
                    log.error("audit log: cannot be written (%s)", type(error).__name__)
                return
        self._task.wake()

    def _open(self) -> tuple[int, int]:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(file).st_size
        if size and not _ends_with_newline(self._path):  # a write that a full disk cut short
            size += os.write(file, b"\n")
        return file, size

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = self._path if number == 1 else self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        old = self._file
        self._file, self._size = self._open()
        os.close(old)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _bring_to_disk(self) -> None:
        with self._lock:
            file = os.dup(self._file)
        try:
            self._sync(file)
        except OSError as error:
            log.error("audit log: cannot be brought to the disk (%s)", type(error).__name__)
        finally:
            os.close(file)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
