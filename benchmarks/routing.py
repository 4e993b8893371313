"""Which engine gets the next request: prediction against simpler rules, in a seeded simulation of events.

    python benchmarks/routing.py [--requests N] [--seeds 1,2,3] [--load 0.85] [--case NAME] [--json FILE] [--regions]

Engines are the simulator's scheduler, driven by simulated time: the same steps, slots, chunked prefill and KV cache as
the server's, with a prefix cache beside it (the prompts last sent, least recently used first; a cached prefix is not
computed). All rules see the same: their own requests at once, KV use and waiting requests of each engine once a second.
`tuned` is a weighted score of our requests, waiting requests, KV use and prefix match, as gateways have it, its weights
chosen per case by a seeded search on another seed: what an operator could reach by hand. `tuned, tokens` has the prompt
tokens that wait on each engine as well, which no gateway counts; it is not among "the best of the others". The router's
own constants were chosen on seeds 1, 2 and 3: judge it by others. It is told how many requests an engine runs at once.
Load: tokens to compute a second, of prompts after the prefix cache and of answers, as a share of what the engines
compute at most.

`--regions`: two engines where the router is and two 100 ms away, at several loads. `least requests` is blind to the
way, `local only` is the router without the other region.

benchmarks/routing_live.py compares the rules of the service through the service, in real time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.routing_rules import (
    LeastKv,
    LeastRequests,
    LocalOnly,
    Predicted,
    PrefixAffinity,
    Random,
    RoundRobin,
    Rule,
    Weighted,
)
from benchmarks.routing_world import CASES, REGIONS, Case, Engine, Running, workload

REPORT_SECONDS = 1.0
TUNE_TRIALS = 24
REGION_LOADS = (0.2, 0.35, 0.45, 0.6, 0.85)


def run(case: Case, rule: Rule, load: float, requests: int, seed: int) -> list[float]:
    """Seconds to the first token of each request, without the first tenth."""
    asked = workload(case, requests, load, seed)
    ways = case.ways or (0.0,) * len(case.speeds)
    engines = [
        Engine(str(number), speed, way) for number, (speed, way) in enumerate(zip(case.speeds, ways, strict=True))
    ]
    every: list[Running] = []
    next_report, middle = 0.0, asked[len(asked) // 2].at
    slowed = False
    for request in asked:
        now = request.at
        if case.degrades > 1 and now >= middle and not slowed:
            engines[0].slower(case.degrades)
            slowed = True
        found = [(at, ended, running) for engine in engines for at, ended, running in engine.news(now)]
        for at, ended, running in sorted(found, key=lambda one: one[:2]):
            rule.news(at, ended, running)
        if now >= next_report:
            next_report = now + REPORT_SECONDS
            for engine in engines:
                engine.kv = engine.scheduler.kv_used / engine.scheduler.model.kv_tokens
                engine.waiting = engine.scheduler.waiting_count
            rule.reported(engines, now)
        place = rule.choose(engines, request)
        every.append(engines[place].submit(request))
        rule.sent(every[-1], engines[place])
    for engine in engines:
        engine.scheduler.advance(asked[-1].at + 10_000)
    measured = every[len(every) // 10 :]
    rule.away = sum(one.way > 0 for one in measured) / len(measured)
    return [one.sequence.first_token_at + one.way / 2 - one.request.at for one in measured]


def p99(seconds: list[float]) -> float:
    """The 99th percentile."""
    return sorted(seconds)[int(0.99 * len(seconds))]


def tuned(case: Case, load: float, requests: int, seed: int, *, tokens: bool) -> Weighted:
    """The best of some weights on a seed that is not measured. `tokens`: prompt tokens are one of the weights."""
    rng = random.Random(seed)
    tries = [(1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, 1.0, 0.5)]
    while len(tries) < TUNE_TRIALS:
        drawn = [rng.choice((0.0, 0.1, 0.3, 1.0, 3.0)) for _ in range(5)]
        tries.append((drawn[0], drawn[1], drawn[2], drawn[3], drawn[4]))
    if not tokens:
        tries = [(*weights[:3], 0.0, weights[4]) for weights in tries if any((*weights[:3], weights[4]))]
    best = min(tries, key=lambda weights: p99(run(case, Weighted(weights), load, requests // 2, 1000 + seed)))
    return Weighted(best)


def regions(requests: int, seeds: list[int]) -> dict[str, dict[str, list[float]]]:
    """Of two regions, by load: for each rule p50 and p99 in seconds, and the share of requests that went away."""
    rules: dict[str, Callable[[], Rule]] = {
        "local only": lambda: LocalOnly(Predicted()),
        "least requests": LeastRequests,
        "predicted": Predicted,
    }
    found: dict[str, dict[str, list[float]]] = {}
    for load in REGION_LOADS:
        for name, make in rules.items():
            seconds, away = [], []
            for seed in seeds:
                rule = make()
                seconds += run(REGIONS, rule, load, requests, seed)
                away.append(rule.away)
            middle = sorted(seconds)[len(seconds) // 2]
            found.setdefault(f"{load:.2f}", {})[name] = [middle, p99(seconds), sum(away) / len(away)]
    return found


RULES: dict[str, Callable[[], Rule]] = {
    "random": Random,
    "round robin": RoundRobin,
    "least requests": LeastRequests,
    "least KV": LeastKv,
    "prefix affinity": PrefixAffinity,
}


def measure(case: Case, load: float, requests: int, seeds: list[int]) -> dict[str, float]:
    """p99 of each rule over all seeds together, in seconds; and `decision`: p99 of the router's own time."""
    found: dict[str, list[float]] = {}
    decisions: list[float] = []
    scores = {
        "tuned": tuned(case, load, requests, seeds[0], tokens=False),
        "tuned, tokens": tuned(case, load, requests, seeds[0], tokens=True),
    }
    for seed in seeds:
        for name, make in RULES.items():
            found.setdefault(name, []).extend(run(case, make(), load, requests, seed))
        for name, score in scores.items():
            found.setdefault(name, []).extend(run(case, score, load, requests, seed))
        rule = Predicted()
        found.setdefault("predicted", []).extend(run(case, rule, load, requests, seed))
        decisions += rule.decisions
    return {name: p99(seconds) for name, seconds in found.items()} | {"decision": p99(decisions)}


