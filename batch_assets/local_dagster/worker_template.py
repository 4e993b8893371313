"""The template of a code server: a process that has imported what run workers need, and is forked for each of them.

Imports take nearly all of the three seconds of processor time that a worker's start costs. The template is a fork of
the code server itself, made before that has read any datasets, so it costs no import of its own; it holds the same
code as its server, and ends with that or, when that was killed, with its last worker. A server that loads the
definitions again is started from nothing, and has a template of its own.

Only a process of one thread may be forked safely: a lock that another thread holds stays locked in the copy for ever.
So numpy and pyarrow are told to start none, what always starts some (polars) is imported where it is used, and `start`
refuses to fork a process of two.

The template speaks the protocol of `multiprocessing`'s own fork server, which starts Dagster's workers. It ignores
SIGTERM, which a process group gets as a whole, so that its workers end in good order; when it is killed, the kernel
kills them (PR_SET_PDEATHSIG), because nobody could tell any more how they end.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

from batch_assets.local_dagster.forked_process import bound_socket
from gpu_runner.providers.process_guard import die_with, name_process

TEMPLATE, WORKER = "worker-template", "run-worker"  # names of the processes, 15 bytes at most
MODULES = (
    "dagster",
    "dagster._cli",
    "dagster._cli.api",
    "dagster._grpc.impl",
    "dagster._grpc.server",
    "dagster._core.execution.api",
    "dagster._core.storage.legacy_storage",
    "dagster._core.storage.sqlite_storage",
    "dagster.components",
    "alembic",
    "sqlalchemy.dialects.sqlite",
    "batch_assets.definitions",
)
# Read while OpenBLAS (numpy) and jemalloc (pyarrow) are loaded: no threads of their own.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


class TemplateError(Exception):
    """The process cannot be forked safely."""


def import_modules() -> None:
    """Import what workers need. Raises TemplateError when that has started a thread.

    What workers start, a local engine say, does not inherit `ONE_THREAD`. Garbage is not collected meanwhile, which
    takes a fifth of the time of imports and finds nothing.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    gc.disable()
    try:
        for name in MODULES:
            importlib.import_module(name)
    finally:
        gc.enable()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    if (found := threads()) != 1:
        raise TemplateError(f"{found} threads after the imports of {__name__}, expected 1: one of them starts threads")


def threads() -> int:
    """How many threads this process has, those that are not Python's too."""
    return len(list(Path("/proc/self/task").iterdir()))


def start(address: Path) -> BaseContext:
    """Fork the template and return the context that starts processes from it. `address`: of its socket, for us alone.

    A socket that is there is an earlier process's of the same number: after a container was killed, the next one counts
    from 1 again. The socket is for our user alone. Raises TemplateError when this process has more than one thread.
    """
    if (found := threads()) != 1:
        raise TemplateError(f"expected a process of one thread, found {found}: it cannot be forked safely")
    gc.freeze()  # the copies share the memory of what is not collected; imports leave no garbage (test)
    alive, held = os.pipe()
    with bound_socket(address) as listener:
        pid = os.fork()
        if pid == 0:
            os.close(held)
            _serve(listener.detach(), alive)
    os.close(alive)
    gc.unfreeze()
    _use(str(address), held, pid)
    threading.Thread(target=_end_with, args=(pid,), name="worker-template-watch", daemon=True).start()
    return multiprocessing.get_context("forkserver")


def _serve(listener: int, alive: int) -> None:
    """The template: fork a worker for each request, until nobody holds the other end of `alive`. Does not return."""
    status = 1
    try:
        name_process(TEMPLATE)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        template, prepare = os.getpid(), die_with(os.getpid())

        def become_worker() -> None:
            if os.getppid() != template:  # what a worker forks later
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # before it has its name, by which it may be found and ended
            prepare()
            name_process(WORKER)

        os.register_at_fork(after_in_child=become_worker)
        forkserver.main(listener, alive, [])
    except SystemExit:
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _use(address: str, alive: int, pid: int) -> None:
    """Make it the fork server of this process. The standard library's private names are held by its tests."""
    server = forkserver._forkserver
    for name, value in {"address": address, "alive_fd": alive, "pid": pid}.items():
        field = f"_forkserver_{name}"
        if not hasattr(server, field):
            raise TemplateError(f"multiprocessing.forkserver.ForkServer has no {field} in Python {sys.version}")
        setattr(server, field, value)


def _end_with(template: int) -> None:
    """End this process when the template has ended, so that both are started again."""
    os.waitid(os.P_PID, template, os.WEXITED | os.WNOWAIT)
    os.kill(os.getpid(), signal.SIGKILL)
