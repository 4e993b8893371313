"""`batch-assets restore` again and again, each time killed later: `python killed_restore.py STEP WORDS…`.

Each try is a process of its own that kills itself (SIGKILL) at its STEP-th, 2 × STEP-th and so on change in the home:
a file that is opened there, renamed or deleted, a database that is connected to, or a statement on one, before it is
done. Prints how many were killed, and the exit status of the one that came to its end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

import batch_assets.cli.backup_commands.restore_command
import batch_assets.definitions  # noqa: F401 - a child has nothing to import
from batch_assets.cli.main import app

CHANGES = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "sqlite3.connect"})
MOST = 60


def die_at(number: int, home: str) -> None:
    """Ends this process with its `number`-th change."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(name: str, arguments: tuple[Any, ...]) -> None:
        if name in CHANGES and home in str(arguments[0] if arguments else ""):
            count()

    def statement(*_: object) -> None:
        count()

    sys.addaudithook(heard)
    event.listen(Engine, "before_cursor_execute", statement)


def main(step: int, words: list[str]) -> int:
    home = str(Path(os.environ["DAGSTER_HOME"]).resolve())
    for killed in range(MOST):
        child = os.fork()
        if child == 0:
            die_at(step * (killed + 1), home)
            app(["restore", *words])
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            continue
        print(f"killed {killed}, then {os.waitstatus_to_exitcode(status)}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
