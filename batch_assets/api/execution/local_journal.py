"""Finished rows on this computer's disk until the store's journal has them: what a kill -9 of the service would lose.

Each row is written when its answer is there, without a wait for the disk: it outlives the process, not the computer.
The next worker on this computer reads what a worker that is gone has left. A disk that is full or read-only costs
nothing but this.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

import orjson

from batch_assets.api.database.home_folders import take_over
from gpu_runner.answers import NO_PARTS
from gpu_runner.rows import Origin, Outcome


def own_name() -> str:
    """The name of a worker in this process: computer, process id, when the process began, and a number."""
    pid = os.getpid()
    return f"{socket.gethostname()[:60]}/{pid}/{began(pid)}/{secrets.token_hex(4)}"


def began(pid: int) -> str:
    """When a process began, in ticks since boot; "": there is none, or the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def gone(name: str) -> bool:
    """Whether the process of this name surely runs no more. Of another computer nobody knows."""
    try:
        host, pid, since, _ = name.split("/")
        number = int(pid)
    except ValueError:
        return False
    return host == socket.gethostname()[:60] and since != "" and began(number) != since


log = logging.getLogger(__name__)

CHECKSUM_LENGTH = 8
ENDING = ".rows"
LARGEST_FILE = 1 << 30  # bytes, of one that is read
_numbers = itertools.count()

Rows = Mapping[str, Mapping[str, Outcome]]  # by key of a part, by row id


class LocalJournal:
    """The rows of one feed, in files of one worker. For one thread.

    `folder` None: nothing is kept. `soon` calls what it is given in a moment: rows that come until then are written
    together.
    """

    def __init__(self, folder: Path | None, worker: str, soon: Callable[[Callable[[], None]], object]) -> None:
        self._folder, self._worker, self._soon = folder, worker, soon
        self._noted: list[bytes] = []
        self._file: int | None = None
        self._path: Path | None = None
        self._closed: Path | None = None

    def note(self, batch_id: str, key: str, outcome: Outcome) -> None:
        """A row has its outcome."""
        if self._folder is None or outcome.parts is not NO_PARTS or isinstance(outcome.output, tuple):
            return
        try:
            text = orjson.dumps((batch_id, key, outcome))
        except TypeError:  # an id that is no UTF-8
            return
        self._noted.append(b"%08x%s\n" % (zlib.crc32(text), text))
        if len(self._noted) == 1:
            self._soon(self._write)

    def _write(self) -> None:
        noted, self._noted = self._noted, []
        if self._folder is None or not noted:
            return
        try:
            if self._file is None:
                self._open(self._folder)
            assert self._file is not None
            os.write(self._file, b"".join(noted))
        except OSError as error:
            log.warning("rows are not kept on this disk any more: %s", error.strerror)
            self._folder = None

    def _open(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{quote(self._worker, safe='')}-{next(_numbers)}{ENDING}"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o600)

    def turn(self) -> None:
        """What comes now goes to another file, unless the one before is still needed."""
        self._write()
        if self._closed is None and self._file is not None:
            os.close(self._file)
            self._file, self._closed = None, self._path

    def drop_closed(self) -> None:
        """All rows before `turn` are in the store."""
        if self._closed is not None:
            with contextlib.suppress(OSError):
                self._closed.unlink()
            self._closed = None

    def close(self) -> None:
        """What is not in the store by now is left for the next worker."""
        self._write()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class LeftRows:
    """What workers that are gone have left on this computer. Methods block; for several threads."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._rows: dict[str, dict[str, dict[str, Outcome]]] = {}
        self._files: dict[Path, set[str]] = {}  # and the batches that still need it
        self._guard = threading.Lock()

    @property
    def waiting(self) -> bool:
        """Files are needed still."""
        return bool(self._files)

    def scan(self) -> None:
        """Read files that were not read before."""
        with self._guard:
            self._scan()

    def _scan(self) -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        take_over(self._folder, left_file)
        for path in sorted(self._folder.iterdir()):
            if path not in self._files and is_left(path):
                self._files[path] = self._read(path)

    def _read(self, path: Path) -> set[str]:
        found: set[str] = set()
        try:
            with path.open("rb") as file:
                for line in file.read(LARGEST_FILE).splitlines():
                    if (row := read_row(line)) is not None:
                        batch_id, key, outcome = row
                        rows = self._rows.setdefault(batch_id, defaultdict(dict))
                        rows[key][outcome.row_id] = outcome
                        found.add(batch_id)
        except OSError as error:
            log.warning("rows of a worker that is gone cannot be read: %s", error.strerror)
        return found

    def of(self, batch_id: str) -> Rows:
        """The rows of one batch."""
        with self._guard:
            return self._rows.get(batch_id, {})

    def settle(self, batch_ids: Collection[str] | None = None, *, open_batches: Collection[str] | None = None) -> None:
        """The store has the rows of `batch_ids`; and of batches that are not in `open_batches` nobody needs any."""
        with self._guard:
            for path, needed in list(self._files.items()):
                over = set(batch_ids or ()) | (needed - set(open_batches) if open_batches is not None else set())
                needed -= over
                for batch_id in over:
                    self._rows.pop(batch_id, None)
                if not needed:
                    with contextlib.suppress(OSError):
                        path.unlink()
                    del self._files[path]


@contextlib.contextmanager
def left_file(path: Path) -> Iterator[bool]:
    """Whether a worker that is gone has left this file. Who takes one twice does no harm."""
    yield is_left(path)


def is_left(path: Path) -> bool:
    """The same."""
    worker = unquote(path.name.removesuffix(ENDING).rpartition("-")[0])
    return path.name.endswith(ENDING) and gone(worker)


def read_row(line: bytes) -> tuple[str, str, Outcome] | None:
    """(batch id, key, outcome) of a line; None: it is torn."""
    text = line[CHECKSUM_LENGTH:]
    try:
        if int(line[:CHECKSUM_LENGTH], 16) != zlib.crc32(text):
            return None
        batch_id, key, fields = orjson.loads(text)
        read = {"origin": Origin(**fields["origin"]), "parts": NO_PARTS, "turns": ()}
        return batch_id, key, Outcome(**{**fields, **read})
    except (ValueError, TypeError, KeyError):  # of another version of this program
        return None
