"""What run workers are forked from: imported by `multiprocessing`'s fork server only, which then waits for work.

Nothing may be imported here that starts threads: a fork has the one thread that forked, and whatever another one held
stays locked for ever. So neither polars nor pyarrow nor numpy; nor modules of our own, which a worker reads as they are
when it starts. `tests/test_definitions_server.py` counts the threads.
"""

from __future__ import annotations

import gc
import os
import signal

import aiohttp  # noqa: F401
import alembic.command  # noqa: F401
import dagster._core.storage.event_log
import dagster._core.storage.runs
import dagster._core.storage.sqlite_storage
import dagster._grpc.server
import dagster.components  # noqa: F401
import jsonschema  # noqa: F401
import sqlalchemy.dialects.sqlite.pysqlite  # noqa: F401

from gpu_runner.providers.guard import die_with

# The group gets SIGTERM when a stack ends. Workers then end in good order: who forked them stays for as long.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
_template = os.getpid()
_ends_with_template = die_with(_template)


def _in_worker() -> None:
    """A worker without its template would be taken for dead by Dagster, and done a second time."""
    if os.getppid() == _template:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _ends_with_template()


os.register_at_fork(after_in_child=_in_worker)
gc.collect()
gc.freeze()  # what is shared with the workers stays shared
