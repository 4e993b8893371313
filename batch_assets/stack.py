"""Dagster on one machine: code server, daemon and webserver as children that cannot outlive us.

Each child runs under `gpu_runner.providers.guard`: when this process ends, however it ends, they end. A child that dies
is started again, which is what a service manager does in a real deployment. One stack per DAGSTER_HOME, by a file lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from batch_assets import settings
from gpu_runner.providers.guard import GRACE_SECONDS
from gpu_runner.providers.local import free_port
from gpu_runner.small_pages import read_page

# Never `logs`: dagster-webserver uploads whatever lies in DAGSTER_HOME/logs, also when telemetry is off
# (dagster_webserver/cli.py, dagster/_core/telemetry_upload.py).
LOGS = "process_logs"
START_SECONDS = 120.0
RESTARTS = 20
ANSWER_BYTES = 16 << 20
END_SECONDS = 3 * GRACE_SECONDS


class StackError(Exception):
    """Dagster could not be started, or another stack holds this DAGSTER_HOME."""


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Where a running stack answers."""

    url: str
    port: int
    pid: int


def prepare_home() -> Path:
    """DAGSTER_HOME with a dagster.yaml in it; a file that is there already is left as it is."""
    home = settings.dagster_home()
    home.mkdir(parents=True, exist_ok=True)
    os.environ["DAGSTER_HOME"] = str(home)
    if not (home / "dagster.yaml").exists():
        shutil.copy(settings.PROJECT / "deploy" / "local" / "dagster.yaml", home / "dagster.yaml")
    return home


def ensure_storage(home: Path) -> None:
    """Create Dagster's tables, once and by one process.

    Processes that open a new home at the same moment leave it unusable ("alembic_version has more than one head").
    """
    mark = home / "storage.ready"
    with (home / "storage.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists():
            return
        import dagster as dg

        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.get_runs_count()
            instance.all_asset_keys()
            instance.all_instigator_state()
        mark.touch()


def running_stack(home: Path) -> StackAddress | None:
    """The stack that holds this home now, or None."""
    path = home / "stack.lock"
    if not path.exists():
        return None
    with path.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with contextlib.suppress(ValueError, TypeError):
                return StackAddress(**json.loads(lock.read(ANSWER_BYTES)))
            return None
    return None


def port_taken(port: int) -> bool:
    """Whether somebody listens on this port of 127.0.0.1, or nobody may."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


@dataclass
class _Child:
    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    starts: list[float] = field(default_factory=list)


class Stack:
    """The three processes. Use as a context manager; leaving it ends them and everything they started."""

    def __init__(self, home: Path, *, port: int | None = None) -> None:
        self.home = home
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._lock: IO[str] | None = None
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="stack", daemon=True)
        code_port = free_port()
        workspace = home / "workspace.yaml"
        self._workspace_text = (
            "load_from:\n  - grpc_server:\n"
            f"      host: 127.0.0.1\n      port: {code_port}\n      location_name: batch_assets\n"
        )
        self._workspace = workspace
        definitions = ("-m", "batch_assets.definitions", "-d", str(settings.PROJECT))
        self._children = [
            _Child("code-server", _dagster("dagster", f"code-server start -h 127.0.0.1 -p {code_port}", *definitions)),
            _Child("daemon", _dagster("dagster._daemon", "run -w", str(workspace))),
            _Child("webserver", _dagster("dagster_webserver", f"-h 127.0.0.1 -p {self.port} -w", str(workspace))),
        ]

    def __enter__(self) -> Stack:
        self._lock = (self.home / "stack.lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StackError(
                f"Dagster already runs on {self.home}; end it first, or use another DAGSTER_HOME"
            ) from None
        self._lock.truncate(0)
        self._lock.write(json.dumps({"url": self.url, "port": self.port, "pid": os.getpid()}))
        self._lock.flush()
        try:
            ensure_storage(self.home)
            self._workspace.write_text(self._workspace_text)
            for child in self._children:
                self._start(child)
            self._watcher.start()
        except BaseException:  # a signal too: what has been started must end
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join(timeout=5)
        for child in self._children:
            _close(child)
        for child in self._children:
            _end(child)
        self._end_instances()
        if self._lock:
            self._lock.truncate(0)
            self._lock.close()

    def _end_instances(self) -> None:
        """End what was rented on this machine; what cannot be ended here ends itself when nobody looks after it."""
        if not (self.home / "cloud.db").exists():
            return
        from batch_assets.fleet_command import the_fleet

        try:
            fleet = the_fleet()
            with fleet.open_book() as book:
                fleet.down(book, here=True)
        except Exception as error:
            sys.stderr.write(f"instances are left to end themselves: {type(error).__name__}: {error}\n")

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the webserver has loaded the definitions. Raises StackError with what the code server said."""
        _wait_loaded(self.url, self.home, seconds, lambda: all(len(child.starts) <= 3 for child in self._children))

    def pids(self) -> dict[str, int]:
        """Process id of each child's guard."""
        return {child.name: child.process.pid for child in self._children if child.process}

    def _start(self, child: _Child) -> None:
        logs = self.home / LOGS
        logs.mkdir(exist_ok=True)
        child.starts.append(time.monotonic())
        with (logs / f"{child.name}.log").open("ab") as log:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "gpu_runner.providers.guard", "--", *child.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=settings.PROJECT,
                env={**os.environ, "DAGSTER_HOME": str(self.home), "DAGSTER_DISABLE_TELEMETRY": "1"},
                start_new_session=True,
            )

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            for child in self._children:
                if child.process and child.process.poll() is not None and len(child.starts) < RESTARTS:
                    if child.process.stdin:
                        child.process.stdin.close()
                    self._start(child)


