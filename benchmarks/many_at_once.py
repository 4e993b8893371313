"""Many datasets, rented instances and OpenAI batches at once, on one control plane: how fast, and what it costs.

    python -m benchmarks.many_at_once [--datasets 5] [--rows 2000] [--instances 10] [--batches 200] [--lines 10]
        [--database postgres|sqlite] [--slots 16] [--minutes 5] [--idle 0] [--json FILE] [--profile FOLDER]

Daemon, webserver, code server, run workers and `batch-assets serve` are what a deployment has. Machines of five
simulated providers are rented, which differ in price and boot time, and an engine of `--slots` slots at the modelled
speed of a GPU answers on each. All datasets are refreshed at once; beside them callers upload and create batches, and a
client asks for lists, single batches and chats at a steady rate, whatever the answers take.

Says rows/s, ticks of each sensor, how long runs were queued, calls of the service, statements and seconds in each
database, CPU and memory of each part, and what is left over. Fails unless every row is in its table once, every line is
in its output file once, no budget is passed and no machine is left. `--profile`: py-spy records code server, daemon and
service for a minute, where it is installed. `--no-checks` looks at no content, for sizes at which something breaks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import dagster as dg
import duckdb
import psutil
import sqlalchemy as sa
import yaml

from batch_assets import settings
from batch_assets.local_dagster.dagster_client import DagsterClient
from batch_assets.local_dagster.home import StackAddress, prepare_home
from batch_assets.local_dagster.stack import Stack
from batch_assets.local_dagster.worker_template import WORKER
from batch_assets.publishing.published_table import published_table
from batch_assets.tags import PUBLISH_TAG, RANGE_START_TAG, REFRESH_TAG
from benchmarks import scale
from benchmarks.front_door import ENDED, created, wait_up
from benchmarks.postgres import PostgresServer, postgres, why_not
from benchmarks.scale import sensor_ticks, write_source
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.engine_process import free_port
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

ROOT = Path(__file__).parent.parent
MODELS = [f"sim/model-{letter}" for letter in "abcd"]
BATCH_ROWS, BATCHES_PER_RUN = 250, 20
BUDGET_USD = 50.0
CALLERS = 4  # that create batches
LOOK_SECONDS, PROFILE_SECONDS, LEFT_SECONDS = 2.0, 60, 90.0
RATES = {"retrieve": 5.0, "list": 1.0, "chat": 2.0}  # calls a second
DATABASES = ("dagster", "fleet", "api")
# Price per hour and seconds until the first answer, of five kinds of offers.
PROVIDERS = {
    "sim-north": ("n.l40s", 1.09, 4.0),
    "sim-south": ("s.l40s", 0.89, 12.0),
    "sim-east": ("e.l40s", 1.49, 2.0),
    "sim-west": ("w.l40s", 0.99, 8.0),
    "sim-spot": ("p.l40s", 0.69, 20.0),
}
ROLES = {
    "gpu_runner.providers.process_guard": "guards",
    "batch_assets.dagster_internals.daemon": "daemon",
    "batch_assets.local_dagster.code_server": "code server (proxy)",
    "batch_assets.webserver.server": "webserver",
    "batch_assets.local_dagster.definitions_server": "code server (definitions)",
    "gpu_runner.simulator": "engines",
    "gpu_runner.providers.machine_host": "machines",
    "batch_assets.cli.main": "service",
}
NAMES = {WORKER[:15]: "run workers"} | scale.FORKED


@dataclass
class Usage:
    """Of one part: MiB of its largest process at its peak, of all together at most, and CPU seconds by process."""

    peak_mib: int = 0
    together_mib: int = 0
    most: int = 0
    cpu: dict[int, float] = field(default_factory=dict)


class Watcher:
    """Looks at every process of the home, and at the database server."""

    def __init__(self, home: Path, server: PostgresServer | None) -> None:
        self._mark = f"DAGSTER_HOME={home}".encode()
        self._server = server
        self._roles: dict[int, str] = {}
        self.usage: dict[str, Usage] = defaultdict(Usage)
        self.queued: list[int] = []
        self.instances: list[int] = []

    def look(self) -> None:
        """Take note of every process that lives now."""
        now: dict[str, list[int]] = defaultdict(list)
        for pid, role in self._living():
            with contextlib.suppress(psutil.Error, OSError):
                one, used = psutil.Process(pid), self.usage[role]
                times = one.cpu_times()
                used.cpu[pid] = times.user + times.system
                if role == "postgres":
                    used.cpu[pid] += times.children_user + times.children_system
                now[role].append(one.memory_info().rss >> 20)
        for role, sizes in now.items():
            used = self.usage[role]
            used.peak_mib = max(used.peak_mib, *sizes)
            used.together_mib, used.most = max(used.together_mib, sum(sizes)), max(used.most, len(sizes))

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each part so far."""
        return {role: round(sum(used.cpu.values()), 1) for role, used in sorted(self.usage.items())}

    def pid_of(self, role: str) -> int | None:
        """A living process of a part."""
        return next((pid for pid, found in self._living() if found == role), None)

    def _is_ours(self, entry: Path) -> bool:
        """Machines give no environment on to their engines: these are known by their parents."""
        if self._mark in (entry / "environ").read_bytes().split(b"\0"):
            return True
        if b"gpu_runner" not in (entry / "cmdline").read_bytes():
            return False
        with contextlib.suppress(psutil.Error):
            return any(one.pid in self._roles for one in psutil.Process(int(entry.name)).parents())
        return False

    def _living(self) -> Iterator[tuple[int, str]]:
        if self._server is not None:
            yield self._server.pid, "postgres"
            for child in psutil.Process(self._server.pid).children():
                yield child.pid, "postgres"
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if int(entry.name) not in self._roles:
                        if not self._is_ours(entry):
                            continue
                        self._roles[int(entry.name)] = _role(entry)
                    if (entry / "comm").exists():
                        yield int(entry.name), self._roles[int(entry.name)]


