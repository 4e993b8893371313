"""Seconds of a chain of three datasets, step after step and with `source.streaming`, and that kills lose nothing.

    python -m benchmarks.chain_streaming --rows 100000 --kills 6

`numbers` → `questions` → `answers`, `--rows` rows each, on machines of a simulated provider `--clock` times as fast as
an H100, one for each step. Both ways begin with an empty store and are one `batch-assets run answers --upstream` under
a deadline and a budget. While the second one works, `--kills` processes get SIGKILL: workers of runs, Dagster's daemon
and its code server in turn. Where the command ends for it, it is given again. At the end every table is read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batch_assets.orchestration.chain_shares import spent_since
from gpu_runner.fleet_database.database import FleetDatabase

STEPS = ("numbers", "questions", "answers")
BATCH_ROWS, BATCHES_PER_RUN = 250, 40
PRICE, BUDGET = 3.0, 6.0  # US dollars, of a machine per simulated hour and of the whole chain
TOKENS = 32
COMMANDS = 8  # at most, when kills end one
VICTIMS = ("worker", "daemon", "worker", "code server")
SERVERS = {"daemon": "batch_assets.dagster_internals.daemon", "code server": "batch_assets.local_dagster.code_server"}
GUARD = "process_guard"


@dataclass
class Way:
    """One of the two ways. `dead`: processes that were killed."""

    folder: Path
    rows: int
    clock: float
    streaming: bool
    dead: list[str] = field(default_factory=list)
    commands: int = 0

    def prepare(self) -> None:
        """Datasets and a fleet of their own."""
        shared = {
            "model": "Qwen/Qwen3-8B",
            "sampling": {"max_tokens": TOKENS},
            "batch_rows": BATCH_ROWS,
            "batches_per_run": BATCHES_PER_RUN,
        }
        numbers = self.folder / "numbers.csv"
        numbers.write_text("number\n" + "".join(f"{number}\n" for number in range(self.rows)))
        specs: list[dict[str, Any]] = [
            {"source": {"path": str(numbers)}, "id": "number", "prompt": {"user": "Say {{ number }}."}}
        ]
        for before in STEPS[:-1]:
            source = {"dataset": before, **({"streaming": True} if self.streaming else {})}
            specs.append({"source": source, "prompt": {"user": "More: {{ output }}"}})
        documents = [
            {"type": "batch_assets.GeneratedDataset", "attributes": {"name": name, **spec, **shared}}
            for name, spec in zip(STEPS, specs, strict=True)
        ]
        (self.folder / "defs").mkdir()
        (self.folder / "defs" / "defs.yaml").write_text(yaml.safe_dump_all(documents))
        offer = {"instance_type": "h100", "gpu": "H100", "price_per_hour": PRICE, "capacity": 6}
        provider = {"name": "sim", "region": "here", "boot_seconds": 5 * self.clock, "offers": [offer]}
        fleet = {"simulated": {"clock": self.clock, "providers": [provider]}, "idle_minutes": 1, "move_seconds": 10}
        (self.folder / "fleet.yaml").write_text(yaml.safe_dump(fleet))

    def environment(self) -> dict[str, str]:
        """Of every command."""
        names = {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}
        names["BATCH_ASSETS_FLEET"] = "fleet.yaml"
        return {**os.environ, **{name: str(self.folder / place) for name, place in names.items()}}

    def run(self, kills: int, deadline: float, rng: random.Random) -> tuple[float, float]:
        """Seconds until all tables are there, and US dollars; kills meanwhile. Raises RuntimeError."""
        began = time.monotonic()
        while self.commands < COMMANDS:
            self.commands += 1
            left, usd = max(60.0, deadline - (time.monotonic() - began)), self.spent()
            command = [sys.executable, "-m", "batch_assets.cli.main", "run", STEPS[-1], "--upstream", "--json"]
            command += ["--budget-usd", f"{BUDGET - usd:.6f}", "--deadline", f"{left:.0f}s"]
            with (self.folder / "errors.txt").open("ab") as said:
                process = subprocess.Popen(command, stdout=said, stderr=said, env=self.environment())
                self._follow(process, kills, rng)
            if process.returncode == 0:
                return time.monotonic() - began, self.spent()
        raise RuntimeError(f"{STEPS[-1]} is not complete after {COMMANDS} commands: {self.folder}/errors.txt")

    def spent(self) -> float:
        """US dollars of all machines so far."""
        if not (self.folder / "home" / "fleet.db").exists():
            return 0.0
        with self._fleet_db() as fleet_db:
            return spent_since(fleet_db, STEPS, 0.0)

    def _fleet_db(self) -> contextlib.closing[FleetDatabase]:
        return contextlib.closing(FleetDatabase(f"sqlite:///{self.folder}/home/fleet.db"))

    def _follow(self, process: subprocess.Popen[bytes], kills: int, rng: random.Random) -> None:
        """Wait for the end, and kill something each time that another part of the rows is committed."""
        while process.poll() is None:
            time.sleep(1.0)
            share = self.committed() / (len(STEPS) * self.rows)
            if len(self.dead) < kills and share > (len(self.dead) + 1) / (kills + 2):
                self._kill(process, VICTIMS[len(self.dead) % len(VICTIMS)], rng)

    def _kill(self, process: subprocess.Popen[bytes], kind: str, rng: random.Random) -> None:
        """Kill one of these, if there is one now."""
        if kind == "worker":
            with self._fleet_db() as fleet_db:
                found = [beat.pid for beat in fleet_db.runs() if beat.first_key and psutil.pid_exists(beat.pid)]
        else:
            below = psutil.Process(process.pid).children(recursive=True)
            words = {one.pid: " ".join(one.cmdline()) for one in below}
            found = [pid for pid, text in words.items() if SERVERS[kind] in text and GUARD not in text]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
                self.dead.append(kind)

    def committed(self) -> int:
        """Rows of committed batches, of all steps, about."""
        batches = sum(1 for step in STEPS for _ in (self.folder / "store" / step / "batches").glob("*/*.parquet"))
        return batches * BATCH_ROWS

    def snapshots(self) -> dict[str, int]:
        """How many snapshots each step has left in the store."""
        return {step: len(list((self.folder / "store" / step / "snapshots").glob("*/"))) for step in STEPS}

    def check(self) -> Mapping[str, int]:
        """Rows of each table. Raises RuntimeError where one is not there once with an answer."""
        found: dict[str, int] = {}
        for step in STEPS:
            published = self.folder / "store" / step / "published"
            parts = sorted((published / (published / "CURRENT").read_text().strip()).glob("part-*.parquet"))
            table = pa.concat_tables([pq.read_table(part, columns=["row_id", "error"]) for part in parts])
            ids = sorted(table.column("row_id").to_pylist(), key=int)
            if ids != [str(number) for number in range(self.rows)] or table.column("error").null_count != self.rows:
                raise RuntimeError(f"{step}: expected {self.rows:,} rows, each once with an answer: {self.folder}")
            found[step] = len(ids)
        return found


def main() -> None:
    """Both ways, and their ratio."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--clock", type=float, default=4.0, help="how much faster than an H100 the machines are")
    options.add_argument("--kills", type=int, default=6)
    options.add_argument("--deadline", type=float, default=7200.0, help="seconds, of each way")
    options.add_argument("--ways", default="after,streaming")
    options.add_argument("--folder", type=Path, help="a new folder that is kept")
    given = options.parse_args()
    seconds: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for way in given.ways.split(","):
            (folder / way).mkdir(parents=True)
            one = Way(folder / way, given.rows, given.clock, way == "streaming")
            one.prepare()
            kills = given.kills if way == "streaming" else 0
            seconds[way], usd = one.run(kills, given.deadline, random.Random(1))
            said: dict[str, object] = {
                "seconds": round(seconds[way], 1),
                "usd": round(usd, 4),
                "budget_held": usd <= BUDGET,
            }
            said |= {"deadline_held": seconds[way] <= given.deadline, "rows": one.check(), "commands": one.commands}
            print(f"{way}: {json.dumps(said | {'killed': one.dead, 'load': os.getloadavg()[1]})}", flush=True)
    if len(seconds) == 2:
        print(f"streaming ÷ step after step: {seconds['streaming'] / seconds['after']:.2f}")


if __name__ == "__main__":
    main()
