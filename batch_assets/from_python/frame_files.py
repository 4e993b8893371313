"""Frames as Parquet files in DAGSTER_HOME, named by their content: the same frame is the same file.

What a dataset reads is a file, so that a run in another process reads what was declared.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from pathlib import Path

import polars as pl

from batch_assets import settings
from batch_assets.spec.errors import Problem, SpecError

FOLDER = "frames"
KEPT = 5  # files of one dataset: runs under way may still read an earlier one
_GROUP_ROWS = 100_000


def write_frame(name: str, frame: pl.DataFrame | pl.LazyFrame) -> Path:
    """The file of a frame, written unless it is there; older ones of the dataset are deleted.

    A LazyFrame is collected. Raises SpecError for a frame without rows, or that cannot be a Parquet file.
    """
    whole = (frame.collect() if isinstance(frame, pl.LazyFrame) else frame).rechunk()
    if not len(whole):
        raise _problem(name, "a frame with rows", f"none, and {len(whole.columns)} columns")
    folder = settings.dagster_home() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / f".{name}-{uuid.uuid4().hex}"
    try:
        try:
            whole.write_parquet(half, compression="zstd", row_group_size=_GROUP_ROWS)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise _problem(name, "columns that Parquet has", said) from None
        with half.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()[:16]
        file = folder / f"{name}-{digest}.parquet"
        try:  # an equal one stays as it is for those who read it, and is the newest then
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
        except FileNotFoundError:
            half.replace(file)
    finally:
        half.unlink(missing_ok=True)
    _prune(folder, name, file)
    return file


def _problem(name: str, expected: str, found: str) -> SpecError:
    return SpecError(f"dataset {name!r}", [Problem("source", expected, found)])


def _prune(folder: Path, name: str, newest: Path) -> None:
    """Delete all but the newest files of a dataset; names end with a hash of 16 digits."""
    found = [Path(one.path) for one in os.scandir(folder) if one.name[:-25] == name and one.name.endswith(".parquet")]
    others = sorted((one for one in found if one != newest), key=_moment, reverse=True)
    for file in others[KEPT - 1 :]:
        file.unlink(missing_ok=True)


def _moment(file: Path) -> int:
    try:
        found = file.stat()
        return max(found.st_atime_ns, found.st_mtime_ns)
    except FileNotFoundError:  # another process has deleted it
        return 0
