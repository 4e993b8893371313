"""Which engine gets the next chat, through the real service: each rule of BATCH_ASSETS_ROUTING under the same load.

    python -m benchmarks.routing_live [--requests 600] [--warm-up 150] [--load 0.8] [--seed 1] [--json FILE]
    python -m benchmarks.routing_live --rate 8 --speeds 1 0.35          # two simulated engines, no calibration
    python -m benchmarks.routing_live --endpoint URL1 --endpoint URL2 --model NAME --requests 150 --warm-up 80
        --prompt-tokens 20 110 --shared-tokens 64 --answer-tokens 16 --concurrency 6 --calibrate-seconds 45

The second form of engines is any two that serve the same model, such as vLLM on a CPU:

    vllm serve MODEL --served-model-name NAME --port 8001 --max-num-seqs 8
    vllm serve MODEL --served-model-name NAME --port 8002 --max-num-seqs 2

For each rule `batch-assets serve` is started anew, in a folder of its own, with both engines. Chats are streamed
through it at times that do not depend on answers: Poisson arrivals, in bursts `--burst` times as many a fifth of the
time. Most prompts are short, some long, and some begin with one of a few system messages. Arrivals, sizes and texts are
the same for each rule, but for a number at the beginning of each prompt, so that no engine has cached those of the
run before. The rate is `--load` of what both engines did when both were kept busy directly (`--calibrate-seconds`).

The time to the first token is the caller's, from the moment at which the chat was due. The first `--warm-up` chats are
not counted: the router predicts nothing until it has seen 30 answers of each engine, and until then all rules are one.
`predicted`: share of the choices that were made by prediction. `by engine`: of the tokens generated. `--rounds` repeats
the rules in turned order, with further seeds. Simulated engines have no prefix cache, and the router looks at whole
kilobytes of a beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import orjson

from batch_assets.api.interactive.engine_choice import ROUTING
from gpu_runner.client.engine_load import parse_metrics
from gpu_runner.providers.engine_process import free_port
from gpu_runner.routing.router import Reason, Rule

ROOT = Path(__file__).parent.parent
MODEL = "bench"
WORDS = ("time", "year", "work", "day", "hand", "part", "life", "eye", "week", "case", "point", "home")  # a token each
BURST_SHARE = 0.2  # of the time
BURST_EVERY = 30.0  # mean seconds between two chats
START_SECONDS = 120.0
CHAT_SECONDS = 300.0
CHOICES = re.compile(r'^batch_assets_routing_choices_total\{reason="(\w+)"\} (\S+)', re.MULTILINE)
SIMULATED = ("--weights-ms", "15", "--token-us", "300", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for. `prompt`: tokens of short and of long ones, about. `shared`: share of the chats that begin
    with one of `prefixes` system messages of `shared_tokens`. The first `warm_up` chats are not counted.
    """

    requests: int
    warm_up: int
    burst: float
    prompt: tuple[int, int]
    long_share: float
    shared: float
    shared_tokens: int
    answer: int
    prefixes: int = 4


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat. `at`: seconds after the beginning."""

    at: float
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Counters at one moment: tokens that each engine has generated, and choices of the router by their reason."""

    tokens: tuple[int, ...]
    reasons: Counter[str]


@dataclass(slots=True)
class Seen:
    """What callers saw of the chats that count. `failed`: by what went wrong. `late`: seconds the client itself was."""

    first_tokens: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    tokens: tuple[int, ...] = ()
    reasons: Counter[str] = field(default_factory=Counter)
    late: float = 0.0

    def add(self, other: Seen) -> None:
        """Another round of the same rule."""
        self.first_tokens += other.first_tokens
        self.failed += other.failed
        self.reasons += other.reasons
        self.tokens = tuple(map(sum, zip(self.tokens, other.tokens, strict=True))) if self.tokens else other.tokens
        self.late = max(self.late, other.late)

    def percentile(self, share: float) -> float:
        """Of the seconds to first tokens; NaN where there are none."""
        seconds = sorted(self.first_tokens)
        return seconds[math.ceil(share * len(seconds)) - 1] if seconds else math.nan


def text(rng: random.Random, tokens: int) -> str:
    """Words of about so many tokens."""
    return " ".join(rng.choices(WORDS, k=max(1, tokens)))


def conversation(load: Load, rng: random.Random, prefixes: list[str], salt: str) -> tuple[dict[str, str], ...]:
    """The messages of one chat."""
    short, long = load.prompt
    if rng.random() < load.shared:
        system = {"role": "system", "content": f"{salt} {rng.choice(prefixes)}"}
        return system, {"role": "user", "content": text(rng, round(short * rng.uniform(0.5, 1.5)))}
    tokens = round(long * rng.uniform(0.8, 1.2) if rng.random() < load.long_share else short * rng.uniform(0.5, 1.5))
    return ({"role": "user", "content": f"{salt} {text(rng, tokens)}"},)


