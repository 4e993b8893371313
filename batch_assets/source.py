"""Rows of a source, as a stream of small blocks that know the file and line of every row.

A source is a Parquet, JSONL or CSV file, a glob of them, the same in S3, or a grid. Only the columns asked for are
read. Nothing here holds more than one block, whatever the size of the source.
"""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from batch_assets.source_errors import Reject, SourceError, no_column
from batch_assets.spec import GridColumn, SourceSpec
from resources.objects import open_objects

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_ROWS = 1024
MAX_GRID_ROWS = 200_000_000
# A text file that unpacks to more than this many times its size is no text (deflate reaches 1032 on a constant).
MAX_RATIO, RATIO_FROM = 300, 1 << 26
_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}


@dataclass(slots=True)
class Block:
    """Consecutive rows of one file.

    `columns` holds Python values by column; `lines` the 1-based line (row in Parquet and grids) of each row.
    `arrow` holds the same columns as they were read, where the source has types (see `source_parquet.plain`).
    `rejects` are rows that could not be read at all.
    """

    file: str
    lines: list[int]
    columns: dict[str, list[Any]]
    arrow: dict[str, pa.Array] | None = None
    rejects: list[Reject] = field(default_factory=list)

    def take(self, rows: Sequence[int]) -> Block:
        """The block with only these rows (rejects are left as they are)."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        arrow = self.arrow
        if arrow is not None:
            import pyarrow as pa

            places = pa.array(rows, pa.int64())
            arrow = {name: array.take(places) for name, array in arrow.items()}
        return Block(self.file, [self.lines[i] for i in rows], columns, arrow, self.rejects)

    def part(self, first: int, rows: int) -> Block:
        """At most this many rows from one place on, without the rejects."""
        columns = {name: values[first : first + rows] for name, values in self.columns.items()}
        arrow = self.arrow and {name: array.slice(first, rows) for name, array in self.arrow.items()}
        return Block(self.file, self.lines[first : first + rows], columns, arrow)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its name for people, its size, how to open it, and what changes when it is replaced."""

    name: str
    bytes: int
    open: Callable[[], BinaryIO]
    stamp: Callable[[], object]


def read_source(
    source: SourceSpec, columns: Sequence[str], base: Path, optional: set[str] | None = None
) -> Iterator[Block]:
    """All rows of the source, before `where` and `limit`. Relative paths are looked up below `base`.

    In JSONL, a row need not have each key: columns in `optional` may be absent for long. They are taken out of that
    set when they are found; what is left at the end was nowhere.

    Raises SourceError for what makes the whole source unusable: no file, no such column, types that differ between
    files, a file that is broken or that changes while it is read.
    """
    optional = set() if optional is None else optional
    if source.grid is not None:
        return _grid(source, columns, base, optional)
    return _files(source, columns, base, optional)


def _files(source: SourceSpec, columns: Sequence[str], base: Path, optional: set[str]) -> Iterator[Block]:
    from batch_assets.source_parquet import ParquetReader
    from batch_assets.source_text import read_csv, read_jsonl

    assert source.path is not None
    files = find_files(source.path, base)
    formats = [(file, *format_of(file.name, source.format)) for file in files]
    kinds = sorted({kind for _, kind, _ in formats})
    if len(kinds) > 1:
        raise SourceError(f"{source.path}: expected files of one format, found {' and '.join(kinds)}")
    parquet = ParquetReader(columns)
    for file, kind, packed in formats:
        with _readable(file), file.open() as raw:
            if kind == "parquet":
                yield from parquet.read(file.name, raw, optional)
            else:
                read = read_csv if kind == "csv" else read_jsonl
                yield from read(file.name, unpacked(raw, packed, file.name), columns, optional)


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


def format_of(name: str, given: str | None) -> tuple[str, str]:
    """(format, compression) of a file, from its ending."""
    path = PurePosixPath(name.lower())
    packed = path.suffix if path.suffix in (".gz", ".zst") else ""
    kind = given or _FORMATS.get((path.with_suffix("") if packed else path).suffix)
    if kind is None:
        raise SourceError(
            f"{name}: expected a file ending in {', '.join(_FORMATS)} (.gz or .zst may follow); name its format "
            "under source.format"
        )
    if kind == "parquet" and packed:
        raise SourceError(f"{name}: Parquet compresses itself; a packed Parquet file cannot be read in blocks")
    return kind, packed


def find_files(path: str, base: Path) -> list[SourceFile]:
    """The files a source path names, sorted by name. Raises SourceError when there are none."""
    remote = path.lower().startswith("s3://")
    files = _s3_files(path) if remote else _local_files(path, base)
    if not files:
        raise SourceError(
            f"{path}: no such file" + (f" below {base}" if not remote and not Path(path).is_absolute() else "")
        )
    return files


def _local_files(path: str, base: Path) -> list[SourceFile]:
    try:
        whole = base / Path(path).expanduser()
        if whole.is_dir():
            raise SourceError(f"{path}: expected a file or a glob, found a folder; write for example {path}/*.parquet")
        # A name that exists is meant as it is, also with brackets in it. Path.glob would also find hidden files.
        found = [whole] if whole.is_file() else _matching(whole)
        files = [file for file in found if file.is_file()]
        for file in files:
            _refuse_system_file(path, file)
        return [_local_file(file, base) for file in files]
    except RuntimeError as error:  # of expanduser
        raise SourceError(f"{path}: expected a home folder that exists at its beginning, found none") from error
    except (OSError, ValueError) as error:  # too long, a loop of links, a NUL byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(
            f"{path}: expected the path of a file, found one that cannot be looked up ({reason})"
        ) from error


