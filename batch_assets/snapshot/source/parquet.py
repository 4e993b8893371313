"""Parquet files, read a few rows at a time; their column types must agree from file to file."""

from __future__ import annotations

import datetime
import io
import itertools
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import Reject, SourceError, Unseen, no_column
from batch_assets.snapshot.source.files import SourceFile
from batch_assets.snapshot.source.parquet_pages import Page, pages
from batch_assets.snapshot.source.parquet_types import joined, may_widen, plain_type, python_type
from batch_assets.snapshot.source.signatures import LOOKED_AT, text_or_other_kind

# Few rows at a time: a dictionary page of a few KB may stand for a megabyte in each row.
READ_ROWS = 256
READ_BYTES = 1 << 20
# What a batch of rows may take when their columns are as large in memory as in the file.
BATCH_BYTES = 16 << 20
# A page is unpacked whole, and its values are copied out of it. Writers end a page after 1 MB, but some only look after
# 1,024 values, so that large cells make pages of gigabytes.
MAX_PAGE = 256 << 20
# Of chunks whose values take this much on average, each page is looked at before any is read.
LARGE_CELL = 8 << 10
_SMALLER_PAGES = (
    "write the file again with smaller pages (pyarrow: write_batch_size=16; Spark: parquet.page.size.row.check.min=1)"
)
# Columns whose values take less than this in the file are read as dictionaries, so that repeated values stay shared.
_REPEATED_BYTES = 8


class ParquetReader:
    """Reads one file after the other and remembers the types of the first."""

    def __init__(self, columns: Sequence[str], may_lack: Container[str] = (), files: Sequence[SourceFile] = ()) -> None:
        """`may_lack`: columns that a file may be without; then its blocks are without them, too. `files`: all that are
        to be read; of those behind the first, footers say the type of a column that has only nulls or few bits in it.
        """
        self._wanted, self._may_lack, self._files = list(columns), may_lack, files
        self._columns = self._wanted
        self._given: dict[str, str | None] = {}
        self._types: dict[str, tuple[str, pa.DataType]] = {}

    def read(
        self, file: str, stream: BinaryIO, optional: Unseen, given: Mapping[str, str | None] = MappingProxyType({})
    ) -> Iterator[Block]:
        """All rows of one file; `line` counts rows from 1. `given`: columns of its folders, for those that it lacks."""
        try:
            with pq.ParquetFile(stream) as first:
                metadata, schema = first.metadata, first.schema_arrow
            there = set(schema.names)
            self._given = {name: given[name] for name in self._wanted if name in given and name not in there}
            wanted = [name for name in self._wanted if name not in self._given]
            self._columns = [name for name in wanted if name in there or name not in self._may_lack]
            no_column(file, self._columns, [*schema.names, *given])
            if metadata.num_rows:
                self._check(file, schema)
            _refuse_encryption(file, stream, metadata)
            _refuse_large_pages(file, stream, metadata, self._columns)
            stream.seek(0)
            # Without the last two, pyarrow holds the whole file, or a whole row group, before it gives the first row.
            reader = pq.ParquetFile(
                stream,
                read_dictionary=_repeated(metadata, schema, self._columns),
                page_checksum_verification=True,
                pre_buffer=False,
                buffer_size=READ_BYTES,
            )
        except pa.ArrowNotImplementedError as error:
            raise SourceError(
                f"{file}: expected columns of types that Arrow can read, found another one ({_first_line(error)}); "
                "write the file again without that column, or with it as text"
            ) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            found = _instead(file, stream) or f"none ({_first_line(error)})"
            raise SourceError(f"{file}: expected a whole Parquet file, found {found}") from error
        optional.clear()
        number = 1
        for group in range(metadata.num_row_groups):
            rows = _batch_rows(stream, metadata, group, self._columns)
            batches = reader.iter_batches(rows, row_groups=[group], columns=self._columns, use_threads=False)
            for batch in self._batches(file, batches, metadata, group, number):
                block = _block(file, number, batch, {name: self._types[name][1] for name in self._columns})
                yield _with(self._given, block)
                number += batch.num_rows
        if number - 1 != metadata.num_rows:
            raise SourceError(f"{file}: expected {metadata.num_rows} rows as its footer says, found {number - 1}")

    def _batches(
        self, file: str, batches: Iterator[pa.RecordBatch], metadata: Any, group: int, row: int
    ) -> Iterator[pa.RecordBatch]:
        """The batches of a row group that begins at a row (from 1), and what is wrong with them as SourceError."""
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except MemoryError as error:
                raise _no_memory(file, metadata, group, self._columns, row, error) from error
            except (pa.ArrowException, OSError, ValueError) as error:
                raise SourceError(f"{file}: broken at row {row} or after ({_first_line(error)})") from error
            yield batch
            row += batch.num_rows

    def _check(self, file: str, schema: pa.Schema) -> None:
        for name in [*self._columns, *self._given]:
            if len(schema.get_all_field_indices(name)) > 1:
                raise SourceError(f"{file}: expected one column {name!r}, found several")
            found = pa.string() if name in self._given else plain_type(schema.field(name).type)
            if name not in self._types:
                self._types[name] = self._of_all_files(name, file, found) if may_widen(found) else (file, found)
            first, expected = self._types[name]
            if joined(expected, found) != expected:
                raise SourceError(
                    f"{file}: expected {expected} in column {name!r} as in {first}, found {found}; write it with one "
                    "type in all files"
                )

    def _of_all_files(self, name: str, first: str, kind: pa.DataType) -> tuple[str, pa.DataType]:
        """The type of a column whose first file with rows may have a narrower one than others, or only nulls: from
        footers; and the file that has it.
        """
        for file in self._files:
            if not may_widen(kind):
                break
            try:
                with file.open() as stream, pq.ParquetFile(stream) as footer:
                    schema, rows = footer.schema_arrow, footer.metadata.num_rows
            except (pa.ArrowException, OSError, ValueError):
                continue  # said when it is read
            if rows and len(schema.get_all_field_indices(name)) == 1:
                wider = joined(kind, plain_type(schema.field(name).type)) or kind
                first, kind = (first, kind) if wider == kind else (file.name, wider)
        return first, kind