def workload(load: Load, rate: float, seed: int, salt: str) -> list[Chat]:
    """The chats of one run, in the order of their times. `salt` is all that differs between runs of one seed."""
    rng = random.Random(seed)
    prefixes = [text(rng, load.shared_tokens) for _ in range(load.prefixes)]
    low = (1 - BURST_SHARE * load.burst) / (1 - BURST_SHARE)
    now, chats = 0.0, []
    for _ in range(load.warm_up + load.requests):
        in_burst = (now * rate / BURST_EVERY) % 1.0 < BURST_SHARE
        now += rng.expovariate(rate * (load.burst if in_burst else max(low, 0.1)))
        chats.append(Chat(now, conversation(load, rng, prefixes, salt)))
    return chats


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> float:
    """One streamed chat to its end. Returns the moment of its first token, by the loop's clock.

    Raises ValueError for an answer that is none, aiohttp.ClientError or TimeoutError where it did not come.
    """
    first, done = None, False
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            part = orjson.loads(line[6:])
            if "error" in part:
                raise ValueError("an error in the stream")
            if first is None and any(choice["delta"].get("content") for choice in part["choices"]):
                first = asyncio.get_running_loop().time()
    if first is None or not done:
        raise ValueError("a stream without a token or without its end")
    return first


def body_of(chat: Chat, load: Load, model: str) -> dict[str, object]:
    """The request."""
    asked: dict[str, object] = {"model": model, "messages": chat.messages, "max_tokens": load.answer}
    return asked | {"temperature": 0, "ignore_eos": True, "stream": True}


