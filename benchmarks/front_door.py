"""The front door beside a plain client: the same lines, the same simulated engine, the same number of requests at once.

    python benchmarks/front_door.py [--endpoint /v1/embeddings] [--lines 10000] [--batches 1] [--plain-lines N]
        [--slots 64] [--rounds 2] [--instant] [--json FILE]

Per round: an asyncio client that keeps `4 × slots` requests in flight and throws the answers away, then a batch by
`batch-assets serve`, from its creation to `completed`; then the output file is read, and has each line once. Also the
time from creation to the engine's first request, by the engine's own log, the memory at its peak, and the CPU of the
service and of the plain client. Goals: rows/s ≥ 0.90 of the plain client's, first request ≤ 1 s. `--batches`: the
lines are those of so many batches, which are uploaded and created by 16 callers; then the time is that from the first
upload to the last end. `--instant`: an engine that answers at once, so that the clients are the limit; goals then:
rows/s ≥ 0.85 of the plain client's, 0.40 ms of CPU a line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gpu_runner.providers.engine_process import free_port

ROOT = Path(__file__).parent.parent
ENDED = ("completed", "failed", "expired", "cancelled")
CALLERS = 16  # that create batches
POLLS = 100  # a second, of all batches together
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Round:
    """One round's figures: seconds, and rows per second."""

    plain_rate: float
    door_rate: float
    ratio: float
    first_request: float
    upload: float
    download: float
    cpu_ms: float
    plain_cpu_ms: float
    peak_mib: float


def body(endpoint: str, number: int) -> dict[str, Any]:
    """The request of one line."""
    if endpoint == EMBEDDINGS:
        return {"model": "tiny", "input": f"say {number}"}
    return {"model": "tiny", "max_tokens": 32, "messages": [{"role": "user", "content": f"say {number}"}]}


@contextlib.contextmanager
def engine(slots: int, log: Path, *, instant: bool = False) -> Iterator[str]:
    """The simulator, with 2 ms for a token, or an engine that answers at once: its address."""
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "tiny", "--exit-with-parent"]
    command += ["--max-num-seqs", str(slots), "--output-tokens", "fixed:32", "--weights-ms", "2"]
    command += ["--request-log", str(log)]
    if instant:
        command = [sys.executable, "-m", "benchmarks.instant_engine", "--log", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        with process:  # closes its pipes
            process.kill()


@contextlib.contextmanager
def service(home: Path, endpoint: str, slots: int) -> Iterator[tuple[str, psutil.Process]]:
    """`batch-assets serve`: its address and its process."""
    port = free_port()
    environment = {**os.environ, "DAGSTER_HOME": str(home / "home"), "BATCH_ASSETS_STORE": str(home / "store")}
    command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(port)]
    command += ["--endpoint", endpoint, "--max-num-seqs", str(slots)]
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        yield f"http://127.0.0.1:{port}/v1", psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


async def plain(url: str, endpoint: str, lines: int, at_once: int) -> float:
    """Rows per second of the plain client."""
    numbers = iter(range(lines))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def ask() -> None:
            for number in numbers:
                data = json.dumps(body(endpoint, number)).encode()
                headers = {"Content-Type": "application/json"}
                async with session.post(f"{url}{endpoint}", data=data, headers=headers) as answer:
                    assert answer.status == 200
                    json.loads(await answer.read())

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return lines / (time.perf_counter() - began)


