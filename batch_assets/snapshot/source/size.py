"""How many lines a source has, without reading all of it: Parquet footers, and samples of the bytes of text files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from batch_assets.snapshot.source.errors import SourceError
from batch_assets.snapshot.source.files import SourceFile, find_files, format_of, in_utf8, unpacked
from batch_assets.snapshot.source.json_array import JsonArray
from batch_assets.spec.source import SourceSpec

SAMPLED_FILES = 16
SAMPLE_BYTES = 1 << 20  # of each sampled text file, unpacked


def estimated_lines(source: SourceSpec, base: Path) -> float:
    """Lines (rows of Parquet, items of JSON, combinations of a grid) of a source, before `where` and `limit`.

    Where there are more files than are looked at, the others count by their bytes. NaN where that cannot be told: a
    grid with a list in a file, files that hold nothing. Raises SourceError.
    """
    if source.grid is not None:
        lists = [values for values in source.grid.values() if isinstance(values, list)]
        return math.prod(map(len, lists)) if len(lists) == len(source.grid) else math.nan
    assert source.path is not None
    files = find_files(source.path, base)
    sampled = [_lines_and_bytes(file, source) for file in _spread(files)]
    looked_at = sum(size for _, size in sampled)
    return sum(lines for lines, _ in sampled) / looked_at * sum(file.bytes for file in files) if looked_at else math.nan


def _spread(files: Sequence[SourceFile]) -> list[SourceFile]:
    """At most SAMPLED_FILES of the files, evenly spread."""
    if len(files) <= SAMPLED_FILES:
        return list(files)
    return [files[i * len(files) // SAMPLED_FILES] for i in range(SAMPLED_FILES)]


def _lines_and_bytes(file: SourceFile, source: SourceSpec) -> tuple[float, int]:
    """Lines in some bytes of a file, as they are stored."""
    kind, packed = format_of(file.name, source.format)
    try:
        with file.open() as raw:
            if kind == "parquet":
                import pyarrow.parquet as pq

                return pq.read_metadata(raw).num_rows, file.bytes
            sample, stream = b"", unpacked(raw, packed, file.name)
            while len(sample) < SAMPLE_BYTES and (part := stream.read(SAMPLE_BYTES - len(sample))):
                sample += part
            taken = raw.tell() if packed else len(sample)
    except (OSError, ValueError) as error:
        raise SourceError(f"{file.name}: cannot be read ({type(error).__name__})") from error
    whole = len(sample) < SAMPLE_BYTES
    text = in_utf8(io.BytesIO(sample), source.encoding, file.name).read(SAMPLE_BYTES)
    return _lines(file.name, kind, text, whole), file.bytes if whole else taken


def _lines(file: str, kind: str, text: bytes, whole: bool) -> int:
    """Lines of the beginning of a text file, or items of an array, of which the last one is not counted."""
    if kind != "json":
        end = b"\n" if b"\n" in text else b"\r"
        return text.count(end) + (whole and not text.endswith(end))
    items = 0
    try:
        for block in JsonArray(file, io.BytesIO(text)).blocks():
            items += len(block)
    except SourceError:
        if whole:
            raise
    return items
