"""A large dataset through the whole platform: source → snapshot → range runs → ledger → published table.

    python benchmarks/scale.py [--rows 2000000] [--database sqlite|postgres] [--engines 2] [--batches-per-run 500]

Everything is what a deployment has: daemon, webserver, code server and one worker process per run; only the engines are
simulated ones, fast enough not to be the limit. Says how long each phase took, how many batches a second reached the
ledger, how long the sensors' ticks took as the daemon saw them, what each process used at its peak, and how large the
database is at the end. Fails unless every row is in the table once, and every batch is in the ledger. What the engines
were asked is told, and batches that more than one run reported are named, with the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batch_assets import settings
from batch_assets.catalog import ledger
from batch_assets.local_dagster import first_daemon, first_server
from batch_assets.local_dagster.dagster_client import DagsterClient
from batch_assets.local_dagster.home import StackAddress, prepare_home
from batch_assets.local_dagster.stack import Stack
from batch_assets.local_dagster.worker_template import TEMPLATE, WORKER
from batch_assets.publishing.published_table import PublishedTable, published_table
from batch_assets.tags import PUBLISH_TAG
from benchmarks.postgres import PostgresServer, postgres, why_not
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

NAME = "scale"
BATCH = 250
SOURCE_CHUNK = 100_000
LOOK_SECONDS = 1.0
ROLES = {
    "batch_assets.dagster_internals.daemon": "daemon",
    "batch_assets.local_dagster.code_server start": "code server (proxy)",
    "batch_assets.webserver.server": "webserver",
    "batch_assets.local_dagster.definitions_server": "code server (definitions)",
    "gpu_runner.simulator": "engine",
    "bin/postgres": "postgres (largest process)",
}
FORKED = {  # processes with the command line of the code server, by their own name
    first_daemon.NAME: "daemon",
    first_server.NAME: "code server (definitions)",
    TEMPLATE: "worker template",
}


@dataclass
class Usage:
    """Peak resident MiB of the largest process of a role, and CPU seconds of all of them."""

    peak_mib: int = 0
    cpu: dict[int, float] = field(default_factory=dict)

    def note(self, process: psutil.Process) -> None:
        """One look at a living process; the kernel keeps its peak."""
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), "0")
        self.peak_mib = max(self.peak_mib, int(peak) // 1024)
        times = process.cpu_times()
        self.cpu[process.pid] = times.user + times.system
        if "-D" in process.cmdline():  # PostgreSQL's first process: with its backends, those that have ended and others
            self.cpu[process.pid] += times.children_user + times.children_system + sum(map(_cpu, process.children()))


def _cpu(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


class Watcher:
    """Looks at all our descendants. Run workers are told apart by the phase in which they were first seen."""

    def __init__(self) -> None:
        self.usage: dict[str, Usage] = {}
        self._role: dict[int, str | None] = {}

    def look(self, phase: str) -> None:
        """Take note of every process that lives now."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid not in self._role:
                    self._role[process.pid] = role_of(process, phase)
                if role := self._role[process.pid]:
                    self.usage.setdefault(role, Usage()).note(process)


def role_of(process: psutil.Process, phase: str) -> str | None:
    """Which part of a stack a process is; None for guards and others. Raises psutil.Error when it has ended."""
    command = " ".join(process.cmdline())
    if "gpu_runner.providers.process_guard" in command:
        return None
    if process.name() == WORKER:
        return f"run worker: {phase}"
    if process.name() in FORKED:
        return FORKED[process.name()]
    return next((role for words, role in ROLES.items() if words in command), None)


def write_source(file: Path, rows: int) -> None:
    """A Parquet file of short questions with an id and a column to keep."""
    schema = pa.schema({"id": pa.int64(), "question": pa.string(), "topic": pa.string()})
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for first in range(0, rows, SOURCE_CHUNK):
            ids = range(first, min(rows, first + SOURCE_CHUNK))
            lines = {
                "id": list(ids),
                "question": [f"Question {i}: what follows from {i * 7919 % 104729}?" for i in ids],
                "topic": [f"topic {i % 97}" for i in ids],
            }
            writer.write_table(pa.table(lines, schema=schema))


