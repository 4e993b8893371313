"""The files of a snapshot while it is made: staged rows in source order, shards in batch order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.snapshot.source.errors import SourceError
from gpu_runner.rows import data_version
from resources.store.dataset_store import BatchEntry, Shard

SHARD_ROWS = 100_000
SHARD_BYTES = 256 << 20
BUCKET_BYTES = 16 << 20
STAGE_ROWS, STAGE_BYTES = 8192, 8 << 20
MAX_BUCKETS = 256
MAX_BATCHES = 100_000


class Stage:
    """Rows in source order on disk, as Arrow record batches."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self.rows = self.bytes = 0
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_file(path, schema, options=options)
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows; small pieces are written together."""
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        self.rows += batch.num_rows
        self.bytes += batch.nbytes
        if self._held_rows >= STAGE_ROWS or self._held_bytes >= STAGE_BYTES:
            self._flush()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows at once."""
        self._writer.write_batch(batch)

    def _flush(self) -> None:
        if self._held:
            self.write(pa.concat_batches(self._held))
            self._held, self._held_rows, self._held_bytes = [], 0, 0

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._writer.close()

    def read(self) -> Iterator[pa.RecordBatch]:
        """The rows again, in the order of writing."""
        with pa.OSFile(str(self.path)) as source, pa.ipc.open_file(source) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


@dataclass(slots=True)
class _OpenBatch:
    number: int
    pieces: list[pa.Table]


class ShardWriter:
    """Writes rows that come in batch order: one row group per batch, about SHARD_ROWS rows a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shards: list[Shard] = []
        self.entries: list[BatchEntry] = []
        self._writer: pq.ParquetWriter | None = None
        self._open: _OpenBatch | None = None
        self._rows = self._bytes = self._groups = 0

    def add(self, table: pa.Table, batches: np.ndarray) -> None:
        """Append rows; `batches` are their batch numbers, never falling."""
        cuts = [0, *(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(batches)]
        for first, last in itertools.pairwise(cuts):
            if first == last:
                continue
            number = int(batches[first])
            if self._open is None or self._open.number != number:
                self._finish_batch()
                self._open = _OpenBatch(number, [])
            self._open.pieces.append(table.slice(first, last - first))

    def _finish_batch(self) -> None:
        if self._open is None:
            return
        number, table = self._open.number, pa.concat_tables(self._open.pieces)
        if self.entries and number <= int(self.entries[-1].key):
            raise RuntimeError("snapshot: rows did not come in batch order")
        if number >= MAX_BATCHES:
            raise SourceError(f"expected at most {MAX_BATCHES} batches (keys have five digits); raise batch_rows")
        if self._writer is None:
            name = f"prompts-{len(self.shards):05d}.parquet"
            self.shards.append(Shard(path=name, rows=0))
            kept = table.schema.names[3:]
            self._writer = pq.ParquetWriter(
                self._folder / name, table.schema, compression="zstd", use_dictionary=kept, write_statistics=kept
            )
            self._rows = self._bytes = self._groups = 0
        self._writer.write_table(table.combine_chunks(), row_group_size=table.num_rows)
        ids, keys = (table.column(name).to_pylist() for name in ("row_id", "row_key"))
        version = data_version(zip(ids, keys, strict=True))
        self.entries.append(BatchEntry(f"{number:05d}", table.num_rows, version, len(self.shards) - 1, self._groups))
        self._rows, self._bytes, self._groups = self._rows + len(ids), self._bytes + table.nbytes, self._groups + 1
        if self._rows >= SHARD_ROWS or self._bytes >= SHARD_BYTES:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self.shards[-1] = Shard(path=self.shards[-1].path, rows=self._rows)

    def close(self) -> None:
        """Finish the last batch and file."""
        self._finish_batch()
        self._open = None
        self._finish_shard()


class Buckets:
    """Puts rows into batch order without sorting them all: neighbouring batches share a file, sorted on its own."""

    def __init__(self, folder: Path, last_batch: int, total_bytes: int) -> None:
        self._folder = folder
        buckets = min(MAX_BUCKETS, 1 + total_bytes // BUCKET_BYTES)
        self._batches = -(-(last_batch + 1) // buckets)
        self._stages: dict[int, Stage] = {}

    def add(self, table: pa.Table, batch: np.ndarray, place: np.ndarray) -> None:
        """Scatter rows to their buckets."""
        table = table.append_column("~batch", pa.array(batch)).append_column("~place", pa.array(place))
        bucket = batch // self._batches
        order = np.argsort(bucket, kind="stable")
        (rows,) = table.take(order).combine_chunks().to_batches()
        cuts = [0, *(np.flatnonzero(np.diff(bucket[order])) + 1).tolist(), len(order)]
        for first, last in itertools.pairwise(cuts):
            number = int(bucket[order[first]])
            stage = self._stages.get(number)
            if stage is None:
                stage = self._stages[number] = Stage(self._folder / f"bucket-{number:05d}.arrow", table.schema)
            stage.write(rows.slice(first, last - first))

    def read(self) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """All rows by batch and place, with their batch numbers; each bucket's file is removed once read."""
        for number in sorted(self._stages):
            stage = self._stages[number]
            stage.close()
            table = pa.Table.from_batches(list(stage.read()), stage.schema)
            stage.path.unlink()
            table = table.sort_by([("~batch", "ascending"), ("~place", "ascending")])
            yield table.drop_columns(["~batch", "~place"]), table.column("~batch").to_numpy()
