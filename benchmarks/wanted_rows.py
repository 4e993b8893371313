"""Rows that are made until enough are accepted (`want`): 100 seeded worlds, by the product's own `next_round`.

Each world has a source with a share of accepted rows from 5 to 95 %, which is steady, rises, falls, goes up and down,
or jumps once by a fifth; in a third of the worlds in ten strata, each with a share of its own. A round takes the time
of its rows on the instances that the deadline asks for, by what is expected then, and a minute more. The other way
knows the rows from the beginning, and makes them in one round, for which a deadline leaves a quarter of an hour.

    python benchmarks/wanted_rows.py [--worlds 100] [--seed 1]
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batch_assets.capacity_planning.acceptance import Expected, Stratum, Stretch, Z, next_round, prior_of, rows_for
from batch_assets.orchestration.active_request import MOST_SPREAD

BATCH, INSTANCES, ROWS_PER_SECOND, ROUND_SECONDS = 250, 20, 10.0, 60.0
DRIFTS = ("steady", "rising", "falling", "waves", "jump")


@dataclass(frozen=True)
class World:
    """`accepts`: of each stratum, whether each of its rows would be accepted, in the order of the source."""

    drift: str
    wanted: int
    accepts: dict[str, Sequence[bool]]
    deadline: float
    budget_rows: float  # what the budget pays for, in rows

    @property
    def least(self) -> int:
        """Rows that hold as many accepted ones as are wanted."""
        return sum(_least(rows, self.wanted) for rows in self.accepts.values())


@dataclass(frozen=True)
class Run:
    """How a world ended."""

    reached: bool
    made: int
    rounds: int
    seconds: float


def _least(rows: Sequence[bool], wanted: int) -> int:
    for number, accepted in enumerate(itertools.accumulate(map(int, rows)), 1):
        if accepted == wanted:
            return number
    raise ValueError("the source has too few rows that are accepted")


def _share(draws: random.Random, drift: str, wanted: int) -> Callable[[int], float]:
    base = draws.uniform(0.05, 0.95)
    length = wanted / base  # rows that a steady share would need
    moves: dict[str, Callable[[float], float]] = {
        "steady": lambda at: base,
        "rising": lambda at: base * (1 + 0.5 * at),
        "falling": lambda at: base * (1 - 0.4 * min(1.0, at)),
        "waves": lambda at: base * (1 + 0.3 * math.sin(6 * at)),
        "jump": lambda at: base * (1.2 if at > 0.5 else 1.0),
    }
    return lambda row: min(0.97, max(0.02, moves[drift](row / length)))


def world(seed: int) -> World:
    """One world; the same for the same seed."""
    draws = random.Random(seed)
    drift = DRIFTS[seed % len(DRIFTS)]
    strata = [""] if seed % 3 else [f"topic {number}" for number in range(10)]
    wanted = draws.choice([2_000, 5_000, 10_000]) if len(strata) == 1 else draws.choice([300, 500])
    accepts: dict[str, Sequence[bool]] = {}
    for name in strata:
        share, rows, good = _share(draws, drift, wanted), list[bool](), 0
        while good < 2 * wanted:
            rows.append(draws.random() < share(len(rows)))
            good += rows[-1]
        accepts[name] = rows
    least = sum(_least(rows, wanted) for rows in accepts.values())
    seconds = least / ROWS_PER_SECOND
    deadline = seconds / draws.uniform(2.0, INSTANCES / 2) + 900
    budget = least * draws.choice([0.7, 1.1, 1.5, 3.0]) + BATCH * 2
    return World(drift, wanted, accepts, deadline, budget)


def _instances(rows: float, left: float) -> int:
    """Instances that do these rows in the time left, with a fifth of it in reserve."""
    needed = rows / ROWS_PER_SECOND / max(1.0, 0.8 * left)
    return max(1, min(INSTANCES, math.ceil(needed)))


def in_rounds(one: World) -> Run:
    """As the product does it."""
    limits = {name: -(-one.wanted // BATCH) * BATCH if len(one.accepts) == 1 else one.wanted for name in one.accepts}
    read = dict.fromkeys(limits, 0)
    expected = Expected(*(len(limits) * rows for rows in rows_for(one.wanted, prior_of(None))))
    clock, rounds = 0.0, 0
    while True:
        rounds += 1
        new = sum(min(limits[name], len(rows)) - read[name] for name, rows in one.accepts.items())
        if sum(read.values()) + new > one.budget_rows:
            return Run(False, int(one.budget_rows), rounds, clock)
        read = {name: min(limits[name], len(rows)) for name, rows in one.accepts.items()}
        planned = max(new, expected.middle) + Z * min(
            MOST_SPREAD * expected.middle, (expected.high - expected.low) / 2 / Z
        )
        instances = min(_instances(planned, one.deadline - clock), max(1, new // BATCH))
        clock += new / ROWS_PER_SECOND / instances + ROUND_SECONDS
        strata = {
            name: Stratum(limits[name], read[name], stretches(rows[: read[name]], len(limits)))
            for name, rows in one.accepts.items()
        }
        found = next_round(strata, one.wanted, each=1.0, batch=BATCH, prior=prior_of(None))
        if not found.limits:
            return Run(not found.missing, sum(read.values()), rounds, clock)
        limits, expected = {**limits, **found.limits}, found.expected


def at_once(one: World) -> Run:
    """By who knows how many rows it takes."""
    instances = _instances(one.least, one.deadline)
    return Run(one.least <= one.budget_rows, one.least, 1, one.least / ROWS_PER_SECOND / instances + ROUND_SECONDS)


def stretches(rows: Sequence[bool], strata: int) -> tuple[Stretch, ...]:
    """What the report of a filter tells of rows that were made."""
    most = max(4, 64 // strata)
    ends = [len(rows) * part // most for part in range(most + 1)]
    return tuple(Stretch(end - begin, sum(rows[begin:end])) for begin, end in itertools.pairwise(ends) if end > begin)


def main() -> None:
    """Print the figures."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--worlds", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=1)
    asked = arguments.parse_args()
    worlds = [world(asked.seed * 1000 + number) for number in range(asked.worlds)]
    runs = [(one, in_rounds(one), at_once(one)) for one in worlds]
    allowed = [run for run in runs if 1.03 * run[0].least + BATCH <= run[0].budget_rows]
    print(f"{len(allowed)} of {len(runs)} worlds have a budget that allows it")
    print(f"reached: {sum(run.reached for _, run, _ in allowed)}")
    kept = sum(run.made <= one.budget_rows for one, run, _ in runs)
    print(f"budget kept: {kept} of {len(runs)}")
    for drift in DRIFTS:
        few = [(one, run) for one, run, _ in allowed if one.drift == drift and run.reached]
        over = [max(0.0, run.made - BATCH - one.least) / one.least for one, run in few]
        many = sum(value > 0.03 for value in over)
        rounds = [run.rounds for _, run in few]
        print(
            f"{drift:8} {len(few):3} worlds: beyond one batch {statistics.median(over):.1%} (median), {max(over):.1%} "
            f"(most), above 3 % in {many}; rounds {statistics.median(rounds):g} (median), {max(rounds)} (most)"
        )
    in_time = sum(run.seconds <= one.deadline for one, run, _ in allowed)
    knowing = sum(run.seconds <= one.deadline for one, _, run in allowed)
    print(f"deadline met: {in_time} in rounds, {knowing} by who knows the rows")


if __name__ == "__main__":
    main()