def client_session() -> aiohttp.ClientSession:
    """As many connections as there are chats."""
    timeout = aiohttp.ClientTimeout(total=CHAT_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def calibrate(engines: list[str], load: Load, options: argparse.Namespace) -> list[float]:
    """Chats a second of each engine while all are kept busy. The first quarter of the time is not counted."""
    salt = str(time.time_ns() % 10**6)
    chats = iter(workload(replace(load, requests=100_000), 1.0, options.seed, salt))
    began, ended = time.monotonic(), [list[float]() for _ in engines]

    async def keep_busy(session: aiohttp.ClientSession, place: int) -> None:
        while True:
            await stream(session, engines[place], body_of(next(chats), load, options.model))
            ended[place].append(time.monotonic() - began)

    async with client_session() as session:
        places = [place for place in range(len(engines)) for _ in range(options.concurrency)]
        busy = [asyncio.create_task(keep_busy(session, place)) for place in places]
        done, _ = await asyncio.wait(busy, timeout=options.calibrate_seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        for task in done:
            task.result()  # its error
    quarter = options.calibrate_seconds / 4
    counted = [sum(at > quarter for at in times) for times in ended]
    if not all(counted):
        raise SystemExit(f"chats of each engine while calibrating: {counted}; ask for more --calibrate-seconds")
    return [count / (3 * quarter) for count in counted]


async def look(session: aiohttp.ClientSession, service: str, engines: list[str]) -> Look:
    """Read the counters of the engines and of the service."""
    tokens = []
    for engine in engines:
        async with session.get(f"{engine}/metrics") as answer:
            load = parse_metrics(await answer.read())
        if load is None:
            raise SystemExit(f"{engine}/metrics: expected the figures of vLLM or llama.cpp, found none")
        tokens.append(load.generated_tokens)
    async with session.get(f"{service}/metrics") as answer:
        page = await answer.text()
    return Look(tuple(tokens), Counter({reason: int(float(count)) for reason, count in CHOICES.findall(page)}))


async def play(service: str, engines: list[str], chats: list[Chat], load: Load, model: str) -> Seen:
    """All chats at their times, each to its end."""
    seen, loop = Seen(), asyncio.get_running_loop()

    async def ask(session: aiohttp.ClientSession, chat: Chat, due: float, *, counts: bool) -> None:
        try:
            first = await stream(session, service, body_of(chat, load, model))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            what = f"HTTP {error.status}" if isinstance(error, aiohttp.ClientResponseError) else type(error).__name__
            seen.failed[what] += counts
        else:
            if counts:
                seen.first_tokens.append(first - due)

    async with client_session() as session:
        began, before = loop.time(), Look((0,) * len(engines), Counter())
        async with asyncio.TaskGroup() as group:
            for number, chat in enumerate(chats):
                if number == load.warm_up:  # all later chats wait for it: one that is chosen before it would not count
                    looked_at = loop.time()
                    before = await look(session, service, engines)
                    began += loop.time() - looked_at
                await asyncio.sleep(began + chat.at - loop.time())
                seen.late = max(seen.late, loop.time() - began - chat.at)
                group.create_task(ask(session, chat, began + chat.at, counts=number >= load.warm_up))
        after = await look(session, service, engines)
    seen.tokens = tuple(map(int.__sub__, after.tokens, before.tokens))
    seen.reasons = after.reasons - before.reasons
    return seen


@contextlib.contextmanager
def engines_of(options: argparse.Namespace) -> Iterator[list[str]]:
    """Addresses of the engines: those that run already, or simulated ones, for as long as they are wanted."""
    if options.endpoint:
        yield options.endpoint
        return
    command = [sys.executable, "-m", "gpu_runner.simulator", "--model", options.model, "--exit-with-parent", *SIMULATED]
    with contextlib.ExitStack() as stack:
        urls = []
        for speed in options.speeds:
            asked = [*command, "--speed", str(speed)]
            process = stack.enter_context(subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(process.terminate)
            assert process.stdout is not None
            urls.append(orjson.loads(process.stdout.readline())["url"])
        yield urls


@contextlib.contextmanager
def service_of(engines: list[str], rule: Rule, folder: Path) -> Iterator[str]:
    """The service with this rule, in an empty folder; yields its address when it is ready."""
    port, log = free_port(), folder / "log"
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(folder / "home"),
        "BATCH_ASSETS_STORE": str(folder / "store"),
        "BATCH_ASSETS_API_DB": f"sqlite:///{folder / 'api.db'}",
        ROUTING: rule.value,
    }
    command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(port)]
    command += [part for engine in engines for part in ("--endpoint", engine)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=output)
    try:
        until, url = time.monotonic() + START_SECONDS, f"http://127.0.0.1:{port}"
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the service did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
    except OSError:
        return False
    return True


def table(found: dict[str, Seen]) -> str:
    """The figures, as in docs/evidence.md; the first rule's beside each other one's in the last lines."""
    lines = [
        "| rule | requests | failed | first token p50, p95, p99 | by engine | predicted |",
        "|---|---|---|---|---|---|",
    ]
    for name, seen in found.items():
        times = ", ".join(f"{1e3 * seen.percentile(share):,.0f}" for share in (0.5, 0.95, 0.99))
        engines = " : ".join(f"{count / max(1, sum(seen.tokens)):.0%}" for count in seen.tokens)
        predicted = seen.reasons[Reason.PREDICTED.value] / max(1, seen.reasons.total())
        failed = f"{seen.failed.total()}" + "".join(f", {count} {what}" for what, count in seen.failed.items())
        count = len(seen.first_tokens) + seen.failed.total()
        lines.append(f"| {name} | {count} | {failed} | {times} ms | {engines} | {predicted:.0%} |")
    first, *others = found
    for name in others:
        ratios = [found[first].percentile(share) / found[name].percentile(share) for share in (0.5, 0.95, 0.99)]
        lines.append(f"| {first} / {name} | | | {', '.join(f'{ratio:.2f}' for ratio in ratios)} | | |")
    return "\n".join(lines)


def as_json(found: dict[str, Seen]) -> bytes:
    """All that was seen, by rule."""
    return orjson.dumps(found, option=orjson.OPT_INDENT_2)


def run(options: argparse.Namespace, load: Load) -> dict[str, Seen]:
    """All rules, as often as asked for."""
    found = {rule.value: Seen() for rule in Rule}
    with engines_of(options) as engines:
        rate = options.rate
        if rate is None:
            each = asyncio.run(calibrate(engines, load, options))
            rate = options.load * sum(each)
            print(f"chats/s of each engine while all are busy: {', '.join(f'{one:.2f}' for one in each)}", flush=True)
        print(f"{rate:.2f} chats/s, {load.requests} chats after {load.warm_up}", flush=True)
        for number in range(options.rounds):
            for rule in list(Rule)[:: -1 if number % 2 else 1]:
                chats = workload(load, rate, options.seed + number, str(time.time_ns() % 10**6))
                with tempfile.TemporaryDirectory() as folder, service_of(engines, rule, Path(folder)) as service:
                    seen = asyncio.run(play(service, engines, chats, load, options.model))
                found[rule.value].add(seen)
                load_average = os.getloadavg()[0]
                print(
                    f"{rule.value}: client late by {seen.late:.3f} s at most, load average {load_average:.1f}",
                    flush=True,
                )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--endpoint", action="append", help="of an engine that runs, without /v1; may come several times"
    )
    parser.add_argument("--model", default=MODEL, help="as the engines serve it")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 0.35], help="of simulated engines")
    parser.add_argument("--requests", type=int, default=600, help="that are counted, of each rule and round")
    parser.add_argument("--warm-up", type=int, default=150, help="before those")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.8, help="share of what the engines do together")
    parser.add_argument("--rate", type=float, help="chats a second, instead of --load")
    parser.add_argument("--calibrate-seconds", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=16, help="chats at once on each engine while calibrating")
    parser.add_argument("--burst", type=float, default=2.5, help="times the rate, a fifth of the time; up to 5")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[150, 1500], help="of short and long ones, about")
    parser.add_argument("--long-share", type=float, default=0.1)
    parser.add_argument("--shared-share", type=float, default=0.3)
    parser.add_argument("--shared-tokens", type=int, default=600)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = tuple(options.prompt_tokens), options.long_share, options.shared_share, options.shared_tokens
    load = Load(options.requests, options.warm_up, options.burst, *sizes, options.answer_tokens)
    found = run(options, load)
    print(table(found))
    if options.json is not None:
        options.json.write_bytes(as_json(found))


if __name__ == "__main__":
    main()
