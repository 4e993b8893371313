"""The host of one machine: `python -m gpu_runner.providers.machine_host.daemon HOME ID`, a detached process.

It stands for the rented computer. It boots for as long as the plan says, starts the engine under the guard, writes the
endpoint into the machine's record, and then watches the record ten times a second: when the bill was closed, the
machine is taken away, or the fleet gave no sign of life (`<home>/fleet.alive` was not touched for `orphan_seconds`),
it ends the engine and itself. An engine that dies later leaves the machine running, as on any VM.

Start: the host detaches, locks its file and prints a line. The caller sends the engine's own environment as a line of
JSON, enters the record and says "go". So there is never a record without a host, and a host whose record was not
entered (the caller was killed, refused, or another caller was first) ends with our standard input.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.engine_process import EngineProcess, EngineStartError
from gpu_runner.providers.machine_host.registry import (
    HostPlan,
    MachineRecord,
    MachineRegistry,
    hold,
    kill_marked,
)

ALIVE = "fleet.alive"
POLL_SECONDS = 0.1
SIGN_SECONDS = 1.0
LEAD_SECONDS = 2.0  # the simulator starts in less; a real boot has no boot time to wait for


class MachineEnds(Exception):
    """The machine's time is over."""

    def __init__(self, reason: EndReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Watch:
    """What may end a machine, looked at in every pause. Seconds of waiting are monotonic: a set clock ends nothing."""

    def __init__(self, register: MachineRegistry, record: MachineRecord, orphan_seconds: float) -> None:
        self.record = record
        self._register = register
        self._connection = register.connect()
        self._version = -1
        self._lock = register.lock_path(record.id)
        self._alive = register.home / ALIVE
        self._orphan_seconds = orphan_seconds
        self._alive_mark = self._alive_mtime()
        self._alive_at = self._signed_at = time.monotonic()

    def pause(self, _: float = POLL_SECONDS) -> None:
        """Wait a moment. Raises MachineEnds."""
        time.sleep(POLL_SECONDS)
        self._read_record()
        if self.record.ended_at is not None:
            raise MachineEnds(self.record.reason or EndReason.TERMINATED)
        if self.record.take_at is not None and self._register.now() >= self.record.take_at:
            raise MachineEnds(EndReason.INTERRUPTED)
        if time.monotonic() - self._signed_at >= min(SIGN_SECONDS, self._orphan_seconds / 4):
            self._exchange_signs()

    def _read_record(self) -> None:
        """Look again, but only after another connection has written (PRAGMA data_version costs microseconds)."""
        try:
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                found = self._register.get(self.record.id, self._connection)
                if found is None:
                    raise MachineEnds(EndReason.ORPHANED)
                self.record, self._version = found, version
        except sqlite3.OperationalError:
            return  # busy; we look again soon

    def _exchange_signs(self) -> None:
        """Touch our file, and look whether the fleet touched its own. Without our file the whole home is gone."""
        now = self._signed_at = time.monotonic()
        try:
            os.utime(self._lock)
        except OSError:
            raise MachineEnds(EndReason.ORPHANED) from None
        if (mark := self._alive_mtime()) != self._alive_mark:
            self._alive_mark, self._alive_at = mark, now
        if now - self._alive_at > self._orphan_seconds:
            raise MachineEnds(EndReason.ORPHANED)

    def _alive_mtime(self) -> int:
        try:
            return self._alive.stat().st_mtime_ns
        except OSError:
            return 0


class Host:
    """The life of one machine."""

    def __init__(self, register: MachineRegistry, record: MachineRecord, environment: dict[str, str]) -> None:
        self._register = register
        self._record = record
        self._plan = HostPlan.load(record.plan)
        devices = {"CUDA_VISIBLE_DEVICES": self._plan.gpus} if self._plan.gpus else {}
        self._environment = {**environment, **devices}
        self._watch = Watch(register, record, self._plan.orphan_seconds)
        self._engine: EngineProcess | None = None

    def live(self) -> None:
        """Boot, run, end; nothing of the machine is left afterwards."""
        reason = EndReason.INTERRUPTED  # also when a signal or an error of ours ends the host
        try:
            self._boot()
            self._run()
        except MachineEnds as end:
            reason = end.reason
        except EngineStartError as error:
            print(f"host: {error}", file=sys.stderr, flush=True)
            reason = EndReason.BOOT_FAILED
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            _insist(lambda: self._register.end(self._record.id, reason))
            if reason is EndReason.INTERRUPTED:
                kill_marked(self._record.id)  # it is taken away, not asked
            if self._engine is not None:
                self._engine.close()
            kill_marked(self._record.id)
            _insist(lambda: self._register.gone(self._record.id))

    def _boot(self) -> None:
        until = time.monotonic() + self._plan.boot_seconds
        while time.monotonic() < until - LEAD_SECONDS:
            self._watch.pause()
        if self._plan.boot == "works":
            self._engine = EngineProcess(
                self._plan.command,
                model=self._plan.model,
                log=self._register.log_path(self._record.provider, self._record.name),
                environment=self._environment,
            )
            self._engine.wait_ready(math.inf, self._watch.pause)
        while time.monotonic() < until or self._plan.boot == "hangs":
            self._watch.pause()
        if self._plan.boot == "fails":
            raise MachineEnds(EndReason.BOOT_FAILED)
        assert self._engine is not None
        endpoint = self._engine.endpoint
        _insist(lambda: self._register.ready(self._record.id, endpoint))

    def _run(self) -> None:
        assert self._engine is not None
        engine_lives = True
        while True:
            self._watch.pause()
            if engine_lives and not self._engine.alive():
                engine_lives = False
                kill_marked(self._record.id)  # if only the guard was killed, the engine is left


def _insist(write: Callable[[], object]) -> None:
    """Write although the file is busy; given up after a minute, or when the file is gone. The next caller closes it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            write()
            return
        except sqlite3.OperationalError as error:
            if time.monotonic() > deadline or not _is_locked(error):
                print(f"host: {error}", file=sys.stderr, flush=True)
                return
            time.sleep(0.2)


def _is_locked(error: sqlite3.OperationalError) -> bool:
    """Another connection is writing. The low byte is SQLite's primary result code (sqlite.org/rescode.html)."""
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _leave(number: int, _: object) -> None:
    raise MachineEnds(EndReason.INTERRUPTED)


def main(home: Path, machine_id: str) -> None:
    """Detach, wait for the record to be entered, live."""
    if os.fork():
        os._exit(0)
    register = MachineRegistry(home)
    lock = register.lock_path(machine_id)
    hold(lock)
    try:
        os.write(1, b"locked\n")
    except BrokenPipeError:  # the caller was killed before we held it
        lock.unlink(missing_ok=True)
        return
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    environment = sys.stdin.buffer.readline()
    sys.stdin.buffer.readline()  # "go", or the end of the caller
    os.dup2(null, 0)
    record = register.get(machine_id)
    if record is None:
        lock.unlink(missing_ok=True)
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    Host(register, record, json.loads(environment)).live()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