def _refuse_system_file(path: str, file: Path) -> None:
    """Raise SourceError for what the kernel makes up: /proc has the secrets of processes, /dev has no end."""
    if file.resolve().is_relative_to("/proc") or file.resolve().is_relative_to("/sys"):
        raise SourceError(f"{path}: expected a file with data, found one of the operating system's own")


def _matching(pattern: Path) -> list[Path]:
    """The files and folders that a glob names, sorted, each real one once.

    Links to folders are followed, but not to one that was seen: they may go round in circles.
    """
    parts = pattern.parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if "**" not in parts[fixed:]:
        names = sorted(glob.glob(str(pattern)))  # noqa: PTH207
        return _once([Path(name) for name in names])
    top = Path(*parts[:fixed])
    matches = _glob_pattern("/".join(parts[fixed:])).fullmatch
    hidden = any(part.startswith(".") for part in parts[fixed:])
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(top, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        for name in files:
            file = Path(folder) / name
            if (hidden or not name.startswith(".")) and matches(file.relative_to(top).as_posix()):
                found.append(file)
    return _once(sorted(found))


def _once(files: Sequence[Path]) -> list[Path]:
    """The files without those that are another one under the name of a link."""
    real: dict[Path, Path] = {}
    for file in files:
        real.setdefault(Path(os.path.realpath(file)), file)
    return list(real.values())


def _local_file(file: Path, base: Path) -> SourceFile:
    def stamp() -> object:
        status = file.stat()
        return status.st_size, status.st_mtime_ns, status.st_ino

    name = str(file.relative_to(base)) if file.is_relative_to(base) else str(file)
    return SourceFile(name, file.stat().st_size, lambda: file.open("rb"), stamp)


def _s3_files(path: str) -> list[SourceFile]:
    bucket, _, key = path[len("s3://") :].partition("/")
    if not bucket or not key:
        raise SourceError(f"{path}: expected s3://bucket/key or s3://bucket/folder/*.parquet")
    objects = open_objects(f"s3://{bucket}")
    wild = re.search(r"[*?\[]", key)
    folder = key[: wild.start() if wild else len(key)].rpartition("/")[0]
    matches = _glob_pattern(key).fullmatch if wild else key.__eq__
    with _readable_store(path):
        found = [info for info in objects.list(folder + "/" if folder else "") if matches(info.path)]

    def file(name: str, size: int) -> SourceFile:
        def stamp() -> object:
            with objects.open(name) as stream:
                return stream.seek(0, io.SEEK_END)

        return SourceFile(f"s3://{bucket}/{name}", size, lambda: objects.open(name), stamp)

    return [file(info.path, info.size) for info in found]


@contextlib.contextmanager
def _readable_store(path: str) -> Iterator[None]:
    """Turns the store's own errors into a SourceError; only their first line speaks to people."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        code = re.search(r"<Code>(\w+)</Code>", str(error))
        reason = code[1] if code else type(error).__name__
        raise SourceError(f"{path}: the store refuses to be read ({reason})") from error


def _glob_pattern(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay within a folder, `**/` crosses folders, `[…]` is a set: as in Python's glob."""
    out, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif pattern[at] in "*?":
            out, at = out + ("[^/]*" if pattern[at] == "*" else "[^/]"), at + 1
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
            inside = pattern[at + 1 : end].replace("\\", "\\\\")
            out, at = out + f"[{'^' + inside[1:] if inside.startswith('!') else inside}]", end + 1
        else:
            out, at = out + re.escape(pattern[at]), at + 1
    return re.compile(out)


class _Unpacked(io.RawIOBase):
    """A decompressed stream that stops at absurd ratios, so that a small file cannot occupy the reader for ever."""

    def __init__(self, raw: BinaryIO, packed: str, name: str) -> None:
        import pyarrow as pa

        self._raw, self._name, self._given = raw, name, 0
        codec = "gzip" if packed == ".gz" else "zstd"
        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            data = cast(bytes, self._stream.read(size))
        except OSError as error:
            raise SourceError(f"{self._name}: cannot be unpacked ({error})") from error
        self._given += len(data)
        if self._given > RATIO_FROM and self._given > MAX_RATIO * self._raw.tell():
            raise SourceError(
                f"{self._name}: unpacks to more than {MAX_RATIO} times its size; unpack it yourself first"
            )
        return data


def unpacked(raw: BinaryIO, packed: str, name: str) -> BinaryIO:
    """The stream without its compression (".gz", ".zst", or "" for none)."""
    return cast(BinaryIO, _Unpacked(raw, packed, name)) if packed else raw


def _grid(source: SourceSpec, columns: Sequence[str], base: Path, optional: set[str]) -> Iterator[Block]:
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
    for block in _files(SourceSpec(path=where.csv, format="csv"), [where.column], base, set()):
        if block.rejects:
            raise SourceError.of_rows(block.rejects, len(block.rejects))
        values += block.columns[where.column]
    return values
