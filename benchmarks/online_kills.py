"""Submit and poll under kills: `kill -9` of services, consumers and Redis at random while requests come in.

    python benchmarks/online_kills.py [--queue redis|embedded] [--rate 300] [--seconds 60] [--kill-every 10]
        [--services 1] [--consumers 1] [--fsync always] [--seed 1] [--json FILE]

Requests come at random at the given rate, each with an Idempotency-Key; one that is not accepted is sent again with the
same key until it is. Every accepted request is then asked for until it has a result. Everything is real: services are
`batch-assets serve`, Redis is Debian's redis-server with its append-only file, the engine is the simulator. What is
killed is started again at once. Counted: accepted, answered, dead letters, lost (accepted without a result after
five minutes, by what was last said of it), engine requests beyond one per request, refusals by status, and seconds
from acceptance to the stored result (as the services say it) and until the client has it: all, and those accepted
shortly before and within ten seconds after a kill. Exit status 1 when anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gpu_runner.providers.engine_process import free_port

ROOT = Path(__file__).parent.parent
RECOVERY_SECONDS = 10.0
PATIENCE_SECONDS = 300.0
WAIT_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `rate`: requests/s. `kill_every`: mean seconds between kills; 0: none."""

    queue: str = "redis"
    rate: float = 300.0
    seconds: float = 60.0
    kill_every: float = 10.0
    services: int = 1
    consumers: int = 1
    fsync: str = "always"
    seed: int = 1


