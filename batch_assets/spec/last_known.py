"""Files of datasets as they were when they could last be used: copies in DAGSTER_HOME.

The copy of a file that names a class for a JSON schema holds the schema: the class may be what is broken next.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from batch_assets import settings

FOLDER = "last_known_defs"
# What is taken for it by mistake is written in other words that mean the same.
_NAMES_CLASS = re.compile(rb"""json_schema["']?\s*:\s*["']?[\w.]+:\w""")


def keep(files: Iterable[Path], resolved: Callable[[Path], str]) -> None:
    """Copy the files that have changed; they can all be used. Without a home, or on a full disk, nothing is kept.

    `resolved`: the text of a file, with schemas in place of classes that it names.
    """
    with contextlib.suppress(OSError):
        for file in files:
            copy, about = copy_of(file), file.stat()
            if _moment(copy) != (about.st_mtime_ns, about.st_size):
                copy.parent.mkdir(exist_ok=True)
                half = copy.with_name(f"{copy.name}.{os.getpid()}")
                text = file.read_bytes()
                half.write_bytes(resolved(file).encode() if _NAMES_CLASS.search(text) else text)
                os.utime(half, ns=(about.st_atime_ns, about.st_mtime_ns))
                half.replace(copy)


def copy_of(file: Path) -> Path:
    """Where the copy of a file lies, if it has one."""
    name = hashlib.sha256(str(file).encode(errors="surrogateescape")).hexdigest()[:16]
    return settings.dagster_home() / FOLDER / f"{name}.yaml"


def _moment(file: Path) -> tuple[int, int] | None:
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size