def plain(array: pa.Array) -> pa.Array:
    """An array as the snapshot keeps it: without dictionary encoding, extension or 64-bit offsets."""
    return array.cast(plain_type(array.type))


def _refuse_encryption(file: str, stream: BinaryIO, metadata: Any) -> None:
    """Raise SourceError for a file with encrypted columns: Arrow aborts the process when it looks at one without a key.

    Such a file has a plain footer with a signature after it, so that the footer is longer than its metadata (Parquet
    Modular Encryption, section 5.4). An encrypted footer is refused by Arrow itself.
    """
    stream.seek(-8, io.SEEK_END)
    if int.from_bytes(stream.read(4), "little") != metadata.serialized_size:
        raise SourceError(
            f"{file}: expected a Parquet file without encryption, found a signed footer; decrypt it first"
        )


def _chunks(metadata: Any, columns: Sequence[str], groups: Iterable[int] | None = None) -> Iterator[tuple[int, Any]]:
    """(row group, chunk) of the wanted columns in some row groups or all, of nested columns each leaf's."""
    wanted = set(columns)
    places = [i for i in range(metadata.num_columns) if _column(metadata.schema.column(i).path, wanted) in wanted]
    for group in range(metadata.num_row_groups) if groups is None else groups:
        row_group = metadata.row_group(group)
        yield from ((group, row_group.column(i)) for i in places)


def _column(path: str, wanted: set[str]) -> str:
    """The column that a leaf belongs to."""
    return path if path in wanted else path.partition(".")[0]