def _dagster(module: str, options: str, *words: str) -> list[str]:
    return [sys.executable, "-m", module, *options.split(), *words]


def _close(child: _Child) -> None:
    """Close the guard's standard input: it then ends the child and everything that it started."""
    if child.process is not None and child.process.stdin:
        with contextlib.suppress(OSError):
            child.process.stdin.close()


def _end(child: _Child) -> None:
    if child.process is None:
        return
    try:
        child.process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        child.process.terminate()
        child.process.wait(timeout=10)


def _wait_loaded(url: str, home: Path, seconds: float, healthy: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and healthy():
        state = _location_state(url)
        if state == "loaded":
            return
        if state is not None and state != "loading":
            raise StackError(f"the definitions do not load:\n{state}")
        time.sleep(0.2)
    raise StackError(f"Dagster on {home} did not answer in time at {url}; its logs: {home / LOGS}")


def _location_state(url: str) -> str | None:
    """ "loaded", "loading", an error text, or None while nobody answers."""
    query = (
        "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename "
        "... on PythonError { message } } } } } }"
    )
    request = urllib.request.Request(
        f"{url}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            entries = json.loads(read_page(answer, ANSWER_BYTES, 10))["data"]["workspaceOrError"]["locationEntries"]
    except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError):
        return None
    if not entries or any(entry["loadStatus"] != "LOADED" for entry in entries):
        return "loading"
    for entry in entries:
        found = entry["locationOrLoadError"]
        if found and found["__typename"] == "PythonError":
            return None if "Could not reach user code server" in found["message"] else str(found["message"])
    return "loaded"


@contextlib.contextmanager
def stack(*, port: int | None = None) -> Iterator[StackAddress]:
    """The stack of this DAGSTER_HOME: the one that runs already, or one of our own for as long as the body runs."""
    home = prepare_home()
    if found := running_stack(home):
        _wait_loaded(found.url, home, START_SECONDS, lambda: running_stack(home) is not None)
        yield found
        return
    with Stack(home, port=port) as own:
        own.wait_ready()
        yield StackAddress(own.url, own.port, os.getpid())
