"""The rules that benchmarks/routing.py compares: which engine gets the next request."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field

from benchmarks.routing_world import BASE, Engine, Request, Running
from gpu_runner.routing.engine_view import EngineReport
from gpu_runner.routing.router import Choice, RoutedRequest, Router


class Rule:
    """Chooses by what can be known of engines. `away`: share of the requests that went to another region."""

    away = 0.0

    def choose(self, engines: list[Engine], request: Request) -> int:
        """The place of the engine."""
        raise NotImplementedError

    def sent(self, running: Running, engine: Engine) -> None:
        """It went there."""

    def news(self, at: float, ended: bool, running: Running) -> None:
        """Its first token came, or it ended."""

    def reported(self, engines: list[Engine], now: float) -> None:
        """The engines' pages were read."""


@dataclass
class Random(Rule):
    """Any."""

    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def choose(self, engines: list[Engine], request: Request) -> int:
        return self.rng.randrange(len(engines))


@dataclass
class RoundRobin(Rule):
    """One after the other."""

    last: int = -1

    def choose(self, engines: list[Engine], request: Request) -> int:
        self.last = (self.last + 1) % len(engines)
        return self.last


class LeastRequests(Rule):
    """The fewest of ours."""

    def choose(self, engines: list[Engine], request: Request) -> int:
        return min(range(len(engines)), key=lambda i: len(engines[i].open))


class LeastKv(Rule):
    """The least KV use, as reported; among equals the fewest requests."""

    def choose(self, engines: list[Engine], request: Request) -> int:
        return min(range(len(engines)), key=lambda i: (round(engines[i].kv, 3), len(engines[i].open)))


class PrefixAffinity(Rule):
    """The longest cached prefix, unless that engine has a quarter more requests than the mean; else the fewest."""

    def choose(self, engines: list[Engine], request: Request) -> int:
        mean = statistics.fmean([len(engine.open) for engine in engines])
        free = [i for i in range(len(engines)) if len(engines[i].open) <= 1.25 * mean + 2]
        return max(free, key=lambda i: (engines[i].match(request.blocks), -len(engines[i].open)))


@dataclass
class Weighted(Rule):
    """A weighted score of all that can be known, the same for all engines."""

    weights: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    def choose(self, engines: list[Engine], request: Request) -> int:
        open_, waiting, kv, prompt, prefix = self.weights
        return min(
            range(len(engines)),
            key=lambda i: (
                open_ * len(engines[i].open) / 50
                + waiting * engines[i].waiting / 10
                + kv * engines[i].kv
                + prompt * engines[i].sent_prompt / 4000
                - prefix * engines[i].match(request.blocks) / 8
            ),
        )


class Predicted(Rule):
    """The router of this project."""

    def __init__(self) -> None:
        self.router = Router()
        self.decisions: list[float] = []
        self._asked: RoutedRequest | None = None

    def choose(self, engines: list[Engine], request: Request) -> int:
        began = time.thread_time()
        self._asked = RoutedRequest(request.prompt, 120.0, request.blocks)
        choice = self.router.choose([engine.name for engine in engines], self._asked, request.at)
        assert isinstance(choice, Choice)
        self.decisions.append(time.thread_time() - began)
        return int(choice.engine)

    def sent(self, running: Running, engine: Engine) -> None:
        assert self._asked is not None
        running.routed = self.router.send(engine.name, self._asked, running.request.at)

    def news(self, at: float, ended: bool, running: Running) -> None:
        assert running.routed is not None
        if ended:
            self.router.end(running.routed, at, running.request.output)
        else:
            self.router.first_token(running.routed, at)

    def reported(self, engines: list[Engine], now: float) -> None:
        for engine in engines:
            self.router.round_trips.measured(engine.name, engine.way + 0.001)
            running = engine.scheduler.running_count
            self.router.report(engine.name, EngineReport(running, engine.waiting, engine.kv, now, BASE.max_num_seqs))


class LocalOnly(Rule):
    """Another rule, among the engines without a way to them."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def choose(self, engines: list[Engine], request: Request) -> int:
        local = [engine for engine in engines if not engine.way]
        return engines.index(local[self._rule.choose(local, request)])

    def sent(self, running: Running, engine: Engine) -> None:
        self._rule.sent(running, engine)

    def news(self, at: float, ended: bool, running: Running) -> None:
        self._rule.news(at, ended, running)

    def reported(self, engines: list[Engine], now: float) -> None:
        self._rule.reported([engine for engine in engines if not engine.way], now)
