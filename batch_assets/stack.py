"""Dagster on one machine: code server, daemon and webserver as children that cannot outlive us.

Each child runs under `gpu_runner.providers.guard`: when this process ends, however it ends, they end. A child that dies
is started again, which is what a service manager does in a real deployment. One stack per DAGSTER_HOME, by a file lock;
what an earlier one has left behind is ended first (`leftovers.py`). Nobody but the webserver listens on a port: the
code server, which runs code for whoever asks, is reached by a socket that only our user may open.
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

from batch_assets import access, settings, web_token
from batch_assets.clock import set_back_meanwhile, wake_sensors
from batch_assets.leftovers import LeftoverError, StackMark, end_child, forget_stack, hold_alive, new_stack
from batch_assets.loopback import keep_loopback_direct
from gpu_runner.addresses import direct
from gpu_runner.providers.guard import GRACE_SECONDS
from gpu_runner.providers.local import free_port
from gpu_runner.small_pages import read_page
from gpu_runner.steady import JumpWatch

# Never `logs`: dagster-webserver uploads whatever lies in DAGSTER_HOME/logs, also when telemetry is off
# (dagster_webserver/cli.py, dagster/_core/telemetry_upload.py).
LOGS = "process_logs"
START_SECONDS = 120.0
RESTARTS = 20  # of one child, within
RESTARTS_SECONDS = 600.0
LOCK_SECONDS = 1.0  # longer than a look at who holds the lock takes
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
    try:
        access.make_private(home)
    except access.AccessError as error:
        raise StackError(str(error)) from None
    os.environ["DAGSTER_HOME"] = str(home)
    keep_loopback_direct(os.environ)
    if not (home / "dagster.yaml").exists():
        shutil.copyfile(settings.PROJECT / "deploy" / "local" / "dagster.yaml", home / "dagster.yaml")
    return home


def prepare_store() -> None:
    """The store's folder, for its user or the group only; one that is there already is left as it is, and named.

    Raises StackError.
    """
    scheme, _, path = settings.store_root().rpartition("://")
    if scheme not in ("", "file"):
        return
    folder = Path(path).expanduser().resolve()
    try:
        if not folder.exists():
            access.make_private(folder)
        elif said := access.too_wide(folder):
            sys.stderr.write(f"{said}\n")
    except (OSError, access.AccessError) as error:
        raise StackError(f"the store cannot be made: {error}") from None


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

    def recent_starts(self) -> int:
        """How often it was started of late."""
        return sum(time.monotonic() - start < RESTARTS_SECONDS for start in self.starts)


class Stack:
    """The three processes. Use as a context manager; leaving it ends them and everything they started."""

    def __init__(self, home: Path, *, port: int | None = None) -> None:
        self.home = home
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._lock: IO[str] | None = None
        self._alive: IO[bytes] | None = None
        self._mark: StackMark | None = None
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="stack", daemon=True)
        workspace = str(home / "workspace.yaml")
        self._server = _Child("code-server", [])
        self._children = [
            self._server,
            _Child("daemon", _dagster("dagster._daemon", "run -w", workspace)),
            _Child("webserver", _dagster("batch_assets.webserver", f"--port {self.port} --workspace", workspace)),
        ]

    def __enter__(self) -> Stack:
        self._lock = _locked(self.home)
        self._lock.truncate(0)
        self._lock.write(json.dumps({"url": self.url, "port": self.port, "pid": os.getpid()}))
        self._lock.flush()
        try:
            self._prepare()
            self._start(self._server)  # it loads the definitions, which takes longest, and needs no storage for that
            ensure_storage(self.home)
            if set_back_meanwhile(self.home):
                wake_sensors(self.home)
            for child in self._children:
                if child is not self._server:
                    self._start(child)
            self._watcher.start()
        except BaseException as error:  # a signal too: what has been started must end
            self.__exit__()
            if isinstance(error, LeftoverError):
                raise StackError(str(error)) from None
            raise
        return self

    def _prepare(self) -> None:
        """Nobody of an earlier stack is left; where our children meet is known."""
        self._mark = new_stack(self.home)
        self._alive = hold_alive(self.home)
        prepare_store()
        socket = str(self._mark.socket)
        location = {"grpc_server": {"socket": socket, "location_name": "batch_assets"}}
        (self.home / "workspace.yaml").write_text(json.dumps({"load_from": [location]}) + "\n")
        options = ["start", "-s", socket, "-m", "batch_assets.definitions", "-d", str(settings.PROJECT)]
        self._server.command = [sys.executable, "-m", "batch_assets.code_server", *options]

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join(timeout=5)
        for child in self._children:
            _close(child)
        for child in self._children:
            _end(child)
        self._end_instances()
        if self._mark:
            forget_stack(self.home, self._mark)
        if self._alive:
            self._alive.close()
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
        self._follow_definitions()

    def _follow_definitions(self) -> None:
        """Load the definitions again when a dataset is added while we run."""
        from batch_assets.dagster_client import DagsterClient
        from batch_assets.definitions_watch import DefinitionsWatch, log_to

        client = DagsterClient(StackAddress(self.url, self.port, os.getpid()))
        watch = DefinitionsWatch(client.reload, log_to(self.home / LOGS / "definitions.log"))
        threading.Thread(target=watch.watch, args=(self._stop,), name="definitions", daemon=True).start()

    def pids(self) -> dict[str, int]:
        """Process id of each child's guard."""
        return {child.name: child.process.pid for child in self._children if child.process}

    def _start(self, child: _Child) -> None:
        logs = self.home / LOGS
        logs.mkdir(exist_ok=True)
        child.starts.append(time.monotonic())
        mark = self._mark.environment(self.home, child.name) if self._mark else {"DAGSTER_HOME": str(self.home)}
        with (logs / f"{child.name}.log").open("ab") as log:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "gpu_runner.providers.guard", "--", *child.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=settings.PROJECT,
                env={**os.environ, **mark, "DAGSTER_DISABLE_TELEMETRY": "1"},
                pass_fds=[self._alive.fileno()] if self._alive else [],
                umask=access.umask(),
                start_new_session=True,
            )

    def _watch(self) -> None:
        clock, said = JumpWatch(), ""
        while not self._stop.wait(0.5):
            try:
                if (jumped := clock.jumped()) < 0:
                    self._clock_set_back(jumped)
                for child in self._children:
                    if child.process and child.process.poll() is not None and child.recent_starts() < RESTARTS:
                        self._restart(child)
            except Exception as error:  # a full disk, say: what is dead is started again once that is over
                found = f"processes of Dagster cannot be looked after: {type(error).__name__}: {error}\n"
                if found != said:
                    said = found
                    with contextlib.suppress(OSError):
                        sys.stderr.write(found)

    def _clock_set_back(self, seconds: float) -> None:
        """Sensors and the run queue would wait until it is as late again (batch_assets/clock.py)."""
        sys.stderr.write(f"the clock was set back by {-seconds:.0f} s: Dagster's daemon is started again\n")
        daemon = next(child for child in self._children if child.name == "daemon")
        _close(daemon)
        _end(daemon)
        try:
            wake_sensors(self.home)
        except Exception as error:
            sys.stderr.write(f"sensors may wait for {-seconds:.0f} s: {type(error).__name__}: {error}\n")
        if not self._stop.is_set():
            del daemon.starts[-1:]  # it did not die by itself
            self._restart(daemon)

    def _restart(self, child: _Child) -> None:
        """Start it again once nothing of it is left: of two daemons, each would give a lost run a retry."""
        _close(child)
        try:
            if self._mark:
                end_child(self.home, self._mark, child.name)
        except LeftoverError as error:
            with (self.home / LOGS / f"{child.name}.log").open("a") as log:
                log.write(f"not started again yet: {error}\n")
            return
        if not self._stop.is_set():
            self._start(child)


