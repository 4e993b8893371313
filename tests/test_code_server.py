"""The code server listens on a socket of its own folder only, and ends when the server behind it is killed."""

from __future__ import annotations

import contextlib
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
from pace import PATIENCE

from batch_assets import leftovers
from batch_assets.stack import Stack, prepare_home

PROXY = (
    "import subprocess, sys, threading, time\n"
    "from batch_assets.code_server import end_with_server\n"
    "server = subprocess.Popen(['sleep', sys.argv[1]])\n"
    "threading.Thread(target=end_with_server, daemon=True).start()\n"
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


def test_the_code_server_ends_when_the_server_behind_it_is_killed():
    with proxy("300") as (process, server):
        os.kill(server, signal.SIGKILL)
        assert process.wait(timeout=5 * PATIENCE) == 1


def test_the_code_server_stays_when_the_server_behind_it_was_replaced():
    with proxy("0.1") as (process, _):
        time.sleep(0.5)
        assert process.poll() is None


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
    assert not (home / leftovers.RECORD).exists()
