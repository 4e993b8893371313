"""How many calls a core of the service answers, what it adds to their time, and whether any is lost with a replica.

    python -m benchmarks.front_door_load [--seconds 5] [--at-once 16]                      # one service, SQLite
    python -m benchmarks.front_door_load --postgres URL --end kill [--seconds 10]          # two, one is killed half-way

Calls: `poll` (GET of a batch), `create` (POST of a batch of ten lines, with an Idempotency-Key), `proxy` (a chat of one
token). Of each: calls per second with `--at-once` under way, calls per second of the service's CPU; and at half of that
rate p50 and p99 of the time, for `proxy` beside the engine asked directly, after a second of the same load: connections
that idleness has closed are opened again in it. With `--end kill` (or `drain`) one of two
replicas gets SIGKILL (SIGTERM) half-way; a caller whose connection breaks asks the other one. Nothing may be lost: each
call is answered with 200, and each batch that was created is completed with all of its lines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.front_door import CHAT, body, engine
from gpu_runner.providers.engine_process import free_port

ROOT = Path(__file__).parent.parent
LINES = 10
KINDS = ("poll", "proxy", "create")  # creations last: the engine has their lines to do for long
TRIES, PAUSE_SECONDS = 100, 0.1
START_SECONDS = 120.0
WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one kind of call. Milliseconds at half load; `direct` of the engine without the service."""

    kind: str
    per_second: float
    per_cpu_second: float
    p50: float
    p99: float
    direct_p50: float | None = None
    direct_p99: float | None = None


@dataclass(slots=True)
class Ended:
    """What became of the calls while a replica ended. `lost`: calls without an answer of 200, batches without lines."""

    calls: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    lost: list[str] = field(default_factory=list)


@contextlib.contextmanager
def replicas(folder: Path, number: int, database: str, url: str) -> Iterator[list[tuple[str, psutil.Popen]]]:
    """That many services over one store and one database: their addresses and processes."""
    found: list[tuple[str, psutil.Popen]] = []
    try:
        for one in range(number):
            port = free_port()
            environment = {
                **os.environ,
                "DAGSTER_HOME": str(folder / f"home{one}"),
                "BATCH_ASSETS_STORE": str(folder / "store"),
                "BATCH_ASSETS_API_DB": database,
            }
            command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(port), "--endpoint", url]
            with (folder / "log").open("ab") as log:
                process = psutil.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            found.append((f"http://127.0.0.1:{port}", process))
        yield found
    finally:
        for _, process in found:
            if process.is_running():
                process.kill()
            process.wait()


class Caller:
    """Calls of the replicas, the first that answers."""

    def __init__(self, session: aiohttp.ClientSession, addresses: list[str]) -> None:
        self._session, self._addresses = session, addresses
        self.file = self.batch = ""
        self.made: set[str] = set()
        self.moved = 0

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """JSON of an answer of 200, by whichever replica."""
        for attempt in range(TRIES):
            address = self._addresses[attempt % len(self._addresses)]
            try:
                async with self._session.request(method, address + path, **options) as answer:
                    if answer.status in (502, 503):  # it is being drained, or starts
                        raise aiohttp.ClientConnectionError
                    if answer.status != 200:
                        raise SystemExit(f"{method} {path}: {answer.status} {await answer.text()}")
                    return await answer.json()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
                self.moved += 1
                if attempt >= len(self._addresses) - 1:
                    await asyncio.sleep(PAUSE_SECONDS)
        raise TimeoutError(path)

    async def prepare(self) -> None:
        """An input file, and a batch to poll."""
        rows = [{"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": body(CHAT, n)} for n in range(LINES)]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, rows)).encode(), filename="in.jsonl")
        self.file = (await self.ask("POST", "/v1/files", data=form()))["id"]
        self.batch = await self.create()

    async def create(self) -> str:
        """A new batch."""
        asked = {"input_file_id": self.file, "endpoint": CHAT, "completion_window": "24h"}
        made: str = (await self.ask("POST", "/v1/batches", json=asked, headers={"Idempotency-Key": uuid.uuid4().hex}))[
            "id"
        ]
        self.made.add(made)
        return made

    async def poll(self) -> str:
        """The status of a batch."""
        return str((await self.ask("GET", f"/v1/batches/{self.batch}"))["status"])

    async def proxy(self) -> str:
        """A chat of one token."""
        return str((await self.ask("POST", CHAT, json={**body(CHAT, 1), "max_tokens": 1}))["id"])


Call = Callable[[], Awaitable[object]]


