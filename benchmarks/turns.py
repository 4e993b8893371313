"""Conversations of three turns: whether an engine stays as full as with a client of no bounds, and what a kill costs.

    python benchmarks/turns.py [--conversations 2000] [--turns 3] [--rate 400] [--slots 256] [--json FILE]

The same conversations go through the same simulated engine three times: a client that begins all of them at once and
keeps nothing, one that has 4 × slots under way at any time, and a run of the dataset in a process of its own (journal,
objects of 250 rows; no Dagster). The ratio is the run against the faster client. Then a run is killed (`kill -9`) when
half of all turns were asked and some are journaled, and another one finishes. The engine's log says which requests
came: each must be a turn of a conversation behind the answers that the table has of it, so none is out of order; those
that came twice are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from feed import engine_speed

from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.models import load_spec
from gpu_runner.fleet_database.database import Lease
from gpu_runner.rows import Row, next_request
from resources.fleet.resource import LeasedEngine
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

NAME, MODEL = "turns", "bench"
MEAN, CAP = 100, 800  # output tokens of a turn


@dataclass(frozen=True)
class Figures:
    """Turns a second of both clients and of the run; of the killed run, what was asked twice."""

    conversations: int
    turns: int
    unbounded: float
    saturating: float
    run: float
    ratio: float
    killed_after: int
    asked_twice: int
    most_times: int
    out_of_order: int
    missing: int


@contextlib.contextmanager
def simulator(slots: int, speed: float, log: Path | None = None) -> Iterator[str]:
    """A simulated engine; yields its address."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", MODEL, "--port", "0", "--exit-with-parent"]
    command += ["--max-num-seqs", str(slots), "--speed", f"{speed:.3f}", "--max-model-len", "32768"]
    command += ["--output-tokens", f"lognormal:{MEAN}:{CAP}", "--keep-alive-timeout", "120"]
    command += ["--request-log", str(log)] if log else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def make_dataset(folder: Path, conversations: int, turns: int) -> DatasetStore:
    """The dataset's snapshot in a new store."""
    folder.mkdir()
    source = folder / "source.jsonl"
    with source.open("wb") as file:
        for i in range(conversations):
            said = [f"Question {i}, part {turn}: what follows from {i * 7919 % 104729}?" for turn in range(turns)]
            file.write(orjson.dumps({"said": said}) + b"\n")
    attributes: dict[str, Any] = {
        "name": NAME,
        "source": {"path": str(source)},
        "prompt": {"system": "Answer in one paragraph.", "turns_from": "said"},
        "model": MODEL,
        "sampling": {"temperature": 1.0, "max_tokens": CAP},
    }
    store = DatasetStore(open_objects(str(folder / "store")), NAME)
    build_snapshot(load_spec(attributes, NAME), store, now=time.time(), workdir=folder / "work")
    return store


def rows_of(store: DatasetStore) -> list[Row]:
    """All rows, in order."""
    snapshot = store.current_snapshot()
    assert snapshot is not None
    manifest = store.manifest(snapshot)
    return [row for _, rows in store.rows(manifest, store.entries(snapshot)) for row in rows]


async def client(url: str, rows: list[Row], at_once: int) -> float:
    """Turns/s of a client with so many conversations under way, which keeps nothing."""
    start = orjson.dumps({"model": MODEL, "temperature": 1.0, "max_tokens": CAP})[:-1] + b',"messages":'
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Content-Type": "application/json"},
    ) as session:
        free = asyncio.Semaphore(at_once)

        async def talk(row: Row) -> None:
            prompt = row.prompt
            async with free:
                for turn in range(len(row.turns)):
                    async with session.post(f"{url}/v1/chat/completions", data=start + prompt + b"}") as answer:
                        text = orjson.loads(await answer.read())["choices"][0]["message"]["content"]
                    if turn + 1 < len(row.turns):
                        prompt = next_request(prompt, text, row.turns[turn + 1])

        began = time.perf_counter()
        await asyncio.gather(*map(talk, rows))
        return sum(len(row.turns) for row in rows) / (time.perf_counter() - began)


