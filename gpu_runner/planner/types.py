"""What a plan is made of: offers, held instances, work, the wish, and the ways to do it. Plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpu_runner.offers.offer import HOUR, Objective
from gpu_runner.planner.speed_model import KNOWN_STD, HardwareType


@dataclass(frozen=True, slots=True)
class ControlTiming:
    """How fast the world around the controller is, in real seconds. The default: a sensor that looks every 30 s.

    `tick`: that may pass until the next decision counts. `measuring`: of work, after which a speed is known. `reserve`:
    that instances may cost on after the decision to end them.
    """

    tick: float = 60.0
    measuring: float = 120.0
    reserve: float = 150.0

    @classmethod
    def of_sensor(cls, seconds: float) -> ControlTiming:
        """For a sensor that looks so often. Leases that nobody renews and the sweep after them take their time."""
        return cls(2 * seconds, 4 * seconds, max(40.0, 5 * seconds))


TIMING = ControlTiming()


@dataclass(frozen=True, slots=True)
class PlannedOffer:
    """An offer as the planner sees it.

    `usd_per_hour`, `tokens_per_second`: of one instance, the speed as expected. `boot_seconds`: from the order to the
    first answer. `capacity`: further instances to be had now, None if unknown. `interruptions_per_hour`: of each
    instance, spot only. `spread`: relative standard deviation of the speed. `row_usd`: of an engine that is paid by the
    token, the most that one row may cost; `usd_per_hour` is then that of its tokens, and idle time costs nothing. None:
    time is paid.
    """

    name: str
    usd_per_hour: float
    tokens_per_second: float
    boot_seconds: float
    capacity: int | None = None
    spot: bool = False
    interruptions_per_hour: float = 0.0
    spread: float = 0.0
    hardware: HardwareType | None = None
    row_usd: float | None = None

    @property
    def held_usd_per_hour(self) -> float:
        """US dollars per hour while it is held, whether it works or not."""
        return self.usd_per_hour if self.row_usd is None else 0.0

    @property
    def is_unmeasured(self) -> bool:
        """Whether its speed is an estimate."""
        return self.spread > KNOWN_STD

    @property
    def hardware_type(self) -> HardwareType:
        """What has one speed. Spot or not, it is as fast."""
        return self.hardware or HardwareType(self.name.removesuffix(" spot"), 0.0, 0)

    @property
    def usd_per_token(self) -> float:
        """US dollars per token while it works."""
        return self.usd_per_hour / HOUR / max(self.tokens_per_second, 1e-9)


@dataclass(frozen=True, slots=True)
class HeldInstance:
    """An instance that works or boots for the dataset now; `ready_in` seconds.

    `replaces`: the instance on which the same run works until this one answers; "" when there is none.
    """

    instance: str
    option: PlannedOffer
    ready_in: float = 0.0
    replaces: str = ""


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
    """What is wanted. `deadline`: seconds from now, may be negative. `budget_usd`: US dollars from now on.

    `idle_seconds`: that an instance stands idle, and is paid, after its last row. `reserve_seconds`: that instances may
    cost on after the decision to end them; the budget has to hold this back. 0: whoever asks has done so already.
    """

    deadline: float | None = None
    budget_usd: float | None = None
    max_instances: int = 20
    objective: Objective = "cheapest"
    idle_seconds: float = 0.0
    reserve_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """The median and what is not passed in 95 of 100 cases."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do the work: held instances and new ones, the finish in seconds from now, US dollars from now on."""

    fleet: tuple[tuple[PlannedOffer, int], ...]
    finish: Interval
    usd: Interval

    @property
    def instances(self) -> int:
        """How many in all."""
        return sum(number for _, number in self.fleet)


@dataclass(frozen=True, slots=True)
class Plan:
    """`chosen`: None when no offer can do it or the budget allows nothing. `keep`: the held instances in it.

    `least_usd`: US dollars from now on with which it can be done, where the budget is not enough.
    `earliest`: the earliest possible finish whatever it costs. `feasible`: P95 of the finish within the deadline, and
    the expected cost within the budget. `met`: the same at the confidence asked for. `next_best`: up to 3 others.
    `curve`: cost against finish time, fastest first.
    """

    chosen: Candidate | None
    earliest: Candidate | None
    reason: str
    feasible: bool = False
    met: bool = False
    keep: tuple[str, ...] = ()
    next_best: tuple[Candidate, ...] = ()
    curve: tuple[Candidate, ...] = ()
    least_usd: float | None = None

    @property
    def fleet(self) -> tuple[tuple[PlannedOffer, int], ...]:
        """The chosen fleet, or nothing."""
        return self.chosen.fleet if self.chosen else ()

    @property
    def instances(self) -> int:
        """How many are chosen in all."""
        return self.chosen.instances if self.chosen else 0

    @property
    def has_spot(self) -> bool:
        """Whether any of what is chosen is spot."""
        return any(option.spot for option, _ in self.fleet)

    @property
    def usd(self) -> float:
        """Expected cost in US dollars, infinite without a chosen fleet."""
        return self.chosen.usd.p50 if self.chosen else math.inf


def say_fleet(candidate: Candidate) -> str:
    """`3 × aws/p4d spot + 1 × lambda/a10`."""
    return " + ".join(f"{number} × {option.name}" for option, number in candidate.fleet) or "nothing"


def say_time(seconds: float) -> str:
    """Hours, or minutes when there are few, or seconds: no time is said to be none."""
    if abs(seconds) >= 2 * HOUR:
        return f"{seconds / HOUR:.1f} h"
    return f"{seconds / 60:.0f} min" if abs(seconds) >= 120 else f"{seconds:.0f} s"
