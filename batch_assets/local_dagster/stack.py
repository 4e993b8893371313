"""Dagster on one machine: code server, daemon and webserver as children that cannot outlive us.

Each child runs under `gpu_runner.providers.process_guard`: when this process ends, however it ends, they
end. A child that dies is started again, which is what a service manager does in a real deployment. One stack per
DAGSTER_HOME, by a file lock; what an earlier one has left behind is ended first (`leftovers.py`). Nobody but the
webserver listens on a port: the code server, which runs code for whoever asks, is reached by a socket that only our
user may open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from batch_assets import file_permissions, settings
from batch_assets.local_dagster import first_daemon
from batch_assets.local_dagster.clock_setback import set_back_meanwhile, wake_sensors
from batch_assets.local_dagster.home import (
    LOGS,
    StackAddress,
    StackError,
    ensure_storage,
    prepare_home,
    prepare_store,
    refuse_second_daemon,
    running_stack,
)
from batch_assets.local_dagster.leftover_processes import (
    LeftoverError,
    StackMark,
    end_child,
    forget_stack,
    hold_alive,
    new_stack,
)
from batch_assets.local_dagster.location import wait_loaded
from gpu_runner.boot_clock import JumpWatch
from gpu_runner.providers.engine_process import free_port
from gpu_runner.providers.process_guard import GRACE_SECONDS

START_SECONDS = 120.0
RESTARTS = 20  # of one child, within
RESTARTS_SECONDS = 600.0
LOCK_SECONDS = 1.0  # longer than a look at who holds the lock takes
END_SECONDS = 3 * GRACE_SECONDS


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
    """The three processes, and `service`, a command beside them. Use as a context manager; leaving it ends them and
    everything they started.
    """

    def __init__(
        self, home: Path, *, port: int | None = None, webserver_later: bool = False, service: Sequence[str] = ()
    ) -> None:
        self.home = home
        self._webserver_later = webserver_later
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._lock: IO[str] | None = None
        self._alive: IO[bytes] | None = None
        self._mark: StackMark | None = None
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="stack", daemon=True)
        self._workspace = home / "workspace.yaml"
        self._server, self._daemon = _Child("code-server", []), _Child("daemon", [])
        webserver = ["batch_assets.webserver.server", "--port", str(self.port), "--workspace", str(self._workspace)]
        self._webserver = _Child("webserver", [sys.executable, "-m", *webserver])
        self._children = [
            self._server,
            self._daemon,
            self._webserver,
            *([_Child("serve", [*service])] if service else []),
        ]

    def __enter__(self) -> Stack:
        self._lock = _locked(self.home)
        self._lock.truncate(0)
        self._lock.write(json.dumps({"url": self.url, "port": self.port, "pid": os.getpid()}))
        self._lock.flush()
        try:
            self._prepare()
            self._start(self._server)  # it loads the definitions, which takes longest
            ensure_storage(self.home)
            refuse_second_daemon(self.home)
            if set_back_meanwhile(self.home):
                wake_sensors(self.home)
            for child in self._children:
                if child is not self._server and not (child is self._webserver and self._webserver_later):
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
        self._workspace.write_text(json.dumps({"load_from": [location]}) + "\n")
        options = [
            "start",
            "-s",
            socket,
            "--location-name",
            "batch_assets",
            "-m",
            "batch_assets.definitions",
            "-d",
            str(settings.PROJECT),
        ]
        self._server.command = [sys.executable, "-m", "batch_assets.local_dagster.code_server", *options]
        daemon = [str(self._mark.socket.with_name(first_daemon.ADDRESS)), "batch_assets.dagster_internals.daemon"]
        daemon += ["--workspace", str(self._workspace)]
        self._daemon.command = [sys.executable, "-m", "batch_assets.local_dagster.first_daemon", *daemon]

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
        """End what was rented: nobody looks after it here any more. What stays is named.

        Of a fleet that other computers share, end machines of this computer only: others' reapers look after the rest.
        """
        shared = settings.fleet_is_shared()
        if not (self.home / ("cloud.db" if shared else "fleet.db")).exists():
            return
        from batch_assets.local_dagster.local_fleet import the_fleet

        try:
            fleet = the_fleet()
            with fleet.open_database() as fleet_db:
                _, left = fleet.down(fleet_db, here=True)
                config = fleet.config()
                own = {one.name for one in config.local}
                own |= {one.name for one in config.simulated.providers} if config.simulated else set()
                if not shared and any(one.provider not in own for one in fleet_db.fleet()):
                    left += fleet.down(fleet_db)[1]
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"what is rented may still be billed, `batch-assets fleet down` ends it: {cause}\n")
            return
        if left:
            sys.stderr.write(f"still rented, `batch-assets fleet down` ends them: {', '.join(left)}\n")

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the webserver has loaded the definitions. Raises StackError with what the code server said."""
        wait_loaded(self.url, self.home, seconds, self._starts_well)
        self._follow_definitions()

    def start_webserver(self) -> None:
        """Start the webserver of a stack that was to have it later; nothing when it is there."""
        if self._webserver_later:
            self._webserver_later = False
            self._start(self._webserver)
            self._follow_definitions()

    @property
    def has_webserver(self) -> bool:
        """Whether the webserver was started."""
        return not self._webserver_later

    def wait_definitions(self) -> None:
        """Wait until the code server has loaded the definitions, or has failed to. Raises StackError."""
        from batch_assets.dagster_internals.code_server import answers

        deadline = time.monotonic() + START_SECONDS
        while not (self._mark and answers(self._mark.socket)):
            if time.monotonic() > deadline or not self._starts_well():
                said = f"the code server of {self.home} did not answer in time"
                raise StackError(f"{said}; its logs: {self.home / LOGS}")
            time.sleep(0.05)

    def launch(self, job: str, tags: Mapping[str, str], run_config: Mapping[str, Any]) -> str | None:
        """Queue a run of the job without the webserver; returns its run id, None when the code server has just died.

        Raises StackError with what the code server said of the definitions.
        """
        import dagster as dg

        from batch_assets.dagster_internals.code_server import LocationError, NotReached, launch
        from batch_assets.local_dagster.dagster_client import LOCATION, REPOSITORY

        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            try:
                return launch(instance, self._workspace, (LOCATION, REPOSITORY), job, tags, run_config)
            except NotReached:
                return None
            except LocationError as error:
                raise StackError(f"the definitions do not load:\n{error}") from None

    def _starts_well(self) -> bool:
        return all(len(child.starts) <= 3 for child in self._children)

    def _follow_definitions(self) -> None:
        """Load the definitions again when a dataset is added while we run."""
        from batch_assets.local_dagster.dagster_client import DagsterClient
        from batch_assets.local_dagster.definitions_watch import DefinitionsWatch, log_to

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
                [sys.executable, "-m", "gpu_runner.providers.process_guard", "--", *child.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=settings.PROJECT,
                env={**os.environ, **mark, "DAGSTER_DISABLE_TELEMETRY": "1"},
                pass_fds=[self._alive.fileno()] if self._alive else [],
                umask=file_permissions.umask(),
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
        """Sensors and the run queue would wait until it is as late again (`clock_setback.py`)."""
        sys.stderr.write(f"the clock was set back by {-seconds:.0f} s: Dagster's daemon is started again\n")
        _close(self._daemon)
        _end(self._daemon)
        try:
            wake_sensors(self.home)
        except Exception as error:
            sys.stderr.write(f"sensors may wait for {-seconds:.0f} s: {type(error).__name__}: {error}\n")
        if not self._stop.is_set():
            del self._daemon.starts[-1:]  # it did not die by itself
            self._restart(self._daemon)

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


@contextlib.contextmanager
def stack(meanwhile: Callable[[], None]) -> Iterator[tuple[StackAddress, Stack | None]]:
    """The stack of this DAGSTER_HOME: the one that runs already, or one of our own for as long as the body runs.

    One of our own is yielded too, as soon as its storage is there: its code server is still loading the definitions,
    and it has no webserver yet. `meanwhile` is called while it starts.
    """
    home = prepare_home()
    if found := running_stack(home):
        wait_loaded(found.url, home, START_SECONDS, lambda: running_stack(home) is not None)
        yield found, None
        return
    with Stack(home, webserver_later=True) as own:
        meanwhile()
        yield StackAddress(own.url, own.port, os.getpid()), own
