"""Reading a published table in small pieces, and finding ids or values that occur more than once.

Memory is 8 bytes per row: a hash of each value, sorted in place. That two hashes are equal is never taken as proof for
ids; those few are read again and compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.publishing.published_table import PublishedTable
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import DatasetStore
from resources.store.object_integrity import is_damage

_BATCH_ROWS = 4000
_RUN_ROWS = 1 << 20


def table_batches(store: DatasetStore, table: PublishedTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The table's lines in order, these columns only. Raises CorruptObject when a file cannot be read."""
    for listed in table.files:
        path = f"{table.path}/{listed.name}"
        with store.objects.open(path) as opened:
            try:
                # Not pre-buffered: pyarrow would keep every row group of these columns until the file is closed.
                with pq.ParquetFile(opened, pre_buffer=False, page_checksum_verification=True) as file:
                    yield from file.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False)
            except (pa.ArrowException, OSError, KeyError) as error:
                if not is_damage(error):
                    raise
                raise CorruptObject(f"{path}: cannot be read ({error})") from error


class Hashes:
    """64-bit hashes of a column's values, 8 bytes each, added batch by batch."""

    def __init__(self, expected: int) -> None:
        self._values = np.empty(max(expected, 1), np.uint64)
        self._count = 0
        self._sorted = True

    def __len__(self) -> int:
        return self._count

    def add(self, column: pa.Array) -> None:
        """Add every value that is not null."""
        found = value_hashes(column.drop_null())
        if self._count + len(found) > len(self._values):
            self._values = np.resize(self._values, 2 * (self._count + len(found)))
        self._values[self._count : self._count + len(found)] = found
        self._count += len(found)
        self._sorted = False

    def _blocks(self) -> Iterator[tuple[Any, Any]]:
        """(hash, how many times) in sorted order; a run that spans two blocks comes in two pieces."""
        if not self._sorted:
            self._values[: self._count].sort()
            self._sorted = True
        for start in range(0, self._count, _RUN_ROWS):
            yield np.unique(self._values[start : min(start + _RUN_ROWS, self._count)], return_counts=True)

    def repeated(self) -> set[int]:
        """Hashes that occur more than once."""
        found: set[int] = set()
        last = None
        for values, counts in self._blocks():
            found.update(values[counts > 1].tolist())
            if last is not None and last == values[0]:
                found.add(int(last))
            last = values[-1]
        return found

    def most_frequent(self) -> int:
        """How many times the most frequent value occurs."""
        most = carried = 0
        last = None
        for values, counts in self._blocks():
            counts = counts.copy()
            if last is not None and last == values[0]:
                counts[0] += carried
            most = max(most, int(counts.max()))
            last, carried = values[-1], int(counts[-1])
        return most


def repeated_ids(store: DatasetStore, table: PublishedTable, hashes: Hashes) -> dict[str, int]:
    """Row ids that occur more than once, with their counts; `hashes` are those of the table's column `row_id`."""
    suspects = hashes.repeated()
    if not suspects:
        return {}
    wanted = np.fromiter(suspects, np.uint64)
    counted: Counter[str] = Counter()
    for batch in table_batches(store, table, ["row_id"]):
        ids = batch.column("row_id")
        counted.update(ids.filter(pa.array(np.isin(value_hashes(ids), wanted))).to_pylist())
    return {row_id: count for row_id, count in counted.items() if count > 1}


def value_hashes(column: pa.Array) -> Any:
    """64-bit hashes of texts or vectors, the same within one process."""
    if pa.types.is_list(column.type):
        width = 0 if not len(column) else len(column[0])
        if width and len(column.flatten()) == width * len(column):
            rows = np.asarray(column.flatten()).reshape(len(column), width)
            return np.fromiter((hash(row.tobytes()) & 0xFFFFFFFFFFFFFFFF for row in rows), np.uint64, len(rows))
        return np.fromiter((hash(tuple(row)) & 0xFFFFFFFFFFFFFFFF for row in column.to_pylist()), np.uint64)
    return pl.Series(pl.from_arrow(column.cast(pa.large_string()))).hash(0).to_numpy()
