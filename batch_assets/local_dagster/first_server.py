"""The first definitions server of a code server: a fork of it, so that Dagster and our code are imported once for both.

The code server starts another one, from nothing, whenever the definitions are loaded again: what a reload must see is
never inherited. The fork is made while the code server has one thread and has read no dataset (worker_template.py says
why), and waits until Dagster gives its arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from batch_assets.local_dagster import worker_template
from batch_assets.local_dagster.forked_process import keep_only, order_for, take_order
from gpu_runner.providers.process_guard import name_process

NAME = "definitions"  # of the process, 15 bytes at most
STEP_SECONDS = 0.05
MOST_BYTES = 1 << 20  # of its arguments and environment


class FirstServer:
    """A forked process with what Dagster uses of `subprocess.Popen`."""

    def __init__(self, pid: int, orders: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._orders: int | None = orders

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Let it serve with these arguments. False when it serves already, or has ended."""
        if self._orders is None or self.poll() is not None:
            return False
        orders, self._orders = self._orders, None
        try:
            with os.fdopen(orders, "wb") as pipe:
                pipe.write(order_for(sys.argv[0], arguments, environment))
        except BrokenPipeError:
            return False
        return True

    def poll(self) -> int | None:
        """Exit status, as subprocess counts it; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else collected it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(NAME, timeout or 0.0)
            time.sleep(STEP_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fork(serve: Callable[[], None]) -> FirstServer:
    """Fork a process that runs `serve` once it is told to begin, and ends when it cannot be told any more.

    Raises worker_template.TemplateError when this process has more than one thread.
    """
    if (found := worker_template.threads()) != 1:
        raise worker_template.TemplateError(f"expected a process of one thread, found {found}: it cannot be forked")
    sys.stdout.flush()
    sys.stderr.flush()
    orders, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        from batch_assets.dagster_internals.process_end import run_process  # the code server has it by now

        run_process(lambda: _begin(orders, serve))
    os.close(orders)
    return FirstServer(pid, ours)


def _begin(orders: int, serve: Callable[[], None]) -> None:
    """The forked process: serve once it is told to."""
    keep_only(orders)
    name_process(NAME)
    with os.fdopen(orders, "rb") as pipe:
        told = pipe.read(MOST_BYTES)
    if told:
        take_order(told)
        serve()
