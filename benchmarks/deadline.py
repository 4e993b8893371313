"""Deadlines and dollars: the platform's controller against other policies, over recorded prices and drawn misfortune.

    python benchmarks/deadline.py [--scenarios 500] [--seed 1] [--prices FILE] [--shortest HOURS] [--knowing] [--json F]

Each world is drawn from the seed and its number (benchmarks/deadline_world.py), and each policy is replayed in each
world (benchmarks/deadline_replay.py). "ours" is gpu_runner.planner.controller.decide, the code that the sensor calls.

What is drawn (log-uniform where not said otherwise):
- prices: on-demand and spot as recorded at a random moment and as they changed afterwards; 3 to 10 instance types of
  that day that can serve an 8B or a 32B model; in 15 % of the worlds no spot. On spot price spikes of × 1.3 to 3 (at
  most the price on demand), one per 60 h, for 1 to 4 h.
- work: 50,000 to 20 million rows, 150 to 800 prompt tokens, 80 to 500 completion tokens; its amount is believed with
  an error of 15 % until the first instance has worked.
- speeds: true = roofline estimate × lognormal error. Half of the machine types are known by an estimate (σ 0.5), a
  quarter by other lengths (0.2), a quarter by measurement (0.05). Of an estimate's variance 30 % is common to all and
  50 % to a card. What has worked 120 s is measured, with an error of 2 %.
- boots: 240, 480 or 900 s by provider as believed; true × lognormal (σ 0.25) of each offer.
- capacity: half of the offers have as many as are allowed (8, 20 or 50 instances), the others 2, 4, 8 or 16.
- spot is taken: per instance and hour 0.05 (AWS, Azure), 0.08 (GCP), 0.12 (Jarvislabs) as believed, true × lognormal
  (σ 0.7). Nothing new is to be had for 1 to 4 h once per 200 h (spot, and all that run there are taken) or 300 h (on
  demand) and offer. What is taken loses 20 s of work; what is ended is paid for 30 s more.
- deadline: 1.1 to 10 times the earliest finish that is possible with all knowledge, and at least an hour, because boots
  take 4 to 15 minutes (`--shortest 0` leaves the hour away). In half of the worlds a budget: 1.25 to 4 times what the
  oracle pays. The oracle makes each deadline and each budget; both are described in benchmarks/deadline_oracle.py.

A miss is a world whose work is not done at the deadline: late, or out of money. "On demand" is our own controller that
sees no spot offers, which is the strongest baseline of that kind; it is also given in the plain way: the cheapest
token, as many as needed with a quarter in reserve. $ ratios compare what was spent, missed or not. `--knowing` tells
the policies all speeds and the amount of work: what is lost even then is lost to boots, interruptions and prices.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.deadline_oracle import bound_usd, earliest, oracle_usd
from benchmarks.deadline_policies import POLICIES
from benchmarks.deadline_replay import Outcome, Replay
from benchmarks.deadline_world import Scenario, draw
from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.speed_model import SpeedEstimate

SHORTEST = HOUR
TOLD = 0.02  # relative standard deviation of a speed that was told
SAME = 1.001  # ratio up to which two costs count as equal
HERE = Path(__file__).resolve().parent
RECORDED = HERE.parent.parent / "shared" / "data" / "prices" / "history.csv"
INVENTED = HERE.parent / "tests" / "fixtures" / "prices" / "invented.csv"
SLACKS = ((1.0, 1.3), (1.3, 2.0), (2.0, 4.0), (4.0, 1e9))


@dataclass(frozen=True, slots=True)
class Result:
    """One world: what the oracle pays, what nobody goes below, and what each policy did."""

    number: int
    slack: float
    spot: bool
    most: int
    rows: int
    deadline: float
    budget: float | None
    oracle_usd: float
    bound_usd: float
    outcomes: dict[str, Outcome]

    def missed(self, policy: str) -> bool:
        return self.outcomes[policy].finish > self.deadline

    def broke(self, policy: str) -> bool:
        """Missed because the money was gone: nearly all spent, or never done."""
        outcome = self.outcomes[policy]
        spent = self.budget is not None and (outcome.usd > 0.95 * self.budget or outcome.finish == float("inf"))
        return self.missed(policy) and spent

    def over(self, policy: str) -> bool:
        return self.budget is not None and self.outcomes[policy].usd > self.budget

    def ratio(self, policy: str) -> float:
        return self.outcomes[policy].usd / self.oracle_usd

    def dearer(self, policy: str, other: str) -> bool:
        """Whether it cost more than another policy that made it."""
        return not self.missed(other) and self.outcomes[policy].usd > SAME * self.outcomes[other].usd


def prepare(path: Path, seed: int, number: int, shortest: float = SHORTEST) -> tuple[Scenario, float]:
    """A world with its deadline and budget, and the oracle's cost."""
    scenario = draw(path, seed, number)
    first = earliest(scenario)
    scenario.deadline = max(shortest, scenario.slack * first)
    scenario.slack = scenario.deadline / first
    usd = oracle_usd(scenario)
    if usd is None:
        raise RuntimeError(f"world {number}: the oracle finds no schedule")
    if scenario.budget_factor is not None:
        scenario.budget = scenario.budget_factor * usd
    return scenario, usd