def _locked(home: Path) -> IO[str]:
    """The home's lock file, held. Raises StackError when another stack has it; not for somebody who only looks."""
    lock = (home / "stack.lock").open("a+")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if time.monotonic() > deadline:
                lock.close()
                raise StackError(f"Dagster already runs on {home}; end it first, or use another DAGSTER_HOME") from None
            time.sleep(0.05)


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
        state = _location_state(url, home)
        if state == "loaded":
            return
        if state is not None and state != "loading":
            raise StackError(f"the definitions do not load:\n{state}")
        time.sleep(0.2)
    raise StackError(f"Dagster on {home} did not answer in time at {url}; its logs: {home / LOGS}")


def _location_state(url: str, home: Path) -> str | None:
    """ "loaded", "loading", an error text, or None while nobody answers."""
    query = (
        "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename "
        "... on PythonError { message } } } } } }"
    )
    request = urllib.request.Request(
        f"{url}/graphql",
        json.dumps({"query": query}).encode(),
        {"Content-Type": "application/json", **web_token.headers(home)},
    )
    try:
        with direct.open(request, timeout=10) as answer:
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
def stack(*, port: int | None = None, meanwhile: Callable[[], None] | None = None) -> Iterator[StackAddress]:
    """The stack of this DAGSTER_HOME: the one that runs already, or one of our own for as long as the body runs.

    `meanwhile` is called while one of our own starts.
    """
    home = prepare_home()
    if found := running_stack(home):
        _wait_loaded(found.url, home, START_SECONDS, lambda: running_stack(home) is not None)
        yield found
        return
    with Stack(home, port=port) as own:
        if meanwhile is not None:
            meanwhile()
        own.wait_ready()
        yield StackAddress(own.url, own.port, os.getpid())
