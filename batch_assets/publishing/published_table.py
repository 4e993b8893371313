"""A published table: what its manifest says, its version, and whether its files are there.

Ids or values that occur more than once are found in 8 bytes of memory per row: a hash of each value, sorted in place.
That two hashes are equal is never taken as proof for ids; those few are read again and compared.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, Field

from batch_assets.publishing.table_files import Column, Source, TableFile
from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import BatchObject, DatasetStore
from resources.store.object_integrity import Sealed, StoredFile, is_damage, read_sealed

FORMAT = 1


class BrokenTable(Exception):
    """Files of a published version are gone or have another size than its manifest says."""


class PublishedTable(Sealed):
    """A published version, as its manifest.json says.

    `rows` counts lines: one per source row that was not rejected, `ok` + `dead`, with `duplicates` among them. Tokens
    and `usd` are those of the rows that were asked; a duplicate adds nothing. `usd` covers all but the `unpriced` rows
    and is None while no price is known. `reused`: rows that were asked and paid for by another dataset, by its name.
    `model`: the one that was asked for (None: written before it was kept); those that answers named are in `sources`.
    `output_mismatches`: rows that were asked and whose output does not make the columns of `output.columns`; None: the
    table has no such columns.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT
    dataset: str
    snapshot: str
    version: str
    created_at: float
    batches: int
    generations: int
    rows: int
    ok: int
    dead: int
    duplicates: int
    dead_duplicates: int
    prompt_tokens: int
    completion_tokens: int
    usd: float | None
    unpriced: int
    bytes: int
    simulated: bool
    columns: list[Column]
    sources: list[Source]
    files: list[TableFile]
    card: StoredFile | None = None
    reused: dict[str, int] = Field(default_factory=dict)
    model: str | None = None
    output_mismatches: int | None = None

    def stored(self) -> Iterator[TableFile | StoredFile]:
        """Every object of the version beside its manifest."""
        yield from self.files
        if self.card:
            yield self.card

    @property
    def parts(self) -> int:
        """Number of Parquet files."""
        return len(self.files)

    @property
    def path(self) -> str:
        """Folder of this version, below the store's root."""
        return f"{self.dataset}/published/{self.version}"

    def uri(self, objects: Objects) -> str:
        """Folder as a path or `s3://` URL."""
        return objects.uri(self.path)

    def glob(self, objects: Objects) -> str:
        """All parts, for `polars.scan_parquet` and DuckDB's `read_parquet`."""
        return objects.uri(f"{self.path}/part-*.parquet")


def table_version(
    snapshot: str, current: Mapping[str, BatchObject], *, prompt: bool = True, output_columns: bool = False
) -> str:
    """Version (16 hex digits) of the table that a snapshot and its current objects make, with or without prompts, and
    the columns of outputs, which follow from the snapshot's schema.

    A table without them has the version that it had before there were such columns.
    """
    with_columns = f"{' prompt' if prompt else ''}{' output columns' if output_columns else ''}"
    digest = hashlib.sha256(f"{FORMAT} {snapshot}{with_columns}\n".encode())
    for key in sorted(current):
        digest.update(f"{current[key].name}\n".encode())
    return digest.hexdigest()[:16]


def table_versions(snapshot: str, current: Mapping[str, BatchObject]) -> tuple[str, ...]:
    """Versions of the tables that a snapshot and its current objects make: with prompts and columns of outputs, and
    without.
    """
    return tuple(
        table_version(snapshot, current, prompt=prompt, output_columns=output_columns)
        for output_columns in (False, True)
        for prompt in (True, False)
    )


def published_table(store: DatasetStore, version: str | None = None) -> PublishedTable | None:
    """The table that readers see, or the given version; None when there is none. Raises CorruptObject."""
    version = version or store.current_published()
    if version is None:
        return None
    path = store.published_path(version, "manifest.json")
    try:
        return read_sealed(store.objects, path, PublishedTable, store.mended_by_run)
    except FileNotFoundError:
        return None


def broken_files(store: DatasetStore, table: PublishedTable) -> list[str]:
    """Names of the table's files that are gone or have another size than the manifest says."""
    found = {info.path: info.size for info in store.objects.list(f"{table.path}/")}
    return [file.name for file in table.stored() if found.get(f"{table.path}/{file.name}") != file.bytes]


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
    import polars as pl

    if pa.types.is_list(column.type):
        width = 0 if not len(column) else len(column[0])
        if width and len(column.flatten()) == width * len(column):
            rows = np.asarray(column.flatten()).reshape(len(column), width)
            return np.fromiter((hash(row.tobytes()) & 0xFFFFFFFFFFFFFFFF for row in rows), np.uint64, len(rows))
        return np.fromiter((hash(tuple(row)) & 0xFFFFFFFFFFFFFFFF for row in column.to_pylist()), np.uint64)
    return pl.Series(pl.from_arrow(column.cast(pa.large_string()))).hash(0).to_numpy()