@contextlib.contextmanager
def simulator() -> Iterator[str]:
    """A simulated engine of 1,024 slots whose own speed is no limit; yields its address."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "bench", "--port", "0", "--exit-with-parent"]
    command += ["--max-num-seqs", "1024", "--speed", "5000", "--output-tokens", "fixed:16"]
    command += ["--kv-tokens", "10000000", "--keep-alive-timeout", "120"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def prepare(folder: Path, urls: list[str], batches_per_run: int, server: PostgresServer | None) -> None:
    """Home, fleet and dataset in `folder`, and the environment that points at them."""
    home, defs = folder / "home", folder / "defs" / NAME
    home.mkdir()
    defs.mkdir(parents=True)
    os.environ |= {
        "DAGSTER_HOME": str(home),
        "BATCH_ASSETS_DEFS": str(defs.parent),
        "BATCH_ASSETS_STORE": str(folder / "store"),
        "BATCH_ASSETS_FLEET": str(home / "fleet.yaml"),
    }
    for variable in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_ENDPOINT"):
        os.environ.pop(variable, None)
    if server is not None:
        os.environ["BATCH_ASSETS_FLEET_DB"] = server.url()
        local = yaml.safe_load((settings.PROJECT / "deploy" / "local" / "dagster.yaml").read_text())
        (home / "dagster.yaml").write_text(yaml.safe_dump({**local, "storage": server.dagster_storage()}))
    engines = [
        {"name": f"engine-{i}", "kind": "endpoint", "url": url, "max_num_seqs": 1024} for i, url in enumerate(urls)
    ]
    (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": engines}))
    spec = {
        "name": NAME,
        "source": {"path": str(folder / "source.parquet")},
        "id": "id",
        "keep_columns": ["topic"],
        "prompt": {"user": "{{ question }}"},
        "model": "bench",
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "batch_rows": BATCH,
        "batches_per_run": batches_per_run,
        "objective": "fastest",  # all engines at once
    }
    document = {"type": "batch_assets.GeneratedDataset", "attributes": spec}
    (defs / "defs.yaml").write_text(yaml.safe_dump(document))


def drive(stack: Stack, instance: dg.DagsterInstance, seconds: float) -> dict[str, Usage]:
    """Launch the refresh, and watch until the table is published. Raises RuntimeError when something fails."""
    watcher, deadline = Watcher(), time.monotonic() + seconds
    request = DagsterClient(StackAddress(stack.url, stack.port, os.getpid())).launch(f"{NAME}_refresh", {}, {})
    while time.monotonic() < deadline:
        runs = instance.get_runs()
        failed = [run for run in runs if run.status in (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)]
        if failed:
            raise RuntimeError(f"run {failed[0].run_id} ({failed[0].job_name}) ended as {failed[0].status.value}")
        publications = [run for run in runs if PUBLISH_TAG in run.tags]
        if any(run.is_success for run in publications):
            watcher.look("publish")
            return watcher.usage
        read = any(run.run_id == request and run.is_success for run in runs)
        watcher.look("publish" if publications else "rows" if read else "prompts")
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"not published within {seconds:.0f} s")


def phases(instance: dg.DagsterInstance) -> dict[str, float]:
    """Wall seconds from the catalog: of each phase from its first run's creation to its last run's end, and of all."""
    spans: dict[str, tuple[float, float]] = {}
    for record in instance.get_run_records():
        run = record.dagster_run
        rows = ledger.rows_key(NAME) in (run.asset_selection or ())
        phase = "publish" if PUBLISH_TAG in run.tags else "rows" if rows else "prompts"
        first, last = spans.get(phase, (float("inf"), 0.0))
        ended = record.end_time or 0.0
        spans[phase] = (min(first, record.create_timestamp.timestamp()), max(last, ended))
    found = {phase: round(last - first, 1) for phase, (first, last) in spans.items()}
    return found | {"all": round(spans["publish"][1] - spans["prompts"][0], 1)}


def ledger_entries(instance: dg.DagsterInstance) -> tuple[dict[str, list[str]], list[float]]:
    """(the runs that reported each batch, time of every entry in order)."""
    entries: dict[str, list[str]] = {}
    times: list[float] = []
    cursor = None
    while True:
        found = instance.fetch_materializations(ledger.rows_key(NAME), limit=1000, cursor=cursor)
        for record in found.records:
            if record.partition_key:
                entries.setdefault(record.partition_key, []).append(record.run_id)
        times += [record.timestamp for record in found.records]
        cursor = found.cursor
        if not found.has_more:
            return entries, sorted(times)


def best_minute(times: list[float]) -> float:
    """Entries per second in the best 60 seconds."""
    best = first = 0
    for last, time_ in enumerate(times):
        while times[first] < time_ - 60:
            first += 1
        best = max(best, last - first + 1)
    return round(best / min(60.0, max(1.0, times[-1] - times[0])), 2)


def sensor_ticks(instance: dg.DagsterInstance) -> dict[str, dict[str, float]]:
    """Seconds per tick of each sensor as the daemon saw them: waiting ones, and those that created runs."""
    found = {}
    for state in instance.all_instigator_state():
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id)
        quiet = [t.end_timestamp - t.timestamp for t in ticks if t.end_timestamp and not t.run_ids]
        starting = [t.end_timestamp - t.timestamp for t in ticks if t.end_timestamp and t.run_ids]
        found[state.instigator_name] = {
            "ticks": len(ticks),
            "failed": sum(tick.is_failure for tick in ticks),
            "median": round(statistics.median(quiet), 2) if quiet else 0.0,
            "slowest": round(max(quiet, default=0.0), 2),
            "slowest_that_started_runs": round(max(starting, default=0.0), 2),
        }
    return found


def database_mib(home: Path, server: PostgresServer | None) -> dict[str, float]:
    """Size of the database at the end, and of its largest parts."""
    if server is None:
        files = [path for path in home.rglob("*") if path.is_file() and ".db" in path.name]
        runs = [path for path in files if path.parent.name == "runs" and path.name != "index.db"]
        sizes = {"all": sum(p.stat().st_size for p in files), "files per run": sum(p.stat().st_size for p in runs)}
        sizes["event index"] = next((path.stat().st_size for path in files if path.name == "index.db"), 0)
    else:
        query = "SELECT relname, pg_total_relation_size(oid) FROM pg_class WHERE relkind = 'r' ORDER BY 2 DESC LIMIT 3"
        with contextlib.closing(FleetDatabase(server.url())) as fleet_db, fleet_db.engine.connect() as connection:
            sizes = {"all": connection.exec_driver_sql("SELECT pg_database_size('postgres')").scalar_one()}
            sizes |= {str(name): size for name, size in connection.exec_driver_sql(query)}
    return {name: round(size / 2**20, 1) for name, size in sizes.items()}


def check_table(store: DatasetStore, rows: int) -> PublishedTable:
    """Every source row is in the published table once, with an output."""
    table = published_table(store)
    assert table is not None
    query = "SELECT count(*), count(DISTINCT row_id), count(output), count(DISTINCT batch) FROM read_parquet(?)"
    with duckdb.connect() as connection:
        counted = connection.execute(query, [table.glob(store.objects)]).fetchone()
    if counted != (rows, rows, rows, -(-rows // BATCH)):
        raise RuntimeError(f"expected {rows} rows, each once and with an output; the table has {counted}")
    return table


def asked(urls: list[str]) -> dict[str, int]:
    """What the engines say they were asked, all together."""
    totals = {"requests": 0, "completed": 0, "repeated": 0}
    for url in urls:
        with urllib.request.urlopen(f"{url}/simulator/stats", timeout=60) as answer:
            stats = json.loads(answer.read())
        totals["requests"] += stats["requests"]
        totals["completed"] += stats["completed"]
        totals["repeated"] += stats["prompts"]["repeated"]
    return totals


def measure(options: argparse.Namespace, folder: Path, server: PostgresServer | None) -> dict[str, Any]:
    """One dataset from its source to its table; all figures."""
    began = time.monotonic()
    write_source(folder / "source.parquet", options.rows)
    source_seconds = time.monotonic() - began
    batches = -(-options.rows // BATCH)
    with contextlib.ExitStack() as resources:
        urls = [resources.enter_context(simulator()) for _ in range(options.engines)]
        prepare(folder, urls, options.batches_per_run, server)
        home = prepare_home()
        stack = resources.enter_context(Stack(home))
        instance = resources.enter_context(dg.DagsterInstance.from_config(str(home)))
        stack.wait_ready()
        usage = drive(stack, instance, options.minutes * 60)
        table = check_table(DatasetStore(open_objects(settings.store_root()), NAME), options.rows)
        entries, times = ledger_entries(instance)
        if len(entries) != batches:
            raise RuntimeError(f"expected {batches} batches in the ledger; found {len(entries)}")
        found = asked(urls)
        # A slow engine may have been asked for a sign of life too: one prompt more on that engine.
        # On a machine that others keep busy, a row that is late is asked once more: said, and no error.
        if found["completed"] < options.rows:
            raise RuntimeError(f"expected {options.rows} answers; the engines gave {found}")
        taken = phases(instance)
        return {
            "rows": options.rows,
            "batches": batches,
            "database": options.database,
            "engines": options.engines,
            "batches_per_run": options.batches_per_run,
            "runs": instance.get_runs_count(),
            "engines_asked": found,
            "reported_again": {key: runs for key, runs in entries.items() if len(runs) > 1},
            "seconds": {"write source": round(source_seconds, 1), **taken},
            "rows_per_second": round(options.rows / taken["rows"]),
            "ledger_per_second": round(batches / taken["rows"], 2),
            "ledger_per_second_best_minute": best_minute(times),
            "ticks": sensor_ticks(instance),
            "processes": {
                role: {"peak_mib": found.peak_mib, "cpu_seconds": round(sum(found.cpu.values()), 1)}
                for role, found in sorted(usage.items())
            },
            "database_mib": database_mib(home, server),
            "table_mib": round(table.bytes / 2**20, 1),
            "load_average": os.getloadavg()[1],
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--engines", type=int, default=2, help="simulated engines, and instances that may be leased")
    parser.add_argument("--batches-per-run", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after this time")
    parser.add_argument("--fast-disk", action="store_true", help="Postgres without fsync, for tests")
    parser.add_argument("--folder", type=Path, help="where the data goes (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if options.database == "postgres" and (reason := why_not()):
        parser.error(reason)
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        server = None
        if options.database == "postgres":
            server = resources.enter_context(postgres(durable=not options.fast_disk))
        figures = json.dumps(measure(options, folder, server), indent=1)
    print(figures)
    if options.json:
        options.json.write_text(figures)


if __name__ == "__main__":
    main()
