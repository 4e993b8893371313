"""How soon gates pause a dataset whose rows turn bad, and whether they ever pause a good one.

    python benchmarks/gates.py [--worlds 480] [--rows 10000] [--in-flight 256] [--seed 1] [--json FILE]

Half of the worlds turn bad at row 500, by one of nine ways, in 75 to 100 % of the rows from then on (90 to 100 % where
they repeat an output, or one of ten nearly). The others are good: up to 40 % of their rows are bad by one way, or 50 in
a row are; or their answers are alike or short. Outcomes are given to the gates that a run has by default and to those
of near repetitions (not where answers share a template), of the language and of the schema, in the order in which rows
end: each is taken at random from those in flight. What is paid for a bad world are the rows until its gate trips and
those in flight then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from batch_assets.gates.quality_gates import QualityGates
from batch_assets.generation.op import bounds_of
from batch_assets.spec.gates import GatesSpec, LanguageSpec, NearRepeatedSpec
from gpu_runner.rows import Origin, Outcome

TURN = 500
ORIGIN = Origin("model", "engine", "provider", "instance", False, "run")
WORDS = "river stone lamp green quick market letter window paper cloud silver garden north bread".split()  # noqa: SIM905
GERMAN = "Fluss Stein Lampe grün schnell Markt Brief Fenster Papier Wolke Silber Garten Norden Brot".split()  # noqa: SIM905
LONG = "This sentence is the answer to every question, whatever it was, and it is long enough to be remembered as such."

Make = Callable[[int, random.Random], Outcome]


def outcome(number: int, output: str | None, finish_reason: str = "stop", error: str = "timeout") -> Outcome:
    dead = output is None
    return Outcome(
        f"row-{number}",
        "key",
        output,
        None if dead else finish_reason,
        60,
        40,
        1,
        error if dead else None,
        None,
        ORIGIN,
        0.0,
        0.5,
    )


def text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60)))


def german(rng: random.Random) -> str:
    return "Das ist die Antwort auf diese Frage, und sie handelt von " + " und ".join(rng.choices(GERMAN, k=12)) + "."


def nearly(rng: random.Random) -> str:
    one = random.Random(rng.randrange(10))
    return " ".join([*one.choices(WORDS, k=60), rng.choice(WORDS)])


BAD: dict[str, Make] = {
    "dead": lambda number, rng: outcome(number, None),
    "empty": lambda number, rng: outcome(number, " "),
    "cut": lambda number, rng: outcome(number, text(rng), "length"),
    "refused": lambda number, rng: outcome(number, "I'm sorry, but I can't help with that. " + text(rng)),
    "refused in German": lambda number, rng: outcome(number, "Es tut mir leid, ich kann dabei nicht helfen."),
    "invalid": lambda number, rng: outcome(number, None, error="schema_invalid"),
    "in German": lambda number, rng: outcome(number, german(rng)),
    "nearly repeated": lambda number, rng: outcome(number, nearly(rng)),
    "repeated": lambda number, rng: outcome(number, LONG),
}
GOOD: dict[str, Make] = {
    "texts": lambda number, rng: outcome(number, text(rng)),
    "labels": lambda number, rng: outcome(number, rng.choice(["yes", "no"])),
    "code": lambda number, rng: outcome(
        number, f"def {rng.choice(WORDS)}_{number}(a, b):\n    return [a, b, {number}]\n"
    ),
    "templates": lambda number, rng: outcome(number, f"{LONG} Number {number}: {rng.choice(WORDS)}."),
    "apologies in stories": lambda number, rng: outcome(number, f"“I'm sorry, but I can't help you,” said {text(rng)}"),
}


@dataclass(frozen=True, slots=True)
class World:
    """What became of one dataset. `paid`: rows until it was paused, with those in flight; None: it was not."""

    kind: str
    good: bool
    rate: float
    gate: str | None
    paid: int | None
    seconds: float


def in_order_of_ends(outcomes: list[Outcome], in_flight: int, rng: random.Random) -> Iterator[Outcome]:
    flying: list[Outcome] = []
    for one in outcomes:
        flying.append(one)
        if len(flying) == in_flight:
            yield flying.pop(rng.randrange(in_flight))
    rng.shuffle(flying)
    yield from flying


SPEC = GatesSpec(near_repeated=NearRepeatedSpec(), language=LanguageSpec(allowed=["en"]), max_invalid_rate=0.5)


def world(number: int, rows: int, in_flight: int, seed: int) -> World:
    rng = random.Random(f"{seed}/{number}")
    good, kind = number % 2 == 1, list(BAD)[number // 2 % len(BAD)]
    usual = GOOD[rng.choice(list(GOOD))] if "repeated" not in kind or not good else GOOD["texts"]
    burst = good and rng.random() < 0.5
    rate = rng.uniform(0, 0.4) if good else rng.uniform(0.9 if "repeated" in kind else 0.75, 1)
    turn = rng.randrange(rows - 50) if burst else 0 if good else TURN
    end = turn + 50 if burst else rows
    rate = 1.0 if burst else rate
    outcomes = [(BAD[kind] if turn <= row < end and rng.random() < rate else usual)(row, rng) for row in range(rows)]
    spec = SPEC if usual is not GOOD["templates"] else SPEC.model_copy(update={"near_repeated": None})
    gates = QualityGates(bounds_of(spec, rows, rows), max_tokens=400)
    began = time.process_time()
    for ended, one in enumerate(in_order_of_ends(outcomes, in_flight, rng), 1):
        if trips := gates.note(one):
            seconds = time.process_time() - began
            return World(kind, good, rate, trips[0].gate, min(rows, ended + in_flight), seconds)
    said = f"{kind}, {'50 in a row' if burst else 'now and then'}"
    return World(said, good, rate, None, None, time.process_time() - began)


def report(worlds: list[World], rows: int) -> str:
    good, bad = [one for one in worlds if one.good], [one for one in worlds if not one.good]
    head = "| what turns bad | worlds | paused | rows paid after the turn: median, most | of the budget |"
    lines = [head, "|---|---|---|---|---|"]
    for kind in BAD:
        own = [one for one in bad if one.kind == kind]
        late = sorted(one.paid - TURN for one in own if one.paid is not None)
        if late:
            middle = statistics.median(late)
            share = f"{100 * middle / rows:.1f} %, {100 * late[-1] / rows:.1f} %"
            lines.append(f"| {kind} | {len(own)} | {len(late)} | {middle:,.0f}, {late[-1]:,} | {share} |")
    paused = Counter(one.gate for one in good if one.paid is not None)
    cost = sum(one.seconds for one in good if one.paid is None) / (rows * sum(one.paid is None for one in good))
    lines += ["", f"{len(good)} good worlds: {sum(paused.values())} paused {dict(paused) or ''}"]
    lines += [f"{1e6 * cost:.1f} µs of CPU a row"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=480)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    worlds = [world(number, given.rows, given.in_flight, given.seed) for number in range(given.worlds)]
    print(report(worlds, given.rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in worlds]))


if __name__ == "__main__":
    main()
