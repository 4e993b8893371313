"""What a plan is made of: offers, held instances, work, the wish, and the ways to do it. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runner.beliefs import Machine
from gpu_runner.offers import HOUR, Objective


@dataclass(frozen=True, slots=True)
class Option:
    """An offer as the planner sees it.

    `usd_per_hour`, `tokens_per_second`: of one instance, the speed as expected. `boot_seconds`: from the order to the
    first answer. `capacity`: further instances to be had now, None if unknown. `interruptions_per_hour`: of each
    instance, spot only. `spread`: relative standard deviation of the speed.
    """

    name: str
    usd_per_hour: float
    tokens_per_second: float
    boot_seconds: float
    capacity: int | None = None
    spot: bool = False
    interruptions_per_hour: float = 0.0
    spread: float = 0.0
    machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """An instance that works or boots for the dataset now; `ready_in` seconds."""

    instance: str
    option: Option
    ready_in: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is left. `tokens` of `total_tokens`; `started_ago` seconds; `units`: batches left, more instances than that
    have nothing to do; `spread`: relative standard deviation of `tokens`."""

    tokens: float
    total_tokens: float
    started_ago: float
    units: int
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted. `deadline`: seconds from now, may be negative. `budget_usd`: US dollars from now on."""

    deadline: float | None = None
    budget_usd: float | None = None
    max_instances: int = 20
    objective: Objective = "cheapest"


@dataclass(frozen=True, slots=True)
class Interval:
    """The median and what is not passed in 95 of 100 cases."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do the work: held instances and new ones, the finish in seconds from now, US dollars from now on."""

    fleet: tuple[tuple[Option, int], ...]
    finish: Interval
    usd: Interval

    @property
    def instances(self) -> int:
        """How many in all."""
        return sum(number for _, number in self.fleet)


@dataclass(frozen=True, slots=True)
class Plan:
    """`chosen`: None when no offer can do it or the budget allows nothing. `keep`: the held instances in it.

    `feasible`: P95 of the finish within the deadline, and the expected cost within the budget. `met`: the same at the
    caution that was asked for. `earliest`: the earliest possible finish whatever it costs. `next_best`: up to 3 others.
    `curve`: cost against finish time, fastest first.
    """

    chosen: Candidate | None
    instances: int
    feasible: bool
    earliest: Candidate | None
    next_best: tuple[Candidate, ...]
    curve: tuple[Candidate, ...]
    reason: str
    keep: tuple[str, ...] = ()
    met: bool = False


def say_fleet(candidate: Candidate) -> str:
    """`3 × aws/p4d spot + 1 × lambda/a10`."""
    return " + ".join(f"{number} × {option.name}" for option, number in candidate.fleet) or "nothing"


def say_time(seconds: float) -> str:
    """Hours, or minutes when there are few."""
    return f"{seconds / HOUR:.1f} h" if abs(seconds) >= 2 * HOUR else f"{seconds / 60:.0f} min"
