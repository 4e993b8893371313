"""Datasets as they were when their file could last be used: by copies of the files in DAGSTER_HOME.

When a file is broken, what is being made of its datasets goes on by its copy: batches that a snapshot has are written
by the settings in that snapshot.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from batch_assets import settings
from batch_assets.spec.discovery import BrokenFile, Datasets, Declarations, declarations, read_file
from batch_assets.spec.models import GeneratedDatasetSpec

FOLDER = "last_known_defs"


def keep(found: Declarations) -> None:
    """Copy every file that can be used and has changed. Without a home, or on a full disk, nothing is kept."""
    with contextlib.suppress(OSError):
        for file in found.files:
            copy, about = _copy_of(file), file.stat()
            if _moment(copy) != (about.st_mtime_ns, about.st_size):
                copy.parent.mkdir(exist_ok=True)
                half = copy.with_name(f"{copy.name}.{os.getpid()}")
                shutil.copyfile(file, half)
                os.utime(half, ns=(about.st_atime_ns, about.st_mtime_ns))
                half.replace(copy)


def last_known(found: Declarations) -> Iterator[tuple[GeneratedDatasetSpec, BrokenFile]]:
    """The datasets of broken files as they were last known, unless another file has taken the name."""
    taken = set(found.datasets)
    for broken in found.broken:
        for spec in read_file(_copy_of(broken.file)).specs:
            if spec.name not in taken:
                taken.add(spec.name)
                yield spec, broken


def known_datasets() -> Datasets:
    """Every dataset that is looked after: as it is declared now, or as it was last known."""
    found = declarations()
    return found.datasets | {spec.name: (spec, broken.file.parent) for spec, broken in last_known(found)}


def _copy_of(file: Path) -> Path:
    name = hashlib.sha256(str(file).encode(errors="surrogateescape")).hexdigest()[:16]
    return settings.dagster_home() / FOLDER / f"{name}.yaml"


def _moment(file: Path) -> tuple[int, int] | None:
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size
