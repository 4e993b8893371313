"""How long `batch-assets run` takes on a new home, from the command to the first row that an engine is asked.

    python benchmarks/start.py [--dataset example | --rows N] [--times 3] [--fleet] [--json FILE]

Starts a simulated engine, then the real command on a new DAGSTER_HOME and a new store, and cancels it once the engine
has answered a row. When the engine got its first request stands in its request log; the other moments are Dagster's
events. Processor seconds are read from /proc ten times a second, so the last tenth of a process may be missing.

With `--fleet` no engine is named: the command rents from the three embedded simulated providers, as it does out of the
box. Their boot, of two simulated minutes or more, is then part of the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import dagster as dg
import yaml

from batch_assets.local_dagster import first_daemon, first_server
from batch_assets.local_dagster.worker_template import TEMPLATE, WORKER
from resources.fleet.fleet_config import FleetConfig

MOST_SECONDS = 180.0
END_SECONDS = 60.0
LOOK_SECONDS = 0.1
EVENTS = {
    dg.DagsterEventType.PIPELINE_ENQUEUED: "queued",
    dg.DagsterEventType.PIPELINE_STARTING: "taken from the queue",
    dg.DagsterEventType.PIPELINE_START: "started",
    dg.DagsterEventType.STEP_START: "op begun",
    dg.DagsterEventType.PIPELINE_SUCCESS: "succeeded",
}
PARTS = {  # of a stack, by a word of its command line
    "gpu_runner.providers.process_guard": "guards",
    "batch_assets.local_dagster.code_server": "code server",
    "batch_assets.local_dagster.definitions_server": "definitions server",
    "api": "definitions server",
    "batch_assets.dagster_internals.daemon": "daemon",
    "batch_assets.webserver.server": "webserver",
    "gpu_runner.providers.machine_host.daemon": "simulated machines",
    "gpu_runner.simulator": "simulated machines",
    "run": "command",
}
FORKED = {  # by their own name: they have the command line of what they were forked from
    first_server.NAME: "definitions server",
    first_daemon.NAME: "daemon",
    TEMPLATE: TEMPLATE,
    WORKER: WORKER,
}


@dataclass
class Process:
    """One process of the stack: its name, when it was first seen and its processor seconds, seen last."""

    name: str
    since: float
    cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds after the command. `cpu` and `cpu_total`: processor seconds up to the first answer, or to the end."""

    first_request: float
    first_answer: float
    cpu_total: float
    load_average: float
    moments: list[tuple[float, str]] = field(default_factory=list)  # of Dagster's events, and after the first request
    cpu: list[tuple[float, str, float]] = field(default_factory=list)


class Watch:
    """All processes with a mark, `NAME=value`, in their environment, those that have ended too."""

    def __init__(self, mark: str) -> None:
        self._mark, self._tick = mark.encode(), os.sysconf("SC_CLK_TCK")
        self._others: set[str] = set()
        self.processes: dict[str, Process] = {}

    def look(self, now: float) -> None:
        """Read what each has used so far."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or entry.name in self._others:
                continue
            with contextlib.suppress(OSError):
                if entry.name not in self.processes:
                    if self._mark not in (entry / "environ").read_bytes().split(b"\0"):
                        self._others.add(entry.name)
                        continue
                    self.processes[entry.name] = Process("", now)
                process = self.processes[entry.name]
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                process.cpu = (int(fields[11]) + int(fields[12])) / self._tick
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if command != [""]:  # of one that has ended
                    process.name = name_of((entry / "comm").read_text().strip(), command)


def name_of(name: str, command: Sequence[str]) -> str:
    """Which part of the stack a process of this name and command line is."""
    if name in FORKED:
        return FORKED[name]
    if "multiprocessing.resource_tracker" in " ".join(command):
        return "resource tracker"
    return next((part for word, part in PARTS.items() if word in command), "others")


@contextlib.contextmanager
def engine(model: str, log: Path) -> Iterator[str]:
    """A simulated engine that runs already; its address."""
    words = ["--model", model, "--exit-with-parent", "--output-tokens", "fixed:64", "--request-log", str(log)]
    command = [sys.executable, "-m", "gpu_runner.simulator", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.wait()


def logged(folder: Path, event: str) -> list[float]:
    """Times of the events of this kind in the request logs below the folder, in order."""
    found = []
    for log in folder.rglob("*.requests"):
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        found += [line["t"] for line in lines if line["event"] == event]
    return sorted(found)


def declare(folder: Path, rows: int, model: str) -> str:
    """Write a dataset of so many rows into a folder of definitions; its name."""
    about = {"name": "start_rows", "model": model, "prompt": {"user": "Say {{ number }}."}, "batch_rows": 250}
    about["source"] = {"grid": {"number": [str(one) for one in range(rows)]}}
    (folder / "start_rows").mkdir(parents=True)
    declared = {"type": "batch_assets.GeneratedDataset", "attributes": about}
    (folder / "start_rows" / "defs.yaml").write_text(yaml.safe_dump(declared))
    return "start_rows"


def moments(home: Path, began: float) -> list[tuple[float, str]]:
    """What Dagster's event log says of every run, in seconds after the command."""
    found: list[tuple[float, str]] = []
    with dg.DagsterInstance.from_config(str(home)) as instance:
        for run in instance.get_runs():
            selected = {key.path[-1] for key in run.asset_selection or ()}
            what = "rows" if "rows" in selected else "table" if run.job_name.endswith("_publish") else "prompts"
            for record in instance.get_records_for_run(run.run_id, of_type=set(EVENTS)).records:
                kind = record.event_log_entry.get_dagster_event().event_type
                found.append((round(record.timestamp - began, 2), f"{what}: {EVENTS[kind]}"))
    return sorted(found)


