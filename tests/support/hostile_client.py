"""A client of a hostile engine in a process of its own, whose memory is measured: `python hostile_client.py URL`.

Its address space is limited, so that a client without limits harms nobody. Prints one JSON object a line.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson

from gpu_runner.client.engine_client import EngineClient
from gpu_runner.client.protocol import EngineError
from gpu_runner.inference.feed import Feed
from gpu_runner.rows import Batch, Generation, Origin, Outcome, Row

ORIGIN = Origin("m", "fake", "test", "cpu", False, "run")


def peak_mb() -> float:
    """Most memory that this process had so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


async def fed(engine: EngineClient, rows: int, size: int) -> dict[str, int]:
    """What became of so many rows in batches of that size: outcomes by code."""
    names = [f"r{i}" for i in range(rows)]
    parts = [names[i : i + size] for i in range(0, rows, size)]
    batches = [Batch(f"b{n}", tuple(Row(f"b{n}", x, x, b'"x"') for x in part)) for n, part in enumerate(parts)]
    codes: Counter[str] = Counter()

    async def commit(job: str, key: str, outcomes: list[Outcome]) -> None:
        await asyncio.sleep(0.02)
        codes.update(outcome.error or "ok" for outcome in outcomes)

    feed = Feed(iter(batches), on_row=lambda job, key, outcome: None, on_batch=commit, rng=random.Random(0))
    await feed.serve(engine, ORIGIN, 8)
    return dict(codes)


async def case(name: str, url: str) -> object:
    """One hostile engine met: what came of it."""
    generation = Generation("completion", "m", {"max_tokens": 64})
    limit = {"answer_bytes": 16 << 20} if name == "permitted" else {}
    async with EngineClient(f"{url}/{name}", generation, **limit) as engine:
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "models": engine.info,
            "metrics": engine.load,
            "large": lambda: fed(engine, 500, 250),
            "permitted": lambda: fed(engine, 16, 4),
        }
        try:
            return await asked.get(name, lambda: engine.generate(b'"x"'))()
        except EngineError as error:
            return type(error).__name__ + " " + getattr(error, "code", "")


def main() -> None:
    """All cases, one after the other."""
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    url, *names = sys.argv[1:]
    before = peak_mb()
    for name in names:
        found = asyncio.run(case(name, url))
        print(orjson.dumps({"case": name, "found": found, "more_mb": peak_mb() - before}).decode(), flush=True)


if __name__ == "__main__":
    main()
