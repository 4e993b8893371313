"""The committed rows of a table that is still being made, as local files with the columns of the table.

Each look adds the batches that were committed since, so that lines keep their numbers. Of a dataset of very many rows
every Nth batch is read; rows, bytes and seconds have an end. Nothing is written into the store.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from batch_assets.publishing.committed_part import write_committed
from batch_assets.publishing.published_table import published_table
from batch_assets.table_access.opened_table import Table, TableError
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchObject, DatasetStore, SnapshotManifest

UNFINISHED = "unfinished"  # as the page names it, beside `passed` and `judged`
MOST_ROWS, MOST_BYTES, MOST_SECONDS = 250_000, 512 << 20, 20.0
_FILE_ROWS = 5000


@dataclass(frozen=True, slots=True)
class BeingMade:
    """How far a table is: rows `committed` of `rows` to ask. `every`: one batch of so many is shown. `unreadable`:
    batches that are left out, as their objects cannot be read."""

    committed: int
    rows: int
    every: int
    unreadable: int


def is_unfinished(store: DatasetStore) -> bool:
    """The current snapshot has no published table yet. Raises CorruptObject."""
    snapshot = store.current_snapshot()
    if snapshot is None:
        return False
    table = published_table(store)
    return table is None or table.snapshot != snapshot


class UnfinishedTable:
    """Of one dataset. `folder` takes the files. For several threads."""

    def __init__(self, store: DatasetStore, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._folder, self._clock = store, folder, clock
        self._lock = threading.Lock()
        self._looks = 0
        self._begin("")

    def _begin(self, snapshot: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._snapshot = snapshot
        self._read: dict[str, BatchObject] = {}
        self._unreadable: set[BatchObject] = set()
        self._files: list[Path] = []
        self._rows = self._bytes = 0
        self._tables: dict[str, tuple[Table, BeingMade]] = {}
        self._newest = ""

    def forget(self) -> None:
        """Delete the files."""
        with self._lock:
            self._begin("")

    def known(self, version: str | None) -> tuple[Table, BeingMade] | None:
        """One of the looks at the current snapshot, as it was then."""
        with self._lock:
            return self._tables.get(version or "")

    def look(self, stopped: Callable[[], bool] = lambda: False) -> tuple[Table, BeingMade]:
        """Read what was committed since the last look, and return all of it. Raises TableError where there is nothing.

        Ends early, with a part of it, after `MOST_SECONDS` and when it is `stopped`.
        """
        with self._lock:
            try:
                return self._look(stopped)
            except FileNotFoundError:  # another snapshot is current, and this one is gone
                self._begin("")
                raise TableError(
                    f"{self._store.dataset}: its snapshot was deleted meanwhile; load the page again"
                ) from None

    def _look(self, stopped: Callable[[], bool]) -> tuple[Table, BeingMade]:
        store, name = self._store, self._store.dataset
        snapshot = store.current_snapshot()
        if snapshot is None:
            raise TableError(f"{name}: no snapshot in {store.objects.root}; `batch-assets run {name}` makes one")
        manifest, entries = store.manifest(snapshot), store.entries(snapshot)
        current = store.current_objects(entries)
        changed = any(current.get(key) != batch for key, batch in self._read.items())
        if snapshot != self._snapshot or changed:
            self._begin(snapshot)
        rows = sum(entry.rows for entry in entries)
        every = -(-rows // MOST_ROWS) or 1
        wanted = [entry for entry in entries if int(entry.key) % every == 0]
        self._add([entry for entry in wanted if entry.key in current], manifest, current, stopped)
        committed = sum(entry.rows for entry in entries if entry.key in current)
        if not self._files:
            raise TableError(
                f"{name}: none of its {rows:,} rows can be shown yet: {committed:,} are committed. Load the page again "
                f"later; finished rows of open batches: batch-assets show {name}"
            )
        return self._told(BeingMade(committed, rows, every, len(self._unreadable)))

    def _add(
        self,
        entries: Sequence[BatchEntry],
        manifest: SnapshotManifest,
        current: dict[str, BatchObject],
        stopped: Callable[[], bool],
    ) -> None:
        new = [one for one in entries if one.key not in self._read and current[one.key] not in self._unreadable]
        until = self._clock() + MOST_SECONDS
        for some in _slices(new):
            if stopped() or self._clock() > until or self._bytes > MOST_BYTES:
                return
            try:
                self._write(some, manifest, current)
            except CorruptObject:
                for one in some:
                    try:
                        self._write([one], manifest, current)
                    except CorruptObject:
                        self._unreadable.add(current[one.key])

    def _write(
        self, entries: Sequence[BatchEntry], manifest: SnapshotManifest, current: dict[str, BatchObject]
    ) -> None:
        file = self._folder / f"part-{len(self._files):05d}.parquet"
        write_committed(self._store, manifest, entries, current, file, prompt=True, output_columns=False)
        self._files.append(file)
        self._read |= {one.key: current[one.key] for one in entries}
        self._rows += sum(one.rows for one in entries)
        self._bytes += file.stat().st_size

    def _told(self, being_made: BeingMade) -> tuple[Table, BeingMade]:
        self._looks += self._newest == "" or self._tables[self._newest][0].rows != self._rows
        said = f"{self._store.dataset} {self._snapshot} {self._looks} {self._rows}"
        version = self._newest = hashlib.sha256(said.encode()).hexdigest()[:16]
        columns = tuple(pq.read_schema(self._files[0]).names)
        uris = tuple(str(file) for file in self._files)
        table = Table(self._store.dataset, version, self._rows, columns, uris, self._store.objects)
        self._tables[version] = table, being_made
        return table, being_made


def _slices(entries: Sequence[BatchEntry]) -> Iterator[list[BatchEntry]]:
    """Batches of about `_FILE_ROWS` rows together."""
    some: list[BatchEntry] = []
    for entry in entries:
        some.append(entry)
        if sum(one.rows for one in some) >= _FILE_ROWS:
            yield some
            some = []
    if some:
        yield some
