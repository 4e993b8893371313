"""The files of one part of an export, for training and for validation, written to a local folder first."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson
import pyarrow as pa
import pyarrow.parquet as pq


class FileWriter(Protocol):
    """One file: `write` takes records, or a table of lines; `close` makes it whole. `rows`, `bytes`: written so far."""

    path: Path
    rows: int

    @property
    def bytes(self) -> int:
        """Size of the file so far, roughly."""

    def write(self, records: Any) -> None:
        """Add records."""

    def close(self) -> None:
        """No more will come."""


class JsonLines:
    """Records as JSON, one a line. Values that JSON does not have: bytes as base64, all else as text."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.bytes = path, 0, 0
        self._file: BinaryIO = path.open("wb")

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            line = orjson.dumps(record, default=_plain, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
            self._file.write(line)
            self.rows += 1
            self.bytes += len(line)

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


class ParquetLines:
    """Lines of a table as they are."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.rows, self.bytes = path, 0, 0
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)

    def write(self, lines: pa.Table) -> None:
        if lines.num_rows:
            self._writer.write_table(lines)
            self.rows += lines.num_rows
            self.bytes += lines.nbytes

    def close(self) -> None:
        self._writer.close()


class PartFiles:
    """The files of one part: `train-00000.jsonl` and, where some lines are for validation, `validation-00000.jsonl`.

    `datasets.load_dataset` finds the splits by these names.
    """

    def __init__(self, folder: Path, number: int, ending: str, make: Callable[[Path], FileWriter]) -> None:
        self._folder, self._number, self._ending, self._make = folder, number, ending, make
        self.writers: dict[str, FileWriter] = {}

    def of(self, split: str) -> FileWriter:
        """The file of a split."""
        if split not in self.writers:
            self.writers[split] = self._make(self._folder / f"{split}-{self._number:05d}.{self._ending}")
        return self.writers[split]

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(writer.bytes for writer in self.writers.values())

    def close(self) -> None:
        """Make the files whole."""
        for writer in self.writers.values():
            writer.close()
