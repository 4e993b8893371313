"""The processes of `online_kills`: services, consumers, Redis and the simulated engine, killed and measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_runner.providers.engine_process import free_port

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `rate`: requests/s. `kill_every`: mean seconds between kills; 0: none."""

    queue: str = "redis"
    rate: float = 300.0
    seconds: float = 60.0
    kill_every: float = 10.0
    services: int = 1
    consumers: int = 1
    kind: str = "chat"
    fsync: str = "always"
    seed: int = 1


class Process:
    """A process that is killed and started again."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._used = 0.0

    @property
    def cpu_seconds(self) -> float:
        """CPU that it has used, over all its lives."""
        return self._used + (0.0 if self._process is None else cpu_seconds(self._process.pid))

    @property
    def pid(self) -> int:
        """Of its present life."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._used += cpu_seconds(self._process.pid)
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def cpu_seconds(pid: int) -> float:
    """CPU of a process, user and system (proc(5), fields 14 and 15 of `stat`)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def simulator() -> contextlib.AbstractContextManager[tuple[str, int]]:
    """An engine that answers at once, and has room for everybody: its address, and its process."""
    words = ["--model", "tiny", "--exit-with-parent", "--max-num-seqs", "512", "--output-tokens", "fixed:4"]
    return _engine("gpu_runner.simulator", *words, "--weights-ms", "2", "--event-loop", "uvloop")


def fixed_engine(lists: int) -> contextlib.AbstractContextManager[tuple[str, int]]:
    """So many engines that take 200 ms for a list of up to 64 texts: their address, and their process."""
    return _engine("benchmarks.fixed_engine", "--lists", str(lists))


@contextlib.contextmanager
def _engine(module: str, *words: str) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], process.pid
        finally:
            process.kill()


class OnlineProcesses:
    """All processes of a run. `fronts`: ports that accept requests."""

    def __init__(self, plan: Plan, folder: Path, engine: str) -> None:
        self.processes: list[Process] = []
        self.fronts: list[int] = []
        redis: dict[str, str] = {}
        if plan.queue == "redis":
            port = self._keep(folder / "redis-0", plan.fsync)
            redis = {"BATCH_ASSETS_ONLINE_REDIS": f"redis://127.0.0.1:{port}/0"}
        if plan.kind == "embedding":
            redis |= {"BATCH_ASSETS_MICRO_BATCHES": "on"}
        accepts = "0" if plan.queue == "redis" and plan.consumers else "256"
        for number in range(plan.services if plan.queue == "redis" else 1):
            self.fronts.append(self._serve(folder, engine, f"service-{number}", {**redis, _CONCURRENCY: accepts}))
        for number in range(plan.consumers if plan.queue == "redis" else 0):
            self._serve(folder, engine, f"consumer-{number}", {**redis, _CONCURRENCY: "256"})

    def _keep(self, folder: Path, fsync: str) -> int:
        folder.mkdir()
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", fsync]
        self.processes.append(Process(folder.name, command, {}, folder / "redis.log"))
        return port

    def _serve(self, folder: Path, engine: str, name: str, environment: dict[str, str]) -> int:
        home, port = folder / name, free_port()
        home.mkdir()
        environment |= {"DAGSTER_HOME": str(home), "BATCH_ASSETS_STORE": str(home / "store")}
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(port), "--endpoint", engine]
        self.processes.append(Process(name, command, environment, folder / f"{name}.log"))
        return port

    def start(self) -> None:
        """Start all."""
        for process in self.processes:
            process.start()

    def end(self) -> None:
        """Kill all."""
        for process in self.processes:
            process.kill()


_CONCURRENCY = "BATCH_ASSETS_ONLINE_CONCURRENCY"
