"""Parquet files, read a few rows at a time; their column types must agree from file to file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batch_assets.source import Block
from batch_assets.source_errors import Reject, SourceError, no_column

# Few rows at a time: a dictionary page of a few KB may stand for a megabyte in each row.
READ_ROWS = 256
READ_BYTES = 1 << 20
# Columns whose values take less than this in the file are read as dictionaries, so that repeated values stay shared.
_REPEATED_BYTES = 8


class ParquetReader:
    """Reads one file after the other and remembers the types of the first."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._types: dict[str, tuple[str, pa.DataType]] = {}

    def read(self, file: str, stream: BinaryIO, optional: set[str]) -> Iterator[Block]:
        """All rows of one file; `line` counts rows from 1."""
        try:
            with pq.ParquetFile(stream) as first:
                metadata, schema = first.metadata, first.schema_arrow
            stream.seek(0)
            shared = _repeated(metadata, schema, self._columns)
            # Without these two, pyarrow holds the whole file, or a whole row group, before it gives the first row.
            reader = pq.ParquetFile(
                stream,
                read_dictionary=shared,
                page_checksum_verification=True,
                pre_buffer=False,
                buffer_size=READ_BYTES,
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SourceError(f"{file}: expected a whole Parquet file, found none ({_first_line(error)})") from error
        self._check(file, schema)
        optional.clear()
        number = 1
        batches = reader.iter_batches(READ_ROWS, columns=self._columns, use_threads=False)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except (pa.ArrowException, OSError, ValueError) as error:
                raise SourceError(f"{file}: broken at row {number} or after ({_first_line(error)})") from error
            yield _block(file, number, batch, self._columns)
            number += batch.num_rows
        if number - 1 != metadata.num_rows:
            raise SourceError(f"{file}: expected {metadata.num_rows} rows as its footer says, found {number - 1}")

    def _check(self, file: str, schema: pa.Schema) -> None:
        no_column(file, self._columns, schema.names)
        for name in self._columns:
            if len(schema.get_all_field_indices(name)) > 1:
                raise SourceError(f"{file}: expected one column {name!r}, found several")
            found = plain_type(schema.field(name).type)
            first, expected = self._types.setdefault(name, (file, found))
            if found != expected:
                raise SourceError(f"{file}: expected {expected} in column {name!r} as in {first}, found {found}")


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary encoding, extension or 64-bit offsets: what the snapshot keeps."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind


def plain(array: pa.Array) -> pa.Array:
    """An array as the snapshot keeps it: without dictionary encoding, extension or 64-bit offsets."""
    return array.cast(plain_type(array.type))


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


def _block(file: str, first: int, batch: pa.RecordBatch, columns: Sequence[str]) -> Block:
    arrow: dict[str, pa.Array] = {}
    values: dict[str, list[Any]] = {}
    bad: dict[int, str] = {}
    for name in columns:
        array = batch.column(name)
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        arrow[name] = array
        values[name] = _values(file, first, name, array, bad)
    block = Block(file, list(range(first, first + batch.num_rows)), values, arrow)
    if bad:
        block = block.take([i for i in range(batch.num_rows) if i not in bad])
        block.rejects = [Reject(file, first + i, reason) for i, reason in sorted(bad.items())]
    return block


def _values(file: str, first: int, name: str, array: pa.Array, bad: dict[int, str]) -> list[Any]:
    """Python values; text that is not UTF-8 marks its row as bad."""
    if isinstance(array, pa.DictionaryArray):
        bad_shared: dict[int, str] = {}
        shared = _values(file, first, name, array.dictionary, bad_shared)
        indices = array.indices.to_pylist()
        if bad_shared:
            bad.update({row: bad_shared[i] for row, i in enumerate(indices) if i in bad_shared})
        return [None if i is None else shared[i] for i in indices]
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
        # Python's datetime ends at microseconds.
        array = array.cast(pa.string())
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        return [_text(array[i], i, name, bad) for i in range(len(array))]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise SourceError(
            f"{file}, row {first} and after: values of column {name!r} ({array.type}) cannot be read "
            f"({type(error).__name__}); cast it to another type"
        ) from error


def _text(value: Any, row: int, name: str, bad: dict[int, str]) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        bad[row] = f"column {name!r} is not valid UTF-8"
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
