"""How an engine fares while one run after the other takes it over.

    python benchmarks/handover.py [--runs 10] [--seconds 20] [--no-client] [--json FILE]

A simulated provider with room for one machine, a dataset that may have one instance, a pool of two slots: the spare run
waits until the one before it only has its last rows with the engine, and leases the same instance beside it. Two
figures count. From the engine's own log: the longest time without a request inside, between the first and the last.
And rows/s of the whole job, from the start of the first run to the end of the last (start-up of runs, boot of the
instance, commits and ledger included), against a client that keeps 4 × slots requests at an engine with the same
command line and throws the answers away. The engine is slowed to about `--rate` rows/s, so that no CPU is the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from feed import bodies, client

from batch_assets import settings
from batch_assets.catalog import ledger
from batch_assets.local_dagster.dagster_client import DagsterClient
from batch_assets.local_dagster.home import StackAddress, prepare_home
from batch_assets.local_dagster.stack import Stack
from batch_assets.tags import PUBLISH_TAG
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.machine_host.registry import HostPlan, MachineRegistry
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

NAME = "handover"
BATCH = 250
PRICE = 1.0
ROWS_PER_SECOND = 25.0  # of the simulated L40S with an 8B model and these lengths, at a clock of 1
LENGTHS = "lognormal:256:1024"
LOG = "--request-log"


@dataclass(frozen=True, slots=True)
class HandOver:
    """The figures. `gaps`: the longest times without a request inside; `below_slots_seconds`: with fewer than slots."""

    runs: int
    rows: int
    slots: int
    clock: float
    seconds_per_run: float
    longest_gap: float
    gaps: list[float]
    below_slots_seconds: float
    engine_seconds: float
    job_seconds: float
    job_rows_per_second: float
    client_rows_per_second: float | None
    ratio: float | None
    leases: int
    load_average: float


def prepare(folder: Path, rows: int, batches_per_run: int, clock: float) -> Path:
    """Home, fleet and dataset in `folder`, and the environment that points at them; returns the home."""
    home, defs = folder / "home", folder / "defs" / NAME
    home.mkdir()
    defs.mkdir(parents=True)
    offer = {"instance_type": "l40s", "gpu": "L40S", "price_per_hour": PRICE, "capacity": 1}
    words = ["--output-tokens", LENGTHS, LOG, "{home}/requests-{name}.jsonl"]
    provider = {"name": "sim-one", "boot_seconds": 0, "offers": [offer]}
    fleet = {"simulated": {"clock": clock, "arguments": words, "providers": [provider]}, "idle_minutes": 10}
    (home / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    lines = [json.dumps({"question": f"Question {i}: what follows from {i * 7919 % 104729}?"}) for i in range(rows)]
    (folder / "source.jsonl").write_text("\n".join(lines) + "\n")
    spec = {
        "name": NAME,
        "source": {"path": str(folder / "source.jsonl")},
        "prompt": {"user": "{{ question }}"},
        "model": "bench",
        "sampling": {"temperature": 1.0, "max_tokens": 1024},
        "batch_rows": BATCH,
        "batches_per_run": batches_per_run,
    }
    document = {"type": "batch_assets.GeneratedDataset", "attributes": spec}
    (defs / "defs.yaml").write_text(yaml.safe_dump(document))
    os.environ |= {
        "DAGSTER_HOME": str(home),
        "BATCH_ASSETS_DEFS": str(defs.parent),
        "BATCH_ASSETS_STORE": str(folder / "store"),
        "BATCH_ASSETS_FLEET": str(home / "fleet.yaml"),
    }
    for variable in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_ENDPOINT"):
        os.environ.pop(variable, None)
    return prepare_home()


def run_job(stack: Stack, instance: dg.DagsterInstance, seconds: float) -> list[tuple[float, float]]:
    """Generate and publish the dataset; (start, end) of each run over batches, in order. Raises RuntimeError."""
    stack.wait_ready()
    DagsterClient(StackAddress(stack.url, stack.port, os.getpid())).launch(f"{NAME}_refresh", {}, {})
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        records = instance.get_run_records()
        for record in records:
            if record.dagster_run.status in (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED):
                raise RuntimeError(f"run {record.dagster_run.run_id} ended as {record.dagster_run.status.value}")
        if any(PUBLISH_TAG in record.dagster_run.tags and record.dagster_run.is_success for record in records):
            rows = [one for one in records if ledger.rows_key(NAME) in (one.dagster_run.asset_selection or ())]
            return sorted((one.start_time or 0.0, one.end_time or 0.0) for one in rows)
        time.sleep(1)
    raise RuntimeError(f"not published within {seconds:.0f} s")


def levels(log: Path) -> list[tuple[float, int]]:
    """(time, requests inside from then on), from an engine's own log."""
    changes = sorted(
        (event["t"], 1 if event["event"] == "received" else -1)
        for event in (json.loads(line) for line in log.read_text().splitlines())
    )
    inside, found = 0, []
    for moment, change in changes:
        inside += change
        found.append((moment, inside))
    return found


