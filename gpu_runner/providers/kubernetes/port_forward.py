"""The way to an engine from outside the cluster: `kubectl port-forward` as a guarded child, started again when it ends.

kubectl was measured to be the better way in than the official Python client, which has no back-pressure. It ends
whenever a connection through it breaks, so a thread starts it again, on any free port: the one that clients know is
ours all the time (`port_relay`). Another thread looks at the way while nothing comes back (`tunnel_health`).
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
from collections.abc import Callable, Sequence

from gpu_runner.providers.base import EngineAccess, ProviderError, ProviderUnclear
from gpu_runner.providers.kubernetes.api import ApiAway, ApiRefused, ClusterApi, CredentialsError
from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.port_relay import PortRelay
from gpu_runner.providers.kubernetes.tunnel_health import PROBE_SECONDS, QUIET_SECONDS, Probe, TunnelHealth
from gpu_runner.reachability import Reachability

OPEN_SECONDS = 15.0
WAITS = (0.1, 0.5, 1.0, 2.0, 5.0)
STEADY_SECONDS = 10.0  # a tunnel that stood for so long begins again with the shortest wait
LONGEST_LINE = 4096
END_SECONDS = 8.0
LATELY_SECONDS = 60.0
LOOK_SECONDS = 0.5
DOWN_SECONDS = 1.5  # kubectl takes some tenths of a second to start again
# The stream that kubectl asked for until Kubernetes 1.31; servers that have it no more answer 400, which says enough.
STREAM_HEADERS = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1", "X-Stream-Protocol-Version": "portforward.k8s.io"}
# What kubectl prints when it listens, and for each connection.
_LISTENS = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d{1,5}) -> \d+")
_HANDLES = b"Handling connection for"


_tunnels: weakref.WeakValueDictionary[tuple[str, str], Tunnel] = weakref.WeakValueDictionary()


def find_kubectl() -> str | None:
    """Path of kubectl, or None."""
    return shutil.which("kubectl")


def open_forward(config: KubernetesProviderConfig, api: ClusterApi, name: str, api_key: str) -> EngineAccess:
    """A tunnel to the pod `name`; its address lasts until it is closed. Raises ProviderError, ProviderUnclear."""
    kubectl = find_kubectl()
    if kubectl is None:
        raise ProviderError(
            f"{config.name}: expected kubectl on PATH: pods are not reached from outside their cluster without it"
        )
    pod = f"/api/v1/namespaces/{config.namespace}/pods/{name}"
    tunnel = Tunnel([kubectl, *_arguments(config, name)], lambda: probe_way(api, pod, config.port))
    _tunnels[config.name, name] = tunnel
    try:
        tunnel.wait_open(OPEN_SECONDS)
    except BaseException:
        tunnel.close()
        raise
    return EngineAccess(f"http://127.0.0.1:{tunnel.port}", api_key, tunnel.close, lambda: tunnel.reachability)


def probe_way(api: ClusterApi, pod: str, port: int) -> Probe:
    """Ask the API server for the pod at this path, then its kubelet for a stream to it. Raises nothing of the API's."""
    try:
        api.get(pod)
    except ApiAway:
        return Probe.AWAY
    except ApiRefused as error:
        return Probe.AWAY if error.status >= 500 else Probe.ANSWERED
    except CredentialsError:
        return Probe.ANSWERED  # nothing is known
    try:
        status = api.stream_status(f"{pod}/portforward", {"ports": str(port)}, STREAM_HEADERS, PROBE_SECONDS)
    except ApiAway:
        return Probe.SILENT
    except CredentialsError:
        return Probe.ANSWERED
    return Probe.SILENT if status >= 500 else Probe.ANSWERED  # 5xx: of the API server, which gets no connection


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

    `command` must not end by itself. `probe` looks at the way, in some seconds; it is called while nothing comes back.
    """

    def __init__(self, command: Sequence[str], probe: Callable[[], Probe]) -> None:
        self.said, self.said_at = "", 0.0  # the last trouble that it wrote, and when (monotonic)
        self._relay = PortRelay()
        self.port = self._relay.port
        self._command = list(command)
        self._guard = threading.Lock()
        self._probe = probe
        self._health = TunnelHealth(time.monotonic)
        self._listens = False
        self._down_at = 0.0  # monotonic: when the command stopped listening
        self._open = threading.Event()
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="port-forward", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="port-forward-health", daemon=True)
        self._thread.start()
        self._watcher.start()

    @property
    def reachability(self) -> Reachability:
        """What is known of the way. Any thread may ask."""
        return self._health.reachability

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
        self._watcher.join(2 * LOOK_SECONDS)  # a look that is under way ends in some seconds, and changes nothing then

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
            if self._listens and self.reachability is not Reachability.LOST:
                self._relay.hold()
            else:
                self._relay.break_off()
            if self._listens:
                self._listens, self._down_at = False, time.monotonic()
            _end(process)
            failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            self._closed.wait(WAITS[min(failures, len(WAITS) - 1)] if failures else WAITS[0])

    def _watch(self) -> None:
        """Look at the way while nothing comes back; cut what hangs on one that leads nowhere."""
        next_at = 0.0
        while not self._closed.wait(LOOK_SECONDS):
            if self._listens and self._relay.quiet_seconds() < QUIET_SECONDS:
                self._health.heard()
            elif self._doubtful() and time.monotonic() >= next_at:
                was_lost = self.reachability is Reachability.LOST
                self._health.probed(self._probe())
                next_at = time.monotonic() + self._health.next_probe_seconds
                if self.reachability is Reachability.LOST and not was_lost:
                    self._relay.cut()
                    self._restart()

    def _doubtful(self) -> bool:
        return self._listens or (self._open.is_set() and time.monotonic() - self._down_at >= DOWN_SECONDS)

    def _restart(self) -> None:
        """The command hangs on what is gone: `_run` starts it again. Until that one listens, nothing is heard."""
        with self._guard:
            process = self._process
        if process is not None:
            _end(process)
        with self._guard:
            if self._process is process:
                self._listens = False

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
