"""What batches cost interactive requests on the same engine, and what interactive requests leave to batches.

    python benchmarks/interactive.py [--seconds 150] [--settle 50] [--json FILE]
    python benchmarks/interactive.py --endpoint URL --model MODEL --slots 1024 --chats-per-second 4 --targets 0.1 0.2
    python -m benchmarks.interactive --endpoint URL --model MODEL --slots 32 --settle 100 --seconds 240
        --chats-per-second 0.05 --burst-every 30 --chat-tokens 150 16 --row-tokens 30 96     # a small model on a CPU

One simulated engine at a time (8B on H200 at three tenths of its speed, so that the processes stay far below a core),
a feed with rows without end, and streamed chats that come at random through the front door, alone and in bursts of
four. Five runs after each other: chats alone; then with batches, on an engine without and one with priority
scheduling, each with rows that fill the engine's queue ("full") and with rows that give way. Time to first token is
the caller's. Tokens of batches are the engine's own count less those of chats. What chats leave over is what batches
get in the run "full".

With `--whole` chats are not streamed, and the time is that to their whole answer; rows give way by the default policy,
which lets them fill the engine's queue while nobody asks. `--chat-tokens 1000 1` makes it the time to a first token.

With `--endpoint` the engine is one that runs already, such as vLLM on a GPU, started with either policy: chats alone,
then rows that fill its queue, then rows that give way, for the target above and each of `--targets` (seconds).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI

from batch_assets.api.app import create_app
from batch_assets.api.front_door import FrontDoor, build_front_door
from batch_assets.api.server import KEEP_ALIVE_SECONDS
from batch_assets.api.settings import ApiSettings
from gpu_runner.client.engine_client import BATCH_PRIORITY, EngineClient
from gpu_runner.client.engine_load import parse_metrics
from gpu_runner.inference.feed import Feed
from gpu_runner.inference.windows.first_token_window import FirstTokenPolicy, InteractiveShare
from gpu_runner.rows import Batch, Generation, Origin, Outcome, Row

MODEL = "bench"
SPEED = 0.3
BURST = 4
TARGET = 1.25  # times the 95th percentile of chats alone


@dataclass(frozen=True)
class Setting:
    """The engine and what is asked of it. `endpoint`: of an engine that runs, None for simulated ones. `chat`, `row`:
    tokens of the prompt, about, and of the answer.

    `salt` makes prompts of one run differ from those of the runs before, which the engine may still have in its cache.
    `whole`: chats are not streamed.
    """

    endpoint: str | None = None
    model: str = MODEL
    slots: int = 256
    chats_per_second: float = 2.1
    burst_every: float = 5.0
    chat: tuple[int, int] = (1000, 64)
    row: tuple[int, int] = (100, 128)
    salt: str = ""
    whole: bool = False


@dataclass
class Chats:
    """What callers saw. Seconds to first tokens (to whole answers, where they are not streamed) of chats that began in
    the time that is measured.
    """

    measured_from: float
    first_tokens: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0

    def percentile(self, share: float) -> float:
        """Of the seconds to first tokens."""
        seen = sorted(self.first_tokens)
        return seen[min(len(seen) - 1, int(share * len(seen)))]


@dataclass(frozen=True)
class Result:
    """One run. Seconds, and tokens of batches per second."""

    name: str
    chats: int
    failed: int
    p50: float
    p95: float
    batch_tokens: float
    window: int


@contextlib.contextmanager
def engine_of(setting: Setting, policy: str) -> Iterator[str]:
    """The engine that runs, or a simulated one with this scheduling policy; yields its address."""
    if setting.endpoint is not None:
        yield setting.endpoint
        return
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", MODEL, "--exit-with-parent"]
    command += ["--max-num-seqs", str(setting.slots), "--speed", str(SPEED), "--scheduling-policy", policy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def served(engine: str, folder: Path) -> AsyncIterator[tuple[str, FrontDoor]]:
    """The front door on a free port of loopback, without its worker on batches: the feed here takes its place."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        settings = ApiSettings(folder, str(folder), f"sqlite:///{folder / 'api.db'}", port=port, endpoints=(engine,))
        inner = create_app(settings)
        inner.router.lifespan_context = _nothing
        door = build_front_door(settings, inner=inner)
        config = uvicorn.Config(
            door.app, log_level="warning", access_log=False, lifespan="on", timeout_keep_alive=KEEP_ALIVE_SECONDS
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{port}", door
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def _nothing(app: FastAPI) -> AsyncIterator[None]:
    yield


def rows(setting: Setting) -> Iterator[Batch]:
    """Batches without end."""
    for number in itertools.count():
        key = f"{number:06}"
        text = f"{number} {setting.salt}" + "words " * (setting.row[0] * 4 // 6)
        prompts = [orjson.dumps(f"{i} {text}") for i in range(250)]
        yield Batch(key, tuple(Row(key, f"{key}-{i}", f"{key}-{i}", prompt) for i, prompt in enumerate(prompts)))


async def chat(session: aiohttp.ClientSession, url: str, number: int, chats: Chats, setting: Setting) -> None:
    """One chat. Of an answer that is not streamed its end counts."""
    content = f"{number} {setting.salt}" + "words " * (setting.chat[0] * 4 // 6)
    body = {
        "model": setting.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": setting.chat[1],
        "ignore_eos": True,
        "stream": not setting.whole,
    }
    began, first = time.monotonic(), None
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if first is None and b'"content":"' in line and b'"content":""' not in line:
                    first = time.monotonic() - began
        if setting.whole:
            first = time.monotonic() - began
    except aiohttp.ClientError as error:
        print(f"chat {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        chats.failed += 1
        return
    chats.tokens += setting.chat[1]
    if began >= chats.measured_from and first is not None:
        chats.first_tokens.append(first)


async def talk(url: str, chats: Chats, seed: int, ended: asyncio.Event, setting: Setting) -> None:
    """Chats at random, and bursts, until `ended`; then those under way to their end, for late ones count most."""
    draw, next_burst = random.Random(seed), time.monotonic() + setting.burst_every
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session, asyncio.TaskGroup() as group:
        for number in itertools.count():
            await asyncio.sleep(draw.expovariate(setting.chats_per_second))
            if ended.is_set():
                return
            count = 1
            if time.monotonic() >= next_burst:
                next_burst += setting.burst_every
                count = BURST
            for part in range(count):
                group.create_task(chat(session, url, number * BURST + part, chats, setting))


async def generated(session: aiohttp.ClientSession, engine: str) -> int:
    """Tokens that the engine has generated so far."""
    async with session.get(f"{engine}/metrics") as answer:
        load = parse_metrics(await answer.read())
    assert load is not None
    return load.generated_tokens


async def measure(
    name: str,
    scheduling: str,
    times: tuple[float, float],
    setting: Setting,
    *,
    batches: bool,
    target: float | None = None,
) -> Result:
    """One run: `times` are seconds to settle and to measure. `target`: of first tokens, for rows that give way."""
    settle, seconds = times
    setting = replace(setting, salt=f"{time.time_ns()} ")
    with engine_of(setting, scheduling) as engine, tempfile.TemporaryDirectory() as folder:
        async with served(engine, Path(folder)) as (url, door), aiohttp.ClientSession() as session:
            feed, feeding = None, None
            if batches:
                feed = Feed(rows(setting), on_row=_ignore, on_batch=_drop)
                share = None
                if target is not None:
                    look = door.inner.state.proxy.first_tokens.reader(engine)
                    share = InteractiveShare(look, FirstTokenPolicy(target=target, standing=not setting.whole))
                feeding = asyncio.create_task(_feed(feed, engine, share, setting))
            chats, ended = Chats(time.monotonic() + settle), asyncio.Event()
            talking = asyncio.create_task(talk(url, chats, 1, ended, setting))
            await asyncio.sleep(settle)
            before, chat_tokens = await generated(session, engine), chats.tokens
            began = time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            tokens = await generated(session, engine) - before - (chats.tokens - chat_tokens)
            window = feed.progress().window if feed is not None else 0
            ended.set()
            await talking
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
    result = Result(
        name,
        len(chats.first_tokens),
        chats.failed,
        chats.percentile(0.5),
        chats.percentile(0.95),
        tokens / took if batches else 0.0,
        window,
    )
    print(result, file=sys.stderr, flush=True)
    return result


async def _feed(feed: Feed, engine: str, share: InteractiveShare | None, setting: Setting) -> None:
    generation = Generation("completion", setting.model, {"max_tokens": setting.row[1], "ignore_eos": True})
    async with EngineClient(engine, generation, priority=BATCH_PRIORITY) as client:
        await client.info()  # with it requests to vLLM get their priority in the body, too
        origin = Origin(setting.model, "simulated", "bench", "none", setting.endpoint is None, "bench")
        await feed.serve(client, origin, setting.slots, share=share)


def _ignore(job: str, key: str, outcome: Outcome) -> None:
    """Rows are not kept."""


async def _drop(job: str, key: str, outcomes: list[Outcome]) -> None:
    """Batches are not kept."""


def table(alone: Result, results: list[Result], seen: str) -> str:
    """The figures, as in docs/evidence.md. `seen`: what the seconds are those of."""
    lines = [f"| run | chats | {seen} p50, p95 | p95 / alone | batch tokens/s | of what is left over | window |"]
    lines.append("|---|---|---|---|---|---|---|")
    left = {result.name.split(",")[0]: result.batch_tokens for result in results if result.name.endswith("full")}
    for result in [alone, *results]:
        over = left.get(result.name.split(",")[0])
        share = f"{result.batch_tokens / over:.2f}" if over else ""
        lines.append(
            f"| {result.name} | {result.chats} | {result.p50 * 1000:.0f}, {result.p95 * 1000:.0f} ms | "
            f"{result.p95 / alone.p95:.2f} | {result.batch_tokens:,.0f} | {share} | {result.window} |"
        )
    return "\n".join(lines)


async def run(times: tuple[float, float], setting: Setting, targets: list[float]) -> tuple[Result, list[Result]]:
    """All runs: chats alone, then with batches that fill the queue, then with batches that give way."""
    alone = await measure("chats alone", "fcfs", times, setting, batches=False)
    engines = [("fcfs", "no priority"), ("priority", "priority")]
    results = []
    for scheduling, name in engines if setting.endpoint is None else [("", "engine")]:
        results.append(await measure(f"{name}, full", scheduling, times, setting, batches=True))
        for target in (TARGET * alone.p95, *targets):
            label = f"{name}, gives way" + (f", {target * 1000:.0f} ms" if targets else "")
            results.append(await measure(label, scheduling, times, setting, batches=True, target=target))
    return alone, results


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="that are measured in each run")
    parser.add_argument("--settle", type=float, default=50.0, help="before that")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--endpoint", help="of an engine that runs, without /v1; simulated ones when left out")
    parser.add_argument("--whole", action="store_true", help="chats are not streamed")
    parser.add_argument("--model", default=MODEL, help="as the engine serves it")
    parser.add_argument("--slots", type=int, default=256, help="its max_num_seqs")
    parser.add_argument("--chats-per-second", type=float, default=2.1)
    parser.add_argument("--burst-every", type=float, default=5.0, help=f"seconds between {BURST} chats at once")
    parser.add_argument("--chat-tokens", type=int, nargs=2, default=[1000, 64], help="of prompt (about) and answer")
    parser.add_argument("--row-tokens", type=int, nargs=2, default=[100, 128], help="of prompt (about) and answer")
    parser.add_argument("--targets", type=float, nargs="*", default=[], help="seconds to first tokens, beside the goal")
    args = parser.parse_args()
    if args.whole and args.targets:
        parser.error("--targets are of first tokens, which --whole does not see")
    chat, row = tuple(args.chat_tokens), tuple(args.row_tokens)
    setting = Setting(args.endpoint, args.model, args.slots, args.chats_per_second, args.burst_every, chat, row)
    setting = replace(setting, whole=args.whole)
    alone, results = asyncio.run(run((args.settle, args.seconds), setting, args.targets))
    print(table(alone, results, "whole answer" if args.whole else "first token"))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in (alone, *results)], indent=1))


if __name__ == "__main__":
    main()
