"""The machines of this computer's own clouds, in one SQLite file `<home>/cloud.db`. There is no server.

Whoever calls a provider writes here, and so does the host process of each machine (`daemon.py`). A host holds a file
lock for as long as it lives: a record whose lock is free belongs to a dead host, whoever killed it, and is closed by
the next caller that looks. Bills run from `created_at` to `ended_at`; `gone_at` says that the processes are gone too.
Times are Unix seconds of this computer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from gpu_runner.boot_clock import Steady, boot_name, boot_seconds
from gpu_runner.providers.base import EndReason
from gpu_runner.providers.process_marks import end_marked
from gpu_runner.sqlite_files import use_write_ahead_log

MARK = "GPU_RUNNER_MACHINE"  # environment variable of a machine's processes: its id
BUSY_SECONDS, SWITCH_SECONDS = 4.0, 10.0
ENFORCE_SECONDS = 15.0  # a host ends its engine within two grace periods of the guard; after this it is helped
GONE_SECONDS = 5.0  # what a helped host's processes take to be gone

_TABLES = """
CREATE TABLE IF NOT EXISTS machines (
    id TEXT PRIMARY KEY, provider TEXT NOT NULL, name TEXT NOT NULL, region TEXT NOT NULL, instance_type TEXT NOT NULL,
    gpu TEXT NOT NULL, gpus INTEGER NOT NULL, spot INTEGER NOT NULL, price_per_hour REAL NOT NULL, clock REAL NOT NULL,
    max_num_seqs INTEGER, plan TEXT NOT NULL, created_at REAL NOT NULL, ready_at REAL, endpoint TEXT, take_at REAL,
    notice_seconds REAL, ended_at REAL, reason TEXT NOT NULL, gone_at REAL, UNIQUE (provider, name));
CREATE INDEX IF NOT EXISTS machines_not_gone ON machines (id) WHERE gone_at IS NULL;
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, provider TEXT NOT NULL, call TEXT NOT NULL,
    name TEXT NOT NULL, result TEXT);
