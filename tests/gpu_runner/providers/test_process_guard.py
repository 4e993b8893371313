"""Nothing that a guard has started outlives its owner or the guard, whoever of them is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from support.processes import runs
from support.timing import PATIENCE

GUARD = [sys.executable, "-m", "gpu_runner.providers.process_guard", "--", "bash", "-c"]


def descendants(pid: int, count: int) -> list[psutil.Process]:
    """The `count` descendants that the process will have within five seconds."""
    deadline = time.monotonic() + 20 * PATIENCE
    while len(found := psutil.Process(pid).children(recursive=True)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) == count
    return found


def test_what_escaped_into_a_group_of_its_own_ends_with_the_guard():
    guard = subprocess.Popen([*GUARD, "setsid bash -c 'sleep 2; exit 0' & sleep 300"], stdin=subprocess.PIPE)
    below = descendants(guard.pid, 5)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(timeout=20)
    assert not [process for process in below if process.is_running()]


def test_the_guard_exits_with_its_commands_status_and_keeps_no_zombies():
    looks: list[bool] = []  # whether one that has ended was not collected yet
    with subprocess.Popen([*GUARD, "(setsid sleep 0.1 &) ; sleep 3; exit 7"], stdin=subprocess.PIPE) as guard:
        time.sleep(0.6)
        while guard.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(guard.pid).children(recursive=True)
                looks.append(any(process.is_running() and not runs(process) for process in below))
            time.sleep(0.1)
        assert guard.returncode == 7
    assert not all(looks)


def test_killing_the_owner_of_a_guard_ends_its_command(tmp_path: Path):
    note = tmp_path / "pid"
    code = (
        "import subprocess, time\n"
        f"subprocess.Popen({[*GUARD, f'echo $$ > {note}; sleep 300']!r}, stdin=subprocess.PIPE)\n"
        "time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20 * PATIENCE
    while not (note.exists() and note.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    command = psutil.Process(int(note.read_text()))
    os.kill(owner.pid, 9)
    owner.wait()
    command.wait(timeout=10)
    assert not command.is_running()


# A command with children in its group; one more child is in a group and session of its own.
FAMILY = "sleep 301 & sleep 302; exit 0"
ESCAPED = f"setsid sleep 303 & {FAMILY}"


@contextlib.contextmanager
def guarded(script: str, processes: int) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A guard with everything below it: the inner guard first, then the command and what that started."""
    guard = subprocess.Popen([*GUARD, script], stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    with guard.stdin:
        below = descendants(guard.pid, processes)
        try:
            yield guard, below
        finally:
            for process in [*below, psutil.Process(guard.pid) if guard.poll() is None else None]:
                if process is not None and process.is_running():
                    process.kill()
            guard.wait(timeout=10)


def gone(below: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(below, timeout=PATIENCE * 20)
    return not any(runs(process) for process in alive)


def inner_of(guard: subprocess.Popen[bytes], below: list[psutil.Process]) -> psutil.Process:
    return next(process for process in below if process.ppid() == guard.pid)


def test_a_killed_guard_takes_everything_with_it():
    with guarded(FAMILY, 4) as (guard, below):
        guard.kill()
        assert gone(below)


def test_a_killed_inner_guard_takes_everything_with_it():
    with guarded(ESCAPED, 5) as (guard, below):
        inner_of(guard, below).kill()
        assert gone(below)


def test_when_both_processes_of_a_guard_are_killed_the_kernel_ends_the_command():
    with guarded(FAMILY, 4) as (guard, below):
        inner = inner_of(guard, below)
        command = next(process for process in below if process.ppid() == inner.pid)
        inner.suspend()  # nobody acts between the two
        guard.kill()
        inner.kill()
        assert gone([command])


def test_an_inner_guard_that_is_killed_lets_what_it_had_started_end_in_good_order(tmp_path: Path):
    note = tmp_path / "ended"
    script = f"trap '' TERM; (trap 'echo well > {note}; exit' TERM; while :; do sleep 0.05; done) & wait"
    with guarded(script, 4) as (guard, below):
        inner = inner_of(guard, below)
        inner.kill()
        assert guard.wait(timeout=20 * PATIENCE) != 0
        assert gone(below)
    assert note.read_text() == "well\n"


def test_a_signal_to_the_guard_ends_its_command(tmp_path: Path):
    with guarded("sleep 300", 2) as (guard, below):
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(timeout=20 * PATIENCE) == 128 + signal.SIGTERM
        assert gone(below)


def test_a_waiting_guard_uses_no_processor_time():
    with guarded("sleep 300", 2) as (guard, below):
        inner = inner_of(guard, below)
        time.sleep(0.3)
        before = [psutil.Process(pid).num_ctx_switches().voluntary for pid in (guard.pid, inner.pid)]
        time.sleep(1)
        after = [psutil.Process(pid).num_ctx_switches().voluntary for pid in (guard.pid, inner.pid)]
        assert after == before
