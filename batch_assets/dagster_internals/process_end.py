"""How a process of Dagster's size ends: without Python's own shutdown, which takes it a second of processor time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_process(main: Callable[[], None]) -> NoReturn:
    """Run the main function of a process, and end that with the status it would have had. Runs no `atexit`."""
    status = 1
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a full disk
                stream.flush()
        os._exit(status)