CREATE TABLE IF NOT EXISTS counters (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS faults (
    number INTEGER PRIMARY KEY AUTOINCREMENT, provider TEXT, rule TEXT NOT NULL, left INTEGER);
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, provider TEXT NOT NULL, change TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value REAL NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What a host does: real seconds of boot, how the boot ends, and the engine's command (`{port}`, `{model}`).

    `boot`: `works`; `fails`: the provider gives up after the boot time; `hangs`: never ready, billed until terminated.
    `orphan_seconds`: without a sign of life of the fleet for so long, the host ends everything. `gpus`: what the engine
    gets as CUDA_VISIBLE_DEVICES; "": nothing is set.
    """

    command: tuple[str, ...]
    model: str
    boot_seconds: float = 0.0
    boot: str = "works"
    orphan_seconds: float = 120.0
    gpus: str = ""

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(astuple(self))

    @classmethod
    def load(cls, text: str) -> HostPlan:
        """Read what `dump` wrote."""
        command, *others = json.loads(text)
        return cls(tuple(command), *others)


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """One machine as the register has it; columns of the table. `take_at`: when a spot machine is taken away."""

    id: str
    provider: str
    name: str
    region: str
    instance_type: str
    gpu: str
    gpus: int
    spot: bool
    price_per_hour: float
    clock: float
    max_num_seqs: int | None
    plan: str
    created_at: float
    ready_at: float | None = None
    endpoint: str | None = None
    take_at: float | None = None
    notice_seconds: float | None = None
    ended_at: float | None = None
    reason: EndReason | None = None
    gone_at: float | None = None


_NAMES = [field.name for field in fields(MachineRecord)]
_COLUMNS = ", ".join(_NAMES)
_PLACES = ", ".join("?" for _ in _NAMES)
_FORKED: list[object] = []


class MachineRegistry:
    """The file, and the few statements that are allowed on it. Safe to use from several threads and processes."""

    def __init__(self, home: Path) -> None:
        self.home = Path(home)
        self.path = self.home / "cloud.db"
        self.folder = self.home / "machines"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._local = threading.local()
        self._prepare()

    def _prepare(self) -> None:
        use_write_ahead_log(self.connection().execute, SWITCH_SECONDS)
        with self.transaction() as connection:
            for statement in filter(str.strip, _TABLES.split(";")):
                connection.execute(statement)
            self._set_clock(connection)

    def _set_clock(self, connection: sqlite3.Connection) -> None:
        """Set the clock for all, where this process is the first since the boot that opens the register."""
        self._boot = boot_name()
        key, offset = f"clock {self._boot}", time.time() - boot_seconds()
        connection.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (key, offset))
        (self._offset,) = connection.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()

    def now(self) -> float:
        """The providers' clock in Unix seconds, by which machines are billed. Setting the machine's changes nothing."""
        return float(self._offset) + boot_seconds() if self._boot else time.time()

    def connect(self) -> sqlite3.Connection:
        """A new connection; autocommit outside of `transaction`."""
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def connection(self) -> sqlite3.Connection:
        """This thread's own connection. It stays open, because SQLite syncs the file when the last one closes."""
        held: tuple[int, sqlite3.Connection] | None = getattr(self._local, "held", None)
        if held is None or held[0] != os.getpid():
            if held is not None:
                _FORKED.append(held)  # a fork's copy is not ours to use, nor to close
            self._local.held = held = (os.getpid(), self.connect())
        return held[1]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One writer at a time; rolled back when the body raises. Not to be nested."""
        connection = self.connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def lock_path(self, machine_id: str) -> Path:
        """The file that a machine's host holds locked."""
        return self.folder / f"{machine_id}.lock"

    def log_path(self, provider: str, name: str) -> Path:
        """Where the machine's engine and host write."""
        return self.folder / f"{provider}.{name}.log"

    # records

    def add(self, connection: sqlite3.Connection, record: MachineRecord) -> None:
        """Insert a new machine; its bill runs."""
        values = {**asdict(record), "reason": record.reason or ""}  # "": it has not ended
        connection.execute(f"INSERT INTO machines ({_COLUMNS}) VALUES ({_PLACES})", tuple(values.values()))

    def find(self, provider: str, name: str, connection: sqlite3.Connection | None = None) -> MachineRecord | None:
        """The machine of this name."""
        found = self._select("provider = ? AND name = ?", (provider, name), connection)
        return found[0] if found else None

    def get(self, machine_id: str, connection: sqlite3.Connection | None = None) -> MachineRecord | None:
        """The machine with this id."""
        found = self._select("id = ?", (machine_id,), connection)
        return found[0] if found else None

    def machines(
        self, provider: str | None = None, tag: str = "", connection: sqlite3.Connection | None = None
    ) -> list[MachineRecord]:
        """Machines of a provider (None: of all) whose name starts with `tag`, ended ones too, oldest first."""
        who = (provider, provider, len(tag), tag)
        return self._select("(? IS NULL OR provider = ?) AND substr(name, 1, ?) = ?", who, connection)

    def _select(
        self, where: str, values: tuple[Any, ...], connection: sqlite3.Connection | None = None
    ) -> list[MachineRecord]:
        query = f"SELECT {_COLUMNS} FROM machines WHERE {where} ORDER BY created_at, id"
        lines = (connection or self.connection()).execute(query, values).fetchall()
        return [_record(line) for line in lines]

    def _change(self, statement: str, values: tuple[Any, ...]) -> bool:
        return self.connection().execute(f"UPDATE machines SET {statement}", values).rowcount > 0

    def ready(self, machine_id: str, endpoint: str) -> bool:
        """The engine answers. False: the machine has ended meanwhile."""
        return self._change(
            "ready_at = ?, endpoint = ? WHERE id = ? AND ended_at IS NULL", (self.now(), endpoint, machine_id)
        )

    def end(self, machine_id: str, reason: EndReason, at: float | None = None) -> bool:
        """Close the bill, once. False: it was closed before."""
        at = self.now() if at is None else at
        return self._change(
            "ended_at = max(?, created_at), reason = ? WHERE id = ? AND ended_at IS NULL",
            (at, reason.value, machine_id),
        )

    def take(self, machine_id: str, at: float, notice_seconds: float | None) -> bool:
        """Have a machine taken away at `at`, announced `notice_seconds` before; None: without notice."""
        return self._change(
            "take_at = ?, notice_seconds = ? WHERE id = ? AND ended_at IS NULL", (at, notice_seconds, machine_id)
        )

    def gone(self, machine_id: str) -> None:
        """Nothing of the machine runs any more. Killed half-way, this is done again by the next caller that looks."""
        self.lock_path(machine_id).unlink(missing_ok=True)
        self._change("gone_at = ? WHERE id = ? AND gone_at IS NULL", (self.now(), machine_id))

    # hosts

    def close_dead(self) -> None:
        """Close the records of hosts that died, and end what they or a host that does not react have left running.

        A machine whose host was killed was lost: its bill ends at the host's last sign of life.
        """
        for record in self._select("gone_at IS NULL", ()):
            silent = silent_seconds(self.lock_path(record.id))
            if silent is not None:
                self.end(record.id, EndReason.INTERRUPTED, self.now() - silent)
                kill_marked(record.id)
                self.gone(record.id)
            elif record.ended_at is not None and self.now() - record.ended_at > ENFORCE_SECONDS:
                kill_marked(record.id)

    def wait_gone(self, pause: Callable[[float], None] = time.sleep, steady: Steady = boot_seconds) -> list[str]:
        """Wait until no process of a machine that has ended is left, at most as long as it takes to help a deaf host.

        Returns the names of machines with processes all the same. A look counts for as long as it takes by `steady`:
        processes that cannot be killed, or a register that others write, take seconds each time.
        """
        waited = 0.0
        while True:
            began = steady()
            self.close_dead()
            left = [record.name for record in self._select("gone_at IS NULL AND ended_at IS NOT NULL", ())]
            if not left or waited > ENFORCE_SECONDS + GONE_SECONDS:
                return left
            waited += steady() - began + 0.1
            pause(0.1)


def _record(line: tuple[Any, ...]) -> MachineRecord:
    values = dict(zip(_NAMES, line, strict=True))
    reason = EndReason(values["reason"]) if values["reason"] else None
    return MachineRecord(**{**values, "spot": bool(values["spot"]), "reason": reason})


def hold(path: Path) -> int:
    """Lock the file for the life of this process; returns its descriptor. Raises BlockingIOError if it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def silent_seconds(path: Path) -> float | None:
    """None while a host holds the file; after its death, how long ago it last touched it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0.0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return max(0.0, time.time() - os.fstat(descriptor).st_mtime)
    except BlockingIOError:
        return None
    finally:
        os.close(descriptor)


def kill_marked(machine_id: str) -> None:
    """SIGKILL to every process but ours that carries the machine's mark, whatever group, session or parent it has."""
    mark = f"{MARK}={machine_id}".encode()
    end_marked(lambda entries: mark in entries, grace=0.0, insist=2.0)
