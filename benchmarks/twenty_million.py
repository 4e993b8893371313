"""Twenty million rows, whole: 80,000 batches from 20 files of Parquet, over Postgres or SQLite, with kills on the way.

    python -m benchmarks.twenty_million --folder DIR [--rows 20000000] [--database postgres|sqlite] [--stages NAMES]

Everything is what a deployment has (see scale.py); the four engines are simulated. Stages, in order: `source`; `rows`
(refresh: snapshot, rows, table; a run worker, the daemon and Postgres are killed once each); `verify`; `unchanged` (a
refresh with nothing to do); `changed` (a refresh with 1 % other rows); `heal` (2,000 scattered batch objects deleted);
`pages` (what Dagster's asset page and partition dialog ask for); `status`; `rebuild` (rebuild-ledger); `backup`
(backup, then restore into an empty home).

It takes hours. DIR keeps everything, so that an ended benchmark goes on where it was when it is started again, also in
the middle of a stage; a stage that was ended says so in its figures (`sessions`), and its seconds are those in which
the benchmark ran. `DIR/figures.json` has all figures, one entry for each stage; they are printed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batch_assets import settings
from batch_assets.catalog import ledger
from batch_assets.catalog.publications import publish_job
from batch_assets.local_dagster.dagster_client import DagsterClient, TokenAuth
from batch_assets.local_dagster.home import StackAddress, prepare_home
from batch_assets.local_dagster.stack import Stack
from batch_assets.local_dagster.worker_template import WORKER
from batch_assets.tags import PUBLISH_TAG
from benchmarks import postgres, scale
from gpu_runner.providers.engine_process import free_port
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

FILES, ENGINES, KILLS = 20, 4, ("worker", "daemon", "postgres")
CHUNK = 50_000
LOOK_SECONDS = 2.0
SAMPLE_SECONDS = 30.0  # between two looks at memory
SAVE_SECONDS = 30.0
DELETED = 2000
SEED = 1
PAGE_QUERY = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetPartitionStatuses { __typename ... on DefaultPartitionStatuses { materializedPartitions failedPartitions
  unmaterializedPartitions materializingPartitions } }
  partitionStats { numPartitions numMaterialized numFailed numMaterializing }
  assetMaterializations(limit: 20) { runId timestamp partition } } } }"""
KEYS_QUERY = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  partitionKeysByDimension { name partitionKeys } } } }"""


@dataclass
class Bench:
    """The folder of one benchmark. `figures` of each stage are kept in it, as are those of a stage under way."""

    folder: Path
    rows: int
    database: str
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    server: postgres.PostgresServer | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def batches(self) -> int:
        """Of the whole dataset."""
        return -(-self.rows // scale.BATCH)

    @property
    def store(self) -> DatasetStore:
        """Of the dataset."""
        return DatasetStore(open_objects(settings.store_root()), scale.NAME)

    def save(self) -> None:
        """Write the figures."""
        file = self.folder / "figures.json"
        file.with_suffix(".new").write_text(json.dumps(self.figures, indent=1))
        file.with_suffix(".new").replace(file)

    def start_postgres(self) -> None:
        """Start the server of the folder; made where there is none."""
        place, kept = self.folder / "pg", self.folder / "postgres.json"
        if not kept.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            password, port = secrets.token_hex(16), free_port()
            postgres.create(place, password)
            kept.touch(mode=0o600)
            kept.write_text(json.dumps({"password": password, "port": port}))
        known = json.loads(kept.read_text())
        (place / "data" / "postmaster.pid").unlink(missing_ok=True)  # of a killed one
        self.process = postgres.start(place, known["port"])
        self.server = postgres.PostgresServer(known["port"], known["password"], self.process.pid, place)

    def stop_postgres(self) -> None:
        """Fast shutdown."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=120)
            self.process = None


# What is measured while a stage runs.