def _role(entry: Path) -> str:
    name = (entry / "comm").read_text().strip()
    if name in NAMES:
        return NAMES[name]
    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return next((role for words, role in ROLES.items() if words in command), "others")


def prepare(folder: Path, options: argparse.Namespace, server: PostgresServer | None) -> None:
    """Home, fleet and datasets in `folder`, and the environment that points at them."""
    home, defs = folder / "home", folder / "defs"
    home.mkdir()
    os.environ |= {
        "DAGSTER_HOME": str(home),
        "BATCH_ASSETS_DEFS": str(defs),
        "BATCH_ASSETS_STORE": str(folder / "store"),
        "BATCH_ASSETS_FLEET": str(home / "fleet.yaml"),
    }
    for variable in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_API_DB", "BATCH_ASSETS_ENDPOINT"):
        os.environ.pop(variable, None)
    if server is not None:
        os.environ |= {"BATCH_ASSETS_FLEET_DB": server.url("fleet"), "BATCH_ASSETS_API_DB": server.url("api")}
        local = yaml.safe_load((settings.PROJECT / "deploy" / "local" / "dagster.yaml").read_text())
        (home / "dagster.yaml").write_text(yaml.safe_dump({**local, "storage": server.dagster_storage("dagster")}))
    (home / "fleet.yaml").write_text(yaml.safe_dump(fleet(options.instances)))
    for name in dataset_names(options):
        (defs / name).mkdir(parents=True)
        document = {"type": "batch_assets.GeneratedDataset", "attributes": spec(folder, name, options.slots)}
        (defs / name / "defs.yaml").write_text(yaml.safe_dump(document))


def dataset_names(options: argparse.Namespace) -> list[str]:
    """Names of all datasets."""
    return [f"many_{number:03d}" for number in range(options.datasets)]


