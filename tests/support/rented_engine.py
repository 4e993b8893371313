"""An engine as a rented machine runs it: the simulator as a process of its own, with the order's words and key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_runner.providers.engine_process import free_port


class RentedEngine:
    """Runs until `close`, which is what a power-off does to it; `url` stays the same.

    `words`: of the container's command line. Its host and port are replaced, as the network of a container does.
    `log`: where the engine writes down by itself what it was asked.
    """

    def __init__(self, key: str, words: Sequence[str], log: Path, *more: str) -> None:
        port = free_port()
        kept = [word for at, word in enumerate(words) if not {"--host", "--port"} & {word, *words[max(0, at - 1) : at]}]
        command = [sys.executable, "-m", "gpu_runner.simulator", *kept, *more, "--port", str(port)]
        command += ["--request-log", str(log), "--api-key-env", "VLLM_API_KEY", "--exit-with-parent"]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closed when we end: the engine ends with us
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "VLLM_API_KEY": key},
        )

    @property
    def port(self) -> int:
        """On loopback."""
        return int(self.url.rsplit(":", 1)[1])

    def close(self) -> None:
        """kill -9. More than once does no harm."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
