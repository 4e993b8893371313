"""Processes that are known by their environment: a mark in it is passed on to everything that they start (Linux).

Whatever group, session or parent a process has: the kernel keeps the environment that it was started with, and shows it
to its own user only. So nobody else's process can be taken for one of ours, and neither can one that got the number of
a dead process: it is looked at and signalled through one descriptor (pidfd_open(2)).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Environment = frozenset[bytes]
Matches = Callable[[Environment], bool]

STEP_SECONDS = 0.02
EXEC_SECONDS = 1.0  # execve(2) takes microseconds, and longer for a process that waits for a core in the middle of it


def environment(pid: int) -> Environment:
    """Its `NAME=value` entries; empty for somebody else's process, for a zombie, and for one that is gone."""
    deadline = time.monotonic() + EXEC_SECONDS
    found = _entries(pid)
    while not found and _has_program(pid) and time.monotonic() < deadline:
        waits = _in_exec(pid)
        found = _entries(pid)  # once more where it does not wait: it may have gone on between two looks
        if not waits:
            break
        time.sleep(STEP_SECONDS / 10)
    return found


def _entries(pid: int) -> Environment:
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) - {b""}
    except OSError:
        return frozenset()


def _has_program(pid: int) -> bool:
    """No zombie, no kernel thread, and not somebody else's process: those do not show their program."""
    try:
        Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return False
    return True


def _in_exec(pid: int) -> bool:
    """Whether a process has begun a program whose environment the kernel does not show yet: field 51, `env_end`, is 0
    (proc(5)).
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[48]) == 0
    except OSError:
        return False


def marked(matches: Matches) -> Iterator[int]:
    """Processes whose environment matches, ourselves left out."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of them: names are enough
        if name.isdigit() and int(name) != os.getpid() and matches(environment(int(name))):
            yield int(name)


def send(pids: Iterable[int], number: signal.Signals, matches: Matches) -> None:
    """Signal those of the processes that still are what we were looking for."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(pid)
            try:
                if matches(environment(pid)):
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def end_marked(matches: Matches, *, grace: float, insist: float) -> list[int]:
    """End all that matches; returns what is left.

    They have `grace` seconds after SIGTERM, and `insist` seconds of SIGKILL, which is repeated because one may have
    forked while we looked.
    """
    began = time.monotonic()
    asked: set[int] = set()
    while found := list(marked(matches)):
        waited = time.monotonic() - began
        if waited >= grace + insist:
            return found
        if waited >= grace:
            send(found, signal.SIGKILL, matches)
        else:
            send([pid for pid in found if pid not in asked], signal.SIGTERM, matches)
            asked.update(found)
        time.sleep(STEP_SECONDS)
    return []
