"""Run a command as a process group that cannot outlive its owner.

`python -m gpu_runner.providers.guard -- COMMAND …`: the owner holds our standard input. When it closes (the owner gave
the engine back, or was killed with SIGKILL), the whole group gets SIGTERM and, five seconds later, SIGKILL. A killed
vLLM API server leaves its workers alive, so only the group counts. Exits with the command's status.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time

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


def main(command: list[str]) -> int:
    """Start the command, wait for it or for the end of standard input, leave nothing behind."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(number: int, _: object) -> None:
        end_group(process)
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        while process.poll() is None:
            if selector.select(timeout=0.1) and not os.read(sys.stdin.fileno(), 4096):
                break
    end_group(process)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))
