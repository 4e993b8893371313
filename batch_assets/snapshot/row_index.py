"""Rows as numbers: the new source's and the previous snapshot's, in narrow Parquet files that DuckDB joins.

A row id and a row key each become 128 bits of a digest, so that a row takes the same few bytes whatever its text.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, DatasetStore, SnapshotManifest

INDEX_ROWS, INDEX_BYTES = 1 << 16, 8 << 20  # of a row group
PART_ROWS = 1 << 13


def id_digest(row_id: str) -> bytes:
    """16 bytes that stand for a row id; ids that are equal after Unicode normalisation (NFC) have the same."""
    text = row_id if row_id.isascii() else unicodedata.normalize("NFC", row_id)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def halves(digests: bytes, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """The first 16 bytes of each digest as two columns of 64 bits."""
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, stride // 8)
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)


class ColumnFile:
    """A Parquet file, written in large row groups from small pieces."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.rows = path, 0
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="lz4", use_dictionary=False)
        self._pieces: list[pa.RecordBatch] = []
        self._held = self._bytes = 0

    def add(self, **columns: Any) -> None:
        """Append rows; every column of the schema, same length."""
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        piece = pa.record_batch(arrays, schema=self._schema)
        self._pieces.append(piece)
        self._held += piece.num_rows
        self._bytes += piece.nbytes
        self.rows += piece.num_rows
        if self._held >= INDEX_ROWS or self._bytes >= INDEX_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pieces:
            self._writer.write_table(pa.Table.from_batches(self._pieces, self._schema))
            self._pieces, self._held, self._bytes = [], 0, 0

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._writer.close()


_DIGESTS = [("key_hi", pa.uint64()), ("key_lo", pa.uint64())]
_IDS = [("id_hi", pa.uint64()), ("id_lo", pa.uint64())]


def index_file(path: Path, *, with_id: bool) -> ColumnFile:
    """The new source's rows in order: seq, key digest, file number and line; with an id column also the id."""
    place = [("seq", pa.int64()), ("file", pa.int32()), ("line", pa.int64())]
    return ColumnFile(path, pa.schema(place + _DIGESTS + ([*_IDS, ("row_id", pa.string())] if with_id else [])))


def previous_index(path: Path, *, with_id: bool) -> ColumnFile:
    """The previous snapshot's rows: digests, occurrence, batch number and place in the batch."""
    place = [("occurrence", pa.int64()), ("batch", pa.int64()), ("place", pa.int64())]
    return ColumnFile(path, pa.schema(place + _DIGESTS + (_IDS if with_id else [])))


def previous_file(
    path: Path,
    store: DatasetStore,
    manifest: SnapshotManifest,
    entries: Sequence[BatchEntry],
    *,
    with_id: bool,
    damaged: Container[str] = (),
) -> ColumnFile:
    """The index of a snapshot in the store. `damaged`: paths of shards that are not read (see `_committed_rows`)."""
    out = previous_index(path, with_id=with_id)
    for ids, keys, batches, places in snapshot_rows(store, manifest, entries, path.parent, damaged):
        if with_id:
            id_hi, id_lo = halves(b"".join(map(id_digest, ids)), 16)
            extra, occurrences, kept = {"id_hi": id_hi, "id_lo": id_lo}, [0] * len(ids), None
        else:
            # A snapshot made with an id column has other row ids: none of its rows can be found again.
            kept = [i for i, row_id in enumerate(ids) if row_id[:64] == keys[i] and row_id[64:65] == "#"]
            extra, occurrences = {}, [int(ids[i][65:]) for i in kept]
        columns = {"batch": batches, "place": places, **key_halves(keys), **extra}
        if kept is not None and len(kept) < len(ids):
            columns = {name: values[kept] for name, values in columns.items()}
        out.add(occurrence=occurrences, **columns)
    out.close()
    return out


def row_places(path: Path) -> ColumnFile:
    """Rows by what they ask: digest of the row key, batch number and place in the batch."""
    return ColumnFile(path, pa.schema([("batch", pa.int64()), ("place", pa.int64()), *_DIGESTS]))


def key_halves(keys: Iterable[str]) -> dict[str, np.ndarray]:
    """Digests of row keys as columns."""
    key_hi, key_lo = halves(bytes.fromhex("".join([key[:32] for key in keys])), 16)
    return {"key_hi": key_hi, "key_lo": key_lo}


def snapshot_rows(
    store: DatasetStore,
    manifest: SnapshotManifest,
    entries: Sequence[BatchEntry],
    workdir: Path,
    damaged: Container[str] = (),
) -> Iterator[tuple[list[str], list[str], np.ndarray, np.ndarray]]:
    """Row ids, row keys, batch numbers and places of these batches' rows, in parts."""
    for number, shard in enumerate(manifest.shards):
        path = store.snapshot_path(manifest.snapshot, shard.path)
        if path in damaged:
            yield from _committed_rows(store, [entry for entry in entries if entry.shard == number])
            continue
        mine = sorted((entry for entry in entries if entry.shard == number), key=lambda entry: entry.row_group)
        if not mine:
            continue
        uri, copy = store.objects.uri(path), workdir / "previous-shard.parquet"
        if "://" in uri:  # one download instead of thousands of small ranges
            with store.objects.open(path) as remote, copy.open("wb") as local:
                shutil.copyfileobj(remote, local, 1 << 23)
            uri = str(copy)
        with pq.ParquetFile(uri, pre_buffer=False) as file:
            for part in _chunks(mine):
                table = file.read_row_groups([entry.row_group for entry in part], columns=["row_id", "row_key"])
                batches = np.concatenate([np.full(entry.rows, int(entry.key), np.int64) for entry in part])
                places = np.concatenate([np.arange(entry.rows, dtype=np.int64) for entry in part])
                yield table.column("row_id").to_pylist(), table.column("row_key").to_pylist(), batches, places
        copy.unlink(missing_ok=True)


def _committed_rows(
    store: DatasetStore, entries: Sequence[BatchEntry]
) -> Iterator[tuple[list[str], list[str], np.ndarray, np.ndarray]]:
    """The rows of a lost shard as the batch objects have them, so that what is paid keeps its place.

    Rows of batches that are not committed are not known any more: they are placed as new ones.
    """
    current = store.current_objects(entries)
    for entry in entries:
        with contextlib.suppress(KeyError, CorruptObject, FileNotFoundError):
            table = store.batch_table(current[entry.key])
            batches, places = np.full(entry.rows, int(entry.key), np.int64), np.arange(entry.rows, dtype=np.int64)
            yield table.column("row_id").to_pylist(), table.column("row_key").to_pylist(), batches, places


def _chunks(entries: Iterable[BatchEntry]) -> Iterator[list[BatchEntry]]:
    part: list[BatchEntry] = []
    rows = 0
    for entry in entries:
        part.append(entry)
        rows += entry.rows
        if rows >= PART_ROWS:
            yield part
            part, rows = [], 0
    if part:
        yield part
