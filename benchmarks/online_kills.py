"""Submit and poll under kills: `kill -9` of services, consumers and Redis at random while requests come in.

    python benchmarks/online_kills.py [--queue redis|embedded] [--rate 300] [--seconds 60] [--kill-every 10]
        [--services 1] [--consumers 1] [--kind chat|embedding] [--fsync always]
        [--seed 1] [--json FILE]

Requests come at random at the given rate, each with an Idempotency-Key; one that is not accepted is sent again with the
same key, not before the time that Retry-After asks for, until it is. Every accepted request is then asked for, with
`?wait=`, until it has a result. Everything is real: services are `batch-assets serve`, Redis is Debian's redis-server
with its append-only file, the engine is the simulator. What is killed is started again at once. Counted: accepted,
answered, dead letters, lost (accepted without a result after five minutes, by what was last said of it), engine
requests beyond one per request, refusals by status, and seconds from acceptance to the stored result (as the services
say it) and until the client has it: all, and those accepted shortly before and within ten seconds after a kill.
With `--kind embedding` each request is one text, and the services send texts together as lists
(`BATCH_ASSETS_MICRO_BATCHES=on`); what the engine did is then counted in texts.
`cpu_us`: CPU of each process, its starts included, in microseconds per accepted request. Exit status 1 when anything
was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import uvloop

from benchmarks.lean_http import LeanHttp, NoAnswer
from benchmarks.online_processes import OnlineProcesses, Plan, Process, cpu_seconds, simulator
from gpu_runner.client.engine_connections import allow_open_files

RECOVERY_SECONDS = 10.0
PATIENCE_SECONDS = 300.0
WAIT_SECONDS, CALL_SECONDS = 60, 15.0
LONGEST_PAUSE = 5.0
MOST_POLLS = 8_000  # at a time, each on a connection of its own
REST_SECONDS = 0.5  # after a refused connection the others are asked, as by any load balancer
SETTLE_SECONDS = 2.0  # between the start and the load
SUBMIT = "/v1/inference"


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
    cpu_us: dict[str, int]


async def ready(fronts: list[LeanHttp], kind: str) -> None:
    """Until each has accepted one request, and has its result."""
    for number, front in enumerate(fronts):
        for _ in range(1200):
            with contextlib.suppress(NoAnswer):
                answer = await front.call("POST", SUBMIT, CALL_SECONDS, body(90_000_000 + number, kind))
                if answer.status == 202:
                    break
            await asyncio.sleep(0.1)
        else:
            raise SystemExit("the services did not start")
        seen = Seen()
        path = f"/v1/result/{orjson.loads(answer.body)['task_id']}?wait={WAIT_SECONDS}"
        await _result(itertools.repeat(front), path, time.monotonic(), seen)
        if not seen.results["SUCCESS"]:
            raise SystemExit(f"the first request: expected a result, found {dict(seen.results + seen.lost)}")


def body(number: int, kind: str) -> bytes:
    """One request, unlike all others, of the same number of tokens."""
    asked = b'"say %08d"' % number if kind == "chat" else b'["say %08d"]' % number
    return b'{"input":%b,"client_id":"kills","model":"tiny","ttl_seconds":600,"cache":"never"}' % asked


def in_turn(servers: list[LeanHttp]) -> Iterator[LeanHttp]:
    """The servers in turn; those that refused a connection just now only where all did."""
    for number in itertools.count():
        now = time.monotonic()
        ready = [server for server in servers if now - server.refused_at >= REST_SECONDS] or servers
        yield ready[number % len(ready)]


async def one_request(fronts: Iterator[LeanHttp], polls: asyncio.Semaphore, number: int, kind: str, seen: Seen) -> None:
    """Submit until accepted, then ask until there is a result."""
    asked, headers = body(number, kind), b"Idempotency-Key: request-%d\r\n" % number
    for tries in itertools.count():
        try:
            answer = await next(fronts).call("POST", SUBMIT, CALL_SECONDS, asked, headers)
        except NoAnswer:
            seen.refusals["no connection"] += 1
            await asyncio.sleep(_pause(tries))
            continue
        if answer.status == 202:
            break
        seen.refusals[str(answer.status)] += 1
        await asyncio.sleep(_pause(tries, answer.retry_after))
    accepted_at = time.monotonic()
    seen.accepted += 1
    async with polls:
        task_id = orjson.loads(answer.body)["task_id"]
        await _result(fronts, f"/v1/result/{task_id}?wait={WAIT_SECONDS}", accepted_at, seen)


async def _result(fronts: Iterator[LeanHttp], path: str, accepted_at: float, seen: Seen) -> None:
    """Ask until there is a result."""
    last, tries = "not asked", 0
    while time.monotonic() < accepted_at + PATIENCE_SECONDS:
        try:
            answer = await next(fronts).call("GET", path, WAIT_SECONDS + CALL_SECONDS)
        except NoAnswer:
            last = "no connection"
            await asyncio.sleep(_pause(tries))
            tries += 1
            continue
        if answer.status == 200:
            found = orjson.loads(answer.body)
            if found["status"] != "PENDING":
                seen.results[found["status"] if found["error"] is None else found["error"]["code"]] += 1
                stored = found["finished_at"] - found["created_at"]
                seen.latencies.append((accepted_at, stored, time.monotonic() - accepted_at))
                return
            last, tries = "pending", 0
            continue
        last = f"status {answer.status}"
        if answer.status == 404:
            break
        await asyncio.sleep(_pause(tries, answer.retry_after))
        tries += 1
    seen.lost[last] += 1


def _pause(tries: int, retry_after: float = 0.0) -> float:
    """Seconds until the next try: exponential, with jitter, and no less than the server asks for."""
    return max(min(LONGEST_PAUSE, 0.2 * 2.0 ** min(tries, 10)), retry_after) * (1.0 + random.random())


async def kill_now_and_then(site: OnlineProcesses, plan: Plan, seen: Seen) -> None:
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
    """One run. SIGTERM ends all that was started, too."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    seen = Seen()
    with simulator() as (engine, pid):
        site = OnlineProcesses(plan, folder, engine)
        fronts = [LeanHttp(port) for port in site.fronts]

        def used() -> dict[str, float]:
            own = {"simulator": cpu_seconds(pid), "client": time.process_time()}
            return own | {process.name: process.cpu_seconds for process in site.processes}

        try:
            site.start()
            await ready(fronts, plan.kind)
            await asyncio.sleep(SETTLE_SECONDS)
            before, engine_before = used(), await prompt_tokens(engine)
            took = await load(fronts, site, plan, seen)
            after, engine_after = used(), await prompt_tokens(engine)
        finally:
            site.end()
            for front in fronts:
                front.close()
    requests = round((engine_after - engine_before) / (engine_before / len(fronts)))
    cpu = {name: round(1e6 * (after[name] - before[name]) / max(1, seen.accepted)) for name in after}
    return _report(plan, seen, requests, took, cpu)


