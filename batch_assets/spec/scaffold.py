"""A new dataset: a file that can be run as it is, to be changed into what is needed."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from batch_assets.spec.discovery import COMPONENT, declarations, defs_folder
from batch_assets.spec.errors import Problem, SpecError
from batch_assets.spec.models import load_spec
from resources.yaml_files import dump


def first_attributes(name: str) -> dict[str, Any]:
    """The attributes of a new dataset: a grid of two short lists, so that it runs without a file."""
    return {
        "name": name,
        "description": "One sentence per topic and tone.",
        "source": {"grid": {"topic": ["rain", "rivers"], "tone": ["plain", "cheerful"]}},
        "prompt": {"user": "Write one {{ tone }} sentence about {{ topic }}."},
        "model": "Qwen/Qwen3-0.6B",
        "sampling": {"temperature": 0.7, "max_tokens": 64},
        "keep_columns": ["topic", "tone"],
    }


def write_dataset(name: str) -> Path:
    """Write `NAME/defs.yaml` into the folder of the datasets; returns its path. Raises SpecError, and OSError."""
    file = defs_folder() / name / "defs.yaml"
    attributes = first_attributes(name)
    load_spec(attributes, file)
    if taken := declarations().datasets.get(name):
        raise SpecError(file, [Problem("name", "one that no dataset has", f"{name!r}, which lies in {taken[1]}")])
    document = {"type": COMPONENT, "attributes": attributes}
    text = dump(document)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError:
        raise SpecError(file, [Problem("this file", "none of this name", "one; it is left as it is")]) from None
    # What the command line makes is for its user alone; this belongs to the project around it.
    mode = stat.S_IMODE(defs_folder().stat().st_mode)
    file.parent.chmod(mode)
    file.chmod(mode & 0o666)
    return file