def fleet(instances: int) -> dict[str, Any]:
    """Five providers, none of which has all instances."""
    each = math.ceil(instances / len(PROVIDERS) * 1.2)
    providers = [
        {
            "name": name,
            "boot_seconds": boot,
            "offers": [
                {"instance_type": kind, "gpu": "L40S", "price_per_hour": price, "capacity": each}
                | ({"spot": True} if name == "sim-spot" else {})
            ],
        }
        for name, (kind, price, boot) in PROVIDERS.items()
    ]
    simulated = {"clock": 1.0, "arguments": ["--output-tokens", "fixed:16"], "providers": providers}
    return {"simulated": simulated, "idle_minutes": 0.25, "max_instances": instances}


def spec(folder: Path, name: str, slots: int) -> dict[str, Any]:
    """One dataset."""
    return {
        "name": name,
        "source": {"path": str(folder / "source.parquet")},
        "id": "id",
        "keep_columns": ["topic"],
        "prompt": {"user": "{{ question }}"},
        "model": MODELS[int(name[-3:]) % len(MODELS)],
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "engine": {"max_num_seqs": slots},
        "batch_rows": BATCH_ROWS,
        "batches_per_run": BATCHES_PER_RUN,
        "objective": "fastest",
        "budget_usd": BUDGET_USD,
    }


class Calls:
    """What calls of the service took, in seconds, by kind; and what went wrong."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = defaultdict(list)
        self.wrong: Counter[str] = Counter()

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Times the body. What it raises is counted."""
        began = time.perf_counter()
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, KeyError) as error:
            self.wrong[f"{kind}: {type(error).__name__}: {error}"[:120]] += 1
        finally:
            self.took[kind].append(time.perf_counter() - began)

    def figures(self) -> dict[str, dict[str, float]]:
        """Of each kind: how many, and milliseconds."""
        return {kind: {"calls": len(found), **spread(found, 1e3)} for kind, found in sorted(self.took.items())}


def spread(found: Sequence[float], unit: float = 1.0) -> dict[str, float]:
    """Median, 99th percentile and the largest."""
    if not found:
        return {}
    ordered = sorted(found)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return {
        "p50": round(unit * statistics.median(ordered), 2),
        "p99": round(unit * p99, 2),
        "max": round(unit * ordered[-1], 2),
    }


