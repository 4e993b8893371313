"""What a stack costs that has nothing to do, and how soon it does something when it is asked to.

    python benchmarks/idle.py [--datasets 200] [--seconds 60] [--settle 30] [--json FILE]

Declares so many datasets of four rows in a folder of their own, starts the real code server, daemon and webserver on a
new DAGSTER_HOME, waits until they have settled, and adds up the processor seconds of all their processes from /proc.
Then it refreshes one dataset: the reaction is the time from the end of the refresh to the creation of the run over its
batches, both as Dagster recorded them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg
import yaml

from batch_assets.local_dagster import first_daemon, first_server
from batch_assets.local_dagster.dagster_client import DagsterClient
from batch_assets.local_dagster.home import StackAddress, prepare_home
from batch_assets.local_dagster.stack import Stack
from batch_assets.tags import REFRESH_TAG, REQUEST_TAG, SIMULATE_TAG

REACTION_SECONDS = 120.0
ROWS = ["one", "two", "three", "four"]


@dataclass(frozen=True, slots=True)
class Idle:
    """The figures. Processor seconds are per minute; `reactions` are seconds."""

    datasets: int
    start_seconds: float
    cpu_per_minute: float
    by_process: dict[str, float]
    reactions: list[float]
    load_average: float


def declare(folder: Path, count: int) -> None:
    """Write one defs.yaml per dataset."""
    for number in range(count):
        name = f"idle_{number:04d}"
        attributes = {
            "name": name,
            "source": {"grid": {"word": ROWS}},
            "prompt": {"user": "Explain {{ word }}."},
            "model": "Qwen/Qwen3-0.6B",
            "sampling": {"max_tokens": 8},
        }
        (folder / name).mkdir(parents=True)
        document = {"type": "batch_assets.GeneratedDataset", "attributes": attributes}
        (folder / name / "defs.yaml").write_text(yaml.safe_dump(document))


FORKED = {first_server.NAME: "code server (definitions)", first_daemon.NAME: "daemon"}  # by their own name


def processes(home: Path) -> Iterator[tuple[int, str, float]]:
    """Process id, name and processor seconds so far (user and system) of every process of the home's stack."""
    mark, tick = f"DAGSTER_HOME={home}".encode(), os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes().decode().split("\0")
            name = (entry / "comm").read_text().strip()
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        yield int(entry.name), name_of(name, command), (int(fields[11]) + int(fields[12])) / tick


def name_of(name: str, command: list[str]) -> str:
    """Which part of the stack a process of this name and command line is."""
    if name in FORKED:
        return FORKED[name]
    if "gpu_runner.providers.process_guard" in command:
        return "guards"
    if {"api", "grpc"} <= set(command):
        return "code server (definitions)"
    names = {
        "batch_assets.local_dagster.code_server": "code server (proxy)",
        "batch_assets.dagster_internals.daemon": "daemon",
        "batch_assets.local_dagster.definitions_server": "code server (definitions)",
        "batch_assets.webserver.server": "webserver",
    }
    return next((name for module, name in names.items() if module in command), "others")


def spent(home: Path, seconds: float) -> dict[str, float]:
    """Processor seconds per minute by part of the stack, over so many seconds."""
    before, began = {pid: used for pid, _, used in processes(home)}, time.monotonic()
    time.sleep(seconds)
    after, took = list(processes(home)), time.monotonic() - began
    found: dict[str, float] = {}
    for pid, name, used in after:
        found[name] = found.get(name, 0.0) + (used - before.get(pid, 0.0)) * 60 / took
    return {name: round(used, 2) for name, used in sorted(found.items())}


def reaction(instance: dg.DagsterInstance, client: DagsterClient, dataset: str) -> float:
    """Seconds from the end of a refresh of the dataset to the creation of the run that it asked for."""
    request = client.launch(f"{dataset}_refresh", {REFRESH_TAG: dataset, SIMULATE_TAG: "true"}, {})
    deadline = time.monotonic() + REACTION_SECONDS
    while time.monotonic() < deadline:
        if found := instance.get_run_records(dg.RunsFilter(tags={REQUEST_TAG: request})):
            asked = instance.get_run_records(dg.RunsFilter(run_ids=[request]))[0]
            assert asked.end_time is not None
            return round(found[-1].create_timestamp.timestamp() - asked.end_time, 2)
        time.sleep(0.2)
    raise SystemExit(f"{dataset}: nothing was started within {REACTION_SECONDS:.0f} s of its refresh")


def measure(folder: Path, datasets: int, seconds: float, settle: float, requests: int) -> Idle:
    """Start a stack with so many datasets, and look at it."""
    declare(folder / "defs", datasets)
    places = {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "data", "BATCH_ASSETS_DEFS": "defs"}
    os.environ.update({name: str(folder / place) for name, place in places.items()})
    home = prepare_home()
    began = time.monotonic()
    with Stack(home) as stack, dg.DagsterInstance.from_config(str(home)) as instance:
        stack.wait_ready()
        started = time.monotonic() - began
        time.sleep(settle)
        by_process = spent(home, seconds)
        client = DagsterClient(StackAddress(stack.url, stack.port, os.getpid()))
        names = [f"idle_{number * datasets // requests:04d}" for number in range(requests)]
        reactions = [reaction(instance, client, name) for name in names]
        client.terminate([run.run_id for run in instance.get_runs() if not run.is_finished])
    total = round(sum(by_process.values()), 2)
    return Idle(datasets, round(started, 1), total, by_process, reactions, os.getloadavg()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of an idle stack, and its reaction to a request")
    parser.add_argument("--datasets", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60, help="how long it is watched")
    parser.add_argument("--settle", type=float, default=30, help="how long it is left alone before that")
    parser.add_argument("--requests", type=int, default=3, help="refreshes whose reaction is measured")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        found = measure(Path(folder), given.datasets, given.seconds, given.settle, min(given.requests, given.datasets))
    text = json.dumps(asdict(found), indent=1)
    print(text)
    if given.json:
        given.json.write_text(text)


if __name__ == "__main__":
    main()
