"""`batch-assets new` and `check`: a dataset is declared, and its file is tried before anything else is done with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from batch_assets.cli.user_errors import CommandError
from batch_assets.spec.discovery import Declarations, declarations, defs_folder
from batch_assets.spec.scaffold import write_dataset
from gpu_runner.errors import ExitStatus


def write_new(name: str, *, chain: bool = False) -> None:
    """Write a dataset, or a chain of three, that can be run as it is, and say where."""
    file = write_dataset(name, chain=chain)
    after = f"run {name} --upstream" if chain else f"preview {name}"
    sys.stdout.write(f"{file}\nMake of it what you need; then `batch-assets check {name}`, `batch-assets {after}`.\n")


def show_check(asked: Sequence[str]) -> int:
    """Say of every file that is asked for whether it can be used; returns the exit status. `asked`: names of datasets,
    files and folders; none: all files."""
    usable, errors = _found(asked)
    for path in usable:
        sys.stdout.write(f"{path}: can be used\n")
    sys.stdout.flush()
    for error in errors:
        sys.stderr.write(f"{error}\n")
    if not usable and not errors:
        raise CommandError(f"no file that declares a dataset: {', '.join(asked) or defs_folder()}")
    return ExitStatus.WRONG_REQUEST if errors else 0


def _found(asked: Sequence[str]) -> tuple[list[Path], list[Exception]]:
    """Files that can be used, and what is wrong with others, each once."""
    here = declarations()
    if not asked:
        return [*here.files], [one.error for one in here.broken]
    usable: dict[Path, None] = {}
    errors: dict[Path, Exception] = {}
    for words in asked:
        found, below = _declared_at(here, words)
        usable |= dict.fromkeys(_in(found.files, below))
        errors |= {one.file: one.error for one in found.broken if one.file in _in([one.file], below)}
    return [*usable], [*errors.values()]


def _declared_at(here: Declarations, words: str) -> tuple[Declarations, Path]:
    """What a name or a path stands for: the declarations that hold it, and the folder or file in them."""
    if (broken := here.broken_named(words)) is not None:
        return here, broken.file
    if words in here.datasets:
        return here, here.datasets[words][1]
    path = Path(words)
    if not os.path.lexists(path):
        raise CommandError(f"{words}: no dataset, file or folder of this name")
    place = Path(os.path.realpath(path.parent)) / path.name if path.name not in ("", "..") else path.resolve()
    # Whether a name is used twice is seen among all datasets.
    return (here if place.is_relative_to(defs_folder()) else declarations(place)), place


def _in(files: Iterable[Path], below: Path) -> list[Path]:
    return [file for file in files if file.is_relative_to(below)]
