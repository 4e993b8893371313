"""The server behind Dagster's code server: `python -m batch_assets.definitions_server api grpc …`, as `dagster`.

It loads the definitions, evaluates sensors and starts run workers. Dagster spawns each worker as a new Python, which
imports Dagster for a second or more before it does anything. Here workers are forked from a process that has imported
it already (`worker_template.py`), by `multiprocessing`'s own fork server.

The only place that relies on how Dagster's server starts its workers (dagster/_grpc/server.py). When that has changed,
they are spawned as Dagster does, and `tests/test_definitions_server.py` fails.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEMPLATE = "batch_assets.worker_template"
SPAWNS = multiprocessing.get_context("spawn")


def entry_point(_executable: str) -> Sequence[str]:
    """How the code server starts us, in place of `python -m dagster`."""
    return [sys.executable, "-m", "batch_assets.definitions_server"]


def start_template(folder: Path) -> None:
    """Start the process that workers are forked from; its socket lies in a new folder below `folder`."""
    kept, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = kept
    multiprocessing.get_context("forkserver").set_forkserver_preload([TEMPLATE])
    multiprocessing.forkserver.ensure_running()


def fork_workers() -> None:
    """Let Dagster's server take its workers from the template."""
    from dagster._grpc.server import DagsterApiServer

    made = DagsterApiServer.__init__

    def __init__(self: DagsterApiServer, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        if getattr(self, "_mp_ctx", None) is SPAWNS:
            self._mp_ctx = multiprocessing.get_context("forkserver")

    DagsterApiServer.__init__ = __init__  # type: ignore[method-assign]


def main() -> None:
    """Serve until the end."""
    if "--socket" in sys.argv:
        start_template(Path(sys.argv[sys.argv.index("--socket") + 1]).parent)
        fork_workers()
    from dagster._cli import main as dagster

    dagster()


if __name__ == "__main__":
    main()
