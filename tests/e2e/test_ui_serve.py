"""`batch-assets ui --serve`: the front door beside Dagster's UI, started again when it dies, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.timing import PATIENCE

from gpu_runner.providers.engine_process import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def until(true: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 120 * PATIENCE
    while not true():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


def serving(process: psutil.Process) -> list[psutil.Process]:
    """The service itself, below the guard that looks after it."""
    found = [one for one in process.children(recursive=True) if "serve" in one.cmdline()]
    return [one for one in found if "gpu_runner.providers.process_guard" not in one.cmdline()]


def test_the_service_lives_and_ends_with_the_ui(tmp_path: Path) -> None:
    port, api_port, log = free_port(), free_port(), tmp_path / "log"
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home"), "BATCH_ASSETS_STORE": str(tmp_path / "store")}
    command = [sys.executable, "-m", "batch_assets.cli.main", "ui", "--port", str(port)]
    command += ["--serve", "--api-port", str(api_port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=out)
    try:
        until(lambda: ready(api_port), log)
        (service,) = serving(psutil.Process(process.pid))
        service.kill()
        until(lambda: not ready(api_port) or serving(psutil.Process(process.pid)) not in ([], [service]), log)
        until(lambda: ready(api_port), log)
        until(lambda: f"http://127.0.0.1:{api_port}/v1" in log.read_text(), log)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120 * PATIENCE)
    assert not ready(api_port)
