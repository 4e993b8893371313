"""A simulator process for tests: `with simulated_engine("--speed", "50") as engine: engine.url`.

Each is forked from one process that has imported the simulator already. `python -m gpu_runner.simulator` itself takes
half a second to start; tests/gpu_runner/simulator/test_simulator.py starts it so.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["gpu_runner.simulator.__main__"])


class EngineProcess:
    """A process that runs the simulator's command line. When `stdin` is closed, it ends."""

    def __init__(self, arguments: list[str]) -> None:
        given, self.stdin = _FORKS.Pipe(duplex=False)
        self._printed, printing = _FORKS.Pipe(duplex=False)
        words = (arguments, dict(os.environ), given, printing)
        self._process = _FORKS.Process(target=_run_simulator, args=words, daemon=True)
        self._process.start()
        given.close()
        printing.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of subprocess.Popen."""
        return self._process.exitcode

    def first_line(self) -> bytes:
        """What it prints when it is ready; nothing when it has ended before."""
        with os.fdopen(os.dup(self._printed.fileno()), "rb") as printed:
            return printed.readline()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. subprocess.TimeoutExpired: it runs on."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the simulator", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()

    def end(self) -> None:
        """kill -9, and nothing of it is left."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.stdin.close()
        self._printed.close()


def _run_simulator(arguments: list[str], environment: dict[str, str], given: Connection, printing: Connection) -> None:
    """In the forked process: what `python -m gpu_runner.simulator` does with this environment, stdin and stdout."""
    from gpu_runner.simulator.__main__ import main

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(given.fileno(), 0)
    os.dup2(printing.fileno(), 1)
    given.close()
    printing.close()
    sys.argv = ["python -m gpu_runner.simulator", *arguments]
    main()


@dataclass
class SimulatedEngine:
    """A running simulator. `stdin` of the process is ours: when this process dies, the engine does."""

    url: str
    process: EngineProcess

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def set_faults(self, *rules: dict[str, Any]) -> None:
        """Replace the faults in force."""
        body = json.dumps(rules).encode()
        urllib.request.urlopen(urllib.request.Request(self.url + "/simulator/faults", body), timeout=10).close()


@contextmanager
def simulated_engine(*arguments: str, model: str = "tiny") -> Iterator[SimulatedEngine]:
    """Start the simulator on a free port; killed at the end."""
    process = EngineProcess(["--model", model, "--exit-with-parent", *arguments])
    try:
        line = process.first_line()
        if not line:
            raise RuntimeError(f"the simulator did not start: exit status {process.wait(5)}")
        yield SimulatedEngine(json.loads(line)["url"], process)
    finally:
        process.end()