@dataclass(slots=True)
class Seen:
    """What the client saw. `latencies`: accepted at, by the monotonic clock; seconds until the result was stored, and
    until the client had it.
    """

    accepted: int = 0
    results: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    latencies: list[tuple[float, float, float]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    kills: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run."""

    accepted: int
    answered: int
    dead_letters: int
    other_failures: dict[str, int]
    lost: dict[str, int]
    engine_requests: int
    duplicates: int
    kills: dict[str, int]
    refusals: dict[str, int]
    accepted_per_second: float
    p50: float
    p99: float
    p99_recovery: float
    slowest: float
    told_p50: float
    told_p99: float


class Process:
    """A process that is killed and started again."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def simulator(log: Path) -> Iterator[str]:
    """An engine that answers at once, and has room for everybody: its address."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "tiny", "--exit-with-parent"]
    command += ["--max-num-seqs", "512", "--output-tokens", "fixed:4", "--weights-ms", "2", "--request-log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


class Site:
    """All processes of a run. `fronts`: addresses that accept requests."""

    def __init__(self, plan: Plan, folder: Path, engine: str) -> None:
        self.processes: list[Process] = []
        self.fronts: list[str] = []
        redis: dict[str, str] = {}
        if plan.queue == "redis":
            port = free_port()
            redis = {"BATCH_ASSETS_ONLINE_REDIS": f"redis://127.0.0.1:{port}/0"}
            command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
            command += ["--appendonly", "yes", "--appendfsync", plan.fsync]
            self.processes.append(Process("redis", command, {}, folder / "redis.log"))
        accepts = "0" if plan.queue == "redis" and plan.consumers else "256"
        for number in range(plan.services if plan.queue == "redis" else 1):
            self.fronts.append(self._serve(folder, engine, f"service-{number}", {**redis, _CONCURRENCY: accepts}))
        for number in range(plan.consumers if plan.queue == "redis" else 0):
            self._serve(folder, engine, f"consumer-{number}", {**redis, _CONCURRENCY: "256"})

    def _serve(self, folder: Path, engine: str, name: str, environment: dict[str, str]) -> str:
        home, port = folder / name, free_port()
        home.mkdir()
        environment |= {"DAGSTER_HOME": str(home), "BATCH_ASSETS_STORE": str(home / "store")}
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(port), "--endpoint", engine]
        self.processes.append(Process(name, command, environment, folder / f"{name}.log"))
        return f"http://127.0.0.1:{port}"

    def start(self) -> None:
        """Start all."""
        for process in self.processes:
            process.start()

    def end(self) -> None:
        """Kill all."""
        for process in self.processes:
            process.kill()


_CONCURRENCY = "BATCH_ASSETS_ONLINE_CONCURRENCY"


async def ready(session: aiohttp.ClientSession, fronts: list[str]) -> None:
    """Until each accepts requests, and one was answered."""
    for front in fronts:
        for _ in range(1200):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.post(f"{front}/v1/inference", json=body(-1)) as answer:
                    if answer.status == 202:
                        break
            await asyncio.sleep(0.1)
        else:
            raise SystemExit("the services did not start")


def body(number: int) -> dict[str, Any]:
    """One request, unlike all others."""
    return {"input": f"say {number}", "client_id": "kills", "model": "tiny", "ttl_seconds": 600}


async def one_request(session: aiohttp.ClientSession, fronts: Iterator[str], number: int, seen: Seen) -> None:
    """Submit until accepted, then ask until there is a result."""
    headers = {"Idempotency-Key": f"request-{number}"}
    while True:
        status, found = await _call(session, "POST", f"{next(fronts)}/v1/inference", json=body(number), headers=headers)
        if status == 202:
            break
        seen.refusals[str(status) if status else "no connection"] += 1
        await asyncio.sleep(0.2 + random.random() * 0.3)
    task_id, accepted_at = found["task_id"], time.monotonic()
    seen.accepted += 1
    until, last = accepted_at + PATIENCE_SECONDS, "not asked"
    while time.monotonic() < until:
        status, found = await _call(session, "GET", f"{next(fronts)}/v1/result/{task_id}?wait={WAIT_SECONDS}")
        if status == 200 and found["status"] != "PENDING":
            seen.results[found["status"] if found["error"] is None else found["error"]["code"]] += 1
            stored = found["finished_at"] - found["created_at"]
            seen.latencies.append((accepted_at, stored, time.monotonic() - accepted_at))
            return
        last = "pending" if status == 200 else f"status {status}"
        if status == 404:
            break
        if status != 200:
            await asyncio.sleep(0.2 + random.random() * 0.3)
    seen.lost[last] += 1


async def _call(session: aiohttp.ClientSession, method: str, url: str, **more: Any) -> tuple[int, Any]:
    """(status, JSON); status 0: no answer."""
    try:
        async with session.request(method, url, **more) as answer:
            return answer.status, await answer.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return 0, None


async def kill_now_and_then(site: Site, plan: Plan, seen: Seen) -> None:
    """Kill one at a random moment, and start it again; each once before any is killed again."""
    draw, left = random.Random(plan.seed), list[Process]()
    while True:
        await asyncio.sleep(draw.expovariate(1 / plan.kill_every))
        left = left or draw.sample(site.processes, len(site.processes))
        process = left.pop()
        process.kill()
        seen.kills.append((time.monotonic(), process.name.partition("-")[0]))
        await asyncio.sleep(draw.uniform(0.1, 1.0))
        process.start()


async def play(plan: Plan, folder: Path) -> Report:
    """One run."""
    log = folder / "requests"
    seen = Seen()
    with simulator(log) as engine:
        site = Site(plan, folder, engine)
        try:
            site.start()
            timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS + 15, sock_connect=2)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                await ready(session, site.fronts)
                took = await _load(session, site, plan, seen)
        finally:
            site.end()
        requests = log.read_text().count('"event":"received"') - len(site.fronts)
    return _report(plan, seen, requests, took)


async def _load(session: aiohttp.ClientSession, site: Site, plan: Plan, seen: Seen) -> float:
    """Requests at random until the time is over, then their results. Returns the seconds of the load."""
    draw, fronts = random.Random(plan.seed + 1), itertools.cycle(site.fronts)
    kills = asyncio.create_task(kill_now_and_then(site, plan, seen)) if plan.kill_every else None
    began, next_at = time.monotonic(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            next_at += draw.expovariate(plan.rate)
            if next_at - began > plan.seconds:
                break
            if (wait := next_at - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one_request(session, fronts, number, seen))
        took = time.monotonic() - began
        if kills is not None:
            kills.cancel()
            await asyncio.gather(kills, return_exceptions=True)
            for process in site.processes:  # whatever a cancelled kill has not started again
                if process._process is None or process._process.poll() is not None:
                    process.start()
    return took


def _report(plan: Plan, seen: Seen, requests: int, took: float) -> Report:
    seconds = sorted(stored for _, stored, _ in seen.latencies) or [0.0]
    told = sorted(told for _, _, told in seen.latencies) or [0.0]
    after = sorted(
        stored
        for at, stored, _ in seen.latencies
        if any(killed - 5 <= at <= killed + RECOVERY_SECONDS for killed, _ in seen.kills)
    ) or [0.0]
    dead = {"engine_lost", "engine_timeout", "engine_garbage", "engine_error", "consumers_lost"}
    return Report(
        accepted=seen.accepted,
        answered=sum(count for code, count in seen.results.items() if code not in dead),
        dead_letters=sum(count for code, count in seen.results.items() if code in dead),
        other_failures={code: count for code, count in seen.results.items() if code != "SUCCESS"},
        lost=dict(seen.lost),
        engine_requests=requests,
        duplicates=requests - seen.accepted,
        kills=dict(Counter(name for _, name in seen.kills)),
        refusals=dict(seen.refusals),
        accepted_per_second=round(seen.accepted / took, 1),
        p50=round(seconds[len(seconds) // 2], 4),
        p99=round(seconds[int(len(seconds) * 0.99)], 3),
        p99_recovery=round(after[int(len(after) * 0.99)], 3),
        slowest=round(seconds[-1], 3),
        told_p50=round(told[len(told) // 2], 4),
        told_p99=round(told[int(len(told) * 0.99)], 3),
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Plan()
    parser.add_argument("--queue", choices=["redis", "embedded"], default=usual.queue)
    parser.add_argument("--rate", type=float, default=usual.rate)
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--kill-every", type=float, default=usual.kill_every, help="mean seconds; 0: no kills")
    parser.add_argument("--services", type=int, default=usual.services)
    parser.add_argument("--consumers", type=int, default=usual.consumers, help="0: services consume, too")
    parser.add_argument("--fsync", choices=["always", "everysec"], default=usual.fsync)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--json", type=Path)
    asked = vars(parser.parse_args())
    path = asked.pop("json")
    if asked["queue"] == "redis" and shutil.which("redis-server") is None:
        raise SystemExit("redis-server: expected it on the PATH, found none; install Debian's redis-server")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # what was started is ended, then too
    with tempfile.TemporaryDirectory(prefix="online-kills-") as folder:
        report = asyncio.run(play(Plan(**asked), Path(folder)))
    print(json.dumps(asdict(report), indent=1))
    if path is not None:
        path.write_text(json.dumps(asdict(report)))
    sys.exit(1 if report.lost else 0)


if __name__ == "__main__":
    main()
