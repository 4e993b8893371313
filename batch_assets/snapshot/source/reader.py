"""Rows of a source, as a stream of small blocks that know the file and line of every row.

A source is a Parquet, JSONL, JSON, CSV or TSV file, a glob of them, the same in S3 or on the Hugging Face hub, or a
grid. Only the columns asked for are read. Nothing here holds more than one block, whatever the size of the source.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from batch_assets.snapshot.source.block import BLOCK_ROWS, Block
from batch_assets.snapshot.source.derived import columns_in_file, derived
from batch_assets.snapshot.source.errors import SourceError, Unseen, no_column
from batch_assets.snapshot.source.files import SourceFile, find_files, folder_columns, format_of, in_utf8, unpacked
from batch_assets.spec.source import GridColumn, SourceSpec

MAX_GRID_ROWS = 200_000_000


def read_source(
    source: SourceSpec,
    columns: Sequence[str],
    base: Path,
    optional: Unseen | None = None,
    *,
    id_column: str | None = None,
) -> Iterator[Block]:
    """All rows of the source, before `where`, `group_by` and `limit`. Relative paths are looked up below `base`.
    `id_column`: the one that names a row, from which those of elements get their ids (`source.explode`).

    In JSONL, a row need not have each key: columns in `optional` may be absent for long. They are taken out of that
    set when they are found; what is left at the end was nowhere.

    Raises SourceError for what makes the whole source unusable: no file, no such column, types that differ between
    files, a file that is broken or that changes while it is read.

    A column that a file has not, and one of its folders names (`lang=de/`), has that text in all of its rows.
    """
    optional = Unseen() if optional is None else optional
    if not source.derives:
        return _as_stored(source, columns, base, optional)
    wanted, may_lack = columns_in_file(source, columns)
    unseen = Unseen(may_lack) if source.explode else optional
    blocks = _as_stored(source, wanted, base, unseen, may_lack)
    return derived(blocks, source, columns, id_column, optional)


def _as_stored(
    source: SourceSpec, columns: Sequence[str], base: Path, optional: Unseen, may_lack: Container[str] = ()
) -> Iterator[Block]:
    if source.grid is not None:
        there = [name for name in columns if name in source.grid or name not in may_lack]
        return _grid(source, there, base, optional)
    return _files(source, columns, base, optional, may_lack)


def _files(
    source: SourceSpec, columns: Sequence[str], base: Path, optional: Unseen, may_lack: Container[str] = ()
) -> Iterator[Block]:
    from batch_assets.snapshot.source.parquet import ParquetReader

    if source.path is None:
        raise SourceError(f"source.asset: the place of {source.asset} was not looked up")
    files = find_files(source.path, base)
    formats = [(file, *format_of(file.name, source.format)) for file in files]
    kinds = sorted({kind for _, kind, _ in formats})
    if len(kinds) > 1:
        raise SourceError(f"{source.path}: expected files of one format, found {' and '.join(kinds)}")
    _refuse_options(source, kinds[0])
    if not any(file.bytes for file in files):
        raise SourceError(f"{source.path}: expected at least one row, found none: the file is empty (0 bytes)")
    parquet = ParquetReader(columns, may_lack, files)
    for file, kind, packed in formats:
        # Those of a table of a dataset lie below a folder that is not theirs.
        given = folder_columns(file.name) if source.dataset is None else {}
        with _readable(file), file.open() as raw:
            if kind == "parquet":
                yield from parquet.read(file.name, raw, optional, given)
            else:
                text = in_utf8(unpacked(raw, packed, file.name), source.encoding, file.name)
                yield from _text_blocks(file.name, kind, text, columns, optional, source.delimiter, may_lack, given)


def refuse_deleted_version(source: SourceSpec, base: Path) -> None:
    """Raise SourceError where the version of a dataset's table was deleted before all of its files had been listed: its
    manifest goes first."""
    table = "/".join(filter(None, (source.dataset, source.part)))
    if source.path is None or f"/{table}/published/" not in source.path:  # rows may be handed over otherwise
        return
    try:
        find_files(f"{source.path.rpartition('/')[0]}/manifest.json", base)
    except SourceError as error:
        said = f"source.dataset: version {source.table_version} of {table} was deleted while it was read"
        raise SourceError(f"{said}, as two newer ones were published; run again") from error


def _text_blocks(
    file: str,
    kind: str,
    text: BinaryIO,
    columns: Sequence[str],
    optional: Unseen,
    delimiter: str | None,
    may_lack: Container[str],
    given: Mapping[str, str | None],
) -> Iterator[Block]:
    from batch_assets.snapshot.source.text import read_csv, read_json, read_jsonl

    if kind in ("csv", "tsv"):
        sign = delimiter or {"csv": ",", "tsv": "\t"}[kind]
        return read_csv(file, text, columns, optional, sign, may_lack, given)
    return {"json": read_json, "jsonl": read_jsonl}[kind](file, text, columns, optional, given)


def _refuse_options(source: SourceSpec, kind: str) -> None:
    """Raise SourceError for a delimiter or an encoding of files that have none."""
    if source.delimiter is not None and kind not in ("csv", "tsv"):
        raise SourceError(
            f"{source.path}: expected source.delimiter beside CSV or TSV files, found {kind}; leave it out"
        )
    if source.encoding is not None and kind == "parquet":
        raise SourceError(f"{source.path}: expected source.encoding beside files of text, found parquet; leave it out")


@contextlib.contextmanager
def _readable(file: SourceFile) -> Iterator[None]:
    """Turns what goes wrong while a file is read into a SourceError, and notices a file that was replaced."""
    try:
        before = file.stamp()
        yield
        after = file.stamp()
    except FileNotFoundError as error:
        raise SourceError(f"{file.name}: was there when the reading began and is gone") from error
    except OSError as error:
        raise SourceError(f"{file.name}: cannot be read ({error.strerror or type(error).__name__})") from error
    if after != before:
        raise SourceError(f"{file.name}: changed while it was read; run again when its writer has finished")


def _grid(source: SourceSpec, columns: Sequence[str], base: Path, optional: Unseen) -> Iterator[Block]:
    """One row per combination. The lists are held, the product never is."""
    assert source.grid is not None
    no_column("grid", columns, list(source.grid))
    optional.clear()
    axes = {
        name: _csv_values(values, base) if isinstance(values, GridColumn) else values
        for name, values in source.grid.items()
    }
    rows = 1
    for name, values in axes.items():
        if not values:
            raise SourceError(f"grid: expected at least one value of {name!r}, found none")
        rows *= len(values)
    if source.limit is None and rows > MAX_GRID_ROWS:
        raise SourceError(f"grid: expected at most {MAX_GRID_ROWS} combinations, found {rows}; set source.limit")
    product, first = itertools.product(*axes.values()), 1
    while part := list(itertools.islice(product, BLOCK_ROWS)):
        by_name = dict(zip(axes, zip(*part, strict=True), strict=True))
        yield Block("grid", list(range(first, first + len(part))), {name: list(by_name[name]) for name in columns})
        first += len(part)


def _csv_values(where: GridColumn, base: Path) -> list[Any]:
    values: list[Any] = []
    source = SourceSpec(
        path=where.csv,
        format="tsv" if where.csv.lower().endswith(".tsv") else "csv",
        delimiter=where.delimiter,
        encoding=where.encoding,
    )
    for block in _files(source, [where.column], base, Unseen()):
        if block.rejects:
            raise SourceError.of_rows(block.rejects, len(block.rejects))
        values += block.columns[where.column]
    return values
