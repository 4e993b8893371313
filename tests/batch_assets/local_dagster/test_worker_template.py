"""Run workers are forked from a template that is safe to fork, and none of them outlives what should end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import runs
from support.timing import PATIENCE

from batch_assets.local_dagster import worker_template

SERVER = (
    "import json, os, sys, time\n"
    "from pathlib import Path\n"
    "from batch_assets.local_dagster import worker_template\n"
    "context = worker_template.start(Path(sys.argv[1]))\n"
    "worker = context.Process(target=time.sleep, args=[float(sys.argv[2])])\n"
    "worker.start()\n"
    "print(json.dumps({'worker': worker.pid}), flush=True)\n"
    "worker.join()\n"
    "print(json.dumps({'exit': worker.exitcode}), flush=True)\n"
    "time.sleep(300)\n"
)


@contextlib.contextmanager
def server(folder: Path, seconds: float) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, psutil.Process]]:
    """A server with a template and a worker that sleeps; all three."""
    words = [sys.executable, "-c", SERVER, str(folder / "socket"), str(seconds)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = psutil.Process(json.loads(process.stdout.readline())["worker"])
    template = worker.parent()
    assert template is not None
    try:
        eventually_named(worker, worker_template.WORKER)
        yield process, template, worker
    finally:
        for one in (process, template, worker):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                one.kill()
        process.wait()
        process.stdout.close()


def eventually_named(process: psutil.Process, name: str) -> None:
    deadline = time.monotonic() + 10 * PATIENCE
    while process.name() != name and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.name() == name


def ends(process: psutil.Process) -> bool:
    """Whether it ends by itself soon; one that waits to be collected has ended."""
    deadline = time.monotonic() + 10 * PATIENCE
    while runs(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not runs(process)


def said(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout is not None
    found: dict[str, int] = json.loads(process.stdout.readline())
    return found


@pytest.mark.slow
def test_the_template_has_the_code_of_workers_but_no_dataset_and_has_started_no_thread(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "defs.yaml").write_text("type: [")
    code = (
        "from batch_assets.local_dagster import worker_template; import gc, os, sys\n"
        "worker_template.import_modules()\n"
        "values = worker_template.threads(), gc.collect(), os.environ.get('OPENBLAS_NUM_THREADS')\n"
        "print(*values, *sorted(sys.modules))\n"
    )
    environment = {**os.environ, "BATCH_ASSETS_DEFS": str(tmp_path), "OPENBLAS_NUM_THREADS": "7"}
    found = subprocess.check_output([sys.executable, "-W", "ignore", "-c", code], text=True, env=environment)
    threads, garbage, of_workers, *names = found.split()
    assert (threads, of_workers) == ("1", "7")
    assert int(garbage) < 1000
    assert {"batch_assets.definitions", "batch_assets.generation.op", "pyarrow"} <= {*names}
    assert not {"polars", "fastapi", "boto3"} & {*names}, "import it in the function that uses it"


def test_a_process_of_two_threads_is_not_forked(tmp_path: Path):
    assert worker_template.threads() == len(os.listdir("/proc/self/task"))  # noqa: PTH208
    code = (
        "import sys, threading; from pathlib import Path; from batch_assets.local_dagster import worker_template\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "try: worker_template.start(Path(sys.argv[1]))\n"
        "except worker_template.TemplateError as error: print(error)\n"
    )
    found = subprocess.check_output([sys.executable, "-c", code, str(tmp_path / "socket")], text=True)
    assert "expected a process of one thread, found 2" in found
    assert list(tmp_path.iterdir()) == []


def test_the_socket_is_for_our_user_alone(tmp_path: Path):
    with server(tmp_path, 300):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600


def test_a_socket_that_a_killed_server_of_this_number_left_is_taken_away(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(tmp_path / "socket"))
    with server(tmp_path, 300) as (_, _, worker):  # which has started
        assert worker.is_running()


def test_the_end_of_a_worker_is_known_with_its_status(tmp_path: Path):
    with server(tmp_path, 0.2) as (process, _, _):
        assert said(process) == {"exit": 0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_ends_by_a_signal_and_its_server_knows(tmp_path: Path, number: signal.Signals):
    with server(tmp_path, 300) as (process, template, worker):
        worker.send_signal(number)
        assert said(process) == {"exit": -number}
        assert template.is_running()


def test_sigterm_to_the_group_leaves_it_to_the_workers_to_end(tmp_path: Path):
    with server(tmp_path, 300) as (process, template, _):
        template.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert template.is_running()
        assert process.poll() is None


def test_with_a_killed_template_its_workers_and_its_server_end(tmp_path: Path):
    with server(tmp_path, 300) as (process, template, worker):
        template.kill()
        assert ends(worker)
        assert process.wait(timeout=10 * PATIENCE) == -signal.SIGKILL


def test_a_worker_lives_on_after_its_server_and_the_template_ends_with_it(tmp_path: Path):
    with server(tmp_path, 300) as (process, template, worker):
        process.kill()
        process.wait()
        time.sleep(0.3)
        assert worker.is_running()
        assert template.is_running()
        worker.kill()
        assert ends(template)


def test_a_template_without_workers_ends_with_its_server(tmp_path: Path):
    with server(tmp_path, 0.1) as (process, template, worker):
        assert ends(worker)
        process.kill()
        process.wait()
        assert ends(template)