def show_regions(requests: int, seeds: list[int]) -> None:
    """Print the table of two regions."""
    print("two engines here, two 100 ms away; load is a share of all four. p50, p99 in ms, share that went away")
    for load, found in regions(requests, seeds).items():
        cells = [
            f"{name}: {1e3 * middle:6.0f} {1e3 * high:7.0f} {away:4.0%}" for name, (middle, high, away) in found.items()
        ]
        print(f"{load:>5}  " + "    ".join(cells), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    parser.add_argument("--regions", action="store_true", help="two regions only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.regions:
        show_regions(options.requests, [int(seed) for seed in options.seeds.split(",")])
        return
    names = [*RULES, "tuned", "tuned, tokens", "predicted"]
    print(f"p99 of the time to the first token, ms, at {options.load:.0%} load")
    print(f"{'case':24}" + "".join(f"{name:>16}" for name in names) + "   to the best   to least requests   decision")
    figures = {}
    for case in CASES:
        if options.case not in (None, case.name):
            continue
        found = measure(case, options.load, options.requests, [int(seed) for seed in options.seeds.split(",")])
        figures[case.name] = found
        others = min(found[name] for name in names[:-2])
        print(
            f"{case.name:24}"
            + "".join(f"{1e3 * found[name]:16.0f}" for name in names)
            + f"{found['predicted'] / others - 1:+13.0%}{found['predicted'] / found['least requests'] - 1:+19.0%}"
            + f"{1e6 * found['decision']:8.0f} us",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
