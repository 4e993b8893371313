"""Rows of a source as a dataset has them: read, filtered, and with `source.group_by` one row per group.

Groups are made by DuckDB, which spills to disk: memory does not grow with the number of rows, only with the largest
group.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from batch_assets.snapshot.placement import open_database, quoted
from batch_assets.snapshot.row_filter import Where
from batch_assets.snapshot.row_index import ColumnFile, halves
from batch_assets.snapshot.source.block import BLOCK_ROWS, Block
from batch_assets.snapshot.source.derived import NoList, json_value
from batch_assets.snapshot.source.errors import Reject, SourceError, Unseen
from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.models import GeneratedDatasetSpec
from resources.objects.opening import temporary_folder

MAX_ROW = 1 << 20  # bytes of a row of a group, as JSON
MAX_GROUP_ROWS, MAX_GROUP_BYTES = 10_000, 16 << 20
_FETCHED = 2048
_SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("key_hi", pa.uint64()),
        ("key_lo", pa.uint64()),
        ("file", pa.int32()),
        ("line", pa.int64()),
        ("row", pa.binary()),
    ]
)


def where_of_rows(spec: GeneratedDatasetSpec) -> Where | None:
    """The condition that rows of `rows_of` are still to be held to; of groups there is none, their rows passed it."""
    return Where(spec.source.where) if spec.source.where and not spec.source.group_by else None


def rows_of(spec: GeneratedDatasetSpec, columns: Sequence[str], base: Path, unseen: Unseen) -> Iterator[Block]:
    """The rows of a dataset's source with these columns, before `limit`, and before `where_of_rows`.

    Arguments and errors are those of `read_source`.
    """
    if spec.source.group_by is None:
        return read_source(spec.source, columns, base, unseen, id_column=spec.id_column)
    return _grouped(spec, spec.source.group_by, columns, base, unseen)


def _grouped(
    spec: GeneratedDatasetSpec, keys: Sequence[str], columns: Sequence[str], base: Path, unseen: Unseen
) -> Iterator[Block]:
    where = Where(spec.source.where) if spec.source.where else None
    pairs = None if spec.source.pairs is None else _Pairs(spec.source.pairs, spec.source.name_here("row_id"))
    named = [] if pairs is None else [pairs.id_column]
    wanted = list(dict.fromkeys([*keys, *columns, *named, *(where.columns if where else ())]))
    read = 0
    with temporary_folder() as folder:
        staged = _Staged(folder / "rows.parquet", keys, wanted)
        for block in read_source(spec.source, wanted, base, unseen):
            read += len(block.lines) + len(block.rejects)
            rejects = list(block.rejects)
            if where is not None:
                passing, refused = where.split(block)
                rejects += [Reject(block.file, block.lines[row], reason) for row, reason in refused.items()]
                block = block.take(passing)
            rejects += staged.add(block)
            if rejects:
                yield Block(block.file, [], {name: [] for name in columns}, None, rejects, [])
        staged.close()
        if read and not staged.rows and where is not None:
            raise SourceError(f"source.where lets none of {read:,} rows through")
        found = 0
        for block in _groups(staged, folder, keys, columns, spec.source.min_group or 1, pairs):
            found += len(block.lines) + len(block.rejects)
            yield block
        if staged.rows and not found:
            raise SourceError(f"source.group_by: expected groups of {spec.source.min_group} rows or more, found none")


class _Staged:
    """Rows on disk, as JSON beside a digest of their key."""

    def __init__(self, path: Path, keys: Sequence[str], columns: Sequence[str]) -> None:
        self.path, self.columns, self.files = path, list(columns), list[str]()
        self._keys, self._file = list(keys), ColumnFile(path, _SCHEMA)

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self._file.rows

    def add(self, block: Block) -> list[Reject]:
        """Take rows in; returns those that cannot be used."""
        rejects, lines, texts, digests = [], [], [], []
        for place, line in enumerate(block.lines):
            try:
                row = {name: json_value(block.columns[name][place]) for name in self.columns}
                text = orjson.dumps(list(row.values()))
                key = [row[name] for name in self._keys]
                for name, value in zip(self._keys, key, strict=True):
                    if value is None or value != value:
                        raise NoList(f"expected a value of {name!r}, found {'null' if value is None else 'nan'}")
                if len(text) > MAX_ROW:
                    raise NoList(f"expected at most {MAX_ROW:,} bytes in a row of a group, found {len(text):,}")
            except (NoList, orjson.JSONEncodeError) as error:
                rejects.append(Reject(block.file, line, f"source.group_by: {error}"))
                continue
            digests.append(hashlib.blake2b(orjson.dumps(key), digest_size=16).digest())
            lines.append(line)
            texts.append(text)
        if texts:
            self._stage(block.file, lines, texts, digests)
        return rejects

    def _stage(self, file: str, lines: list[int], texts: list[bytes], digests: list[bytes]) -> None:
        if file not in self.files[-1:]:
            self.files.append(file)
        first, count = self.rows, len(texts)
        high, low = halves(b"".join(digests), 16)
        number = np.full(count, len(self.files) - 1, np.int32)
        seq = np.arange(first, first + count)
        self._file.add(seq=seq, key_hi=high, key_lo=low, file=number, line=lines, row=texts)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Of each group pairs of rows instead, so many at most; `id_column` names a row."""

    most: int
    id_column: str


