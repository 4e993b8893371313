"""Embedding rows per second and core: one input a request against lists of up to 64.

    python benchmarks/embeddings.py [--rows N] [--dimensions N] [--op] [--json FILE]
    python benchmarks/embeddings.py --url http://127.0.0.1:8000 --model NAME [--rows N]

The same rows go through the feed to the same engine twice: one input in a request, then as the feed does by default.
"Rows per core second" divides by the CPU seconds of this process, user and system, so that an engine which shares the
machine does not count; the engine's own are told beside it. Without `--url` the engine is the simulator, a process of
its own, on which a row costs next to nothing in simulated time: what is measured is the cost of requests. `--op`: the
whole op of a dataset too, inside a Dagster run, with journal, batch objects and ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import orjson
import psutil

from batch_assets.catalog import ledger
from batch_assets.component import dataset_definitions
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from batch_assets.tags import RANGE_END_TAG, RANGE_START_TAG
from gpu_runner.client.engine_client import EngineClient
from gpu_runner.inference.feed import Feed, FeedPolicy
from gpu_runner.micro_batches.list_limits import ListLimits
from gpu_runner.rows import Batch, Generation, Origin, Outcome, Row
from resources.fleet.resource import GpuFleet
from resources.objects.opening import open_objects
from resources.store.dataset_store import BatchStore, DatasetStore

BATCH, SLOTS, NAME = 250, 256, "vectors"
ORIGIN = Origin("bench", "", "here", "cpu", False, "bench")


@dataclass(frozen=True)
class Figures:
    """One way. `engine_cpu_us`: of the engine's processes, 0 where they are not ours to see."""

    what: str
    inputs: int
    rows: int
    rows_per_second: float
    cpu_us: float
    engine_cpu_us: float

    @property
    def rows_per_core(self) -> float:
        """Rows of one CPU second of this process."""
        return 1e6 / self.cpu_us

    def line(self) -> str:
        """For people."""
        return (
            f"{self.what:5} {self.inputs:3} inputs a request {self.rows:7} rows {self.rows_per_second:8.0f} rows/s, "
            f"CPU of a row {self.cpu_us:5.0f} us = {self.rows_per_core:6.0f} rows/core-second, "
            f"of the engine {self.engine_cpu_us:.0f} us"
        )


def text_of(number: int) -> str:
    """A text of about 25 tokens."""
    return f"Passage {number}: what follows from {number * 7919 % 104729} in a text of some words, as they come?"


