"""How much of an engine's throughput survives 250-row durability.

    python benchmarks/feed.py [--quick] [--json FILE] [--memory]

Per cell of the grid (slots × length distribution) the same rows go through the same simulated engine four times, one
after the other: an unbounded client (every request sent at once, answers counted and thrown away), a saturating client
(the same with 4 × slots requests at any time, which spares it thousands of connections), the `rows` op inside a Dagster
run (journal, 250-row commits, ledger on SQLite), and the barrier version (250 rows at a time, the next batch after the
last row). The ratio is the op against the faster of the two clients. The simulator is a process of its own; `speed` is
chosen so that about `--rate` rows/s can be had, which keeps both processes below one core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import dagster as dg
import orjson

from batch_assets.catalog import ledger
from batch_assets.component import dataset_definitions
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from batch_assets.tags import RANGE_END_TAG, RANGE_START_TAG
from gpu_runner.simulator.scheduler import StepModel
from resources.fleet.resource import GpuFleet
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchStore, DatasetStore

SLOTS = (256, 1024)
LENGTHS = ((300, 2_000), (500, 4_000), (1_500, 16_000))  # mean and cap of output tokens: peers' barrier grid
NAME = "bench"
BATCH = 250


@dataclass
class Cell:
    """One cell's figures. `cpu_ms`: client CPU per row of the op: commits, journal, ledger and Dagster's work.

    What one run costs whatever its size (`start_cpu` seconds, measured on a run over one batch) is taken off it.
    """

    slots: int
    mean: int
    cap: int
    rows: int
    speed: float
    unbounded: float
    saturating: float
    op: float
    barrier: float
    cpu_ms: float
    start_cpu: float

    @property
    def ratio(self) -> float:
        """Rows/s of the op ÷ rows/s of the faster client."""
        return self.op / max(self.unbounded, self.saturating)


def engine_speed(slots: int, mean: int, rate: float) -> float:
    """Speed factor at which a full engine of the default model answers about `rate` rows/s."""
    model = StepModel(max_num_seqs=slots)
    step = model.compute_seconds(slots) + min(model.kv_tokens, slots * mean) * model.context_seconds
    return rate * mean * step / slots


@contextlib.contextmanager
def simulator(slots: int, mean: int, cap: int, speed: float) -> Iterator[str]:
    """A simulated engine; yields its address."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "bench", "--port", "0", "--exit-with-parent"]
    command += ["--max-num-seqs", str(slots), "--speed", f"{speed:.3f}", "--max-model-len", "32768"]
    command += ["--output-tokens", f"lognormal:{mean}:{cap}", "--keep-alive-timeout", "120"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def make_dataset(folder: Path, rows: int, batches_per_run: int) -> tuple[dg.Definitions, DatasetStore]:
    """A dataset of short prompts, its snapshot taken."""
    source = folder / "source.jsonl"
    with source.open("wb") as file:
        for i in range(rows):
            file.write(orjson.dumps({"question": f"Question {i}: what follows from {i * 7919 % 104729}?"}) + b"\n")
    attributes: dict[str, Any] = {
        "name": NAME,
        "source": {"path": str(source)},
        "prompt": {"user": "{{ question }}"},
        "model": "bench",
        "sampling": {"temperature": 1.0, "max_tokens": 16_384},
        "batches_per_run": min(batches_per_run, 100_000),
    }
    (folder / "spec.json").write_text(json.dumps(attributes))
    spec = load_spec(attributes, "bench")
    store = DatasetStore(open_objects(str(folder / "store")), NAME)
    with tempfile.TemporaryDirectory() as work:
        build_snapshot(spec, store, now=time.time(), workdir=Path(work))
    return dataset_definitions(spec, folder), store


def bodies(store: DatasetStore) -> list[bytes]:
    """The request bodies of all rows, in order."""
    snapshot = store.current_snapshot()
    assert snapshot is not None
    manifest = store.manifest(snapshot)
    start = orjson.dumps({"model": "bench", **manifest.settings().sampling})[:-1] + b',"messages":'
    return [start + row.prompt + b"}" for _, rows in store.rows(manifest, store.entries(snapshot)) for row in rows]


async def client(url: str, requests: list[bytes], at_once: int, *, barrier: bool = False) -> float:
    """Rows/s of a client with `at_once` requests at any time, or, with a barrier, group after group of that size."""
    headers = {"Content-Type": "application/json"}
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=headers
    ) as session:
        free = asyncio.Semaphore(at_once)

        async def ask(body: bytes) -> None:
            async with free, session.post(f"{url}/v1/chat/completions", data=body) as answer:
                assert orjson.loads(await answer.read())["choices"][0]["finish_reason"] in ("stop", "length")

        started = time.perf_counter()
        group = at_once if barrier else len(requests)
        for first in range(0, len(requests), group):
            await asyncio.gather(*(ask(body) for body in requests[first : first + group]))
        return len(requests) / (time.perf_counter() - started)


