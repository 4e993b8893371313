"""How long things take that have to be quick, each beside its goal. No test checks it: a busy machine would fail them.

    python benchmarks/timing.py

Plans of the planner, its first decision over offers whose speed nobody knows, a source of many columns, and the engine
simulator: how late it is, and how much CPU a request costs it beside what the client takes. CPU seconds, the best of
several, unless a line says otherwise.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil

from batch_assets.snapshot.source.reader import read_source
from batch_assets.spec.source import SourceSpec
from gpu_runner.planner.controller import ControllerState, decide
from gpu_runner.planner.planner import make_plan
from gpu_runner.planner.speed_model import HardwareType
from gpu_runner.planner.types import PlannedOffer, Target, Work

HOUR = 3600.0
WORK = Work(tokens=5e9, total_tokens=5e9, started_ago=0.0, units=1000, spread=0.15)


def best(times: int, work: Callable[[], object]) -> float:
    """CPU seconds of the quickest of several."""
    took = []
    for _ in range(times):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def plan_seconds(offers: int, limit: int) -> float:
    """One plan without its curve, the mean of three deadlines; `limit`: instances at most."""
    dice = random.Random(5)
    market = [
        PlannedOffer(
            f"o{i}", dice.uniform(0.3, 8), dice.uniform(2000, 30_000), 480.0, dice.choice([None, 4, 16]), spread=0.1
        )
        for i in range(offers)
    ]
    targets = [Target(hours * HOUR, None, limit) for hours in (3, 6, 24)]
    return best(5, lambda: [make_plan(WORK, market, [], target) for target in targets]) / len(targets)


def first_decision_seconds() -> float:
    """13 offers of unknown speed, 50 instances."""
    options = [
        PlannedOffer(
            f"cloud/{i}",
            1.0 + 0.3 * i,
            5_000.0 + 1_500.0 * i,
            (240.0, 480.0, 900.0)[i % 3],
            spot=bool(i % 2),
            spread=0.5,
            hardware=HardwareType(f"card {i // 3}", 80, 1 + i % 3),
        )
        for i in range(13)
    ]
    target = Target(8 * HOUR, max_instances=50)
    return best(1, lambda: decide(WORK, options, [], target, ControllerState(), measured=False, pilots=3, detail=False))


def columns_ratio() -> float:
    """CPU for a CSV file of 100,000 columns over that for 5,000."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def read(columns: int) -> None:
            names = ",".join(f"c{i}" for i in range(columns))
            (folder / "wide.csv").write_text(f"{names},q\n{',' * columns}x\n")
            assert sum(len(block.lines) for block in read_source(SourceSpec(path="wide.csv"), ["q"], folder)) == 1

        read(1000)  # what comes once
        return best(1, lambda: read(100_000)) / best(3, lambda: read(5_000))


@contextmanager
def simulator(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and its process."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "m", "--exit-with-parent", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
        finally:
            process.kill()


def ask(url: str, prompts: int, **more: object) -> None:
    """So many prompts at once."""

    async def all_of_them() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(one(session, number) for number in range(prompts)))

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        async with session.post(url + "/v1/completions", json={"prompt": f"{number}", **more}) as answer:
            answer.raise_for_status()
            await answer.read()

    asyncio.run(all_of_them())


def simulator_cpu() -> tuple[float, float]:
    """Milliseconds of CPU per request: the simulator's, and the client's."""
    with simulator("--speed", "1000", "--output-tokens", "fixed:32") as (url, process):
        ask(url, 200)
        before, began = process.cpu_times(), time.process_time()
        for _ in range(15):
            ask(url, 200)
        after, client = process.cpu_times(), time.process_time() - began
    server = after.user + after.system - before.user - before.system
    return server / 3, client / 3


def simulator_lateness(speed: int, tokens: int) -> tuple[float, float]:
    """Wall-clock seconds of 256 requests through 64 slots in steps of 4 ms of its model, and what the model says."""
    flags = ["--max-num-seqs", "64", "--weights-ms", "4", "--overhead-ms", "0", "--token-us", "0", "--context-ns", "0"]
    with simulator("--speed", str(speed), *flags) as (url, _):
        began = time.monotonic()
        ask(url, 256, max_tokens=tokens, ignore_eos=True)
        return time.monotonic() - began, 4 * tokens * 0.004 / speed


def main() -> None:
    """Print one line per measurement."""
    for offers, limit, goal in ((10, 20, 5), (60, 100, 50)):
        print(
            f"plan over {offers} offers, {limit} instances: {1000 * plan_seconds(offers, limit):.1f} ms (goal {goal})"
        )
    print(f"first decision over 13 offers of unknown speed: {first_decision_seconds():.2f} s (goal 5)")
    print(f"CSV of 20 times the columns: {columns_ratio():.0f} times the CPU (goal 20; comparing each with each: 400)")
    server, client = simulator_cpu()
    print(
        f"a request costs the simulator {server:.2f} ms and the client {client:.2f} ms (goal: not more than the client)"
    )
    for speed, tokens in ((20, 1000), (400, 2000)):
        took, least = simulator_lateness(speed, tokens)
        print(f"256 requests at speed {speed}: {took:.2f} s of wall-clock time (goal {least:.2f} by its model)")


if __name__ == "__main__":
    main()
