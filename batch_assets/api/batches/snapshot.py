"""All lines of an input file, checked in one pass, and kept as a snapshot in parts of 250 lines.

The file is read line by line; memory holds 250 lines and 16 bytes for each custom_id. What is kept has the form of a
dataset's snapshot (`resources.store.dataset_store`): `row_id` is the custom_id, `prompt` the body of the request. Made
twice, it is the same, byte for byte.
"""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.api.batches.lines import Line, LineChecker, LineError
from batch_assets.api.batches.long_texts import LongText
from batch_assets.api.settings import ApiLimits
from gpu_runner.rows import Task, data_version
from resources.objects.opening import Objects, temporary_folder
from resources.store.dataset_store import BatchEntry, DatasetStore, Shard, SnapshotManifest

PART_LINES = 250
SHARD_BATCHES = 40
SNAPSHOT = "input"
READ_BYTES = 4 << 20  # of one ranged request to S3
_SCHEMA = pa.schema([("row_id", pa.string()), ("row_key", pa.string()), ("prompt", pa.binary())])
TASKS: Mapping[str, Task] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of an input: its errors, or its model and how many lines it has.

    `long_texts`: prompts of which an engine is to say whether they are too long, longest first.
    """

    errors: list[LineError] = field(default_factory=list)
    model: str | None = None
    lines: int = 0
    long_texts: list[LongText] = field(default_factory=list)


def batch_store(objects: Objects, batch_id: str) -> DatasetStore:
    """The objects of one batch, as those of a dataset."""
    return DatasetStore(objects, batch_folder(batch_id))


def batch_folder(batch_id: str) -> str:
    """Where the store keeps everything of a batch but its files."""
    return f"api/batches/{batch_id}"


def numbered_lines(file: BinaryIO, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file from 1 on, without blank ones and the byte order mark, as sources are read.

    A longer line comes as its beginning, alone.
    """
    number = 0
    while raw := file.readline(most_bytes + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            continue
        yield number, raw
        if len(raw) > most_bytes:
            return


def check_input(
    objects: Objects,
    path: str,
    batch_id: str,
    endpoint: str,
    models: frozenset[str] | None,
    limits: ApiLimits,
    resolve: Callable[[str], str] = lambda name: name,
    contexts: Mapping[str, int] | None = None,
    *,
    lines: int | None = None,
) -> Checked:
    """Check the file at `path`, and write the snapshot where nothing is wrong. Raises FileNotFoundError.

    `models`: those that can be had; None: not known now. `resolve`: the model behind a name.
    `contexts`: most tokens of models, where that is known. `lines`: how many there were when it was checked before.
    """
    checker = LineChecker(endpoint, models, resolve, contexts)
    store = batch_store(objects, batch_id)
    errors: list[LineError] = []
    with temporary_folder() as folder, objects.open(path) as opened, _buffered(opened) as file:
        writer = _SnapshotWriter(store, folder)
        inputs = 0
        for number, raw in numbered_lines(file, limits.line_bytes):
            if number > limits.lines:
                errors.append(_too_many(limits.lines))
                break
            if len(raw) > limits.line_bytes:
                said = f"This line is too long: expected at most {limits.line_bytes:,} bytes."
                errors.append(LineError("line_too_long", said, line=number))
                break
            found = checker.check(raw, number)
            if isinstance(found, Line):
                inputs += found.inputs
                if not errors:
                    writer.add(found)
                continue
            errors += found
            if len(errors) >= limits.listed_errors:
                break
        if not errors and inputs > limits.lines:
            errors.append(_too_many(limits.lines))
        if not errors and not writer.rows:
            errors.append(LineError("empty_file", "The input file is empty: expected at least one request."))
        if not errors and lines is not None and writer.rows != lines:
            errors.append(LineError("invalid_input_file", f"Expected {lines:,} requests, found {writer.rows:,}."))
        if errors:
            return Checked(errors[: limits.listed_errors])
        assert checker.model is not None
        writer.finish(batch_id, endpoint, checker.model)
        return Checked([], checker.model, writer.rows, checker.long_texts.longest_first())


def _buffered(file: BinaryIO) -> BinaryIO:
    """The same with `readline`, which files of Arrow have not."""
    return io.BufferedReader(cast(io.RawIOBase, file), READ_BYTES)


def _too_many(most: int) -> LineError:
    return LineError("too_many_tasks", f"The batch has too many requests: expected at most {most:,}.")


class _SnapshotWriter:
    """Writes rows into shards, 250 rows to a group, and each full shard into the store."""

    def __init__(self, store: DatasetStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._entries: list[BatchEntry] = []
        self._shards: list[Shard] = []
        self._rows: list[Line] = []
        self._parquet: pq.ParquetWriter | None = None
        self._shard_rows = self._groups = 0
        self.rows = 0

    def add(self, line: Line) -> None:
        """One more row."""
        self._rows.append(line)
        self.rows += 1
        if len(self._rows) == PART_LINES:
            self._write_batch()

    def _write_batch(self) -> None:
        rows, self._rows = self._rows, []
        ids = [row.custom_id for row in rows]
        keys = [hashlib.sha256(row.body).hexdigest() for row in rows]
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(self._shard_file, _SCHEMA, compression="zstd", compression_level=1)
        table = pa.table([ids, keys, [row.body for row in rows]], schema=_SCHEMA)
        self._parquet.write_table(table, row_group_size=PART_LINES)
        key = f"{len(self._entries):05d}"
        version = data_version(zip(ids, keys, strict=True))
        self._entries.append(BatchEntry(key, len(rows), version, len(self._shards), self._groups))
        self._groups += 1
        self._shard_rows += len(rows)
        if self._groups == SHARD_BATCHES:
            self._end_shard()

    @property
    def _name(self) -> str:
        return f"prompts-{len(self._shards):05d}.parquet"

    @property
    def _shard_file(self) -> Path:
        return self._folder / self._name

    def _end_shard(self) -> None:
        if self._parquet is None:
            return
        self._parquet.close()
        self._store.objects.upload(self._store.snapshot_path(SNAPSHOT, self._name), self._shard_file)
        self._shard_file.unlink()
        self._shards.append(Shard(path=self._name, rows=self._shard_rows))
        self._parquet, self._shard_rows, self._groups = None, 0, 0

    def finish(self, batch_id: str, endpoint: str, model: str) -> None:
        """Write what is left, and the manifest last."""
        if self._rows:
            self._write_batch()
        self._end_shard()
        columns = ("key", "rows", "data_version", "shard", "row_group")
        table = pa.table({name: [getattr(entry, name) for entry in self._entries] for name in columns})
        index = self._folder / "batches.parquet"
        pq.write_table(table, index)
        self._store.objects.upload(self._store.snapshot_path(SNAPSHOT, index.name), index)
        self._store.put_manifest(
            SnapshotManifest(
                dataset=self._store.dataset,
                snapshot=SNAPSHOT,
                previous=None,
                created_at=0.0,
                source=batch_id,
                rows=self.rows,
                batches=len(self._entries),
                batch_rows=PART_LINES,
                source_rows=self.rows,
                rejected=0,
                duplicates=0,
                added=self.rows,
                changed=0,
                removed=0,
                unchanged=0,
                keep_columns=[],
                shards=self._shards,
                generation={"task": TASKS[endpoint], "model": model},
            )
        )
