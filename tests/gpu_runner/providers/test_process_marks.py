"""Processes are known by their environment, from the moment that their program has begun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpu_runner.providers.process_marks import EXEC_SECONDS, environment, marked


@contextlib.contextmanager
def running(command: list[str], variables: dict[str, str]) -> Iterator[int]:
    """A process of this environment, as soon as its caller knows of it."""
    process = subprocess.Popen(command, env=variables)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_process_that_has_just_begun_is_seen():
    """subprocess returns in the middle of execve(2): what the kernel shows of the environment is empty then."""
    with contextlib.ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):  # so that some wait for a core just then
            stack.enter_context(running([sys.executable, "-c", "while True: pass"], {}))
        for number in range(40):
            mark = f"TEST_MARK={os.getpid()}.{number}".encode()
            with running(["/bin/sleep", "60"], {"TEST_MARK": f"{os.getpid()}.{number}"}) as pid:
                assert environment(pid) == {mark}
                assert list(marked(lambda entries, mark=mark: mark in entries)) == [pid]


def test_a_process_without_any_environment_is_not_waited_for():
    with running(["/bin/sleep", "60"], {}) as pid:
        began = time.monotonic()
        for _ in range(10):
            assert environment(pid) == set()
        assert time.monotonic() - began < 5 * EXEC_SECONDS


def test_what_is_gone_has_no_environment():
    process = subprocess.Popen(["/bin/true"], env={"TEST_MARK": "1"})
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert environment(process.pid) == set()  # a zombie
    finally:
        process.wait()
    assert environment(process.pid) == set()