@contextlib.contextmanager
def simulator(dimensions: int) -> Iterator[tuple[str, int]]:
    """A simulated engine; yields its address and process id."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "bench", "--port", "0", "--exit-with-parent"]
    command += ["--max-num-seqs", str(SLOTS), "--speed", "1000", "--embedding-dim", str(dimensions)]
    command += ["--keep-alive-timeout", "120"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], process.pid
        finally:
            process.terminate()


def cpu_of(pid: int | None) -> float:
    """CPU seconds of a process and its children so far."""
    if pid is None:
        return 0.0
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def batches(rows: int) -> Iterator[Batch]:
    """Rows as a snapshot has them."""
    for start in range(0, rows, BATCH):
        names = range(start, min(rows, start + BATCH))
        yield Batch(str(start), tuple(Row(str(start), str(i), str(i), orjson.dumps(text_of(i))) for i in names))


async def feed(url: str, model: str, rows: int, inputs: int, pid: int | None) -> Figures:
    """All rows through the feed alone."""

    async def commit(job: str, key: str, outcomes: list[Outcome]) -> None:
        assert all(outcome.ok for outcome in outcomes)

    policy = FeedPolicy(lists=ListLimits(inputs=inputs))
    async with EngineClient(url, Generation("embedding", model)) as engine:
        await engine.info()
        made = Feed(batches(rows), on_row=lambda job, key, outcome: None, on_batch=commit, policy=policy)
        theirs, cpu, began = cpu_of(pid), time.process_time(), time.perf_counter()
        await made.serve(engine, ORIGIN, SLOTS)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert made.counts.ok == rows
        return Figures("feed", inputs, rows, rows / seconds, cpu / rows * 1e6, (cpu_of(pid) - theirs) / rows * 1e6)


def op(url: str, rows: int, inputs: int, pid: int) -> Figures:
    """The op of a dataset, inside a Dagster run; its CPU seconds less those of a run over one batch."""

    def run(count: int) -> tuple[float, float, float]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            definitions, store = dataset(folder, count)
            policy = FeedPolicy(lists=ListLimits(inputs=inputs))
            with mock.patch("batch_assets.generation.range_run.FeedPolicy", lambda: policy):
                return run_op(folder, definitions, store, url, pid)

    run(BATCH)
    start, whole = run(BATCH), run(rows + BATCH)
    wall, cpu, theirs = (more - less for more, less in zip(whole, start, strict=True))
    return Figures("op", inputs, rows, rows / wall, cpu / rows * 1e6, theirs / rows * 1e6)


def dataset(folder: Path, rows: int) -> tuple[dg.Definitions, DatasetStore]:
    """A dataset of texts to embed, its snapshot taken."""
    source = folder / "source.jsonl"
    source.write_bytes(b"".join(orjson.dumps({"text": text_of(i)}) + b"\n" for i in range(rows)))
    attributes: dict[str, Any] = {
        "name": NAME,
        "source": {"path": str(source)},
        "task": "embedding",
        "prompt": {"text": "{{ text }}"},
    }
    attributes |= {"model": "bench", "batches_per_run": 100_000}
    spec = load_spec(attributes, "bench")
    store = DatasetStore(open_objects(str(folder / "store")), NAME)
    with tempfile.TemporaryDirectory() as work:
        build_snapshot(spec, store, now=time.time(), workdir=Path(work))
    return dataset_definitions(spec, folder), store


def run_op(
    folder: Path, definitions: dg.Definitions, store: DatasetStore, url: str, pid: int
) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds here, CPU seconds of the engine) of one run."""
    fleet = folder / "fleet.yaml"
    fleet.write_text(json.dumps({"engines": [{"name": "b", "kind": "endpoint", "url": url, "max_num_seqs": SLOTS}]}))
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
        tags = {RANGE_START_TAG: keys[0], RANGE_END_TAG: keys[-1]}
        theirs, cpu, began = cpu_of(pid), time.process_time(), time.perf_counter()
        assert dg.materialize([rows], instance=instance, resources=resources, tags=tags).success
        return time.perf_counter() - began, time.process_time() - cpu, cpu_of(pid) - theirs


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dimensions", type=int, default=384, help="of the simulated model's vectors")
    parser.add_argument("--inputs", type=int, default=64, help="at most, in one request")
    parser.add_argument("--op", action="store_true", help="the whole op as well")
    parser.add_argument("--url", help="an engine that runs, in place of the simulator")
    parser.add_argument("--model", default="bench")
    parser.add_argument("--pid", type=int, help="of that engine, to tell its CPU seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Figures] = []
    with contextlib.ExitStack() as stack:
        url, pid = (options.url, options.pid) if options.url else stack.enter_context(simulator(options.dimensions))
        asyncio.run(feed(url, options.model, min(options.rows, 256), options.inputs, pid))  # warms both up
        for inputs in (1, options.inputs):
            found.append(asyncio.run(feed(url, options.model, options.rows, inputs, pid)))
            print(found[-1].line(), flush=True)
            if options.op and pid is not None:
                found.append(op(url, options.rows, inputs, pid))
                print(found[-1].line(), flush=True)
    for what in dict.fromkeys(each.what for each in found):
        one, many = (each for each in found if each.what == what)
        print(
            f"{what}: {many.rows_per_core / one.rows_per_core:.1f} times the rows per core second, "
            f"{many.rows_per_second / one.rows_per_second:.1f} times the rows per second"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
