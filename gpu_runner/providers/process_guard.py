"""Run a command as a process group that cannot outlive its owner.

`python -m gpu_runner.providers.process_guard -- COMMAND …`: the owner holds our standard input. When it
closes (the owner gave the engine back, or was killed with SIGKILL), the whole group gets SIGTERM and, five seconds
later, SIGKILL. A killed vLLM API server leaves its workers alive, so only the group counts. What the command started in
groups of its own (the guards of engines below a run worker) is adopted and waited for, so that nothing is left when we
end, except hosts of machines, which end by themselves. Exits with the command's status.

The guard is two processes, because it may be killed with SIGKILL itself. The inner one starts the command and ends it;
it holds a pipe of the outer one and ends everything when that is dead. When the inner one is dead, the kernel kills the
command (PR_SET_PDEATHSIG) and the outer one inherits and ends the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

GRACE_SECONDS = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def end_group(process: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """SIGTERM to the group of `process`, then SIGKILL to what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _prctl(option: int, value: int | bytes) -> None:
    """prctl(2); Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Name this process, as `ps -o comm` and /proc/PID/comm show it: 15 bytes at most."""
    _prctl(_PR_SET_NAME, name.encode())


def die_with(parent: int) -> Callable[[], None]:
    """For a new process, before it becomes the command: the kernel is to kill it when `parent` dies.

    `parent` has one thread only; the death of any other thread that had forked would count too.
    """

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)

    return prepare


def reap_orphans(process: subprocess.Popen[bytes]) -> None:
    """Collect adopted children that have ended; the command's own status is left for `process`."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != process.pid:
            os.waitpid(ended.si_pid, 0)


def end_orphans(grace: float = GRACE_SECONDS, *, ask: bool = False) -> None:
    """Wait until every adopted child has ended; what is left after the grace gets SIGKILL.

    With `ask`, each gets SIGTERM when it is adopted: nobody else told it. Hosts of machines stay: a machine is rented
    by the fleet, not by the process that ordered it.
    """
    deadline = time.monotonic() + grace
    asked: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            children = _children()
            ours = [pid for pid in children if not _is_host(pid)]
            if children and not ours:
                return
            if ask:
                _signal([pid for pid in ours if pid not in asked], signal.SIGTERM)
                asked.update(ours)
            if time.monotonic() >= deadline:
                _signal(ours, signal.SIGKILL)
            time.sleep(0.02)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _is_host(pid: int) -> bool:
    """Whether it is a `gpu_runner.providers.machine_host.daemon`, which ends by itself when the fleet does."""
    try:
        return b"gpu_runner.providers.machine_host.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


@contextlib.contextmanager
def _woken_by_children() -> Iterator[int]:
    """A descriptor that can be read whenever a child has ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    yield woken
    signal.set_wakeup_fd(-1)
    os.close(wake)
    os.close(woken)


def _wait(process: subprocess.Popen[bytes], owners: tuple[int, ...]) -> None:
    """Wait until the command ends, or one of the owners' descriptors does. Costs nothing meanwhile."""
    with selectors.DefaultSelector() as selector, _woken_by_children() as woken:
        for descriptor in (*owners, woken):
            selector.register(descriptor, selectors.EVENT_READ)
        while process.poll() is None:
            for key, _ in selector.select():
                if not os.read(key.fd, 4096):
                    return
            reap_orphans(process)


def _run(command: list[str], outer: int) -> int:
    """The inner process: start the command, wait for it or for the end of an owner, leave nothing behind."""
    adopt_orphans()

    def stop(number: int, _: object) -> None:
        _ignore_signals()
        end_group(process)
        end_orphans()
        os._exit(128 + number)

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until there is a command that can be ended
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # the owner passed no more than the command is to have, a lock that shows who lives
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    )
    for number in _SIGNALS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _wait(process, (sys.stdin.fileno(), outer))
    _ignore_signals()
    end_group(process)
    end_orphans()
    return process.returncode


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _outlive(inner: int) -> int:
    """The outer process: pass signals on, wait for the inner one; when it was killed, end what it has left."""

    def stop(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner, number)

    for number in _SIGNALS:
        signal.signal(number, stop)
    status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    if status < 0:
        _ignore_signals()
        end_orphans(ask=True)
    return status


def main(command: list[str]) -> int:
    """Guard the command; returns its status."""
    adopt_orphans()
    alive, held = os.pipe()
    if inner := os.fork():
        os.close(alive)
        return _outlive(inner)
    os.close(held)
    os.setsid()  # a signal to the group of one is not one to both
    return _run(command, alive)


if __name__ == "__main__":
    sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))