@dataclass
class Meter:
    """CPU seconds and peak memory by role, and memory over time of what must stay flat."""

    bench: Bench
    stage: str
    began: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)
    sampled: float = 0.0
    watcher: scale.Watcher = field(default_factory=scale.Watcher)
    before: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self.bench.figures.get(self.stage, {})
        self.now: dict[str, Any] = {"memory": list(self.before.get("memory", []))}
        self.now["sessions"] = self.before.get("sessions", 0) + 1

    def look(self, phase: str) -> None:
        """Take note of all processes; write the figures now and then."""
        self.watcher.look(phase)
        if time.monotonic() - self.sampled > SAMPLE_SECONDS:
            self.sampled = time.monotonic()
            self.now["memory"].append(self._resident())
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.saved = time.monotonic()
            self.save()

    def _resident(self) -> dict[str, int]:
        """Seconds since the stage's begin, and resident MiB of those that live long."""
        found = {"seconds": round(self.seconds)}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                role = scale.role_of(process, WORKER)
                if role is not None and WORKER not in role:
                    found[role] = max(found.get(role, 0), process.memory_info().rss // 2**20)
        return found

    @property
    def seconds(self) -> float:
        """Of this stage, in all sessions."""
        return float(self.before.get("seconds", 0.0)) + time.monotonic() - self.began

    def save(self, **more: object) -> None:
        """Keep the figures of the stage as they are now."""
        processes = dict(self.before.get("processes", {}))
        for role, usage in self.watcher.usage.items():
            was = processes.get(role, {"peak_mib": 0, "cpu_seconds": 0.0})
            cpu = round(was["cpu_seconds"] + sum(usage.cpu.values()), 1)
            processes[role] = {"peak_mib": max(was["peak_mib"], usage.peak_mib), "cpu_seconds": cpu}
        self.now |= {"seconds": round(self.seconds, 1), "processes": processes, "load": os.getloadavg()[1]}
        self.bench.figures[self.stage] = {**self.before, **self.now, **more}
        self.bench.save()


@contextlib.contextmanager
def platform(bench: Bench) -> Iterator[tuple[Stack, dg.DagsterInstance]]:
    """The daemon, the code server and the webserver of the folder, with four engines."""
    home = prepare_home()
    with contextlib.ExitStack() as resources:
        bench.urls = [resources.enter_context(scale.simulator()) for _ in range(ENGINES)]
        engines = [
            {"name": f"engine-{number}", "kind": "endpoint", "url": url, "max_num_seqs": 1024}
            for number, url in enumerate(bench.urls)
        ]
        (home / "fleet.yaml").write_text(yaml.safe_dump({"engines": engines}))
        stack = resources.enter_context(Stack(home))
        instance = resources.enter_context(dg.DagsterInstance.from_config(str(home)))
        stack.wait_ready()
        yield stack, instance


def prepare(bench: Bench, batches_per_run: int) -> None:
    """Home and dataset of the folder, and the environment that points at them."""
    home = bench.folder / "home"
    fresh = not home.exists()
    for name in ("home", "defs"):
        (bench.folder / name).mkdir(exist_ok=True)
    if fresh:
        shutil.rmtree(home)
        shutil.rmtree(bench.folder / "defs")
        (bench.folder / "defs").mkdir()
        shutil.rmtree(bench.folder / "defs")
        scale.prepare(bench.folder, [], batches_per_run, bench.server)
        file = bench.folder / "defs" / scale.NAME / "defs.yaml"
        document = yaml.safe_load(file.read_text())
        document["attributes"]["source"]["path"] = str(bench.folder / "source" / "*.parquet")
        file.write_text(yaml.safe_dump(document))
    os.environ |= {
        "DAGSTER_HOME": str(home),
        "BATCH_ASSETS_DEFS": str(bench.folder / "defs"),
        "BATCH_ASSETS_STORE": str(bench.folder / "store"),
        "BATCH_ASSETS_FLEET": str(home / "fleet.yaml"),
    }
    if bench.server is not None:
        os.environ |= {"BATCH_ASSETS_FLEET_DB": bench.server.url(), "BATCH_ASSETS_API_DB": bench.server.url()}


# The stages.


def write_file(file: Path, ids: range, text: Callable[[int], str]) -> None:
    """One file of questions, whole or not at all."""
    schema = pa.schema({"id": pa.int64(), "question": pa.string(), "topic": pa.string()})
    part = file.with_suffix(".part")
    with pq.ParquetWriter(part, schema, compression="zstd") as writer:
        for first in range(ids.start, ids.stop, CHUNK):
            some = range(first, min(ids.stop, first + CHUNK))
            lines = {"id": list(some), "question": [text(i) for i in some], "topic": [f"topic {i % 97}" for i in some]}
            writer.write_table(pa.table(lines, schema=schema))
    part.replace(file)


def question(number: int) -> str:
    """Of one row."""
    return f"Question {number}: what follows from {number * 7919 % 104729}?"


def ids_of(bench: Bench, file: int) -> range:
    """The rows of one source file."""
    size = -(-bench.rows // FILES)
    return range(file * size, min(bench.rows, (file + 1) * size))


def source(bench: Bench) -> None:
    """Twenty files."""
    meter = Meter(bench, "source")
    (bench.folder / "source").mkdir(exist_ok=True)
    for number in range(FILES):
        file = bench.folder / "source" / f"part-{number:02}.parquet"
        if not file.exists():
            write_file(file, ids_of(bench, number), question)
    meter.save(done=True)


def refresh(bench: Bench, stage: str, *, kills: bool = False) -> None:
    """A refresh until its table is published; one that was begun in an earlier session goes on."""
    meter = Meter(bench, stage)
    with platform(bench) as (stack, instance):
        asked = meter.before.get("request")
        if asked is None:
            client = DagsterClient(StackAddress(stack.url, stack.port, os.getpid()))
            asked = client.launch(f"{scale.NAME}_refresh", {}, {})
        meter.now |= {"request": asked, "killed": dict(meter.before.get("killed", {}))}
        began = instance.get_run_record_by_id(asked)
        assert began is not None
        since = began.create_timestamp.timestamp()
        phase = "prompts"
        while phase != "done":
            phase = look_at(bench, instance, asked, since, stage)
            meter.look(phase)
            if kills and phase == "rows":
                kill_one(bench, meter, stack, instance)
            time.sleep(LOOK_SECONDS)
        meter.save(**figures_of(bench, instance, asked, since), done=True)


def look_at(bench: Bench, instance: dg.DagsterInstance, asked: str, since: float, stage: str) -> str:
    """prompts, rows, publish or done. Raises RuntimeError when a run has failed and is not tried again."""
    request = instance.get_run_by_id(asked)
    assert request is not None
    if request.status in (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED):
        raise RuntimeError(f"the request of stage {stage} ended as {request.status.value}")
    if not request.is_success:
        return "prompts"
    newest = instance.get_runs(dg.RunsFilter(job_name=publish_job(scale.NAME)), limit=1)
    publications = [run for run in newest if run_begun(instance, run) > since]
    if publications and publications[0].is_success:
        return "done"
    if stage == "unchanged" and not publications and not waiting(bench, instance):
        return "done"
    return "publish" if publications else "rows"


def run_begun(instance: dg.DagsterInstance, run: dg.DagsterRun) -> float:
    """Unix time at which the run was created."""
    record = instance.get_run_record_by_id(run.run_id)
    return 0.0 if record is None else record.create_timestamp.timestamp()


def waiting(bench: Bench, instance: dg.DagsterInstance) -> bool:
    """Whether batches of the snapshot are missing."""
    snapshot = bench.store.current_snapshot()
    assert snapshot is not None
    return bool(ledger.missing(bench.store.entries(snapshot), ledger.ledger_versions(instance, scale.NAME)))


def kill_one(bench: Bench, meter: Meter, stack: Stack, instance: dg.DagsterInstance) -> None:
    """At a quarter of the batches a run worker, at half of them the daemon, at three quarters Postgres: kill -9."""
    killed = meter.now["killed"]
    left = [kind for kind in KILLS if kind not in killed and (kind != "postgres" or bench.server is not None)]
    if not left:
        return
    done = len(instance.get_materialized_partitions(ledger.rows_key(scale.NAME)))
    if done < bench.batches * (KILLS.index(left[0]) + 1) // 4:
        return
    if left[0] == "postgres":
        assert bench.process is not None
        bench.process.kill()
        bench.process.wait()
        time.sleep(5)
        bench.start_postgres()
    else:
        found = [one for one in psutil.Process().children(recursive=True) if is_victim(one, left[0])]
        if not found:
            return
        found[0].kill()
    killed[left[0]] = done
    meter.save()


def is_victim(process: psutil.Process, kind: str) -> bool:
    """Whether a process is a run worker or the daemon itself, not its guard. False for one that has ended."""
    try:
        name, words = process.name(), " ".join(process.cmdline())
    except psutil.Error:
        return False
    if "process_guard" in words:
        return False
    return name == WORKER if kind == "worker" else "batch_assets.dagster_internals.daemon" in words


def figures_of(bench: Bench, instance: dg.DagsterInstance, asked: str, since: float) -> dict[str, Any]:
    """What the catalog, the store and the engines say after a refresh."""
    runs = [record for record in instance.get_run_records(limit=2000) if record.create_timestamp.timestamp() >= since]
    spans: dict[str, list[float]] = {}
    states: dict[str, int] = {}
    for record in runs:
        run = record.dagster_run
        rows = ledger.rows_key(scale.NAME) in (run.asset_selection or ())
        kind = "publish" if PUBLISH_TAG in run.tags else "rows" if rows else "other"
        phase = "prompts" if run.run_id == asked else kind
        first, last = spans.get(phase, [float("inf"), 0.0])
        spans[phase] = [
            min(first, record.create_timestamp.timestamp()),
            max(last, record.end_time or 0.0),
        ]
        states[f"{phase} {run.status.value}"] = states.get(f"{phase} {run.status.value}", 0) + 1
    table = scale.check_table(bench.store, bench.rows)
    ticks = scale.sensor_ticks(instance)
    return {
        "phases": {phase: round(last - first, 1) for phase, (first, last) in spans.items()},
        "runs": states,
        "ticks": {name: {key: found[key] for key in ("median", "slowest", "failed")} for name, found in ticks.items()},
        "engines": scale.asked(bench.urls),
        "ledger": len(ledger.ledger_versions(instance, scale.NAME)),
        "database_mib": scale.database_mib(bench.folder / "home", bench.server),
        "table_mib": round(table.bytes / 2**20, 1),
    }


def changed(bench: Bench) -> None:
    """A refresh after 1 % of the rows have another text: nearly all of them in one stretch, one in twenty scattered."""
    scattered = set(random.Random(SEED).sample(range(bench.rows), bench.rows // 2000))
    stretch = range(bench.rows // 3, bench.rows // 3 + bench.rows * 95 // 10_000)
    kept = bench.folder / "changed.done"
    if not kept.exists():
        for number in range(FILES):
            write_file(
                bench.folder / "source" / f"part-{number:02}.parquet",
                ids_of(bench, number),
                lambda i: f"Changed. {question(i)}" if i in scattered or i in stretch else question(i),
            )
        kept.touch()
    refresh(bench, "changed")


def heal(bench: Bench) -> None:
    """Objects of scattered batches are deleted; a refresh finds and makes them anew."""
    store, kept = bench.store, bench.folder / "deleted.done"
    if not kept.exists():
        snapshot = store.current_snapshot()
        assert snapshot is not None
        current = list(store.current_objects(store.entries(snapshot)).values())
        for batch in random.Random(SEED + 1).sample(current, min(DELETED, len(current) // 4)):
            Path(store.objects.uri(store.batch_path(batch))).unlink()
        kept.touch()
    command(bench, "heal_verify", "verify", scale.NAME, status=1)
    meter = Meter(bench, "heal")
    with platform(bench) as (_, instance):
        voided = meter.before.get("voided", False)
        began = meter.before.get("began", time.time())
        meter.now |= {"began": began}
        while True:
            missing = waiting(bench, instance)
            voided = voided or missing
            meter.now |= {"voided": voided}
            meter.look("rows")
            newest = instance.get_runs(dg.RunsFilter(job_name=publish_job(scale.NAME)), limit=1)
            if voided and not missing and newest and newest[0].is_success and run_begun(instance, newest[0]) > began:
                break
            time.sleep(LOOK_SECONDS)
        meter.save(**figures_of(bench, instance, "", began), done=True)


def pages(bench: Bench) -> None:
    """What the page of the rows and its dialog of partitions ask the webserver for: three times each."""
    meter = Meter(bench, "pages")
    with platform(bench) as (stack, _):
        token = TokenAuth(bench.folder / "home")
        found: dict[str, list[float]] = {}
        for name, query in (("asset page", PAGE_QUERY), ("partition dialog", KEYS_QUERY)):
            for _ in range(3):
                found.setdefault(name, []).append(ask(stack.url, token, query))
                meter.look("pages")
    meter.save(first_and_slowest_seconds={name: [took[0], max(took)] for name, took in found.items()}, done=True)


def ask(url: str, token: TokenAuth, query: str) -> float:
    """Seconds until the answer to one query is there, whole."""
    import requests

    body: Any = {"query": query, "variables": {"key": {"path": [scale.NAME, "rows"]}}}
    began = time.monotonic()
    answer = requests.post(f"{url}/graphql", json=body, auth=token, timeout=120)
    answer.raise_for_status()
    if "errors" in answer.json():
        raise RuntimeError(str(answer.json()["errors"])[:500])
    return round(time.monotonic() - began, 2)


def command(bench: Bench, stage: str, *words: str, status: int = 0) -> str:
    """Run one command of ours in a process of its own: its seconds, CPU and peak memory. Returns what it said."""
    meter = Meter(bench, stage)
    before = time.monotonic()
    with (bench.folder / f"{stage}.txt").open("wb") as said:
        process = subprocess.Popen([sys.executable, "-m", "batch_assets.cli.main", *words], stdout=said, stderr=said)
        _, ended, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(ended)
    text = (bench.folder / f"{stage}.txt").read_text()
    if process.returncode != status:
        raise RuntimeError(f"{' '.join(words)}: expected status {status}, found {process.returncode}: {text[-2000:]}")
    meter.save(
        command=" ".join(words),
        command_seconds=round(time.monotonic() - before, 1),
        cpu_seconds=round(used.ru_utime + used.ru_stime, 1),
        peak_mib=used.ru_maxrss // 1024,
        done=True,
    )
    return text


def backup(bench: Bench) -> None:
    """A backup, the loss of all databases, and the restore."""
    home, settled = bench.folder / "home", bench.folder / "settings"
    if "backup_made" not in bench.figures:
        made = json.loads(command(bench, "backup_made", "backup", "--json"))
        bench.figures["backup_made"]["id"] = made["id"]
        settled.mkdir(exist_ok=True)
        for name in ("dagster.yaml", "fleet.yaml"):  # what no backup has: they are written by people
            shutil.copyfile(home / name, settled / name)
        bench.save()
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(settled, home)
    home.chmod(0o700)
    if bench.server is not None:
        bench.stop_postgres()
        shutil.rmtree(bench.folder / "pg")
        (bench.folder / "pg").mkdir()
        known = json.loads((bench.folder / "postgres.json").read_text())
        postgres.create(bench.folder / "pg", known["password"])
        bench.start_postgres()
    command(bench, "restored", "restore", "--backup", bench.figures["backup_made"]["id"])
    command(bench, "verify_restored", "verify", scale.NAME)
    Meter(bench, "backup").save(done=True)


def rebuild(bench: Bench) -> None:
    """The catalog forgets all batches, and gets them back from the store."""
    with dg.DagsterInstance.from_config(str(prepare_home())) as instance:
        instance.wipe_assets([ledger.rows_key(scale.NAME)])
    command(bench, "rebuild_ledger", "rebuild-ledger", scale.NAME)
    command(bench, "verify_rebuilt", "verify", scale.NAME)
    Meter(bench, "rebuild").save(done=True)


STAGES: dict[str, Callable[[Bench], object]] = {
    "source": source,
    "rows": lambda bench: refresh(bench, "rows", kills=True),
    "verify": lambda bench: command(bench, "verify", "verify", scale.NAME),
    "unchanged": lambda bench: refresh(bench, "unchanged"),
    "changed": changed,
    "heal": heal,
    "pages": pages,
    "status": lambda bench: command(bench, "status", "status"),
    "rebuild": rebuild,
    "backup": backup,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where everything is kept (some 20 GB)")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--database", choices=("postgres", "sqlite"), default="postgres")
    parser.add_argument("--batches-per-run", type=int, default=500)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {', '.join(STAGES)}")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if given.database == "postgres" and (reason := postgres.why_not()):
        parser.error(reason)
    given.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.folder.resolve(), given.rows, given.database)
    with contextlib.suppress(FileNotFoundError):
        bench.figures = json.loads((bench.folder / "figures.json").read_text())
    try:
        if given.database == "postgres":
            bench.start_postgres()
        prepare(bench, given.batches_per_run)
        for name in given.stages.split(","):
            if not bench.figures.get(name, {}).get("done"):
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}\n")
                STAGES[name](bench)
    finally:
        bench.stop_postgres()
    for found in bench.figures.values():
        found.pop("memory", None)
    print(json.dumps(bench.figures, indent=1))


if __name__ == "__main__":
    main()
