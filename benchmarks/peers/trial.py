"""One measurement: a system does a work, is killed on the way or not, and its output is read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb

from benchmarks.peers.systems import System, Task
from benchmarks.peers.works import MODEL, Engine, Row, Work, write_lines, write_rows
from benchmarks.start import Watch

LOOK_SECONDS = 0.2
KILL_AT = 0.6  # of the rows answered


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement. Seconds are those of the wall clock after the command, `cpu` is in seconds of a processor.

    `first`: when the engine was asked the first row; `last`: when it had answered as many as there are (no kill).
    `engine_start`: of an engine that a user would start for this job;
    it is not in `seconds`, but in those of a system that starts its own. `asked`: rows that the engine was asked, after
    a kill in both attempts. `killed_at`: when it was killed; `seconds` has both attempts.
    """

    system: str
    work: str
    rows: int
    kill: bool
    seconds: float = 0.0
    first: float | None = None
    last: float | None = None
    engine_start: float = 0.0
    cpu: float = 0.0
    asked: int | None = None
    in_output: int = 0
    lost: int = 0
    doubled: int = 0
    killed_at: float | None = None
    load: tuple[float, float] = (0.0, 0.0)
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, int, bool]:
        """What was measured."""
        return self.system, self.work, self.rows, self.kill


class Attempt:
    """The system's process and all that it starts, known by a mark in their environment."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._mark = f"BATCH_ASSETS_TRIAL={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        self.watch = Watch(self._mark)
        self.began = time.monotonic()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env={**environment, name: value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self) -> float:
        """Seconds since the command; reads what its processes have used."""
        since = time.monotonic() - self.began
        self.watch.look(since)
        return since

    @property
    def cpu(self) -> float:
        """Seconds of a processor, of all processes."""
        return sum(one.cpu for one in self.watch.processes.values())

    def kill(self) -> None:
        """`kill -9` for all of them, until none is found twice: one that begins another program has no environment."""
        empty = 0
        for _ in range(100):
            found = [int(entry.name) for entry in Path("/proc").iterdir() if self._is_ours(entry)]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            empty = 0 if found or self.process.poll() is None else empty + 1
            if empty == 2:
                return
            time.sleep(0.05)
        raise SystemExit(f"processes of {self.process.args!r} outlive kill -9")

    def _is_ours(self, entry: Path) -> bool:
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                return self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
        return False


def measure(
    system: System,
    python: str,
    work: Work,
    rows: list[Row],
    engine: Engine,
    model: str,
    folder: Path,
    kill: bool,
    minutes: float,
) -> Trial:
    """One trial, in a new folder. Its log is `log` there."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "own").mkdir(parents=True)
    write_rows(folder / "rows.jsonl", rows)
    write_lines(folder / "lines.jsonl", rows, work.max_tokens)
    task = Task(
        rows=str(folder / "rows.jsonl"),
        lines=str(folder / "lines.jsonl"),
        url=engine.url,
        model=MODEL,
        max_tokens=work.max_tokens,
        in_flight=system.in_flight,
        folder=str(folder / "own"),
        model_folder=model,
    )
    system.prepare(task)
    started = 0.0 if engine.simulated else engine.started
    trial = Trial(system.name, work.name, len(rows), kill, engine_start=started, load=(os.getloadavg()[0], 0.0))
    trial = _attempts(trial, system, python, task, engine, folder / "log", minutes)
    if not system.own_engine:
        trial = replace(trial, asked=engine.counts()[0])
    trial = replace(trial, load=(trial.load[0], os.getloadavg()[0]))
    return trial if trial.error else counted(trial, rows, system, task)


def _attempts(
    trial: Trial, system: System, python: str, task: Task, engine: Engine, log: Path, minutes: float
) -> Trial:
    """The command, and once more after a kill."""
    environment = {**os.environ, **system.variables(task)}
    command, spent, cpu = system.command(python, task), 0.0, 0.0
    first = last = killed_at = None
    before = seen = 0  # rows asked of an engine that ends with the command
    while True:
        attempt = Attempt(command, environment, log)
        try:
            while attempt.process.poll() is None:
                now, answered = spent + attempt.look(), 0
                with contextlib.suppress(OSError):
                    asked, answered = engine.counts()
                    seen = max(seen, asked)
                if seen and first is None:
                    first = now
                if answered >= trial.rows and last is None and not trial.kill:
                    last = now
                if trial.kill and killed_at is None and answered >= KILL_AT * trial.rows:
                    killed_at = now
                    break
                if now > minutes * 60:
                    error = f"not done after {minutes:g} minutes, {answered:,} answered"
                    return replace(trial, seconds=now, first=first, killed_at=killed_at, error=error)
                time.sleep(LOOK_SECONDS)
            else:
                spent, cpu = spent + time.monotonic() - attempt.began, cpu + attempt.cpu
                break
        finally:
            attempt.kill()
        spent, cpu = spent + time.monotonic() - attempt.began, cpu + attempt.cpu
        before, seen = before + seen, 0
    last = None if trial.kill else last or spent
    done = replace(trial, seconds=spent, first=first, last=last, cpu=cpu, killed_at=killed_at, asked=before + seen)
    if attempt.process.returncode:
        text = log.read_text(errors="replace").strip().splitlines()
        return replace(done, error=f"status {attempt.process.returncode}: {text[-1][-300:] if text else 'no log'}")
    return done


def counted(trial: Trial, rows: list[Row], system: System, task: Task) -> Trial:
    """What the durable output has of the rows."""
    try:
        answers = system.answers(task)
    except duckdb.IOException as error:
        answers, trial = [], replace(trial, error=f"ended with status 0, and without an output: {error}")
    found = Counter(name for name, output in answers if output is not None)
    lost = sum(row.id not in found for row in rows)
    doubled = sum(times > 1 for times in found.values())
    return replace(trial, in_output=found.total(), lost=lost, doubled=doubled)
