"""The way to an engine from outside the cluster: `kubectl port-forward` as a guarded child, started again when it ends.

kubectl was measured to be the better way in than the official Python client, which has no back-pressure. It ends
whenever a connection through it breaks, so a thread starts it again, on any free port: the one that clients know is
ours all the time (`port_relay`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

from gpu_runner.providers.base import EngineAccess, ProviderError, ProviderUnclear
from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.port_relay import PortRelay

OPEN_SECONDS = 15.0
WAITS = (0.1, 0.5, 1.0, 2.0, 5.0)
STEADY_SECONDS = 10.0  # a tunnel that stood for so long begins again with the shortest wait
LONGEST_LINE = 4096
END_SECONDS = 8.0
LATELY_SECONDS = 60.0
# What kubectl prints when it listens, and for each connection.
_LISTENS = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d{1,5}) -> \d+")
_HANDLES = b"Handling connection for"


_tunnels: weakref.WeakValueDictionary[tuple[str, str], Tunnel] = weakref.WeakValueDictionary()


def find_kubectl() -> str | None:
    """Path of kubectl, or None."""
    return shutil.which("kubectl")


def open_forward(config: KubernetesProviderConfig, name: str, api_key: str) -> EngineAccess:
    """A tunnel to the pod `name`; its address lasts until it is closed. Raises ProviderError, ProviderUnclear."""
    kubectl = find_kubectl()
    if kubectl is None:
        raise ProviderError(
            f"{config.name}: expected kubectl on PATH: pods are not reached from outside their cluster without it"
        )
    tunnel = Tunnel([kubectl, *_arguments(config, name)])
    _tunnels[config.name, name] = tunnel
    try:
        tunnel.wait_open(OPEN_SECONDS)
    except BaseException:
        tunnel.close()
        raise
    return EngineAccess(f"http://127.0.0.1:{tunnel.port}", api_key, tunnel.close)


def last_trouble(config: KubernetesProviderConfig, name: str) -> str:
    """What kubectl complained of lately on the way to this pod, in this process; "": of nothing."""
    tunnel = _tunnels.get((config.name, name))
    return tunnel.said if tunnel is not None and time.monotonic() - tunnel.said_at < LATELY_SECONDS else ""


def _arguments(config: KubernetesProviderConfig, name: str) -> list[str]:
    file = [] if config.kubeconfig is None else ["--kubeconfig", str(config.kubeconfig.expanduser())]
    context = [] if config.context is None else ["--context", config.context]
    where = ["--namespace", config.namespace, "--address", "127.0.0.1"]
    return [*file, *context, "port-forward", *where, f"pod/{name}", f":{config.port}"]


class Tunnel:
    """A command that says on which local port it listens, kept running until `close`; `port` is ours and leads there.

    `command` must not end by itself.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.said, self.said_at = "", 0.0  # the last trouble that it wrote, and when (monotonic)
        self._relay = PortRelay()
        self.port = self._relay.port
        self._command = list(command)
        self._guard = threading.Lock()
        self._listens = False
        self._open = threading.Event()
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="port-forward", daemon=True)
        self._thread.start()

    def wait_open(self, seconds: float) -> None:
        """Wait until the command listens. Raises ProviderUnclear with what it said."""
        if not self._open.wait(seconds):
            raise ProviderUnclear(f"no tunnel within {seconds:.0f} s: {self.said or 'kubectl says nothing'}")

    def close(self) -> None:
        """End the command. From any thread, and more than once."""
        self._closed.set()
        with self._guard:
            process = self._process
        if process is not None:
            _end(process)
        self._relay.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            began = time.monotonic()
            if (process := self._start()) is None:
                return
            assert process.stdout is not None
            with process.stdout:
                while line := process.stdout.readline(LONGEST_LINE):
                    self._hear(line)
            if self._listens:
                self._relay.hold()
            else:
                self._relay.break_off()
            self._listens = False
            _end(process)
            failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            self._closed.wait(WAITS[min(failures, len(WAITS) - 1)] if failures else WAITS[0])

    def _hear(self, line: bytes) -> None:
        if found := _LISTENS.match(line):
            self._relay.lead_to(int(found[1]))
            self._listens = True
            self._open.set()
        elif not line.startswith(_HANDLES):
            self.said = line.decode(errors="replace").strip()[:200] or self.said
            self.said_at = time.monotonic()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._guard:
            if self._closed.is_set():
                return None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_runner.providers.process_guard", "--", *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
            return self._process


def _environment() -> dict[str, str]:
    """Ours, as credential helpers of kubectl need it, without what is for our own processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER_", "BATCH_ASSETS_"))}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The guard ends its command when our end of its standard input is closed."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
