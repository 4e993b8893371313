"""The stack starts again what dies, and the work goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from pace import PATIENCE

from e2e.command_line import NAME, ROWS, Command, site
from e2e.harness import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def code_servers(command: Command) -> list[psutil.Process]:
    """The living code servers, each the leader of a process group below its guard."""
    found = command.find("batch_assets.code_server", "start")
    return [process for process in found if "gpu_runner.providers.guard" not in process.cmdline()]


def test_a_killed_code_server_is_started_again_and_its_runs_go_on(tmp_path: Path):
    with site(tmp_path) as here:
        here.engine(speed=0.6)
        command = here.start("run", NAME)
        here.working(command)
        (server,) = code_servers(command)
        os.killpg(server.pid, signal.SIGKILL)
        killed = time.monotonic()

        def again() -> bool:
            return any(found.pid != server.pid for found in code_servers(command))

        eventually(again, 5, "another code server", every=0.1)
        assert time.monotonic() - killed < 5 * PATIENCE
        status, _ = command.end(200)
        assert status == 0, command.said()
        assert command.left() == []
        found = here.status()
        assert (found["ok"], found["table_current"]) == (ROWS, True)
        assert all(given_back for _, _, given_back in here.leases())
