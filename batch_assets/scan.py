"""Reading a snapshot's committed batches: many at once, handed over in snapshot order.

An object of 250 rows costs a round trip each on S3 and a millisecond of parsing anywhere, so a few threads read ahead
of the one that uses the rows. What is read ahead is bounded, so memory does not grow with the number of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from resources.objects import Objects
from resources.store import BatchEntry, BatchObject, CorruptObject, DatasetStore, SnapshotManifest
from resources.tables import OUTCOME_COLUMNS

Job = TypeVar("Job")
Found = TypeVar("Found")

RESERVED_COLUMNS = frozenset((*OUTCOME_COLUMNS, "batch", "duplicate_of"))
_PIECE_ROWS = 1000
_LOCAL_THREADS, _REMOTE_THREADS = 4, 8


def threads_for(objects: Objects) -> int:
    """How many readers of whole batches: parsing bounds them on a local disk, memory on S3 (about 30 MB a thread)."""
    return _REMOTE_THREADS if objects.root.startswith("s3://") else _LOCAL_THREADS


def read_ahead(read: Callable[[Job], Found], jobs: Iterable[Job], threads: int) -> Iterator[Found]:
    """`map(read, jobs)` with up to `threads` + 2 results read ahead of the consumer, in order.

    The first error of a job is raised at its place; what is still waiting then is dropped.
    """
    source = iter(jobs)
    waiting: deque[Future[Found]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="scan")
    try:
        for job in islice(source, threads + 2):
            waiting.append(pool.submit(read, job))
        while waiting:
            found = waiting.popleft().result()
            for job in islice(source, 1):
                waiting.append(pool.submit(read, job))
            yield found
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def pieces(entries: Iterable[BatchEntry]) -> Iterator[list[BatchEntry]]:
    """Runs of neighbouring batches of one shard, about 1,000 rows each: the unit that is read at once."""
    piece: list[BatchEntry] = []
    rows = 0
    for entry in entries:
        if piece and (rows + entry.rows > _PIECE_ROWS or entry.shard != piece[0].shard):
            yield piece
            piece, rows = [], 0
        piece.append(entry)
        rows += entry.rows
    if piece:
        yield piece


def table_name(column: str) -> str:
    """Name of a keep column in a table: its own, or `source_…` where outcomes have a column of that name."""
    return f"source_{column}" if column in RESERVED_COLUMNS else column


class CommittedRows:
    """Reads the rows of committed batches, with what the snapshot keeps of them. Safe to use from several threads."""

    def __init__(self, store: DatasetStore, manifest: SnapshotManifest, current: Mapping[str, BatchObject]) -> None:
        self._store, self._manifest, self._current = store, manifest, current
        self._footer: tuple[int, pq.FileMetaData | None] = (-1, None)

    def read(self, piece: Sequence[BatchEntry]) -> pa.Table:
        """Outcomes of a piece, each with its `batch` and the snapshot's keep columns.

        Raises CorruptObject when an object cannot be read or holds other rows than the snapshot.
        """
        table = pa.concat_tables([self._outcomes(entry) for entry in piece])
        if not self._manifest.keep_columns:
            return table
        kept = self._kept(piece)
        if not kept.column("row_id").cast(pa.string()).equals(table.column("row_id")):
            raise CorruptObject(
                f"{self._store.dataset} batches {piece[0].key} to {piece[-1].key}: their objects hold other rows than "
                f"snapshot {self._manifest.snapshot}; run verify to find the object"
            )
        for name in self._manifest.keep_columns:
            table = table.append_column(table_name(name), kept.column(name))
        return table

    def _kept(self, piece: Sequence[BatchEntry]) -> pa.Table:
        """`row_id` and the keep columns of a piece; a shard's footer (400 row groups) is parsed once, not per piece."""
        number = piece[0].shard
        known, metadata = self._footer
        path = self._store.snapshot_path(self._manifest.snapshot, self._manifest.shards[number].path)
        with (
            self._store.objects.open(path) as file,
            pq.ParquetFile(
                file, metadata=metadata if known == number else None, page_checksum_verification=True
            ) as shard,
        ):
            self._footer = number, shard.metadata
            columns = ["row_id", *self._manifest.keep_columns]
            return shard.read_row_groups([entry.row_group for entry in piece], columns=columns, use_threads=False)

    def _outcomes(self, entry: BatchEntry) -> pa.Table:
        batch = self._current[entry.key]
        table = self._store.batch_table(batch)
        if table.num_rows != entry.rows:
            raise CorruptObject(f"{self._store.batch_path(batch)}: expected {entry.rows} rows, found {table.num_rows}")
        keys = pa.array([entry.key] * entry.rows, pa.string())
        return table.replace_schema_metadata(None).append_column("batch", keys)