def _batch_rows(stream: BinaryIO, metadata: Any, group: int, columns: Sequence[str]) -> int:
    """Rows of a row group to read at once: fewer where the cells are large."""
    row_group = metadata.row_group(group)
    chunks = [chunk for _, chunk in _chunks(metadata, columns, [group])]
    row_bytes: int = row_group.total_byte_size // max(1, row_group.num_rows)
    if row_bytes * READ_ROWS > BATCH_BYTES:  # many columns that are not read do not count
        by_rows = [chunk.total_uncompressed_size / max(1, chunk.num_values) for chunk in chunks]
        row_bytes = min(row_bytes, int(max(by_rows, default=0)) * len(columns))
    row_bytes = max(row_bytes, sum(_shared_bytes(stream, chunk) for chunk in chunks))
    return max(1, min(READ_ROWS, BATCH_BYTES // max(1, row_bytes)))


def _shared_bytes(stream: BinaryIO, chunk: Any) -> int:
    """Bytes of a value in the dictionary of a chunk, on average: it stands in each row that names it. 0 without one."""
    if chunk.dictionary_page_offset is None or chunk.total_uncompressed_size * READ_ROWS <= BATCH_BYTES:
        return 0
    first = next(pages(stream, chunk.dictionary_page_offset, chunk.total_compressed_size), None)
    return first.unpacked // first.shared if first is not None and first.shared else 0


def _refuse_large_pages(file: str, stream: BinaryIO, metadata: Any, columns: Sequence[str]) -> None:
    """Raise SourceError for a page of a large column chunk that is larger than MAX_PAGE when unpacked.

    Where cells are large, each page is looked at; else the first one of each kind: a look costs a request in S3.
    """
    for group, chunk in _chunks(metadata, columns):
        if chunk.total_uncompressed_size <= MAX_PAGE:
            continue
        largest = max((page.unpacked for page in _pages_to_check(stream, chunk)), default=0)
        if largest > MAX_PAGE:
            raise SourceError(
                f"{file}: expected pages of at most {MAX_PAGE >> 20} MiB in column {chunk.path_in_schema!r}, found "
                f"one of {largest >> 20} MiB in row group {group}, which must be in memory whole; {_SMALLER_PAGES}"
            )


def _pages_to_check(stream: BinaryIO, chunk: Any) -> Iterator[Page]:
    offsets = [offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset is not None]
    if chunk.total_uncompressed_size >= LARGE_CELL * chunk.num_values:
        yield from pages(stream, min(offsets), chunk.total_compressed_size)
        return
    for offset in offsets:
        yield from itertools.islice(pages(stream, offset, chunk.total_compressed_size), 1)


def _no_memory(
    file: str, metadata: Any, group: int, columns: Sequence[str], row: int, error: MemoryError
) -> SourceError:
    """What is said when memory ends at a row (from 1): the largest column of its row group, and what to do."""
    chunks = [chunk for _, chunk in _chunks(metadata, columns, [group])]
    largest = max(chunks, key=lambda chunk: chunk.total_uncompressed_size)
    return SourceError(
        f"{file}, row {row} and after: expected memory for pages of column {largest.path_in_schema!r} in row group "
        f"{group} ({largest.total_uncompressed_size >> 20} MiB in all), found too little "
        f"({_first_line(error)}); give the process more, or {_SMALLER_PAGES}"
    )


def _repeated(metadata: Any, schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Text columns that were written as dictionaries, or are far smaller in the file than their values."""
    names = []
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        if column.path not in columns or column.physical_type != "BYTE_ARRAY":
            continue
        chunks = [metadata.row_group(group).column(index) for group in range(metadata.num_row_groups)]
        rows = sum(chunk.num_values for chunk in chunks)
        dictionary = pa.types.is_dictionary(schema.field(column.path).type)
        if dictionary or (rows and sum(chunk.total_uncompressed_size for chunk in chunks) < _REPEATED_BYTES * rows):
            names.append(column.path)
    return names


def _block(file: str, first: int, batch: pa.RecordBatch, types: Mapping[str, pa.DataType]) -> Block:
    """The rows of a batch; `types`: what each column has in all files."""
    arrow: dict[str, pa.Array] = {}
    values: dict[str, list[Any]] = {}
    bad: dict[int, str] = {}
    for name, kind in types.items():
        array = batch.column(name)
        is_uuid = isinstance(array.type, pa.UuidType)
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if plain_type(array.type) != kind:
            array = _cast(file, name, array, kind)
        arrow[name] = array
        values[name] = _uuids(array) if is_uuid else _values(name, array, bad)
    block = Block(file, list(range(first, first + batch.num_rows)), values, arrow)
    if bad:
        block = block.take([i for i in range(batch.num_rows) if i not in bad])
        block.rejects = [Reject(file, first + i, reason) for i, reason in sorted(bad.items())]
    return block


def _with(given: Mapping[str, str | None], block: Block) -> Block:
    """The block with columns of one text."""
    rows = len(block.lines)
    block.columns |= {name: [value] * rows for name, value in given.items()}
    if block.arrow is not None:
        block.arrow |= {name: pa.repeat(pa.scalar(value, pa.string()), rows) for name, value in given.items()}
    return block


def _cast(file: str, name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return plain(array).cast(kind)
    except pa.ArrowException as error:
        raise SourceError(
            f"{file}: column {name!r} ({array.type}) cannot be read as {kind}, as in other files "
            f"({type(error).__name__}); write it with one type in all files"
        ) from error


def _uuids(array: pa.Array) -> list[Any]:
    """UUIDs as people write them."""
    return [None if raw is None else str(uuid.UUID(bytes=raw)) for raw in array.to_pylist()]


def _values(name: str, array: pa.Array, bad: dict[int, str]) -> list[Any]:
    """Python values; text that is not UTF-8, and what Python has no value for, marks its row as bad."""
    if isinstance(array, pa.DictionaryArray):
        bad_shared: dict[int, str] = {}
        shared = _values(name, array.dictionary, bad_shared)
        indices = array.indices.to_pylist()
        if bad_shared:
            bad.update({row: bad_shared[i] for row, i in enumerate(indices) if i in bad_shared})
        return [None if i is None else shared[i] for i in indices]
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
        # Python's datetime ends at microseconds.
        array = array.cast(pa.string())
    kind = python_type(array.type)
    try:
        return list((array if kind == array.type else array.cast(kind)).to_pylist())
    except (pa.ArrowException, UnicodeDecodeError, ValueError, OverflowError):
        return [_value(array.take(pa.array([i])), kind, i, name, bad) for i in range(len(array))]


def _value(one: pa.Array, kind: pa.DataType, row: int, name: str, bad: dict[int, str]) -> Any:
    """The value of an array of one."""
    try:
        return (one if kind == one.type else one.cast(kind))[0].as_py()
    except UnicodeDecodeError:
        bad[row] = f"column {name!r} is not valid UTF-8"
    except (pa.ArrowException, ValueError, OverflowError) as error:
        if pa.types.is_duration(one.type) and one.type.unit == "ns":
            seconds, rest = divmod(one[0].value, 10**9)
            return f"{datetime.timedelta(seconds=seconds)}.{rest:09}"
        if pa.types.is_time64(one.type):  # in nanoseconds, and no whole microseconds
            return one.cast(pa.string())[0].as_py()
        bad[row] = (
            f"column {name!r}: expected a value that Python can hold (years 1 to 9999; within lists and objects whole "
            f"microseconds), found another one of type {one.type} ({type(error).__name__}); cast the column to text"
        )
    return None


def _instead(file: str, stream: BinaryIO) -> str | None:
    """What a file is that is no Parquet, and what to do; None where that cannot be told."""
    try:
        stream.seek(0)
        data = stream.read(LOOKED_AT)
    except (OSError, ValueError):
        return None
    found = None if data.startswith(b"PAR1") else text_or_other_kind(file, data)
    return "text; write source.format: csv, tsv, jsonl or json, as it is" if found == "text" else found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
