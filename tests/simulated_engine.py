"""A simulator process for tests: `with simulated_engine("--speed", "50") as engine: engine.url`."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class SimulatedEngine:
    """A running simulator. `stdin` of the process is ours: when this process dies, the engine does."""

    url: str
    process: subprocess.Popen[bytes]

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
    """Start `python -m gpu_runner.simulator` on a free port; killed at the end."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", model, "--exit-with-parent", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulator did not start: exit status {process.wait(5)}")
        yield SimulatedEngine(json.loads(line)["url"], process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
