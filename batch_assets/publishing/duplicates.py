"""Rows that repeat another row of the source: asked once, and yet one line each in the published table.

While the table is written, the outcomes that duplicates repeat are set aside in a file on disk, which is then mapped
and read in the duplicates' order. Memory holds 24 bytes per repeated row and 8 MiB of their prompts at a time, whatever
the rows hold (the mapped pages are cache, which the system takes back when it needs to). A duplicate costs nothing: its
tokens, tries, seconds and dollars are 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.publishing.batch_reader import table_name
from batch_assets.publishing.prompt_column import PROMPT, prompt_bytes
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import DatasetStore, SnapshotManifest

_SLICE_ROWS = 5000
_BLOCK_BYTES = 8 << 20
_FREE = {"prompt_tokens": 0, "completion_tokens": 0, "tries": 0, "seconds": 0.0, "usd": 0.0}


class Duplicates:
    """Sets aside the outcomes that duplicates repeat (`note`), then yields the duplicates' own lines (`rows`)."""

    def __init__(self, store: DatasetStore, manifest: SnapshotManifest, schema: pa.Schema, workdir: Path) -> None:
        self._store, self._manifest = store, manifest
        kept = {table_name(name) for name in manifest.keep_columns}
        names = [name for name in schema.names if name not in kept and name != "duplicate_of"]
        self._outcomes = SpilledOutcomes(workdir / "repeated.arrow", pa.schema([schema.field(name) for name in names]))
        self._hashes = np.empty(0, np.uint64)

    def __enter__(self) -> Duplicates:
        found = [hashed(copies.column("of_row_id")) for copies in self._copies(["of_row_id"])]
        if found:
            self._hashes = np.unique(np.concatenate(found))
        return self

    def __exit__(self, *_: object) -> None:
        self._outcomes.close()

    def note(self, rows: pa.Table) -> None:
        """Set aside those of `rows` that a duplicate repeats, and any that only hashes like one."""
        if not len(self._hashes):
            return
        hashes = hashed(rows.column("row_id"))
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        self._outcomes.add(rows.filter(pa.array(self._hashes[places] == hashes)))

    def rows(self) -> Iterator[pa.Table]:
        """The lines of all duplicates, in the snapshot's order. Raises CorruptObject when one repeats no known row."""
        for copies in self._copies():
            ids = copies.column("of_row_id").cast(pa.string()).combine_chunks()
            for first, count in self._outcomes.portions(ids):
                lines = self._outcomes.find(ids.slice(first, count))
                if lines is None:
                    raise CorruptObject(
                        f"{self._store.dataset} snapshot {self._manifest.snapshot}: a duplicate repeats a row that is "
                        "in no batch; materialize prompts again"
                    )
                yield self._line(copies.slice(first, count), lines)

    def _line(self, copies: pa.Table, lines: pa.Table) -> pa.Table:
        columns = {name: lines.column(name) for name in lines.column_names}
        columns |= {table_name(name): copies.column(name) for name in self._manifest.keep_columns}
        for name, value in _FREE.items():
            columns[name] = pa.array([value] * lines.num_rows, lines.schema.field(name).type)
        return pa.table(columns | {"row_id": copies.column("row_id"), "duplicate_of": copies.column("of_row_id")})

    def _copies(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The snapshot's duplicates in slices, in order."""
        for shard in self._manifest.duplicate_shards:
            path = self._store.snapshot_path(self._manifest.snapshot, shard.path)
            with self._store.objects.open(path) as file, pq.ParquetFile(file, pre_buffer=False) as parquet:
                for batch in parquet.iter_batches(_SLICE_ROWS, columns=columns, use_threads=False):
                    yield pa.Table.from_batches([batch])


class SpilledOutcomes:
    """Rows in an Arrow file on disk, found again by their row id through a sorted index of hashes."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._writer: pa.RecordBatchFileWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._starts = [0]
        self._found: list[Any] = []
        self._sizes: list[Any] = []
        self._index: tuple[Any, Any] | None = None
        self._file: pa.RecordBatchFileReader | None = None

    def add(self, rows: pa.Table) -> None:
        """Set rows aside; not after the first `find`."""
        if rows.num_rows:
            rows = rows.select(self._schema.names).cast(self._schema)
            self._found.append(hashed(rows.column("row_id")))
            if PROMPT in self._schema.names:
                self._sizes.append(prompt_bytes(rows.column(PROMPT)))
            self._waiting.append(rows)
            self._waiting_bytes += rows.nbytes
            if self._waiting_bytes >= _BLOCK_BYTES:
                self._write()

    def portions(self, row_ids: pa.StringArray) -> Iterator[tuple[int, int]]:
        """(first, count) of parts of these ids whose rows hold about 8 MiB of prompts; a larger row is one part."""
        if not self._sizes or not len(row_ids):
            yield 0, len(row_ids)
            return
        hashes, places = self._indexed()
        sizes = np.concatenate(self._sizes) if len(self._sizes) > 1 else self._sizes[0]
        self._sizes = [sizes]
        at = np.minimum(np.searchsorted(hashes, hashed(row_ids)), len(hashes) - 1)
        ends = np.cumsum(sizes[places[at]])
        first = 0
        while first < len(ends):
            before = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + _BLOCK_BYTES, side="right")))
            yield first, last - first
            first = last

    def find(self, row_ids: pa.StringArray) -> pa.Table | None:
        """The rows with these ids, in their order, repeated as they repeat; None when one is not there."""
        hashes, places = self._indexed()
        wanted = hashed(row_ids)
        at = np.searchsorted(hashes, wanted)
        while not len(at) or (at.max() < len(hashes) and (hashes[at] == wanted).all()):
            rows = self._at(places[at])
            other = ~np.asarray(pc.equal(rows.column("row_id"), row_ids))
            if not other.any():
                return rows
            at[other] += 1  # another id with the same hash: the row wanted is its neighbour in the index
        return None

    def close(self) -> None:
        """Delete the file."""
        if self._writer is not None:
            with contextlib.suppress(pa.ArrowException, OSError):
                self._writer.close()
        self._file = None
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self._path), self._schema)
        block = pa.concat_tables(self._waiting or [self._schema.empty_table()]).combine_chunks()
        self._writer.write_table(block)
        self._starts.append(self._starts[-1] + block.num_rows)
        self._waiting, self._waiting_bytes = [], 0

    def _indexed(self) -> tuple[Any, Any]:
        """Sorted hashes of the row ids, and the place of each row in the file."""
        if self._index is None:
            self._finish()
        assert self._index is not None
        return self._index

    def _finish(self) -> None:
        self._write()
        assert self._writer is not None
        self._writer.close()
        self._file = pa.ipc.open_file(pa.memory_map(str(self._path)))
        hashes = np.concatenate(self._found or [np.empty(0, np.uint64)])
        self._found = []
        order = np.argsort(hashes, kind="stable")
        self._index = hashes[order], order

    def _at(self, places: Any) -> pa.Table:
        """Rows by their place in the file, block by block, then put into the order asked for."""
        assert self._file is not None
        order = np.argsort(places, kind="stable")
        blocks = np.searchsorted(self._starts, places[order], side="right") - 1
        found = [self._schema.empty_table()]
        for block, first in zip(*np.unique(blocks, return_index=True), strict=True):
            inside = order[first : np.searchsorted(blocks, block, side="right")]
            taken = self._file.get_batch(int(block)).take(pa.array(places[inside] - self._starts[block]))
            found.append(pa.Table.from_batches([taken]))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_tables(found).combine_chunks().take(pa.array(back))


def hashed(column: pa.ChunkedArray | pa.Array) -> Any:
    """64-bit hashes of texts, the same within one process: enough to find, never to prove, that two are equal."""
    import polars as pl

    return pl.Series(pl.from_arrow(column.cast(pa.large_string()))).hash(0).to_numpy()
