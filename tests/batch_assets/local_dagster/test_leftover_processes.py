"""Whoever starts ends what an earlier stack of the same home has left, and nobody else's processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import runs
from support.timing import PATIENCE

from batch_assets.local_dagster import leftover_processes
from batch_assets.local_dagster.leftover_processes import (
    LeftoverError,
    StackMark,
    end_child,
    forget_stack,
    hold_alive,
    new_stack,
)
from gpu_runner.providers.machine_host.registry import MARK

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@contextlib.contextmanager
def sleeping(environment: dict[str, str], *command: str) -> Iterator[psutil.Process]:
    """A process with this in its environment."""
    process = subprocess.Popen(command or ["sleep", "300"], env={**os.environ, **environment}, stdout=subprocess.PIPE)
    try:
        if command and process.stdout:
            process.stdout.readline()
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_next_stack_ends_what_a_killed_one_has_left(home: Path):
    mark = new_stack(home)
    with sleeping(mark.environment(home, "daemon")) as daemon, sleeping(mark.environment(home, "webserver")) as server:
        assert new_stack(home).token != mark.token
        assert not runs(daemon) and not runs(server)
    assert not Path(mark.sockets).exists()


def test_what_does_not_listen_to_sigterm_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leftover_processes, "GRACE_SECONDS", 0.3)
    mark = new_stack(home)
    with sleeping(mark.environment(home, "daemon"), sys.executable, "-c", DEAF) as deaf:
        new_stack(home)
        assert not runs(deaf)


def test_what_does_not_end_at_all_is_named_and_nothing_starts_beside_it(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu_runner.providers.process_marks.send", lambda *_: None)  # as if it hung in the kernel
    monkeypatch.setattr(leftover_processes, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(leftover_processes, "INSIST_SECONDS", 0.1)
    mark = new_stack(home)
    with sleeping(mark.environment(home, "daemon")) as stuck:
        for _ in range(2):
            with pytest.raises(LeftoverError, match=f"kill -9 {stuck.pid}"):
                new_stack(home)


def test_nobody_elses_process_is_ended(home: Path, tmp_path: Path):
    mark = new_stack(home)
    others: list[dict[str, str]] = [
        {"DAGSTER_HOME": str(home)},  # a dagster that its user has started on the same home
        StackMark("0" * 32, "").environment(home, "daemon"),  # another token
        mark.environment(tmp_path / "copy of the home", "daemon"),  # the home was copied, with its record
        {**mark.environment(home, "code-server"), MARK: "i-1"},  # a rented machine: the fleet's, not the stack's
        {"SEEN": f"{leftover_processes.VARIABLE}={mark.token}/daemon/{home}"},
    ]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(sleeping(other)) for other in others]
        new_stack(home)
        assert all(runs(process) for process in processes)


def test_a_child_is_ended_without_the_others(home: Path):
    mark = new_stack(home)
    with sleeping(mark.environment(home, "daemon")) as daemon, sleeping(mark.environment(home, "webserver")) as server:
        end_child(home, mark, "daemon")
        assert not runs(daemon)
        assert runs(server)


def test_a_stack_that_ended_well_leaves_no_record_and_one_with_a_survivor_does(home: Path):
    mark = new_stack(home)
    with sleeping(mark.environment(home, "daemon")):
        forget_stack(home, mark)
        assert (home / leftover_processes.RECORD).exists()
    forget_stack(home, mark)
    assert not (home / leftover_processes.RECORD).exists()


def test_a_living_process_that_cannot_be_looked_at_keeps_the_next_stack_from_starting(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """One of another user of the group: what it has in its environment is not for us to read."""
    monkeypatch.setattr(leftover_processes, "GUARD_SECONDS", 0.2)
    file = hold_alive(home)
    process = subprocess.Popen(["sleep", "300"], pass_fds=[file.fileno()])
    file.close()
    try:
        with pytest.raises(LeftoverError, match="not ours to end"):
            hold_alive(home)
    finally:
        process.kill()
        process.wait(timeout=20 * PATIENCE)
    with hold_alive(home) as held, (home / leftover_processes.ALIVE).open() as other, pytest.raises(BlockingIOError):
        assert held
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_socket_fits_however_long_the_path_of_the_home_and_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", str(long))
    mark = new_stack(long)
    assert Path(mark.sockets).stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(mark.socket))
    forget_stack(long, mark)
    assert not Path(mark.sockets).exists()


def test_a_damaged_record_is_as_good_as_none(home: Path):
    (home / leftover_processes.RECORD).write_text('{"token": ')
    assert new_stack(home).token