async def prompt_tokens(engine: str) -> int:
    """Tokens of the texts that the engine was asked for."""
    stats = await LeanHttp(int(engine.rpartition(":")[2])).call("GET", "/simulator/stats", CALL_SECONDS)
    return int(orjson.loads(stats.body)["prompt_tokens"])


async def load(servers: list[LeanHttp], site: OnlineProcesses, plan: Plan, seen: Seen, first: int = 0) -> float:
    """Requests at random until the time is over, then their results. Returns the seconds of the load. `first`: number
    of the first request; one that was sent before is answered at once, by its Idempotency-Key.
    """
    draw, fronts = random.Random(plan.seed + 1), in_turn(servers)
    kills = asyncio.create_task(kill_now_and_then(site, plan, seen)) if plan.kill_every else None
    began, next_at, polls = time.monotonic(), time.monotonic(), asyncio.Semaphore(MOST_POLLS)
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(first):
            next_at += draw.expovariate(plan.rate)
            if next_at - began > plan.seconds:
                break
            if (wait := next_at - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one_request(fronts, polls, number, plan.kind, seen))
        took = time.monotonic() - began
        if kills is not None:
            kills.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await kills  # raises what ended the kills before their time
            for process in site.processes:  # whatever a cancelled kill has not started again
                if not process.runs:
                    process.start()
    return took


def _report(plan: Plan, seen: Seen, requests: int, took: float, cpu: dict[str, int]) -> Report:
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
        cpu_us={**cpu, "all": sum(cpu.values())},
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
    parser.add_argument("--kind", choices=["chat", "embedding"], default=usual.kind)
    parser.add_argument("--fsync", choices=["always", "everysec"], default=usual.fsync)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--json", type=Path)
    asked = vars(parser.parse_args())
    path = asked.pop("json")
    if asked["queue"] == "redis" and shutil.which("redis-server") is None:
        raise SystemExit("redis-server: expected it on the PATH, found none; install Debian's redis-server")
    with tempfile.TemporaryDirectory(prefix="online-kills-") as folder:
        allow_open_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                report = runner.run(play(Plan(**asked), Path(folder)))
            except asyncio.CancelledError:
                sys.exit(143)
    print(json.dumps(asdict(report), indent=1))
    if path is not None:
        path.write_text(json.dumps(asdict(report)))
    sys.exit(1 if report.lost else 0)


if __name__ == "__main__":
    main()
