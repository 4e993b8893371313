"""How many leases of one fleet can be renewed a second on Postgres, and how long a decision waits beside that.

    python -m benchmarks.heartbeats [--runs 48] [--processes 4] [--seconds 10] [--interval 0.5] [--away-ms 1]

Each run renews a lease and beats, as the thread of a run worker does, `--interval` seconds after it did last. Beside
them one process takes and gives back a lease ten times a second, as the capacity sensor and the reaper do. The server
is one of its own on this machine; `--away-ms` puts it so far away, there and back each. Seconds are of wall-clock time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.postgres import PostgresServer, postgres
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError
from gpu_runner.fleet_database.wait_reason import RunActivity
from gpu_runner.providers.engine_process import free_port

TTL = 10.0


def renewals(url: str, names: list[str], seconds: float, interval: float) -> list[float]:
    """Seconds that each renewal took, of several runs in one process, each in a thread."""
    took: list[float] = []

    def run(name: str) -> None:
        lease = fleet_db.try_lease(f"engine of {name}", name, "rows", TTL)
        assert lease is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            assert fleet_db.renew(lease, TTL)
            took.append(time.monotonic() - began)
            assert fleet_db.beat(name, "leased", RunActivity("works"), 1)
            time.sleep(interval)

    with contextlib.closing(FleetDatabase(url)) as fleet_db:
        for name in names:
            fleet_db.begin_run(name, "rows", "0", "1")
        _in_threads([lambda name=name: run(name) for name in names])  # type: ignore[misc]
    return took


def decisions(url: str, seconds: float) -> list[float]:
    """Seconds that each lease took that was taken and given back."""
    took = []
    with contextlib.closing(FleetDatabase(url)) as fleet_db:
        fleet_db.begin_run("decides", "others", "0", "1")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            lease = fleet_db.try_lease("another engine", "decides", "others", TTL)
            assert lease is not None and fleet_db.release(lease)
            took.append((time.monotonic() - began) / 2)
            time.sleep(0.1)
    return took


async def _proxy(port: int, server: int, away: float) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(away, writer.write, data)
        loop.call_later(away, writer.close)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port) as listening:
        await listening.serve_forever()


def proxy(port: int, server: int, away: float) -> None:
    """Serve a port whose other end is `away` seconds from here."""
    asyncio.run(_proxy(port, server, away))


@contextlib.contextmanager
def farther(server: PostgresServer, away: float) -> Iterator[str]:
    """URL of the server as if it was `away` seconds from here."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=proxy, args=(port, server.port, away), daemon=True)
    process.start()
    try:
        yield replace(server, port=port).url()
    finally:
        process.kill()
        process.join()


def _in_threads(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _opened(url: str) -> None:
    """Make the tables, when the server can be reached."""
    for _ in range(100):
        try:
            return FleetDatabase(url).close()
        except FleetDatabaseError:
            time.sleep(0.1)
    raise SystemExit("the server cannot be reached")


def measure(url: str, runs: int, processes: int, seconds: float, interval: float) -> dict[str, Any]:
    """Renewals a second, and how long they and decisions took: median, 99 %, most, in milliseconds."""
    _opened(url)
    names = [f"run-{number}" for number in range(runs)]
    with multiprocessing.get_context("spawn").Pool(processes + 1) as pool:
        beside = pool.apply_async(decisions, (url, seconds))
        shares = [(url, names[number::processes], seconds, interval) for number in range(processes)]
        took = [one for share in pool.starmap(renewals, shares) for one in share]
        waited = beside.get()
    return {
        "renewals a second": round(len(took) / seconds, 1),
        "renewal, ms": _figures(took),
        "decision, ms": _figures(waited),
        "decisions": len(waited),
    }


def _figures(seconds: list[float]) -> list[float]:
    cuts = statistics.quantiles(seconds, n=100)
    return [round(1000 * one, 1) for one in (statistics.median(seconds), cuts[98], max(seconds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--interval", type=float, default=0.5)
    parser.add_argument("--away-ms", type=float, default=1.0)
    asked = parser.parse_args()
    with postgres(settings=["max_connections=300"]) as server, farther(server, asked.away_ms / 1000) as url:
        print(json.dumps(measure(url, asked.runs, asked.processes, asked.seconds, asked.interval)))


if __name__ == "__main__":
    main()
