"""The code server listens on a socket of its own folder only, and ends when the server behind it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.timing import PATIENCE

from batch_assets import settings
from batch_assets.dagster_internals.code_server import answers
from batch_assets.local_dagster import leftover_processes
from batch_assets.local_dagster.home import prepare_home
from batch_assets.local_dagster.stack import Stack

PROXY = (
    "import subprocess, sys, threading, time\n"
    "from batch_assets.local_dagster.code_server import end_with_server\n"
    "server = subprocess.Popen(['sleep', sys.argv[1]])\n"
    "threading.Thread(target=end_with_server, args=(None,), daemon=True).start()\n"
    "print(server.pid, flush=True)\n"
    "time.sleep(300)\n"
)


@contextlib.contextmanager
def proxy(seconds: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that stands before another one, as the code server does; and that one's process id."""
    process = subprocess.Popen([sys.executable, "-c", PROXY, seconds], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    server = int(process.stdout.readline())
    try:
        yield process, server
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@pytest.mark.slow
def test_the_code_server_ends_when_the_server_behind_it_is_killed():
    with proxy("300") as (process, server):
        os.kill(server, signal.SIGKILL)
        assert process.wait(timeout=20 * PATIENCE) == 1


@pytest.mark.slow
def test_the_server_of_definitions_opens_no_storage_while_another_process_creates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    folder = prepare_home()
    command = [sys.executable, "-m", "batch_assets.local_dagster.definitions_server", "api", "grpc"]
    command += ["--socket", str(folder / "socket"), "-m", "batch_assets.definitions", "-d", str(settings.PROJECT)]
    with (folder / "storage.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            waits = f"-> FLOCK  ADVISORY  WRITE {server.pid} "
            deadline = time.monotonic() + 60 * PATIENCE
            while waits not in Path("/proc/locks").read_text():
                assert server.poll() is None and time.monotonic() < deadline
                assert not list(folder.rglob("*.db")), "it did not wait for the lock"
                time.sleep(0.05)
            assert not list(folder.rglob("*.db"))
            fcntl.flock(lock, fcntl.LOCK_UN)
            while not answers(folder / "socket"):
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            assert (folder / "storage.ready").exists()
        finally:
            server.kill()
            server.wait()


@pytest.mark.slow
def test_the_code_server_stays_when_the_server_behind_it_was_replaced():
    with proxy("0.1") as (process, _):
        time.sleep(0.5)
        assert process.poll() is None


@pytest.mark.slow
def test_a_library_that_starts_threads_makes_the_code_server_slower_and_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    folder = prepare_home()
    command = [sys.executable, "-m", "batch_assets.local_dagster.code_server", "start", "-s", str(folder / "socket")]
    command += ["-m", "batch_assets.definitions", "-d", str(settings.PROJECT)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60 * PATIENCE
        while not answers(folder / "socket"):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        said = (tmp_path / "log").read_text()
        assert "the server of definitions is started from nothing" in said
        assert "run workers are started as Dagster starts them" in said
    finally:
        server.terminate()
        server.wait()


def test_daemon_and_webserver_find_the_code_server_by_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ("long" * 40)))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "store"))
    home = prepare_home()
    stack = Stack(home)
    stack._prepare()
    (location,) = json.loads((home / "workspace.yaml").read_text())["load_from"]
    socket = Path(location["grpc_server"]["socket"])
    assert "port" not in location["grpc_server"]
    assert len(os.fsencode(socket)) < 108
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    (server, *_) = stack._children
    assert server.command[server.command.index("-s") + 1] == str(socket)
    assert not {"-p", "-h", "--port", "--host"} & set(server.command)
    stack.__exit__()
    assert not socket.parent.exists()
    assert not (home / leftover_processes.RECORD).exists()
