"""Folders of DAGSTER_HOME in which several services keep files: each has one of its own, named by its records.

What a process leaves is for the next one with the same records; the place of a file says whose it is, and a note in the
folder, for people, which records those are. Files of an earlier version lie beside the folders and name nobody.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from batch_assets.api.database.service_database import Records

log = logging.getLogger(__name__)

NOTE = "records.txt"
_FOLDER = re.compile(r"[0-9a-f]{16}")

# Whether a file is one that a process which is gone has left. While the body runs, nobody else takes it.
Left = Callable[[Path], contextlib.AbstractContextManager[bool]]


def own_folder(base: Path, records: Records, left: Left) -> Path:
    """The folder of these records below `base`. Raises nothing for the disk: who writes there will find out.

    Files that name nobody are taken over where nobody else has a folder here. What is others' stays, and is said.
    """
    own = base / records.identity
    with _disk_told(base):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        (own / NOTE).write_text(f"{records.address}\n")
        if unnamed := _take_unnamed(own, left):
            log.warning("%s: %s", base.name, _unnamed(base, unnamed))
        for folder in _beside(own):
            if kept := _take(folder, None, left):
                log.warning("%s: %s", base.name, _others(folder, kept))
    return own


def take_over(own: Path, left: Left) -> None:
    """What processes of an earlier version have left since `own_folder` gave this folder, under the same rule.

    They may end after a service of this version has started beside them. Does nothing for any other folder.
    """
    if _FOLDER.fullmatch(own.name) and own.is_dir():
        with _disk_told(own.parent):
            _take_unnamed(own, left)


@contextlib.contextmanager
def _disk_told(base: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be used on this disk: %s", base.name, error.strerror)


def _beside(own: Path) -> list[Path]:
    """Folders of other records."""
    return sorted(one for one in own.parent.iterdir() if _FOLDER.fullmatch(one.name) and one != own)


def _take_unnamed(own: Path, left: Left) -> int:
    """Into `own` where nobody else has a folder. How many stay where they are."""
    return _take(own.parent, None if _beside(own) else own, left)


def _take(folder: Path, target: Path | None, left: Left) -> int:
    """How many files processes that are gone have left in a folder, and leave there: not those that go to `target`."""
    stay = 0
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        with left(path) as is_left, contextlib.suppress(FileNotFoundError):  # another replica was faster
            if is_left and target is not None:
                path.rename(target / path.name)
            else:
                stay += is_left
    return stay


def _unnamed(base: Path, count: int) -> str:
    return (
        f"{count} files of an earlier version do not say to which of several services they belong, and are left alone: "
        f"move them into the right folder of {base}; {NOTE} in each names its records"
    )


def _others(folder: Path, count: int) -> str:
    address = "records that nobody has named"
    with contextlib.suppress(OSError):
        address = (folder / NOTE).read_text()[:300].strip()
    return (
        f"{count} files in {folder} are of a service with other records ({address}), which does not run: it takes them "
        "up when it starts. When those records are gone for good, move the files into this service's folder"
    )
