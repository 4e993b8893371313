"""Machines as host processes of this computer: what the providers `simulated` and `local` share.

Nothing here knows of offers or faults. Whoever may call: several processes at once, each of which may be killed at any
moment. What counts is one transaction: a machine exists from the moment its record is committed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import EndReason, Machine, MachineState, ProviderError
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.machine_host.daemon import ALIVE
from gpu_runner.providers.machine_host.registry import (
    MARK,
    HostPlan,
    MachineRecord,
    MachineRegistry,
    kill_marked,
)

KEEP_SECONDS = 86_400.0  # how long `list` still shows what has ended
LOG_SECONDS = 7 * 24 * 3600.0
STEP_SECONDS = 0.1
# A host starts in 0.1 s on an idle computer, and later than 4 s where each core has ten times the work it can do. One
# that cannot start ends, which is seen at once: only one that hangs is waited for.
START_SECONDS = 30.0

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

Admit = Callable[[sqlite3.Connection, MachineRecord], MachineRecord]


def keep_alive(home: Path) -> None:
    """Say to every host below `home` that the fleet lives. Without it for `orphan_seconds`, hosts end themselves."""
    home.mkdir(parents=True, exist_ok=True)
    (home / ALIVE).touch()


def new_record(
    offer: Offer, name: str, plan: HostPlan, *, provider: str, clock: float, max_num_seqs: int | None
) -> MachineRecord:
    """A machine as ordered; `rent` enters it and sets when its bill begins."""
    return MachineRecord(
        id=f"i-{secrets.token_hex(6)}",
        provider=provider,
        name=name,
        region=offer.region,
        instance_type=offer.instance_type,
        gpu=offer.gpu,
        gpus=offer.gpus,
        spot=offer.spot,
        price_per_hour=offer.price_per_hour,
        clock=clock,
        max_num_seqs=max_num_seqs,
        plan=plan.dump(),
        created_at=0.0,
    )


class Hosting:
    """Rents, lists and ends the machines of one provider."""

    def __init__(self, register: MachineRegistry, provider: str) -> None:
        self.register = register
        self.provider = provider

    def rent(self, record: MachineRecord, admit: Admit, environment: Mapping[str, str] | None = None) -> str:
        """Start a machine and return its id; if one of this name exists, its id, and nothing is started.

        `admit` looks at the fleet's database in the same transaction: it returns the record to enter, or raises
        NoCapacity or another ProviderError. Raises ProviderError also when the register cannot be written; nothing is
        rented then.
        """
        if not _NAME.fullmatch(record.name):
            raise ProviderError(f"machine name: expected {_NAME.pattern}, found {record.name!r:.80}")
        with self._written():
            self.register.close_dead()  # what a dead host held is free
            with self.register.transaction() as connection:
                if known := self.register.find(self.provider, record.name, connection):
                    return known.id
                admit(connection, record)  # before anything is started for it
            self._forget_old_logs()
            with self._waiting_host(record, environment or {}) as go:
                with self.register.transaction() as connection:
                    if known := self.register.find(self.provider, record.name, connection):
                        return known.id
                    self.register.add(connection, replace(admit(connection, record), created_at=self.register.now()))
                go()
                return record.id

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """A register that cannot be read or written is a provider that says no."""
        try:
            yield
        except (sqlite3.OperationalError, BrokenPipeError) as error:
            raise ProviderError(f"{self.register.path}: {error}") from error

    @contextlib.contextmanager
    def _waiting_host(self, record: MachineRecord, environment: Mapping[str, str]) -> Iterator[Callable[[], None]]:
        """A host that has its lock. It looks for its record when told to go, and when the body or this process ends."""
        with self.register.log_path(self.provider, record.name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpu_runner.providers.machine_host.daemon", str(self.register.home), record.id],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, MARK: record.id},
                start_new_session=True,
                bufsize=0,
            )
        assert process.stdin is not None and process.stdout is not None
        stdin = process.stdin
        with contextlib.closing(process.stdout), contextlib.closing(stdin):
            locked = _speaks(process.stdout, START_SECONDS) and process.stdout.read(7) == b"locked\n"
            if not locked:
                kill_marked(record.id)
            process.wait()  # it has detached
            if not locked:
                self.register.lock_path(record.id).unlink(missing_ok=True)
                raise ProviderError(f"no host within {START_SECONDS:.0f} s for {record.name}; see {log.name}")
            stdin.write(json.dumps(dict(environment)).encode() + b"\n")

            def go() -> None:
                with contextlib.suppress(BrokenPipeError):  # it was killed: its record is closed at the next look
                    stdin.write(b"go\n")

            yield go

    def find(self, name: str) -> MachineRecord | None:
        """The record of a machine as it stands now."""
        with self._written():
            self.register.close_dead()
            return self.register.find(self.provider, name)

    def occupied(self, connection: sqlite3.Connection, offer: Offer) -> int:
        """Machines of the offer that have not ended, or whose processes still hold the GPUs."""
        (found,) = connection.execute(
            "SELECT count(*) FROM machines WHERE provider = ? AND region = ? AND instance_type = ? AND spot = ? "
            "AND gone_at IS NULL",
            (self.provider, offer.region, offer.instance_type, offer.spot),
        ).fetchone()
        return int(found)

    def taken_gpus(self, connection: sqlite3.Connection) -> frozenset[str]:
        """What `HostPlan.gpus` says of the provider's machines whose processes may still hold GPUs."""
        query = "SELECT plan FROM machines WHERE provider = ? AND gone_at IS NULL"
        plans = connection.execute(query, (self.provider,)).fetchall()
        return frozenset(HostPlan.load(plan).gpus for (plan,) in plans)

    def machines(self, tag: str, lag: float = 0.0) -> list[Machine]:
        """Machines by tag, ended ones for a day. What is younger than `lag` seconds is not seen yet."""
        with self._written():
            self.register.close_dead()
            found = self.register.machines(self.provider, tag)
        now = self.register.now()
        return [
            describe(one, now, lag)
            for one in found
            if now - one.created_at >= lag and (one.ended_at is None or now - one.ended_at < KEEP_SECONDS + lag)
        ]

    def end(self, name: str) -> None:
        """Close the bill of the machine, if there is one; its host sees it within a moment and ends the engine."""
        if (record := self.find(name)) is not None:
            with self._written():
                self.register.end(record.id, EndReason.TERMINATED)

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """See `Provider.wait_ready`."""
        deadline = time.monotonic() + seconds
        log = self.register.log_path(self.provider, name)
        while True:
            record = self.find(name)
            if record is None:
                raise EngineStartError(f"{self.provider} has no machine {name}")
            if record.ended_at is not None:
                raise EngineStartError(f"{name} at {self.provider} has ended: {record.reason}; its log: {log}")
            if record.ready_at is not None:
                return describe(record, self.register.now())
            if time.monotonic() >= deadline:
                raise EngineStartError(f"{name} at {self.provider} was not ready after {seconds:.0f} s; its log: {log}")
            pause(STEP_SECONDS)

    def _forget_old_logs(self) -> None:
        """Delete the logs of machines that nobody touched for a week."""
        for log in self.register.folder.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - log.stat().st_mtime > LOG_SECONDS:
                    log.unlink()


def _speaks(pipe: IO[bytes], seconds: float) -> bool:
    """Something can be read within this time. By poll: a run has more files open than select can name."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def describe(record: MachineRecord, now: float, lag: float = 0.0) -> Machine:
    """A record as a provider tells it; its end is only told `lag` seconds later."""
    ended = record.ended_at is not None and now - record.ended_at >= lag
    state: MachineState = "ended" if ended else "running" if record.ready_at is not None else "booting"
    notice = None
    if not ended and record.take_at is not None and record.notice_seconds is not None:
        left = record.take_at - now
        notice = max(0.0, left) if left <= record.notice_seconds else None
    return Machine(
        name=record.name,
        id=record.id,
        state=state,
        endpoint=None if ended else record.endpoint,
        max_num_seqs=record.max_num_seqs,
        notice_seconds=notice,
        ended_seconds=now - record.ended_at if ended and record.ended_at is not None else None,
        billed_seconds=(now if record.ended_at is None or not ended else record.ended_at) - record.created_at,
        reason=record.reason if ended else None,
    )