async def wait_up(session: aiohttp.ClientSession, base: str) -> None:
    """Until the service answers."""
    for _ in range(1200):
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{base}/models") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise SystemExit("the service did not start")


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch: seconds of its upload, when it was created, seconds from then to its end, and of its output."""

    upload: float
    created: float
    took: float
    download: float


def write_lines(file: Path, endpoint: str, lines: int) -> None:
    """The input file."""
    with file.open("w") as out:
        for n in range(lines):
            line = {"custom_id": f"r{n}", "method": "POST", "url": endpoint, "body": body(endpoint, n)}
            out.write(json.dumps(line) + "\n")


async def check_output(session: aiohttp.ClientSession, url: str, lines: int) -> float:
    """Seconds to read the output file. SystemExit: a line is missing, or there twice."""
    began, seen, count = time.perf_counter(), bytearray(lines), 0
    async with session.get(url) as answer:
        async for line in answer.content:
            seen[int(json.loads(line)["custom_id"][1:])] = 1
            count += 1
    if not (count == lines == sum(seen)):
        raise SystemExit(f"expected each of {lines} lines once, found {count} lines with {sum(seen)} custom_ids")
    return time.perf_counter() - began


async def created(session: aiohttp.ClientSession, base: str, endpoint: str, written: Path) -> tuple[float, float, Any]:
    """Upload and create: seconds of the upload, when it was created, and the batch."""
    form = aiohttp.FormData({"purpose": "batch"})
    began = time.perf_counter()
    with written.open("rb") as content:
        form.add_field("file", content, filename="in.jsonl")
        async with session.post(f"{base}/files", data=form) as answer:
            file = await answer.json()
    upload = time.perf_counter() - began
    asked = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    at = time.time()
    async with session.post(f"{base}/batches", json=asked) as answer:
        return upload, at, await answer.json()


async def completed(session: aiohttp.ClientSession, base: str, found: Any, lines: int, poll: float) -> Any:
    """The batch once it has ended. SystemExit: not all of its lines were answered."""
    while found["status"] not in ENDED:
        await asyncio.sleep(poll)
        async with session.get(f"{base}/batches/{found['id']}") as answer:
            found = await answer.json()
    expected = {"total": lines, "completed": lines, "failed": 0}
    if found["status"] != "completed" or found["request_counts"] != expected:
        raise SystemExit(f"expected a completed batch, found {found}")
    return found


async def batch(session: aiohttp.ClientSession, base: str, endpoint: str, lines: int, folder: Path) -> Batch:
    """Upload, create, wait for the end, download."""
    write_lines(folder / "in.jsonl", endpoint, lines)
    upload, at, found = await created(session, base, endpoint, folder / "in.jsonl")
    began = time.perf_counter() - (time.time() - at)
    found = await completed(session, base, found, lines, 0.1)
    took = time.perf_counter() - began
    download = await check_output(session, f"{base}/files/{found['output_file_id']}/content", lines)
    return Batch(upload, at, took, download)


async def batches(
    session: aiohttp.ClientSession, base: str, endpoint: str, lines: int, number: int, folder: Path
) -> Batch:
    """Many batches of `lines` together, at once. `upload`: until all are created; `took`: from the first upload on."""
    each, gate = lines // number, asyncio.Semaphore(CALLERS)
    write_lines(folder / "in.jsonl", endpoint, each)
    began, at = time.perf_counter(), time.time()

    async def made() -> Any:
        async with gate:
            return (await created(session, base, endpoint, folder / "in.jsonl"))[2]

    found = await asyncio.gather(*(made() for _ in range(number)))
    upload = time.perf_counter() - began
    poll = max(0.1, number / POLLS)
    ended = await asyncio.gather(*(completed(session, base, one, each, poll) for one in found))
    took = max(one["completed_at"] for one in ended) + 1 - at  # whole seconds
    reads = [await check_output(session, f"{base}/files/{one['output_file_id']}/content", each) for one in ended]
    return Batch(upload, at, took, sum(reads))


def first_request(log: Path, since: float) -> float:
    """Seconds from a moment to the engine's first request after it, by the engine's log."""
    for _ in range(100):
        with log.open() as texts:
            for text in texts:
                if text.endswith("\n") and (event := json.loads(text))["event"] == "received" and event["t"] >= since:
                    return float(event["t"]) - since
        time.sleep(0.1)
    raise SystemExit("the engine's log has no request")


def peak_mib(pid: int) -> float:
    """The most memory that a process has had."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


async def rounds(asked: argparse.Namespace, home: Path) -> list[Round]:
    """Plain and door in turn, on one engine."""
    found: list[Round] = []
    log, endpoint, lines, slots = home / "requests", asked.endpoint, asked.lines, asked.slots
    with engine(slots, log, instant=asked.instant) as url, service(home, url, slots) as (base, process):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            await wait_up(session, base)
            await batch(session, base, endpoint, 10, home)  # warm
            for _ in range(asked.rounds):
                plain_lines, cpu = asked.plain_lines or lines, time.process_time()
                plain_rate = await plain(url, endpoint, plain_lines, 4 * slots)
                plain_cpu = time.process_time() - cpu
                cpu = sum(process.cpu_times()[:2])
                if asked.batches > 1:
                    one_batch = await batches(session, base, endpoint, lines, asked.batches, home)
                else:
                    one_batch = await batch(session, base, endpoint, lines, home)
                spent = sum(process.cpu_times()[:2]) - cpu
                peak = peak_mib(process.pid)
                one = Round(
                    plain_rate,
                    lines / one_batch.took,
                    lines / one_batch.took / plain_rate,
                    first_request(log, one_batch.created),
                    one_batch.upload,
                    one_batch.download,
                    1e3 * spent / lines,
                    1e3 * plain_cpu / plain_lines,
                    peak,
                )
                print({name: round(value, 3) for name, value in asdict(one).items()}, flush=True)
                found.append(one)
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", choices=(CHAT, EMBEDDINGS), default=CHAT)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--plain-lines", type=int, help="of the plain client; without it as many as --lines")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--instant", action="store_true", help="an engine that answers at once")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.batches < 1 or asked.lines % asked.batches:
        parser.error(f"--lines {asked.lines} cannot be shared equally by --batches {asked.batches}")
    with tempfile.TemporaryDirectory(prefix="front-door-") as folder:
        found = asyncio.run(rounds(asked, Path(folder)))
    best = max(found, key=lambda one: one.ratio)
    print(f"{asked.lines:,} lines: {best.door_rate:,.0f} rows/s, {best.ratio:.2f} of the plain client")
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main()