@contextlib.contextmanager
def started(folder: Path, words: Sequence[str], given: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command `batch-assets` with these words; is interrupted when the body ends, if it still runs."""
    command = [str(Path(sys.executable).with_name("batch-assets")), *words]
    with (folder / "command.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **given}, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(END_SECONDS)


def measure(folder: Path, dataset: str, endpoint: str | None, rows: int | None, model: str) -> Start:
    """One start on a new home below the folder, and its end. With `rows`: of a dataset of so many, to its end."""
    home = folder / "home"
    home.mkdir()
    given = {"DAGSTER_HOME": str(home), "BATCH_ASSETS_STORE": str(folder / "data")}
    if rows is not None:
        dataset = declare(folder / "defs", rows, model)
        given["BATCH_ASSETS_DEFS"] = str(folder / "defs")
    words = ["--endpoint", endpoint] if endpoint else []
    if not endpoint:
        fleet = FleetConfig.embedded().model_dump(
            mode="json", exclude_defaults=True, exclude={"simulate_only_if_asked"}
        )
        fleet["simulated"]["arguments"] = ["--request-log", "{home}/{name}.requests"]
        (home / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    watch, load = Watch(f"DAGSTER_HOME={home}"), os.getloadavg()[0]
    began, ticks = time.time(), time.monotonic()
    ends: dict[str, float] = {}
    used: list[tuple[float, str, float]] = []
    with started(folder, ["run", dataset, *words], given) as process:
        while True:
            said = (folder / "command.log").read_text()
            if process.poll() is not None or (rows is None and logged(folder, "finished")):
                break
            if "\ntable: " in said:
                ends.setdefault("RESULT PRINTED", round(time.time() - began, 2))
            if time.monotonic() - ticks > MOST_SECONDS + (rows or 0) / 100:
                break
            watch.look(round(time.monotonic() - ticks, 1))
            used = [(one.since, one.name, round(one.cpu, 2)) for one in watch.processes.values()]
            time.sleep(LOOK_SECONDS)
        ended = time.time()
    asked, answered = logged(folder, "received"), logged(folder, "finished")
    if not answered or (rows is not None and process.returncode != 0):
        raise SystemExit(f"no row was answered, or not all; the command said:\n{said}")
    if rows is not None:
        ends |= {"LAST ANSWER": round(answered[-1] - began, 2), "END": round(ended - began, 2)}
    return Start(
        round(asked[0] - began, 2),
        round(answered[0] - began, 2),
        round(sum(cpu for _, _, cpu in used), 2),
        load,
        sorted([*moments(home, began), *((at, what) for what, at in ends.items())]),
        sorted(used),
    )


def told(start: Start) -> str:
    """The timeline and the processes, as a text."""
    lines = [f"first request {start.first_request:.2f} s, first answer {start.first_answer:.2f} s"]
    lines += [f"  {at:6.2f}  {what}" for at, what in sorted([*start.moments, (start.first_request, "FIRST REQUEST")])]
    lines += [f"processor seconds: {start.cpu_total:.1f} (load average before: {start.load_average:.1f})"]
    lines += [f"  {cpu:6.2f}  {name}, from {since:.1f} s" for since, name, cpu in start.cpu]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time from `batch-assets run` to the first request of an engine")
    parser.add_argument("--dataset", default="example")
    parser.add_argument("--rows", type=int, help="a dataset of so many rows in its place, to the end")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="that the dataset asks for")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--fleet", action="store_true", help="rent from the embedded simulated providers")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    found = []
    for _ in range(given.times):
        with tempfile.TemporaryDirectory(prefix="start-") as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            url = None if given.fleet else stack.enter_context(engine(given.model, folder / "engine.requests"))
            found.append(measure(folder, given.dataset, url, given.rows, given.model))
            print(told(found[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