async def full_load(call: Call, at_once: int, seconds: float) -> int:
    """Calls that were answered with that many always under way."""
    until, done = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await call()
            done += 1

    await asyncio.gather(*(ask() for _ in range(at_once)))
    return done


async def at_rate(call: Call, per_second: float, seconds: float) -> tuple[float, float]:
    """(p50, p99) in milliseconds of calls that begin at this rate, whether those before have ended or not."""
    took: list[float] = []
    counted = time.perf_counter() + 0.1 + WARM_UP_SECONDS

    async def ask(at: float) -> None:
        await asyncio.sleep(at - time.perf_counter())
        await call()
        if at >= counted:
            took.append(1e3 * (time.perf_counter() - at))

    began = counted - WARM_UP_SECONDS
    number_of_calls = int(per_second * (WARM_UP_SECONDS + seconds))
    await asyncio.gather(*(ask(began + number / per_second) for number in range(number_of_calls)))
    cut = statistics.quantiles(took, n=100)
    return round(cut[49], 2), round(cut[98], 2)


async def measure(caller: Caller, process: psutil.Popen, url: str, at_once: int, seconds: float) -> list[Figures]:
    """All kinds of calls, one after the other."""
    found = []
    engine_itself = Caller(caller._session, [url])
    for kind in KINDS:
        call = getattr(caller, kind)
        await call()
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        done = await full_load(call, at_once, seconds)
        rate = done / (time.perf_counter() - began)
        cpu = sum(process.cpu_times()[:2]) - before
        direct = await at_rate(engine_itself.proxy, rate / 2, seconds) if kind == "proxy" else (None, None)
        found.append(Figures(kind, round(rate), round(done / cpu), *await at_rate(call, rate / 2, seconds), *direct))
        print(asdict(found[-1]), flush=True)
    return found


async def end_one(caller: Caller, process: psutil.Popen, number: int, at_once: int, seconds: float) -> Ended:
    """All kinds of calls at once, while a replica ends half-way."""
    ended = Ended()

    async def asked(kind: str) -> None:
        call, until = getattr(caller, kind), time.perf_counter() + seconds
        while time.perf_counter() < until:
            try:
                await call()
                ended.calls[kind] += 1
            except (TimeoutError, SystemExit) as error:
                ended.lost.append(f"{kind}: {error}")

    async def end() -> None:
        await asyncio.sleep(seconds / 2)
        process.send_signal(number)

    await asyncio.gather(end(), *(asked(KINDS[one % 3]) for one in range(at_once)))
    ended.moved = caller.moved
    for name in caller.made:
        batch: dict[str, Any] = {"status": ""}
        until = time.perf_counter() + 120
        while batch["status"] not in ("completed", "failed", "expired") and time.perf_counter() < until:
            batch = await caller.ask("GET", f"/v1/batches/{name}")
            await asyncio.sleep(0.01)
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != LINES:
            ended.lost.append(f"{name}: {batch['status']} {batch.get('request_counts')}")
    return ended


async def wait_ready(session: aiohttp.ClientSession, address: str) -> None:
    """Until a replica answers."""
    until = time.perf_counter() + START_SECONDS
    while time.perf_counter() < until:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{address}/readyz") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(PAUSE_SECONDS)
    raise SystemExit(f"{address} did not start")


async def run(
    folder: Path, end: str | None, database: str | None, at_once: int, seconds: float, slots: int = 64
) -> list[Figures] | Ended:
    """Start everything, and measure."""
    if database is None:
        database = f"sqlite:///{folder / 'api.db'}"
    time_out = aiohttp.ClientTimeout(total=60)
    with engine(slots, folder / "requests") as url, replicas(folder, 1 if end is None else 2, database, url) as found:
        addresses = [address for address, _ in found]
        async with aiohttp.ClientSession(timeout=time_out, connector=aiohttp.TCPConnector(limit=0)) as session:
            for address in addresses:
                await wait_ready(session, address)
            caller = Caller(session, addresses)
            await caller.prepare()
            process = found[0][1]
            if end is None:
                return await measure(caller, process, url, at_once, seconds)
            number = signal.SIGKILL if end == "kill" else signal.SIGTERM
            return await end_one(caller, process, number, at_once, seconds)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--postgres")
    parser.add_argument("--end", choices=("kill", "drain"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="front-door-load-") as folder:
        found = asyncio.run(run(Path(folder), asked.end, asked.postgres, asked.at_once, asked.seconds))
    if isinstance(found, Ended):
        print({**asdict(found), "lost": len(found.lost)})
        sys.exit("\n".join(found.lost[:10]) or 0)


if __name__ == "__main__":
    main()