def seconds_below(steps: Sequence[tuple[float, int]], requests: int) -> list[float]:
    """Each stretch of time, longest first, in which fewer than so many requests were inside, before the last one."""
    found, since = [], None
    for moment, inside in steps:
        if since is not None and inside >= requests:
            found.append(moment - since)
        since = None if inside >= requests else moment if since is None else since
    return sorted(found, reverse=True)


@contextlib.contextmanager
def engine_like(home: Path) -> Iterator[str]:
    """An engine with the command line of the one that the job rented, without its log; yields its address."""
    (record,) = MachineRegistry(home).machines()
    plan = HostPlan.load(record.plan)
    words = [word.format(model=plan.model, port=0) for word in plan.command]
    del words[words.index(LOG) : words.index(LOG) + 2]
    with subprocess.Popen(
        [*words, "--exit-with-parent", "--keep-alive-timeout", "120"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def client_alone(home: Path, requests: int) -> float:
    """Rows/s of a client with so many requests at any time."""
    with engine_like(home) as url:
        return float(
            asyncio.run(client(url, bodies(DatasetStore(open_objects(settings.store_root()), NAME)), requests))
        )


def measure(runs: int, seconds: float, rate: float, folder: Path, compare: bool = True) -> HandOver:
    """The job, then the client when it is to `compare`; all figures."""
    clock = rate / ROWS_PER_SECOND
    batches_per_run = max(1, round(rate * seconds * 1.15 / BATCH))  # a little more: runs shall not be shorter
    rows = runs * batches_per_run * BATCH
    home = prepare(folder, rows, batches_per_run, clock)
    with Stack(home) as stack, dg.DagsterInstance.from_config(str(home)) as instance:
        spans = run_job(stack, instance, 120 + 3 * runs * seconds)
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        rented = fleet_db.fleet(ended=True)
    if len(rented) != 1 or len(spans) != runs:
        raise RuntimeError(f"expected {runs} runs on 1 instance, found {len(spans)} runs on {len(rented)}")
    slots = rented[0].max_num_seqs or 256
    steps = levels(home / f"requests-{rented[0].name}.jsonl")
    if len(steps) != 2 * rows:
        raise RuntimeError(f"expected {rows} requests, each answered once, found {len(steps) / 2:.1f} in the log")
    gaps = seconds_below(steps, 1)
    most = client_alone(home, 4 * slots) if compare else None
    job = spans[-1][1] - spans[0][0]
    return HandOver(
        runs=runs,
        rows=rows,
        slots=slots,
        clock=round(clock, 3),
        seconds_per_run=round((steps[-1][0] - steps[0][0]) / runs, 2),
        longest_gap=round(max(gaps, default=0.0), 4),
        gaps=[round(gap, 4) for gap in gaps[:20]],
        below_slots_seconds=round(sum(seconds_below(steps, slots)), 2),
        engine_seconds=round(steps[-1][0] - steps[0][0], 2),
        job_seconds=round(job, 2),
        job_rows_per_second=round(rows / job, 2),
        client_rows_per_second=most and round(most, 2),
        ratio=most and round(rows / job / most, 4),
        leases=rented[0].epoch,
        load_average=round(os.getloadavg()[1], 1),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="least time that each run has the engine")
    parser.add_argument("--rate", type=float, default=100.0, help="rows/s that the engine shall be able to give")
    parser.add_argument("--no-client", action="store_true", help="the job alone, without what a client could do")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(options.runs, options.seconds, options.rate, Path(name), not options.no_client)
    print(f"{found.runs} runs of {found.rows // found.runs:,} rows and {found.seconds_per_run:.1f} s on 1 instance")
    print(f"longest time without a request inside the engine: {found.longest_gap:.3f} s")
    print(f"fewer than {found.slots} (its slots): for {found.below_slots_seconds:.1f} of {found.engine_seconds:.0f} s")
    print(f"whole job {found.job_rows_per_second:.1f} rows/s in {found.job_seconds:.0f} s")
    if found.ratio is not None:
        print(f"client with {4 * found.slots} requests at any time {found.client_rows_per_second:.1f} rows/s")
        print(f"ratio {found.ratio:.3f}; load of this machine {found.load_average}")
    figures: dict[str, Any] = asdict(found)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
