"""What collecting requests to lists costs each of them, and what it saves the engine.

    python benchmarks/micro_batches.py [--rates 10,100,1000,5000] [--seconds 10] [--json FILE]

The engine is a fixed batch API: up to 64 inputs in `--engine-seconds`, whatever their number, `--calls` at once.
Requests arrive as a Poisson process (seeded). Overhead of a request: from its arrival to its answer, less the engine's
seconds for its list, so waiting for company, waiting for a free call and our own work. The naive pass-through sends
each request alone to the same engine; its highest load, and ours, is the highest rate of the ladder at which 99 % are
answered within 500 ms and none is refused. All in one process: HTTP is measured in benchmarks/embeddings.py, not here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_runner.micro_batches.list_batcher import BatcherFull, BatchPolicy, ListBatcher
from gpu_runner.micro_batches.list_limits import ListLimits

LADDER = (10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240)
GOAL_SECONDS = 0.5


class FixedEngine:
    """So many calls at once, each of the same seconds; further ones wait in order."""

    def __init__(self, seconds: float, calls: int) -> None:
        self.seconds = seconds
        self.sizes: list[int] = []
        self._slots = asyncio.Semaphore(calls)

    async def send(self, values: Sequence[int]) -> list[int]:
        """One list."""
        async with self._slots:
            self.sizes.append(len(values))
            await asyncio.sleep(self.seconds)
        return list(values)


@dataclass(frozen=True)
class Cell:
    """One rate. Milliseconds; `cpu_us` of this process a request, the generator of load included."""

    rate: float
    inputs: int
    requests: int
    refused: int
    p50_ms: float
    p99_ms: float
    mean_size: float
    cpu_us: float

    def holds(self, engine_seconds: float) -> bool:
        """Whether this load is within the goal."""
        return not self.refused and self.p99_ms / 1e3 + engine_seconds <= GOAL_SECONDS


async def measure(rate: float, seconds: float, inputs: int, engine_seconds: float, calls: int, seed: int) -> Cell:
    """Poisson arrivals for some seconds."""
    engine, rng, loop = FixedEngine(engine_seconds, calls), random.Random(seed), asyncio.get_running_loop()
    policy = BatchPolicy(limits=ListLimits(inputs=inputs), calls=calls)
    batcher: ListBatcher[int, int] = ListBatcher(engine.send, lambda value: 100, policy)
    took: list[float] = []
    refused = 0

    async def ask(number: int, arrived: float) -> None:
        nonlocal refused
        try:
            assert await batcher.ask(number) == number
            took.append(loop.time() - arrived)
        except BatcherFull:
            refused += 1

    tasks, number = set(), 0
    cpu, began = time.process_time(), loop.time()
    due = began
    while (due := due + rng.expovariate(rate)) < began + seconds:
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        task = asyncio.create_task(ask(number, due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
        if number % 50 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    cpu = time.process_time() - cpu
    await batcher.close()
    over = sorted(1e3 * (one - engine_seconds) for one in took) or [0.0]
    return Cell(
        rate,
        inputs,
        number,
        refused,
        statistics.median(over),
        over[min(len(over) - 1, int(0.99 * len(over)))],
        statistics.fmean(engine.sizes),
        1e6 * cpu / max(1, number),
    )


def highest(inputs: int, options: argparse.Namespace) -> tuple[float, list[Cell]]:
    """The highest rate of the ladder that holds."""
    best, cells = 0.0, []
    for rate in LADDER:
        cells.append(asyncio.run(measure(rate, 4.0, inputs, options.engine_seconds, options.calls, options.seed)))
        if not cells[-1].holds(options.engine_seconds):
            break
        best = rate
    return best, cells


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10,100,1000,5000")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engine-seconds", type=float, default=0.2)
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("requests/s  requests  refused  overhead p50 ms  p99 ms  mean list  CPU us a request")
    cells = []
    for rate in map(float, options.rates.split(",")):
        cell = asyncio.run(measure(rate, options.seconds, 64, options.engine_seconds, options.calls, options.seed))
        cells.append(cell)
        print(
            f"{cell.rate:10.0f} {cell.requests:9} {cell.refused:8} {cell.p50_ms:16.1f} {cell.p99_ms:7.1f} "
            f"{cell.mean_size:10.1f} {cell.cpu_us:17.0f}",
            flush=True,
        )
    naive, alone = highest(1, options)
    lists, together = highest(64, options)
    print(
        f"highest load within {GOAL_SECONDS} s: alone {naive:.0f}/s, in lists {lists:.0f}/s = {lists / naive:.0f} times"
    )
    if options.json:
        found = {"rates": cells, "alone": alone, "lists": together}
        options.json.write_text(json.dumps({name: [asdict(c) for c in each] for name, each in found.items()}, indent=1))


if __name__ == "__main__":
    main()
