"""`batch-assets serve` as a process of its own, that tests can end and start again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from gpu_runner.providers.engine_process import free_port
from support.timing import PATIENCE

ROOT = Path(__file__).parent.parent.parent


@dataclass
class ServedDoor:
    """Everything of it is below `home`: `home` (DAGSTER_HOME), `store`, `log`. `more`: of its environment."""

    home: Path
    endpoint: str
    slots: int = 16
    more: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start it; returns at once."""
        environment = {
            **os.environ,
            "DAGSTER_HOME": str(self.home / "home"),
            "BATCH_ASSETS_STORE": str(self.home / "store"),
            **self.more,
        }
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(self.port)]
        command += ["--endpoint", self.endpoint, "--max-num-seqs", str(self.slots)]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.launch()
        deadline = time.monotonic() + PATIENCE * 60
        while not self.answers():
            self.check_lives(deadline)
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether it serves."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def check_lives(self, deadline: float) -> None:
        """Its log where it has ended, or where it is late."""
        assert self.process is None or self.process.poll() is None, self.log()
        assert time.monotonic() < deadline, self.log()

    def log(self) -> str:
        """The end of what it wrote."""
        return (self.home / "log").read_text()[-3000:]

    def end(self, number: int) -> int:
        """Send a signal and wait: its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        """Nothing of it is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
