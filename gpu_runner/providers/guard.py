"""Run a command as a process group that cannot outlive its owner.

`python -m gpu_runner.providers.guard -- COMMAND …`: the owner holds our standard input. When it closes (the owner gave
the engine back, or was killed with SIGKILL), the whole group gets SIGTERM and, five seconds later, SIGKILL. A killed
vLLM API server leaves its workers alive, so only the group counts. What the command started in groups of its own (the
guards of engines below a run worker) is adopted and waited for, so that nothing is left when we end, except hosts of
machines, which end by themselves. Exits with the command's status.
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
from pathlib import Path

GRACE_SECONDS = 5.0


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


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies (prctl(2), PR_SET_CHILD_SUBREAPER; Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def reap_orphans(process: subprocess.Popen[bytes]) -> None:
    """Collect adopted children that have ended; the command's own status is left for `process`."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != process.pid:
            os.waitpid(ended.si_pid, 0)


def end_orphans(grace: float = GRACE_SECONDS) -> None:
    """Wait until every adopted child has ended; what is left after the grace gets SIGKILL.

    Hosts of machines stay: a machine is rented by the fleet, not by the process that ordered it.
    """
    deadline = time.monotonic() + grace
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            children = _children()
            ours = [pid for pid in children if not _is_host(pid)]
            if children and not ours:
                return
            if time.monotonic() >= deadline:
                for pid in ours:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _is_host(pid: int) -> bool:
    """Whether it is a `gpu_runner.providers.host`, which ends by itself when the fleet does."""
    try:
        return b"gpu_runner.providers.host" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def main(command: list[str]) -> int:
    """Start the command, wait for it or for the end of standard input, leave nothing behind."""
    adopt_orphans()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(number: int, _: object) -> None:
        end_group(process)
        end_orphans()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        while process.poll() is None:
            if selector.select(timeout=0.1) and not os.read(sys.stdin.fileno(), 4096):
                break
            reap_orphans(process)
    end_group(process)
    end_orphans()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))