def work(root: str, url: str, slots: int, run_id: str) -> None:
    """A run of all batches; prints how long it was served. To be called in a process of its own."""
    store = DatasetStore(open_objects(root), NAME)
    snapshot = store.current_snapshot()
    assert snapshot is not None
    entries, intent = store.entries(snapshot), Intent(run_id)
    identity = RunIdentity(run_id, intent, (entries[0].key, entries[-1].key))

    async def main() -> float:
        run = RangeRun(store, store.manifest(snapshot), plan_range(store, entries, intent), identity)
        began = time.perf_counter()
        if await run.prepare():
            await run.serve(LeasedEngine(url, None, slots, "simulated", "simulated", lease=Lease("e", 1, run_id, NAME)))
        took = time.perf_counter() - began
        assert not run.missing()
        run.close()
        return took

    print(asyncio.run(main()))


def worker(store: DatasetStore, url: str, slots: int, run_id: str) -> subprocess.Popen[bytes]:
    """A process that runs `work`."""
    command = [sys.executable, __file__, "--work", store.objects.root, url, str(slots), run_id]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def asked(url: str) -> int:
    """Requests that the engine has got."""
    with urllib.request.urlopen(f"{url}/simulator/stats", timeout=30) as page:
        return int(json.loads(page.read())["requests"])


def journaled(store: DatasetStore) -> bool:
    """Whether the journal has been written."""
    return next(iter(store.objects.list(f"{NAME}/journal/")), None) is not None


def requests_of(log: Path) -> Counter[str]:
    """How often each prompt was asked, by its digest."""
    found: Counter[str] = Counter()
    for line in log.read_bytes().splitlines():
        event = orjson.loads(line)
        if event["event"] == "received" and event["prompt_tokens"] > 0:
            found[event["prompt"]] += 1
    return found


def digests_of(store: DatasetStore) -> list[str]:
    """The digest of each turn's messages, by what the objects say was answered."""
    snapshot = store.current_snapshot()
    assert snapshot is not None
    current = store.current_objects(store.entries(snapshot))
    outcomes = {one.row_id: one for batch in current.values() for one in store.outcomes(batch)}
    found = []
    for row in rows_of(store):
        turns, prompt = outcomes[row.row_id].turns, row.prompt
        assert tuple(turn.user for turn in turns) == row.turns
        for number, turn in enumerate(turns, 1):
            found.append(hashlib.sha256(prompt).hexdigest())
            if number < len(turns):
                prompt = next_request(prompt, turn.output or "", row.turns[number])
    return found


def killed(folder: Path, options: argparse.Namespace, speed: float) -> tuple[int, Counter[str], list[str]]:
    """(requests at the kill, all requests, those that there should be once each)."""
    store, log = make_dataset(folder, options.conversations, options.turns), folder / "requests.jsonl"
    with simulator(options.slots, speed, log) as url:
        first = worker(store, url, options.slots, "run-1")
        while (before := asked(url)) < options.conversations * options.turns // 2 or not journaled(store):
            time.sleep(0.05)
            assert first.poll() is None, "the run was done before the kill"
        first.kill()
        first.wait()
        assert worker(store, url, options.slots, "run-2").wait() == 0
        time.sleep(0.5)  # until the engine has written its log
    return before, requests_of(log), digests_of(store)


def measure(options: argparse.Namespace) -> Figures:
    """All figures."""
    speed, wanted = engine_speed(options.slots, MEAN, options.rate), options.conversations * options.turns
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_dataset(folder / "whole", options.conversations, options.turns)
        rows = rows_of(store)
        with simulator(options.slots, speed) as url:
            unbounded = asyncio.run(client(url, rows, len(rows)))
        with simulator(options.slots, speed) as url:
            saturating = asyncio.run(client(url, rows, 4 * options.slots))
        with simulator(options.slots, speed) as url:
            process = worker(store, url, options.slots, "run-1")
            said = process.communicate()[0]
            assert process.returncode == 0
        rate = wanted / float(said)
        before, requests, expected = killed(folder / "killed", options, speed)
    return Figures(
        options.conversations,
        options.turns,
        round(unbounded, 1),
        round(saturating, 1),
        round(rate, 1),
        round(rate / max(unbounded, saturating), 3),
        before,
        requests.total() - len(requests),
        max(requests.values()),
        len(requests.keys() - set(expected)),
        len(set(expected) - requests.keys()),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rate", type=float, default=400.0, help="turns/s that the engine shall be able to give")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        root, url, slots, run_id = options.work
        work(root, url, int(slots), run_id)
        return
    figures = measure(options)
    print(orjson.dumps(asdict(figures), option=orjson.OPT_INDENT_2).decode())
    if options.json:
        options.json.write_bytes(orjson.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
