"""One Dagster per home, its tables made once, and no process that outlives its owner."""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batch_assets.stack import LOGS, Stack, StackAddress, StackError, _Child, port_taken, prepare_home, running_stack


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    return prepare_home()


def test_a_new_home_gets_our_settings_and_keeps_what_is_written_there(home: Path):
    settings = home / "dagster.yaml"
    assert "QueuedRunCoordinator" in settings.read_text()
    settings.write_text("telemetry: {enabled: false}\n")
    assert prepare_home() == home
    assert settings.read_text() == "telemetry: {enabled: false}\n"


def test_a_home_is_held_by_whoever_has_its_lock(home: Path):
    assert running_stack(home) is None
    with (home / "stack.lock").open("w") as lock:
        lock.write(json.dumps({"url": "http://127.0.0.1:1", "port": 1, "pid": 7}))
        lock.flush()
        assert running_stack(home) is None
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert running_stack(home) == StackAddress("http://127.0.0.1:1", 1, 7)
        with pytest.raises(StackError, match="already runs"), Stack(home):
            raise AssertionError("a second stack has started")
    assert running_stack(home) is None


def test_dagster_uploads_nothing_that_our_processes_write(home: Path):
    child = _Child("probe", [sys.executable, "-c", "import os; print(os.environ['DAGSTER_DISABLE_TELEMETRY'])"])
    Stack(home)._start(child)
    assert child.process is not None and child.process.stdin is not None
    child.process.wait(timeout=30)
    child.process.stdin.close()
    assert (home / LOGS / "probe.log").read_text() == "1\n"
    assert not (home / "logs").exists()


def test_a_port_is_taken_while_somebody_listens_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_taken(port)
    assert not port_taken(port)


@pytest.mark.slow
def test_a_new_home_may_be_opened_by_several_processes_at_once(home: Path):
    code = (
        "from batch_assets.stack import ensure_storage, prepare_home; import dagster as dg\n"
        "home = prepare_home(); ensure_storage(home)\n"
        "with dg.DagsterInstance.from_config(str(home)) as instance: print(instance.get_runs_count())\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["0\n"] * 3