def pairs_of(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Pairs of different rows, each once: first neighbours, then those two apart, and so on, round the end; so that
    each row is in about as many, however few there are (cyclic designs: David, The Method of Paired Comparisons, 1988).
    """
    for apart in range(1, rows // 2 + 1):
        for first in range(min(most, rows if 2 * apart < rows else apart)):
            yield first, (first + apart) % rows
            most -= 1


def _groups(
    staged: _Staged, folder: Path, keys: Sequence[str], columns: Sequence[str], least: int, pairs: _Pairs | None
) -> Iterator[Block]:
    """One row per key, in the order in which the keys first came; the rows of each in the order of the source."""
    made = _Groups(staged, keys, columns, pairs)
    database = open_database(folder / "groups.duckdb")
    try:
        source = f"read_parquet({quoted(staged.path)})"
        found = database.execute(
            f"SELECT row, file, line, first FROM {source} JOIN (SELECT key_hi, key_lo, min(seq) AS first FROM {source} "
            f"GROUP BY key_hi, key_lo HAVING count(*) >= {least}) USING (key_hi, key_lo) ORDER BY first, seq"
        )
        while rows := found.fetchmany(_FETCHED):
            for row in rows:
                yield from made.add(*row)
    finally:
        database.close()
    yield from made.finish()


class _Groups:
    """Puts rows of one key, that follow each other, together."""

    def __init__(self, staged: _Staged, keys: Sequence[str], columns: Sequence[str], pairs: _Pairs | None) -> None:
        self._files, self._keys = staged.files, list(keys)
        self._places = {name: place for place, name in enumerate(staged.columns)}
        self._columns, self._pairs = list(columns), pairs
        self._first = -1
        self._rows: list[list[Any]] = []
        self._count = self._bytes = 0
        self._where = (0, 0)
        self._block: Block | None = None

    def add(self, text: bytes, file: int, line: int, first: int) -> Iterator[Block]:
        """Take the next row in; the blocks that are full then."""
        if first != self._first:
            yield from self._end_group()
            self._first, self._where = first, (file, line)
        self._count += 1
        self._bytes += len(text)
        if self._count <= MAX_GROUP_ROWS and self._bytes <= MAX_GROUP_BYTES:
            self._rows.append(orjson.loads(text))

    def finish(self) -> Iterator[Block]:
        """The blocks that are left."""
        yield from self._end_group()
        if self._block is not None:
            yield self._block

    def _end_group(self) -> Iterator[Block]:
        if not self._count:
            return
        name, line = self._files[self._where[0]], self._where[1]
        if self._block is not None and (self._block.file != name or len(self._block.lines) >= BLOCK_ROWS):
            yield self._block
            self._block = None
        block = self._block = self._block or Block(name, [], {name: [] for name in self._columns}, None, [], [])
        assert block.ids is not None
        if len(self._rows) < self._count:
            most = f"{MAX_GROUP_ROWS:,} rows and {MAX_GROUP_BYTES >> 20} MiB"
            found = f"{self._count:,} rows of {self._bytes >> 20} MiB"
            block.rejects.append(
                Reject(name, line, f"source.group_by: expected at most {most} in a group, found {found}")
            )
        else:
            key = [self._rows[0][self._places[name]] for name in self._keys]
            whole: Any = key if len(key) > 1 else key[0]
            named = whole if type(whole) in (str, int) else orjson.dumps(whole).decode()
            for row_id, rows in self._rows_of(named):
                block.ids.append(row_id)
                block.lines.append(line)
                for column in self._columns:
                    place = self._places[column]
                    value = rows[0][place] if column in self._keys else [row[place] for row in rows]
                    block.columns[column].append(value)
        self._rows, self._count, self._bytes = [], 0, 0

    def _rows_of(self, group: Any) -> Iterator[tuple[Any, list[list[Any]]]]:
        """The rows that a group makes, by their ids: one, or pairs in both orders, each named by its two rows."""
        if self._pairs is None:
            yield group, self._rows
            return
        place = self._places[self._pairs.id_column]
        for pair in pairs_of(len(self._rows), self._pairs.most):
            for both in itertools.permutations(pair):
                rows = [self._rows[number] for number in both]
                digest = hashlib.blake2b(orjson.dumps([row[place] for row in rows]), digest_size=8).hexdigest()
                yield f"{group}/{digest}", rows