class Clients:
    """Those who use the service: callers that create batches, and one that asks at a steady rate."""

    def __init__(self, base: str, folder: Path, options: argparse.Namespace) -> None:
        self.base, self.folder, self.options = base, folder, options
        self.calls, self.made, self.random = Calls(), list[str](), random.Random(1)
        self.ended: dict[str, Any] = {}
        self.created_seconds, self.answered = 0.0, False

    async def run(self, over: Callable[[], bool]) -> None:
        """Until all batches have ended and `over` says so of the rest."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await wait_up(session, self.base)
            beside = [asyncio.create_task(self._steadily(session, kind)) for kind in RATES]
            await self._create(session)
            while len(self.ended) < len(self.made) or not over():
                await self._see_ended(session)
                await asyncio.sleep(1.0)
            for task in beside:
                task.cancel()
            if self.options.checks:
                await self._check(session)

    async def _create(self, session: aiohttp.ClientSession) -> None:
        for number, model in enumerate(MODELS):
            write_lines(self.folder / f"lines-{number}.jsonl", model, self.options.lines)
        numbers, began = iter(range(self.options.batches)), time.monotonic()

        async def caller() -> None:
            for number in numbers:
                written = self.folder / f"lines-{number % len(MODELS)}.jsonl"
                with self.calls.timed("upload and create"):
                    self.made.append((await created(session, self.base, "/v1/chat/completions", written))[2]["id"])

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        self.created_seconds = time.monotonic() - began

    async def _steadily(self, session: aiohttp.ClientSession, kind: str) -> None:
        """Calls that do not wait for one another: a slow service does not slow its clients down."""
        under_way: set[asyncio.Task[None]] = set()
        while True:
            if kind == "chat" or self.made:
                task = asyncio.create_task(self._call(session, kind))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            await asyncio.sleep(1 / RATES[kind])

    async def _call(self, session: aiohttp.ClientSession, kind: str) -> None:
        if kind == "chat":
            body = {"model": MODELS[0], "max_tokens": 4, "messages": [{"role": "user", "content": "one"}]}
            kind = "chat" if self.answered else "chat before an engine was there"
            with self.calls.timed(kind):
                async with session.post(f"{self.base}/chat/completions", json=body) as answer:
                    await answer.read()
                    answer.raise_for_status()
            self.answered = True
            return
        path = "batches?limit=20" if kind == "list" else f"batches/{self.random.choice(self.made)}"
        with self.calls.timed(kind):
            async with session.get(f"{self.base}/{path}") as answer:
                await answer.read()
                answer.raise_for_status()

    async def _see_ended(self, session: aiohttp.ClientSession) -> None:
        """From the list, hundred at a time."""
        after = ""
        while True:
            async with session.get(f"{self.base}/batches?limit=100{after}") as answer:
                page = await answer.json()
            self.ended |= {one["id"]: one for one in page["data"] if one["status"] in ENDED}
            if not page["has_more"] or not page["data"]:
                return
            after = f"&after={page['data'][-1]['id']}"

    async def _check(self, session: aiohttp.ClientSession) -> None:
        """Each line of each batch has one answer. Raises RuntimeError."""
        expected, gate = sorted(f"r{number}" for number in range(self.options.lines)), asyncio.Semaphore(8)

        async def one(found: Any) -> None:
            async with gate, session.get(f"{self.base}/files/{found['output_file_id']}/content") as answer:
                seen = sorted(json.loads(line)["custom_id"] for line in (await answer.text()).splitlines())
            if found["status"] != "completed" or seen != expected:
                raise RuntimeError(f"{found['id']}: expected each of {len(expected)} lines once, found {len(seen)}")

        await asyncio.gather(*(one(found) for found in self.ended.values()))


def write_lines(file: Path, model: str, lines: int) -> None:
    """The input file of a batch."""
    with file.open("w") as out:
        for number in range(lines):
            body = {"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": f"say {number}"}]}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def service(home: Path) -> Iterator[str]:
    """`batch-assets serve`, whose engines are those of the fleet; its address."""
    port = free_port()
    command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(port)]
    with (home / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def profiled(watcher: Watcher, folder: Path | None) -> Iterator[None]:
    """Has py-spy record the parts of the control plane."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    processes = []
    if folder is not None and spy is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for role in ("code server (definitions)", "daemon", "service"):
            if (pid := watcher.pid_of(role)) is not None:
                out = folder / f"{role.partition(' (')[0].replace(' ', '-')}.txt"
                command = [spy, "record", "--pid", str(pid), "--format", "raw", "--output", str(out)]
                command += ["--rate", "50", "--nonblocking", "--duration", str(PROFILE_SECONDS)]
                processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def create_databases(server: PostgresServer) -> None:
    """One for each part, so that statements are told apart."""
    engine = sa.create_engine(server.url(), isolation_level="AUTOCOMMIT")
    with contextlib.closing(engine.raw_connection()), engine.connect() as connection:
        for name in DATABASES:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        connection.exec_driver_sql("CREATE EXTENSION pg_stat_statements")
    engine.dispose()


