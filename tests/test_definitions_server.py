"""Run workers are forked from a process that has imported Dagster, has one thread, and does not end before them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from pace import PATIENCE

ENDED = "ended None\n"
SERVER = """
import logging, sys, threading, time
from pathlib import Path
from batch_assets.definitions_server import fork_workers, start_template
start_template(Path(sys.argv[1]))
fork_workers()
from dagster._core.utils import FuturesAwareThreadPoolExecutor
from dagster._grpc.server import DagsterApiServer
server = DagsterApiServer(threading.Event(), logging.getLogger(), FuturesAwareThreadPoolExecutor())
for _ in sys.stdin:
    worker = server._mp_ctx.Process(target=time.sleep, args=(300,))
    worker.start()
    print(worker.pid, flush=True)
    threading.Thread(target=lambda: print("ended", worker.join(), flush=True)).start()
"""


@dataclass
class Server:
    """A definitions server that starts a worker for each line that it reads."""

    process: subprocess.Popen[str]

    def worker(self) -> psutil.Process:
        """A new worker."""
        assert self.process.stdin is not None
        self.process.stdin.write("start\n")
        self.process.stdin.flush()
        while (said := self.said()) == ENDED:  # of an earlier worker
            pass
        return psutil.Process(int(said))

    def said(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [sys.executable, "-c", SERVER, str(tmp_path_factory.mktemp("sockets"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        below: list[psutil.Process] = []
        try:
            yield Server(process)
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(process.pid).children(recursive=True)
        finally:
            for one in below:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            process.kill()


def template_of(worker: psutil.Process) -> psutil.Process:
    """What it was forked from."""
    return psutil.Process(worker.ppid())


def test_workers_are_forked_from_a_process_of_one_thread_that_has_imported_dagster(server: Server):
    worker = server.worker()
    template = template_of(worker)
    assert template.ppid() == server.process.pid
    assert template.num_threads() == 1
    assert "batch_assets.worker_template" in " ".join(template.cmdline())
    assert worker.memory_info().rss > 50 << 20, "the worker has imported nothing"
    assert worker.environ() == template.environ()


def test_a_worker_that_is_asked_to_end_does_so_while_what_it_was_forked_from_stays(server: Server):
    worker = server.worker()
    template = template_of(worker)
    for process in (template, worker):  # as a group gets it when a stack ends
        os.kill(process.pid, signal.SIGTERM)
    assert server.said() == ENDED
    assert template.is_running()
    assert template_of(server.worker()) == template


def test_no_worker_outlives_what_it_was_forked_from(server: Server):
    """Dagster would take it for dead, and start the run a second time."""
    worker = server.worker()
    template = template_of(worker)
    template.kill()
    worker.wait(timeout=5 * PATIENCE)
    assert server.said() == ENDED
    assert template_of(server.worker()) != template


def test_nothing_that_starts_threads_is_imported_before_a_fork():
    code = (
        "import os, sys, batch_assets.worker_template\n"
        "heavy = {'dagster', 'polars', 'pyarrow', 'numpy', 'obstore'}\n"
        "print(len(os.listdir('/proc/self/task')), *(heavy & {*sys.modules}))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1", "dagster"]
