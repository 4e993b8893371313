"""`batch-assets` as a process of its own, on a home of its own, with every process below it written down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import yaml
from support.processes import command_line, runs
from support.timing import PATIENCE

from e2e.harness import eventually
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

NAME = "rhymes"
ROWS, BATCHES = 1000, 20
SPEC: dict[str, Any] = {
    "name": NAME,
    "source": {"grid": {"word": [f"word {i}" for i in range(100)], "tone": [f"tone {i}" for i in range(10)]}},
    "prompt": {"user": "A rhyme on {{ word }}, {{ tone }}."},
    "sampling": {"temperature": 0.7, "max_tokens": 64},
    "model": "test-model",
    "keep_columns": ["word", "tone"],
    "batch_rows": ROWS // BATCHES,
    "batches_per_run": BATCHES,
}


@dataclass
class Command:
    """A running `batch-assets`. `below` gathers every process it ever had below it while somebody looked."""

    process: subprocess.Popen[bytes]
    output: Path
    errors: Path
    below: dict[int, psutil.Process] = field(default_factory=dict)

    def note(self) -> None:
        """Write down the processes below."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for found in psutil.Process(self.process.pid).children(recursive=True):
                self.below.setdefault(found.pid, found)

    def find(self, *words: str) -> list[psutil.Process]:
        """Living processes below whose command line holds all the words."""
        self.note()
        found = []
        for process in self.below.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if all(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    def left(self) -> list[str]:
        """What is still there of the processes below."""
        return [f"{one.pid} {' '.join(command_line(one))}" for one in self.below.values() if runs(one)]

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self.note()
        self.process.send_signal(number)

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """Wait for its end; exit status and what it wrote to standard output."""
        deadline = time.monotonic() + PATIENCE * seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.note()
            time.sleep(0.1)
        assert self.process.poll() is not None, f"still running: {self.said()}"
        return self.process.returncode, self.output.read_text()

    def said(self) -> str:
        """What it wrote to standard error so far."""
        return self.errors.read_text()


@dataclass
class CommandProject:
    """A home, a store and a dataset of 1,000 rows in 20 batches."""

    folder: Path
    environment: dict[str, str]
    commands: list[Command] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def store(self) -> DatasetStore:
        return DatasetStore(open_objects(str(self.folder / "store")), NAME)

    def declare(self, attributes: Mapping[str, Any]) -> None:
        file = self.folder / "defs" / str(attributes["name"]) / "defs.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": dict(attributes)}))

    def engine(self, **more: Any) -> None:
        """What fleet.yaml holds: one simulated engine."""
        engine = {"name": "embedded", "kind": "simulated", "max_num_seqs": 256, **more}
        (self.folder / "fleet.yaml").write_text(yaml.safe_dump({"engines": [engine]}))

    def start(self, *words: str, **environment: str) -> Command:
        output, errors = (self.folder / f"{name}-{len(self.commands)}.txt" for name in ("output", "errors"))
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "batch_assets.cli.main", *words],
                stdout=out,
                stderr=err,
                env={**os.environ, **self.environment, **environment},
            )
        command = Command(process, output, errors)
        self.commands.append(command)
        return command

    def ask(self, *words: str, **environment: str) -> tuple[int, str]:
        """Run a command to its end."""
        return self.start(*words, **environment).end()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("status", NAME, "--json")[1])
        return found

    def working(self, command: Command, batches: int = 1) -> None:
        """Wait until a run has committed some batches and goes on."""

        def committed() -> bool:
            assert command.process.poll() is None, command.said()
            command.note()
            return len(self.store.objects_by_batch()) >= batches

        eventually(committed, 90, f"{batches} committed batches")
        command.note()

    @contextlib.contextmanager
    def instance(self) -> Iterator[dg.DagsterInstance]:
        with dg.DagsterInstance.from_config(str(self.home)) as found:
            yield found

    def leases(self) -> list[tuple[str, int, bool]]:
        """Every lease of every run: instance, epoch, whether it was given back."""
        with (
            self.instance() as instance,
            contextlib.closing(FleetDatabase(f"sqlite:///{self.home}/fleet.db")) as fleet_db,
        ):
            return [lease for run in instance.get_runs() for lease in fleet_db.history(run.run_id)]


@contextlib.contextmanager
def site(folder: Path) -> Iterator[CommandProject]:
    """A project; whatever was started on it is ended afterwards."""
    names = {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}
    environment = {name: str(folder / value) for name, value in names.items()}
    environment["BATCH_ASSETS_FLEET"] = str(folder / "fleet.yaml")
    found = CommandProject(folder, environment)
    found.declare(SPEC)
    found.engine(speed=20.0)
    try:
        yield found
    finally:
        for command in found.commands:
            if command.process.poll() is None:
                command.process.kill()
                command.process.wait()