def run_op(folder: Path, definitions: dg.Definitions, store: DatasetStore, url: str, slots: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of the op's step inside a Dagster run with a SQLite instance."""
    fleet = folder / "fleet.yaml"
    engine = {"name": "bench", "kind": "endpoint", "url": url, "max_num_seqs": slots}
    fleet.write_text(json.dumps({"engines": [engine]}))
    resources = {
        "store": BatchStore(root=store.objects.root),
        "fleet": GpuFleet(database=f"sqlite:///{folder}/fleet.db", home=str(folder), config_path=str(fleet)),
    }
    assets = [asset for asset in definitions.assets or () if isinstance(asset, dg.AssetsDefinition)]
    rows = next(asset for asset in assets if asset.key == ledger.rows_key(NAME))
    snapshot = store.current_snapshot()
    assert snapshot is not None
    keys = [entry.key for entry in store.entries(snapshot)]
    with dg.DagsterInstance.local_temp(str(folder)) as instance:
        instance.add_dynamic_partitions(NAME, keys)
        cpu = time.process_time()
        result = dg.materialize(
            [rows],
            instance=instance,
            resources=resources,
            tags={RANGE_START_TAG: keys[0], RANGE_END_TAG: keys[-1]},
        )
        cpu = time.process_time() - cpu
        assert result.success
        assert len(instance.get_materialized_partitions(ledger.rows_key(NAME))) == len(keys)
        stats = instance.get_run_step_stats(result.run_id)[0]
        assert stats.end_time is not None and stats.start_time is not None
        return stats.end_time - stats.start_time, cpu


def start_cost(slots: int) -> float:
    """CPU seconds of the op over one batch on a fast engine: Dagster's start and end, the first connections."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        definitions, store = make_dataset(folder, BATCH, batches_per_run=BATCH)
        with simulator(slots, 100, 400, 2_000) as url:
            return run_op(folder, definitions, store, url, slots)[1]


def measure(slots: int, mean: int, cap: int, rows: int, rate: float, start: float) -> Cell:
    """All versions of one cell; `start` is what `start_cost` found."""
    speed = engine_speed(slots, mean, rate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        definitions, store = make_dataset(folder, rows, batches_per_run=rows)
        requests = bodies(store)
        with simulator(slots, mean, cap, speed) as url:
            free = asyncio.run(client(url, requests, len(requests)))
        with simulator(slots, mean, cap, speed) as url:
            full = asyncio.run(client(url, requests, 4 * slots))
        with simulator(slots, mean, cap, speed) as url:
            wall, cpu = run_op(folder, definitions, store, url, slots)
        with simulator(slots, mean, cap, speed) as url:
            barrier = asyncio.run(client(url, requests[: 4 * BATCH], BATCH, barrier=True))
    each = (cpu - start) / (rows - BATCH) * 1e3
    return Cell(slots, mean, cap, rows, round(speed, 2), free, full, rows / wall, barrier, each, start)


def peak_memory(rows: int) -> tuple[int, float]:
    """(peak resident MiB, CPU seconds) of a process that runs the op over `rows` rows, as its own child."""
    command = [sys.executable, __file__, "--memory-child", str(rows)]
    *_, mib, cpu = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split()
    return int(mib), float(cpu)


def memory_child(rows: int) -> None:
    """Run the op over `rows` rows on a fast engine; print our own peak in MiB and the CPU seconds of the op."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = subprocess.run([sys.executable, __file__, "--make", str(rows), name], check=True)
        assert made.returncode == 0
        store = DatasetStore(open_objects(str(folder / "store")), NAME)
        attributes = json.loads((folder / "spec.json").read_text())
        with simulator(256, 100, 400, 2_000) as url:
            _, cpu = run_op(folder, dataset_definitions(load_spec(attributes, "bench"), folder), store, url, 256)
    # Not ru_maxrss: a process inherits that of whoever started it (getrusage(2), proc(5)).
    status = Path("/proc/self/status").read_text()
    print(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // 1024, cpu)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell, a few seconds")
    parser.add_argument("--rate", type=float, default=400.0, help="rows/s that the engine shall be able to give")
    parser.add_argument("--slots", type=int, choices=SLOTS, help="only this half of the grid")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--memory", action="store_true", help="peak memory and CPU per row, at 20,000 and 200,000 rows")
    parser.add_argument("--memory-child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_dataset(Path(options.make[1]), int(options.make[0]), int(options.make[0]))
        return
    if options.memory_child:
        memory_child(options.memory_child)
        return
    if options.memory:
        (few, few_cpu), (many, many_cpu) = peak_memory(20_000), peak_memory(200_000)
        print(f"peak at 20,000 rows: {few} MiB, at 200,000: {many} MiB ({many / few - 1:+.1%})")
        print(f"CPU of a further row: {(many_cpu - few_cpu) / 180_000 * 1e3:.3f} ms")
        return
    half = SLOTS if options.slots is None else (options.slots,)
    grid = [(256, LENGTHS[0])] if options.quick else [(slots, lengths) for slots in half for lengths in LENGTHS]
    cells = []
    start_cost(half[0])  # the first run of a process also imports and warms up
    start = start_cost(half[0])
    print(f"a run over one batch: {start:.2f} s of CPU")
    print("slots  mean/cap      rows  speed  unbounded  saturating  op rows/s  ratio  barrier  share  cpu ms/row")
    for slots, (mean, cap) in grid:
        cell = measure(slots, mean, cap, 2_000 if options.quick else max(4_000, 8 * slots), options.rate, start)
        cells.append(cell)
        print(
            f"{slots:5}  {mean:5}/{cap:<6} {cell.rows:6} {cell.speed:6.1f} {cell.unbounded:10.1f} "
            f"{cell.saturating:11.1f} {cell.op:10.1f} {cell.ratio:6.3f} {cell.barrier:8.1f} "
            f"{cell.barrier / cell.saturating:6.2f} {cell.cpu_ms:11.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) | {"ratio": cell.ratio} for cell in cells], indent=1))


if __name__ == "__main__":
    main()