def statements(server: PostgresServer) -> dict[str, Any]:
    """Calls and seconds of each database so far, and the statements that took longest."""
    query = (
        "SELECT d.datname, s.calls, s.total_exec_time / 1000, s.rows, s.query "
        "FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid ORDER BY 3 DESC"
    )
    engine = sa.create_engine(server.url())
    with engine.connect() as connection:
        found = connection.exec_driver_sql(query).all()
        opened = dict(connection.exec_driver_sql("SELECT datname, sessions FROM pg_stat_database").tuples().all())
    engine.dispose()
    sums = {
        name: {
            "calls": sum(calls for base, calls, *_ in found if base == name),
            "seconds": round(sum(seconds for base, _, seconds, *_ in found if base == name), 1),
            "commits": sum(calls for base, calls, _, _, text in found if base == name and text == "COMMIT"),
            "connections": int(opened.get(name, 0)),
        }
        for name in DATABASES
    }
    longest = [
        {"database": base, "calls": calls, "seconds": round(seconds, 2), "rows": rows, "query": " ".join(text.split())}
        for base, calls, seconds, rows, text in found[:40]
    ]
    return {"by database": sums, "longest": longest}


def events(server: PostgresServer) -> dict[str, dict[str, float]]:
    """Of each kind of event in Dagster's log: how many, and bytes of one on average."""
    query = "SELECT coalesce(dagster_event_type, 'log'), count(*), avg(length(event)) FROM event_logs GROUP BY 1"
    engine = sa.create_engine(server.url("dagster"))
    with engine.connect() as connection:
        found = connection.exec_driver_sql(query).all()
    engine.dispose()
    return {kind: {"events": count, "bytes": round(size)} for kind, count, size in sorted(found)}


class Control:
    """Dagster's side: refreshes all datasets, and says when all are published."""

    def __init__(self, stack: Stack, instance: dg.DagsterInstance, names: Sequence[str]) -> None:
        self._client = DagsterClient(StackAddress(stack.url, stack.port, os.getpid()))
        self.instance, self.names = instance, list(names)
        self.published: set[str] = set()
        self.launch_seconds: list[float] = []

    def refresh_all(self) -> None:
        """A refresh of each."""
        for name in self.names:
            began = time.perf_counter()
            self._client.launch(f"{name}_refresh", {}, {})
            self.launch_seconds.append(time.perf_counter() - began)

    def look(self) -> None:
        """Which are published. Raises RuntimeError when a run has failed."""
        bad = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED])
        if failed := self.instance.get_runs(bad, limit=1):
            raise RuntimeError(
                f"run {failed[0].run_id} ({failed[0].job_name}) ended as {failed[0].status.value}: "
                f"{self._why(failed[0].run_id)}"
            )
        done = self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS]))
        self.published = {run.job_name for run in done if PUBLISH_TAG in run.tags}

    def _why(self, run_id: str) -> str:
        """What the run's events say of its end."""
        bad = {dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_CANCELED}
        said = []
        for entry in self.instance.all_logs(run_id, of_type=bad):
            error = getattr(entry.dagster_event and entry.dagster_event.event_specific_data, "error", None)
            while error is not None:
                said.append(f"{error.cls_name}: {error.message.strip()[:500]}")
                error = error.cause
        return "; ".join(said)

    def queued(self) -> int:
        """Runs that wait now."""
        return self.instance.get_runs_count(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]))

    def over(self) -> bool:
        """Whether all tables are there."""
        return len(self.published) >= len(self.names)

    def runs(self) -> dict[str, Any]:
        """How many runs there were of each kind, and how long they were queued, and starting."""
        waits: dict[str, list[float]] = defaultdict(list)
        for record in self.instance.get_run_records():
            tags = record.dagster_run.tags
            kind = next(
                (name for name, tag in KINDS.items() if tag in tags),
                "other",
            )
            if record.start_time is not None:
                waits[kind].append(record.start_time - record.create_timestamp.timestamp())
        return {kind: {"runs": len(found), **spread(found)} for kind, found in sorted(waits.items())}


KINDS = {"publish": PUBLISH_TAG, "rows": RANGE_START_TAG, "refresh": REFRESH_TAG}


