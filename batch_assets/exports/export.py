"""A published table to training files: row group by row group, in parts that are each there whole or not at all.

After a kill the same export goes on behind its last part. Memory is that of one row group (24 MB of lines, or one line
where it is larger), whatever the size of the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batch_assets.exports.file_writers import FileWriter, JsonLines, ParquetLines, PartFiles
from batch_assets.exports.ranked_pairs import RankedPairs
from batch_assets.exports.record import ExportedFile, ExportRecord, advance, begun_record, check_own
from batch_assets.exports.training_formats import LeftOut, record_of
from batch_assets.publishing.published_table import PublishedTable
from batch_assets.spec.export_options import (
    TRAIN,
    VALIDATION,
    ExportError,
    ExportOptions,
    Format,
    condition_of,
    is_validation,
)
from resources.objects.opening import CorruptObject, Objects, temporary_folder
from resources.store.object_integrity import StoredFile, is_damage
from resources.store.row_condition import BadCondition

PART_BYTES = 256 << 20
_SLICE_ROWS = 1000


def export(
    source: Objects,
    table: PublishedTable,
    target: Objects,
    options: ExportOptions,
    *,
    told: Callable[[ExportRecord], None] = lambda record: None,
) -> ExportRecord:
    """Write what is not there yet of an export into a folder or a prefix of S3; `told` after each part.

    Raises ExportError where the folder holds something else, CorruptObject for a damaged table.
    """
    record = begun_record(target, table, options)
    if record.complete:
        return record
    with temporary_folder() as folder:
        part: _Part | None = None
        number = record.next_group
        staged = _Staged(source, table, options, folder)
        try:
            for number, lines in staged.groups(record.next_group):
                part = part or _Part(staged.options, folder, record.parts, staged.lines_of_record)
                part.add(lines)
                if part.lines >= options.part_rows or part.files.bytes >= PART_BYTES:
                    record, part = _committed(target, record, part, number + 1), None
                    told(record)
        finally:
            if part is not None:
                part.files.close()
        if part is not None:
            record = _committed(target, record, part, number + 1)
        left_out = dict(sorted((Counter(record.left_out) + staged.left_out).items()))
        whole = record.model_copy(update={"complete": True, "lines": table.rows, "left_out": left_out})
        record = advance(target, record, whole)
    told(record)
    return record


class _Staged:
    """What records are made of: row groups of the table or, where lines are ranked, pairs of lines, which are made
    anew after a kill. `options`: how records are made of that. `left_out`: lines that are in no pair.
    """

    def __init__(self, source: Objects, table: PublishedTable, options: ExportOptions, folder: Path) -> None:
        self._source, self._table, self._of_table, self._folder = source, table, options, folder
        self.left_out: Counter[str] = Counter()
        self.options = options
        self.lines_of_record = 1 if options.group_by is None else 2
        if options.group_by is not None:
            self.options = dataclasses.replace(
                options, columns={name: name for name in ("prompt", "chosen", "rejected")}, where=None
            )

    def groups(self, first: int) -> Iterator[tuple[int, pa.Table]]:
        """Tables of lines, or of pairs, with their numbers, from `first` on."""
        columns = _columns(self._table, self._of_table)
        if self._of_table.group_by is None:
            yield from _read_groups(self._source, self._table, columns, first)
            return
        pairs = RankedPairs(self._of_table, self._folder)
        for _, lines in _read_groups(self._source, self._table, columns, 0):
            pairs.add(_chosen(lines, self._of_table, self.left_out))
        for number, found in pairs.tables(first):
            if "error" not in found.column_names:  # it may be carried along: null, as all of them are answered
                found = found.append_column("error", pa.nulls(found.num_rows, pa.string()))
            yield number, found
        if unpaired := pairs.lines - 2 * pairs.pairs:
            self.left_out["unpaired"] += unpaired


def _columns(table: PublishedTable, options: ExportOptions) -> list[str]:
    known = [column.name for column in table.columns]
    conditioned = condition_of(options.where, known).columns if options.where is not None else []
    return list(dict.fromkeys([*options.read_columns(known), *conditioned]))


def row_groups(
    source: Objects, table: PublishedTable, options: ExportOptions, first: int
) -> Iterator[tuple[int, pa.Table]]:
    """Row groups of the table with their numbers, from `first` on: the columns that an export needs."""
    return _read_groups(source, table, _columns(table, options), first)


def answered_lines(lines: pa.Table, options: ExportOptions) -> pa.Table:
    """Lines with a completion for which `where` is true."""
    return _chosen(lines, options, Counter())


def _read_groups(
    source: Objects, table: PublishedTable, columns: Sequence[str], first: int
) -> Iterator[tuple[int, pa.Table]]:
    """Row groups of the table with their numbers, from `first` on."""
    number = 0
    for listed in table.files:
        path = f"{table.path}/{listed.name}"
        with source.open(path) as opened:
            try:
                with pq.ParquetFile(opened, pre_buffer=False, page_checksum_verification=True) as file:
                    for group in range(file.metadata.num_row_groups):
                        if number >= first and file.metadata.row_group(group).num_rows:
                            yield number, file.read_row_group(group, columns=list(columns), use_threads=False)
                        number += 1
            except (pa.ArrowException, OSError, KeyError) as error:
                if not is_damage(error):
                    raise
                raise CorruptObject(f"{path}: cannot be read ({error})") from error


def _chosen(lines: pa.Table, options: ExportOptions, left_out: Counter[str]) -> pa.Table:
    """Lines with a completion for which `where` is true; others are counted."""
    answered = lines.filter(pc.is_null(lines.column("error")))
    _count(left_out, "error", lines.num_rows - answered.num_rows)
    if options.where is None or not answered.num_rows:
        return answered
    import polars as pl  # it starts threads: not where definitions are loaded

    condition = condition_of(options.where, answered.column_names)
    try:
        mask = condition.mask(pl.DataFrame(pl.from_arrow(answered.select(condition.columns or ["error"]))))
    except BadCondition as error:
        raise ExportError(f"--where: {error}") from None
    passed = answered.filter(mask.to_arrow())
    _count(left_out, "where", answered.num_rows - passed.num_rows)
    return passed


def _count(left_out: Counter[str], reason: str, rows: int) -> None:
    if rows:
        left_out[reason] += rows


@dataclass
class _Part:
    """One part while it is written. `lines`: of the table that were looked at. `lines_of_record`: of which one record
    is made."""

    options: ExportOptions
    folder: Path
    number: int
    lines_of_record: int = 1
    lines: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        ending = "parquet" if self.options.format is Format.PARQUET else "jsonl"
        self.files = PartFiles(self.folder, self.number, ending, self._writer)
        self._schema: pa.Schema | None = None

    def _writer(self, path: Path) -> FileWriter:
        if self.options.format is Format.PARQUET:
            assert self._schema is not None
            return ParquetLines(path, self._schema)
        return JsonLines(path)

    def add(self, lines: pa.Table) -> None:
        """Write a row group."""
        self.lines += lines.num_rows
        kept = _chosen(lines, self.options, self.left_out)
        if self.options.format is Format.PARQUET:
            self._add_lines(kept)  # one row group, as it was
            return
        for at in range(0, kept.num_rows, _SLICE_ROWS):
            rows = kept.slice(at, _SLICE_ROWS)
            if self.options.format.is_training:
                self._add_records(rows.to_pylist())
            else:
                self._add_lines(rows)

    def _add_records(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            try:
                record = record_of(line, self.options)
            except LeftOut as reason:
                _count(self.left_out, str(reason), self.lines_of_record)
                continue
            self.files.of(self._split(line)).write((record,))

    def _add_lines(self, rows: pa.Table) -> None:
        shown = rows.select(list(self.options.kept) or rows.column_names)
        self._schema = self._schema or shown.schema
        sides = [TRAIN] * rows.num_rows
        if self.options.split_by is not None:
            split = rows.column(self.options.split_by).to_pylist()
            sides = [self._split({self.options.split_by: value}) for value in split]
        for side in dict.fromkeys(sides):
            mine = shown.filter(pa.array([one == side for one in sides]))
            whole = self.options.format is Format.PARQUET
            self.files.of(side).write(mine if whole else mine.to_pylist())

    def _split(self, line: dict[str, Any]) -> str:
        by = self.options.split_by
        return VALIDATION if by is not None and is_validation(line[by], self.options.validation) else TRAIN


def _committed(target: Objects, record: ExportRecord, part: _Part, next_group: int) -> ExportRecord:
    """Put the files of a part into their place, then say so."""
    part.files.close()
    check_own(target, record)
    rows, files = Counter(record.rows), [*record.files]
    for split, writer in sorted(part.files.writers.items()):
        stored = StoredFile.of(writer.path)
        target.upload(stored.name, writer.path)
        files.append(ExportedFile(rows=writer.rows, **stored.model_dump()))
        rows[split] += writer.rows
        with contextlib.suppress(FileNotFoundError):
            writer.path.unlink()
    changed = {
        "next_group": next_group,
        "parts": record.parts + 1,
        "lines": record.lines + part.lines,
        "rows": dict(sorted(rows.items())),
        "left_out": dict(sorted((Counter(record.left_out) + part.left_out).items())),
        "files": files,
    }
    return advance(target, record, record.model_copy(update=changed))
