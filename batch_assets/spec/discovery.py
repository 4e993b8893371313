"""The datasets that are declared: every `defs.yaml` of a folder that asks for our component.

The folder is `batch_assets/defs`, loaded by Dagster's own component loader, or BATCH_ASSETS_DEFS: datasets that live in
another repository (and those of tests) need no copy of this project.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batch_assets import settings
from batch_assets.spec.errors import Problem, SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from resources.yaml_files import YamlProblem, load_all, read_text

COMPONENT = "batch_assets.GeneratedDataset"
KEPT_FILES = 2_000


def external_defs() -> Path | None:
    """Folder named by BATCH_ASSETS_DEFS, or None."""
    named = os.environ.get("BATCH_ASSETS_DEFS")
    return Path(named).resolve() if named else None


def defs_folder() -> Path:
    """The folder whose defs.yaml files declare the datasets."""
    return external_defs() or settings.PROJECT / "batch_assets" / "defs"


def declared_specs() -> dict[str, GeneratedDatasetSpec]:
    """Every declared dataset by name. Raises SpecError for the first file that is wrong, or a name used twice."""
    return {name: spec for name, (spec, _) in declared().items()}


def declared() -> dict[str, tuple[GeneratedDatasetSpec, Path]]:
    """Every declared dataset by name, with the folder of its defs.yaml. Raises SpecError."""
    found: dict[str, tuple[GeneratedDatasetSpec, Path]] = {}
    for file in sorted(defs_folder().rglob("defs.yaml")):
        for spec in _specs_of(file):
            if spec.name in found:
                taken = f"{spec.name!r}, which {found[spec.name][1] / 'defs.yaml'} has already"
                raise SpecError(file, [Problem("name", "a name of its own", taken, "Rename one of them.")])
            found[spec.name] = (spec, file.parent)
    return found


def _specs_of(file: Path) -> Sequence[GeneratedDatasetSpec]:
    found = file.stat()
    return _read(file, found.st_mtime_ns, found.st_size, found.st_ino)


@functools.lru_cache(maxsize=KEPT_FILES)  # sensors ask again and again, and to read 200 files takes two seconds
def _read(file: Path, *_of_the_same_file: int) -> Sequence[GeneratedDatasetSpec]:
    return tuple(_parse(file))


def _parse(file: Path) -> Iterator[GeneratedDatasetSpec]:
    for document in _documents(file):
        if isinstance(document, dict) and document.get("type") == COMPONENT:
            yield load_spec(document.get("attributes") or {}, file)


def check_files(folder: Path) -> None:
    """Refuse YAML that would keep Dagster's own loader busy for ever. Raises SpecError for the first such file."""
    for name in ("defs.yaml", "component.yaml"):
        for file in sorted(folder.rglob(name)):
            _documents(file)


def _documents(file: Path) -> list[Any]:
    try:
        return load_all(read_text(file))
    except YamlProblem as error:
        where = f"line {error.line}, column {error.column}" if error.line else "this file"
        raise SpecError(file, [Problem(where, error.expected, error.found)]) from None
    except OSError as error:
        raise SpecError(
            file, [Problem("this file", "a readable file", error.strerror or type(error).__name__)]
        ) from None