def check_tables(names: Sequence[str], rows: int) -> None:
    """Every source row is in each published table once, with an output. Raises RuntimeError."""
    objects = open_objects(settings.store_root())
    query = "SELECT count(*), count(DISTINCT row_id), count(output) FROM read_parquet(?)"
    with duckdb.connect() as connection:
        for name in names:
            table = published_table(DatasetStore(objects, name))
            found = table and connection.execute(query, [table.glob(objects)]).fetchone()
            if found != (rows, rows, rows):
                raise RuntimeError(f"{name}: expected {rows} rows, each once and with an output; found {found}")


def money(fleet_db: FleetDatabase, names: Sequence[str]) -> dict[str, float]:
    """What was spent. Raises RuntimeError when a budget was passed."""
    spent = {name: fleet_db.spend(name).usd for name in names}
    if over := [name for name, usd in spent.items() if usd > BUDGET_USD]:
        raise RuntimeError(f"expected at most {BUDGET_USD} $ for each dataset, found more for {', '.join(over)}")
    return {"datasets": round(sum(spent.values()), 4), "most of one": round(max(spent.values(), default=0.0), 4)}


def wait_empty(fleet_db: FleetDatabase, seconds: float) -> float | None:
    """Seconds until no machine is rented any more; None: that took longer."""
    began = time.monotonic()
    while fleet_db.fleet():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(1.0)
    return round(time.monotonic() - began, 1)


async def watch(watcher: Watcher, control: Control, fleet_db: FleetDatabase, until: float) -> None:
    """Looks at processes, runs and machines until cancelled. Raises RuntimeError when the time is over."""
    while True:
        await asyncio.to_thread(watcher.look)
        watcher.queued.append(await asyncio.to_thread(control.queued))
        watcher.instances.append(len(await asyncio.to_thread(fleet_db.fleet)))
        await asyncio.to_thread(control.look)
        if time.monotonic() > until:
            raise RuntimeError(f"not over in time: {len(control.published)} tables of {len(control.names)}")
        await asyncio.sleep(LOOK_SECONDS)


async def drive(clients: Clients, watcher: Watcher, control: Control, fleet_db: FleetDatabase, seconds: float) -> None:
    """All work at once, to its end."""
    watching = asyncio.create_task(watch(watcher, control, fleet_db, time.monotonic() + seconds))
    working = asyncio.create_task(work(clients, control))
    await asyncio.wait([watching, working], return_when="FIRST_COMPLETED")
    for task in (watching, working):
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(watching, working, return_exceptions=True)


async def work(clients: Clients, control: Control) -> None:
    """What is asked for: refreshes, batches, chats."""
    await asyncio.gather(asyncio.to_thread(control.refresh_all), clients.run(control.over))


def measure(options: argparse.Namespace, folder: Path, server: PostgresServer | None) -> dict[str, Any]:
    """All of it; the figures."""
    write_source(folder / "source.parquet", options.rows)
    if server is not None:
        create_databases(server)
    prepare(folder, options, server)
    home, names = prepare_home(), dataset_names(options)
    watcher = Watcher(home, server)
    with contextlib.ExitStack() as resources:
        stack = resources.enter_context(Stack(home))
        instance = resources.enter_context(dg.DagsterInstance.from_config(str(home)))
        stack.wait_ready()
        base = resources.enter_context(service(home))
        fleet_db = resources.enter_context(contextlib.closing(FleetDatabase(settings.fleet_database())))
        control, clients = Control(stack, instance, names), Clients(base, folder, options)
        asyncio.run(settled(base))
        watcher.look()
        before, began = watcher.cpu(), time.monotonic()
        asked = statements(server) if server is not None else None
        wrong = ""
        with profiled(watcher, options.profile):
            try:
                asyncio.run(drive(clients, watcher, control, fleet_db, options.minutes * 60))
                if options.checks:
                    check_tables(names, options.rows)
            except RuntimeError as error:
                wrong = str(error)
        seconds = time.monotonic() - began
        watcher.look()
        found: dict[str, Any] = {"sizes": {name: getattr(options, name) for name in SIZES}, "wrong": wrong}
        found |= figures(options, seconds, clients, control, watcher)
        found["cpu_seconds"] = {role: round(cpu - before.get(role, 0.0), 1) for role, cpu in watcher.cpu().items()}
        found["usd"] = money(fleet_db, names)
        if server is not None and asked is not None:
            after = statements(server)
            found |= asked_since(asked, after, seconds) | {"events": events(server)}
            if options.idle:
                time.sleep(options.idle)
                found["idle"] = asked_since(after, statements(server), options.idle)["statements"]
    found["seconds until no machine was rented"] = wait_empty(fleet_db, 0.0 if wrong else LEFT_SECONDS)
    found["processes left"] = sorted(role for _, role in Watcher(home, None)._living())
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        found["machines left"] = [one.name for one in fleet_db.fleet()]
    return found


