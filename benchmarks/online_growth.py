"""How the service for online requests grows from one process to several that share Redis, and what 10,000/s need.

    python -m benchmarks.online_growth [--processes 1,2,3,4] [--cores 0.25] [--seconds 10]
        [--engines 64] [--first 100] [--json FILE]

Each process is a `batch-assets serve` that accepts requests, makes lists of their texts, sends these to the engines and
stores the results: service, consumer and batcher in one. With `--cores` each has this part of a core and no more (CFS
bandwidth), so that a machine of two cores shows what several cores would; 0: no limit. Requests are one text each, and
come at random. The rate starts at `--first` a second and process, and rises by a tenth until two rates in a row do not
hold: 99 of 100 clients have their answer within half a second of acceptance, and none is refused. Counted: the highest
rate that holds, and CPU of each part, per request.

The engine is benchmarks/fixed_engine.py: `--engines` lists of up to 64 texts at a time, each in 200 ms. Machines for
10,000 requests/s are computed from CPU and mean list of the highest rate, with each core used to 70 % and each engine,
which does five lists a second, to 80 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
import uvloop

from benchmarks.cpu_quota import cpu_quotas
from benchmarks.lean_http import LeanHttp
from benchmarks.online_kills import CALL_SECONDS, Seen, load, ready
from benchmarks.online_processes import OnlineProcesses, Plan, cpu_seconds, fixed_engine
from gpu_runner.client.engine_connections import allow_open_files

GOAL_SECONDS = 0.5
STEP = 1.1
WANTED, CORE_USE, ENGINE_USE, LIST_SECONDS = 10_000, 0.7, 0.8, 0.2
WARM_UP_SECONDS = 4.0
MOST_REQUESTS = 100_000  # of one rate


@dataclass(frozen=True, slots=True)
class Options:
    """One ladder. `cores`: of a process; 0: no limit. `first`: requests/s and process."""

    cores: float = 0.25
    seconds: float = 10.0
    engines: int = 64
    first: float = 100.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Rung:
    """One rate. Seconds are from acceptance until the client has the answer. CPU in microseconds a request."""

    processes: int
    rate: float
    accepted: int
    refused: int
    p50: float
    p99: float
    mean_list: float
    service_us: int
    redis_us: int
    engine_us: int

    @property
    def holds(self) -> bool:
        """Whether it is within the goal."""
        return not self.refused and self.p99 <= GOAL_SECONDS


@dataclass(frozen=True, slots=True)
class Machines:
    """What 10,000 requests/s need. `redis`: cores that its one thread of commands would need."""

    service_cores: int
    redis: float
    engines: int


def machines(rung: Rung) -> Machines:
    """By the CPU that a request took."""

    def cores(us: int) -> int:
        return math.ceil(WANTED * us / 1e6 / CORE_USE)

    engines = math.ceil(WANTED / rung.mean_list * LIST_SECONDS / ENGINE_USE)
    return Machines(cores(rung.service_us), round(WANTED * rung.redis_us / 1e6, 1), engines)


async def climb(processes: int, options: Options, folder: Path) -> list[Rung]:
    """All rates, up to the second in a row that does not hold."""
    plan = Plan(services=processes, consumers=0, kind="embedding", kill_every=0.0)
    with contextlib.ExitStack() as stack:
        engine, engine_pid = stack.enter_context(fixed_engine(options.engines))
        quotas = stack.enter_context(cpu_quotas(processes if options.cores else 0, options.cores))
        site = OnlineProcesses(plan, folder, engine)
        stack.callback(site.end)
        site.start()
        fronts, stats = [LeanHttp(port) for port in site.fronts], LeanHttp(int(engine.rpartition(":")[2]))

        async def asked() -> tuple[int, int]:
            """Texts and lists that the engine was asked for."""
            found = orjson.loads((await stats.call("GET", "/simulator/stats", CALL_SECONDS)).body)
            return found["prompt_tokens"], found["lists"]

        for front in (*fronts, stats):
            stack.callback(front.close)
        await ready(fronts, plan.kind)
        services = [process for process in site.processes if process.name.startswith("service")]
        for process, quota in zip(services, quotas, strict=False):
            quota.add(process.pid)

        def used() -> tuple[float, float, float]:
            redis = sum(process.cpu_seconds for process in site.processes if process.name.startswith("redis"))
            return sum(one.cpu_seconds for one in services), redis, cpu_seconds(engine_pid)

        async def play(rate: float, seconds: float, seed: int) -> Rung:
            seen, before, (texts, lists) = Seen(), used(), await asked()
            await load(fronts, site, replace(plan, rate=rate, seconds=seconds, seed=seed), seen, seed * MOST_REQUESTS)
            spent = [
                round(1e6 * (now - then) / max(1, seen.accepted)) for now, then in zip(used(), before, strict=True)
            ]
            texts, lists = (now - then for now, then in zip(await asked(), (texts, lists), strict=True))
            if texts < seen.accepted:
                raise SystemExit(f"the engine: expected to be asked for {seen.accepted} texts, found {texts}")
            told = sorted(told for _, _, told in seen.latencies)
            p50, p99 = (round(told[int(len(told) * share)], 4) for share in (0.5, 0.99))
            refused = sum(seen.refusals.values()) + sum(seen.lost.values())
            return Rung(processes, round(rate, 1), seen.accepted, refused, p50, p99, round(texts / lists, 1), *spent)

        await play(options.first * processes, WARM_UP_SECONDS, options.seed + 1000)
        rungs: list[Rung] = []
        while any(rung.holds for rung in rungs[-2:]) or len(rungs) < 2:
            rate = options.first * processes * STEP ** len(rungs)
            rungs.append(await play(rate, options.seconds, options.seed + len(rungs)))
            print(json.dumps(asdict(rungs[-1])), flush=True)
        return rungs


async def run(counts: Sequence[int], options: Options, folder: Path) -> list[Rung]:
    """The highest rate that holds, of each number of processes."""
    best = []
    for count in counts:
        place = folder / str(count)
        place.mkdir()
        held = [rung for rung in await climb(count, options, place) if rung.holds]
        best += held[-1:]
    return best


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Options()
    parser.add_argument("--processes", default="1,2,3,4", help="numbers of processes")
    for name, value in asdict(usual).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", type=Path)
    asked = vars(parser.parse_args())
    counts, path = [int(count) for count in asked.pop("processes").split(",")], asked.pop("json")
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server: expected it on the PATH, found none; install Debian's redis-server")
    with tempfile.TemporaryDirectory(prefix="online-growth-") as folder:
        allow_open_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            best = runner.run(run(counts, Options(**asked), Path(folder)))
    for rung in best:
        needs = machines(rung)
        print(
            f"{rung.processes} processes: {rung.rate:,.0f} requests/s ({rung.rate / best[0].rate:.2f} times), "
            f"p50 {1e3 * rung.p50:.0f} ms, p99 {1e3 * rung.p99:.0f} ms, {rung.mean_list} texts a list; "
            f"CPU of a request: service {rung.service_us} us, Redis {rung.redis_us} us; 10,000/s: "
            f"{needs.service_cores} cores of services, {needs.redis} of Redis, {needs.engines} engines"
        )
    if path is not None:
        path.write_text(json.dumps([asdict(rung) for rung in best]))


if __name__ == "__main__":
    main()
