"""The files of a folder that declare something: found as Dagster's loader finds them, read within bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batch_assets.spec.errors import Problem, SpecError
from resources.yaml_files import Document, YamlProblem, load_documents, read_text

YAML_FILES = ("defs.yaml", "defs.yml", "component.yaml")  # the first one in a folder counts
MAX_FOLDERS = 20_000


@dataclass(frozen=True, slots=True)
class DefsFile:
    """One file, or a folder that cannot be looked into: then `problem` says why."""

    path: Path
    problem: Problem | None = None

    @property
    def folder(self) -> Path:
        """Where relative paths of its datasets start."""
        return self.path if self.problem is not None else self.path.parent


def defs_files(root: Path) -> list[DefsFile]:
    """Every file below a folder, in order. Links are followed, hidden folders and `__pycache__` left out.

    A folder that is not there has none; a file is itself.
    """
    return [DefsFile(root)] if root.name in YAML_FILES else sorted(_walk(root), key=lambda one: one.path)


def _walk(root: Path) -> Iterator[DefsFile]:
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(root, frozenset())]
    looked = 0
    while waiting:
        folder, above = waiting.pop()
        looked += 1
        if looked > MAX_FOLDERS:
            yield DefsFile(root, Problem("this folder", f"at most {MAX_FOLDERS:,} folders in it", "more"))
            return
        try:
            about = folder.stat()
            if (about.st_dev, about.st_ino) in above:
                yield DefsFile(folder, Problem("this link", "a folder elsewhere", "one that holds the link itself"))
                continue
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # not there, or removed in this moment
        except OSError as error:
            yield DefsFile(folder, Problem("this folder", "a folder that can be read", said(error)))
            continue
        names = {entry.name for entry in found}
        if name := next((one for one in YAML_FILES if one in names), None):
            yield DefsFile(folder / name)
        inside = above | {(about.st_dev, about.st_ino)}
        for entry in found:
            if (
                not entry.name.startswith(".")
                and entry.name not in (*YAML_FILES, "__pycache__")
                and _may_be_folder(entry)
            ):
                waiting.append((Path(entry.path), inside))


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: the look into it says so
        return True


def file_in(folder: Path) -> Path | None:
    """The file of a folder that declares something."""
    return next((folder / name for name in YAML_FILES if (folder / name).exists()), None)


def read_documents(file: Path) -> list[Document]:
    """The documents of a file. Raises SpecError."""
    try:
        return load_documents(read_text(file))
    except YamlProblem as error:
        where = f"line {error.line}, column {error.column}" if error.line else "this file"
        raise SpecError(file, [Problem(where, error.expected, error.found)]) from None
    except OSError as error:
        raise SpecError(file, [Problem("this file", "a readable file", said(error))]) from None


def said(error: OSError) -> str:
    """The system's words, without the path, which is named anyway."""
    return error.strerror or type(error).__name__