def figures(
    options: argparse.Namespace, seconds: float, clients: Clients, control: Control, watcher: Watcher
) -> dict[str, Any]:
    """What was seen of rows, ticks, runs, calls and processes."""
    return {
        "seconds": round(seconds, 1),
        "rows_per_second": round(options.rows * options.datasets / seconds),
        "lines_per_second": round(options.batches * options.lines / seconds),
        "seconds to create all batches": round(clients.created_seconds, 1),
        "ticks": sensor_ticks(control.instance),
        "runs": control.runs(),
        "most queued at once": max(watcher.queued, default=0),
        "most instances at once": max(watcher.instances, default=0),
        "launch of a refresh": spread(control.launch_seconds),
        "calls": clients.calls.figures(),
        "calls that went wrong": dict(clients.calls.wrong),
        "mib": {
            role: {"largest": used.peak_mib, "together": used.together_mib, "processes": used.most}
            for role, used in sorted(watcher.usage.items())
        },
        "load_average": os.getloadavg()[1],
    }


def asked_since(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What the databases were asked between two looks."""
    earlier = before["by database"]
    found = {
        name: {
            "per second": round((sums["calls"] - earlier[name]["calls"]) / seconds),
            **{key: round(sums[key] - earlier[name][key], 1) for key in sums},
        }
        for name, sums in after["by database"].items()
    }
    return {"statements": found, "longest statements": after["longest"]}


async def settled(base: str) -> None:
    """Until the service answers."""
    async with aiohttp.ClientSession() as session:
        await wait_up(session, base)


SIZES = ("datasets", "rows", "instances", "batches", "lines", "slots", "database")


def main() -> None:
    """Command line. Exit status 1: something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2_000, help="of each dataset")
    parser.add_argument("--instances", type=int, default=10, help="that may be rented at once")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--lines", type=int, default=10, help="of each batch")
    parser.add_argument("--slots", type=int, default=16, help="of each engine")
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="postgres")
    parser.add_argument("--minutes", type=float, default=5.0, help="give up after this time")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds at the end without work, to count statements")
    parser.add_argument("--no-checks", dest="checks", action="store_false", help="look at no content")
    parser.add_argument("--folder", type=Path, help="where the data goes (default: a temporary folder)")
    parser.add_argument("--profile", type=Path, help="where py-spy writes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.database == "postgres" and (reason := why_not()):
        parser.error(reason)
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="many-", dir=options.folder)))
        server = None
        if options.database == "postgres":
            load = ["shared_preload_libraries=pg_stat_statements", "max_connections=300"]
            server = resources.enter_context(postgres(settings=load))
        found = measure(options, folder, server)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(json.dumps({name: value for name, value in found.items() if name != "longest statements"}, indent=1))
    if found["wrong"] or found["machines left"] or found["processes left"]:
        raise SystemExit(f"does not hold: {found['wrong'] or 'something is left over'}")


if __name__ == "__main__":
    main()
