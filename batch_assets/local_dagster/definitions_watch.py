"""Loads the definitions again when a dataset was added, changed or removed while Dagster runs.

The code server holds what it read at its start. Whoever keeps a stack running looks at the defs.yaml files every two
seconds and, when they have changed, asks the webserver for what "Reload" in its UI does. The log names files that
cannot be used: the UI shows them as broken, and all others are loaded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from batch_assets.spec.defs_files import defs_files
from batch_assets.spec.discovery import Declarations, declarations, defs_folder

LOOK_SECONDS = 2.0

Signature = frozenset[tuple[str, int, int, int]]


def signature() -> Signature:
    """Path, time of the last change, size and inode of every defs.yaml."""
    found = set()
    for one in defs_files(defs_folder()):
        try:
            about = one.path.stat()
        except OSError:  # removed in this moment, or a link that leads nowhere
            found.add((str(one.path), 0, 0, 0))
            continue
        found.add((str(one.path), about.st_mtime_ns, about.st_size, about.st_ino))
    return frozenset(found)


class DefinitionsWatch:
    """Calls `reload` once for each change, when two looks have found the same: nobody writes any more."""

    def __init__(self, reload: Callable[[], None], say: Callable[[str], None]) -> None:
        self._reload, self._say = reload, say
        self._loaded = self._before = signature()

    def look(self) -> None:
        """One look. Whatever goes wrong with a reload is said, and tried again."""
        found, before = signature(), self._before
        self._before = found
        if found == self._loaded or found != before:
            return
        try:
            self._reload()
        except Exception as error:  # the webserver is being started again, or refuses
            self._say(f"the definitions could not be loaded again: {type(error).__name__}: {error}")
            return
        now = declarations()
        self._say("\n".join([f"loaded the definitions again: {len(now.datasets)} datasets", *_unusable(now)]))
        self._loaded = found

    def watch(self, stop: threading.Event) -> None:
        """Look until `stop` is set."""
        while not stop.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:  # a file is no YAML, a folder or Dagster is away: looked at again
                with contextlib.suppress(OSError):  # of a full disk
                    self._say(f"the definitions cannot be looked at: {type(error).__name__}: {error}")


def _unusable(found: Declarations) -> list[str]:
    return [f"cannot be used: {one.error}" for one in found.broken]


def log_to(file: Path) -> Callable[[str], None]:
    """Writes a line with its time, unless it says what the line before said."""
    last = [""]

    def say(text: str) -> None:
        if text != last[0]:
            last[0] = text
            with file.open("a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    return say
