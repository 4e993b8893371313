"""The simulated engines of benchmarks/routing.py, and the requests of each case."""

from __future__ import annotations

import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_runner.routing.engine_view import Routed
from gpu_runner.simulator.scheduler import FINISHED, Scheduler, Sequence, StepModel

BASE = StepModel(max_num_seqs=128, kv_tokens=200_000)
BLOCK = 256  # tokens
CACHE_BLOCKS = 300  # of one engine: 77,000 tokens


@dataclass(frozen=True)
class Request:
    """One request. `prefix`: which shared beginning it has, and how many blocks of it."""

    at: float
    prompt: int
    output: int
    prefix: int = -1
    prefix_blocks: int = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Keys of the blocks of its beginning."""
        return tuple(hash((self.prefix, number)) for number in range(self.prefix_blocks))


@dataclass(frozen=True)
class Case:
    """A workload. `speeds`: of the engines; `degrades`: engine 0 is so many times slower from the middle on. `ways`:
    seconds of the round trip to each engine; empty: none.
    """

    name: str
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    burst: float = 1.0
    long_share: float = 0.0
    prefixes: int = 0
    degrades: float = 1.0
    mixed: bool = False
    ways: tuple[float, ...] = ()


CASES = (
    Case("poisson"),
    Case("bursts", burst=4.0),
    Case("long and short", long_share=0.05, mixed=True),
    Case("shared prefixes", prefixes=24),
    Case("different speeds", speeds=(2.0, 1.0, 1.0, 0.5)),
    Case("one degrades", degrades=3.0),
    Case("speeds, long and short", speeds=(2.0, 1.0, 1.0, 0.5), long_share=0.05, mixed=True),
    Case("all of it", speeds=(2.0, 1.0, 1.0, 0.5), burst=3.0, long_share=0.05, prefixes=24, mixed=True),
)


REGIONS = Case("two regions", ways=(0.0, 0.0, 0.1, 0.1), long_share=0.02, mixed=True)


def token_seconds(speed: float) -> float:
    """Of one token on an engine of this speed, when steps are full."""
    return BASE.token_seconds / speed


def sizes(case: Case, rng: random.Random) -> Request:
    """A request without its time."""
    long = rng.random() < case.long_share
    prompt = int(rng.lognormvariate(math.log(6000), 0.4)) if long else int(rng.lognormvariate(math.log(250), 0.7))
    output = min(1500, max(1, int(rng.lognormvariate(math.log(120), 0.8))))
    if case.prefixes and not long:
        blocks = rng.randint(4, 10)
        prefix = min(case.prefixes - 1, int(rng.expovariate(1 / (case.prefixes / 4))))
        blocks = 4 + prefix % 7
        return Request(0.0, blocks * BLOCK + prompt, output, prefix, blocks)
    return Request(0.0, min(prompt, 30_000), output)


def workload(case: Case, requests: int, load: float, seed: int) -> list[Request]:
    """Requests with their times, so that the mean load is as wanted. Bursts: a rate `burst` times as high, a fifth of
    the time.
    """
    rng = random.Random(seed)
    made = [sizes(case, rng) for _ in range(requests)]
    # Where prefixes are shared, most of them are cached wherever they go.
    work = statistics.fmean([r.prompt - 0.7 * r.prefix_blocks * BLOCK + r.output for r in made])
    capacity = sum(1 / token_seconds(speed) for speed in case.speeds)
    if case.degrades > 1:
        capacity -= (1 - 1 / case.degrades) / token_seconds(case.speeds[0]) / 2
    rate = load * capacity / work
    now, timed = 0.0, []
    low = (1 - 0.2 * case.burst) / 0.8
    for request in made:
        phase = (now / 5.0) % 1.0
        now += rng.expovariate(rate * (case.burst if phase < 0.2 else max(low, 0.1)))
        timed.append(replace(request, at=now))
    return timed


@dataclass(eq=False)
class Running:
    """A request on an engine. `routed`: what the router calls it."""

    request: Request
    sequence: Sequence
    routed: Routed | None = None
    told: bool = False
    way: float = 0.0


class Engine:
    """A scheduler with a prefix cache. What is known of it from outside is what the rules go by."""

    def __init__(self, name: str, speed: float, way: float = 0.0) -> None:
        self.name, self.speed, self.way = name, speed, way
        self.scheduler = Scheduler(_model(speed))
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.open: dict[Running, None] = {}
        self.sent_prompt = 0.0  # of requests without a first token
        self.kv = 0.0  # as reported
        self.waiting = 0

    def slower(self, factor: float) -> None:
        """From the next step on."""
        self.scheduler.model = _model(self.speed / factor)

    def match(self, blocks: tuple[int, ...]) -> int:
        """Blocks that are cached."""
        for number, key in enumerate(blocks):
            if key not in self.cache:
                return number
        return len(blocks)

    def submit(self, request: Request) -> Running:
        """The request arrives."""
        cached = self.match(request.blocks) * BLOCK
        for key in request.blocks:
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        arrives = request.at + self.way / 2
        running = Running(request, self.scheduler.submit(max(1, request.prompt - cached), request.output, arrives))
        running.way = self.way
        self.open[running] = None
        self.sent_prompt += request.prompt
        return running

    def news(self, now: float) -> Iterator[tuple[float, bool, Running]]:
        """(time, ended, request) of first tokens and ends that were heard of until now."""
        back = self.way / 2
        self.scheduler.advance(now - back)
        for running in list(self.open):
            sequence = running.sequence
            if not running.told and sequence.first_token_at >= 0:
                running.told = True
                self.sent_prompt -= running.request.prompt
                yield sequence.first_token_at + back, False, running
            if sequence.state == FINISHED:
                del self.open[running]
                yield sequence.finished_at + back, True, running


def _model(speed: float) -> StepModel:
    return replace(
        BASE,
        weights_seconds=BASE.weights_seconds / speed,
        token_seconds=BASE.token_seconds / speed,
        context_seconds=BASE.context_seconds / speed,
    )
