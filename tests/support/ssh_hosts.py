"""Hosts for tests: sshd in network namespaces, and a provider whose engine is the simulator."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpu_runner.providers.ssh.config import SshProviderConfig
from gpu_runner.providers.ssh.connections import connections
from gpu_runner.providers.ssh.provider import SshProvider
from support.documents import REPOSITORY
from support.processes import environment, runs

TOOL = REPOSITORY.parent / "shared" / "tools" / "vm-namespaces"
_BASHRC = Path.home() / ".bashrc"
_SITE = "SSH_SITE"  # in the environment of its engines: the folder of the hosts
SIMULATOR = [sys.executable, "-m", "gpu_runner.simulator", "--model", "{model}", "--port", "{port}"]
SIMULATOR += ["--api-key-env", "VLLM_API_KEY"]


def missing() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if not _tool():
        return "needs the tool vm-namespaces"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    wanted = ("ip", "unshare", "nsenter", "ssh-keygen")
    absent = [name for name in wanted if not shutil.which(name)] + ["sshd"] * (not Path("/usr/sbin/sshd").exists())
    return f"needs {', '.join(absent)}" if absent else ""


def _tool() -> str:
    tools = os.environ.get("BATCH_ASSETS_TEST_TOOLS")
    found = Path(tools) / TOOL.name if tools else TOOL
    return str(found) if found.exists() else ""


@dataclass(frozen=True)
class Hosts:
    """Running hosts, numbered from 1. Their file system is this computer's; `folder` is where they write.

    What the login shell reads first on them (~/.bashrc) is a file of their own: this computer's may start what takes
    locks (pyenv does), and a host that loses its power would keep them for all others.
    """

    folder: Path
    lines: tuple[tuple[str, ...], ...]
    variables: dict[str, str]

    def do(self, what: str, number: int) -> None:
        """`cut`, `heal`, `kill` or `boot` a host."""
        _call(self.variables, what, str(number))
        if what == "boot":
            self.own_startup_file(number)

    def own_startup_file(self, number: int) -> None:
        """Let the login shell of a host read `startup_file` and nothing else."""
        self.startup_file.touch()
        if not _BASHRC.exists():
            return
        name = f"{self.variables['VMNS_NAME']}{number}"
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=60, check=True)
        mount = ["mount", "--bind", str(self.startup_file), str(_BASHRC)]
        subprocess.run(["nsenter", "--mount", "--target", pids.stdout.split()[-1], *mount], timeout=60, check=True)

    @property
    def startup_file(self) -> Path:
        """What the login shells of the hosts read before each command, if this computer's root has such a file."""
        return self.folder / "bashrc of hosts"

    def run(self, number: int, script: str, *words: str) -> str:
        """What a shell of the host says."""
        command = shlex.join(["sh", "-c", script, "sh", *words])
        return _call(self.variables, "ssh", str(number), command)

    def processes(self, machine_id: str = "") -> list[psutil.Process]:
        """What runs of a machine's engine, or of all engines, on any of these hosts."""
        found = []
        for process in psutil.process_iter():
            variables = environment(process)
            ours = variables.get(_SITE) == str(self.folder) and variables.get("GPU_RUNNER_MACHINE", "")
            if ours and ours.startswith(machine_id) and runs(process):
                found.append(process)
        return found

    def config(self, **settings: Any) -> SshProviderConfig:
        """The provider that has all hosts."""
        one = {"gpu": "H100", "gpu_memory_gib": 80, "price_per_hour": 3.6, **settings.pop("host", {})}
        hosts = [
            {"name": f"host{number}", "address": address, "port": int(port), **one}
            for number, (_, address, port, *_) in enumerate(self.lines, 1)
        ]
        given = {
            "name": "lab",
            "hosts": hosts,
            "user": self.lines[0][3],
            "key_file": self.lines[0][4],
            "known_hosts": str(Path(self.variables["VMNS_DIR"]) / "known_hosts"),
            "command": SIMULATOR,
            "folder": str(self.folder / "machines of hosts"),
            "environment": {"PYTHONPATH": str(REPOSITORY), _SITE: str(self.folder)},
        }
        return SshProviderConfig.model_validate({**given, **settings})

    def provider(self, home: Path, **settings: Any) -> SshProvider:
        """The provider as an object of its own."""
        return SshProvider(home, self.config(**settings))


def _call(variables: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [_tool(), *words], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def ssh_hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """So many hosts; afterwards nothing of them runs."""
    number = os.getpid() % 200 + 20
    variables = {"VMNS_NAME": f"ba{number}", "VMNS_NET": f"10.77.{number}", "VMNS_DIR": str(folder / "vms")}
    try:
        lines = tuple(tuple(line.split()) for line in _call(variables, "up", str(count)).splitlines())
        hosts = Hosts(folder, lines, variables)
        for one in range(1, count + 1):
            hosts.own_startup_file(one)
        yield hosts
    except BaseException:
        print(_report(variables), flush=True)
        raise
    finally:
        connections().close()
        _call(variables, "down")


def _report(variables: dict[str, str]) -> str:
    """What runs on the hosts, and the ends of their sshd's logs: for the output of a test that failed."""
    said = []
    for log in sorted(Path(variables["VMNS_DIR"]).glob("*.log")):
        found = subprocess.run(
            ["ip", "netns", "pids", log.stem], capture_output=True, text=True, timeout=10, check=False
        )
        lines = found.stdout.split()
        ps = ["ps", "-o", "pid,ppid,stat,wchan:20,etimes,args", "-p", ",".join(lines)]
        shown = subprocess.run(ps, capture_output=True, text=True, timeout=10, check=False).stdout if lines else "off\n"
        said.append(f"host {log.stem}:\n{shown[:4000]}{log.read_text(errors='replace')[-1000:]}")
    return "\n".join(said)