def play(
    path: Path, seed: int, number: int, shortest: float, policies: tuple[str, ...], knowing: bool = False
) -> Result:
    """All policies in one world. `knowing`: speeds and the amount of work are told beforehand."""
    scenario, usd = prepare(path, seed, number, shortest)
    if knowing:
        scenario.tokens_believed = scenario.tokens
        for truth in scenario.offers:
            truth.believed = SpeedEstimate(truth.speed, TOLD)
    return Result(
        number=number,
        slack=scenario.slack,
        spot=any(truth.spot for truth in scenario.offers),
        most=scenario.most,
        rows=scenario.rows,
        deadline=scenario.deadline,
        budget=scenario.budget,
        oracle_usd=usd,
        bound_usd=bound_usd(scenario),
        outcomes={name: Replay(scenario, POLICIES[name]()).run() for name in policies},
    )


def table(results: Sequence[Result], policies: Sequence[str]) -> str:
    """The figures of all policies, and those of ours by slack and by length."""
    head = (
        f"{'policy':18s} {'late':>5s} {'broke':>5s} {'$/oracle':>9s} {'P95':>6s} {'$/bound':>8s} {'all $':>6s} "
        f"{'> on demand':>11s} {'over':>5s} {'moves':>6s} {'launches':>8s}"
    )
    lines = [head, *(_line(name, results, name) for name in policies)]
    if "ours" in policies:
        lines += ["", "ours, by deadline ÷ earliest possible finish"]
        lines += [
            _line(f"{low:g} to {high:g}" if high < 1e9 else f"over {low:g}", some, "ours")
            for low, high in SLACKS
            if (some := [one for one in results if low <= one.slack < high])
        ]
        kinds: list[tuple[str, Callable[[Result], bool]]] = [
            ("with spot", lambda one: one.spot),
            ("without spot", lambda one: not one.spot),
            ("up to 2 h", lambda one: one.deadline <= 2 * HOUR),
            ("2 h to 12 h", lambda one: 2 * HOUR < one.deadline <= 12 * HOUR),
            ("over 12 h", lambda one: one.deadline > 12 * HOUR),
        ]
        lines += ["ours, by kind of world"]
        lines += [_line(name, some, "ours") for name, wanted in kinds if (some := list(filter(wanted, results)))]
    return "\n".join(lines)


def _line(label: str, results: Sequence[Result], policy: str) -> str:
    ratios = [one.ratio(policy) for one in results]
    bounds = [one.outcomes[policy].usd / one.bound_usd for one in results]
    late = sum(one.missed(policy) and not one.broke(policy) for one in results)
    total = sum(one.outcomes[policy].usd for one in results) / sum(one.oracle_usd for one in results)
    compared = [one for one in results if "on demand" in one.outcomes and not one.missed("on demand")]
    above = sum(one.dearer(policy, "on demand") for one in compared) / max(1, len(compared))
    return (
        f"{label:18s} {late:5d} {sum(one.broke(policy) for one in results):5d} {statistics.mean(ratios):9.3f} "
        f"{sorted(ratios)[int(0.95 * len(ratios))]:6.2f} {statistics.mean(bounds):8.3f} {total:6.3f} {above:11.1%} "
        f"{sum(one.over(policy) for one in results):5d} "
        f"{statistics.mean(one.outcomes[policy].changes for one in results):6.1f} "
        f"{statistics.mean(one.outcomes[policy].launches for one in results):8.1f}   of {len(results)} worlds"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prices", type=Path, default=RECORDED, help="recorded prices; else invented ones")
    parser.add_argument("--shortest", type=float, default=SHORTEST / HOUR, help="hours that a deadline has at least")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--knowing", action="store_true", help="tell the policies all speeds and the amount of work")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every world's figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prices = options.prices
    if not prices.exists():
        print(f"{prices}: no recorded prices, the invented ones of the tests instead")
        prices = INVENTED
    began = time.monotonic()
    jobs = [
        (prices, options.seed, number, options.shortest * HOUR, tuple(options.policies), options.knowing)
        for number in range(options.scenarios)
    ]
    with multiprocessing.Pool(options.processes) as pool:
        results = pool.starmap(play, jobs, chunksize=2)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results]))
    print(table(results, options.policies))
    print(f"{options.scenarios} worlds of seed {options.seed} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
