"""Learning by doing: which fleet may start before speeds are known, and which unknown offer is worth a try. Pure.

A speed that is only estimated costs money: too many instances, or the wrong ones. Measuring takes one boot and two
minutes. So a fleet that is right if the estimates are right may start, as long as the deadline can still be met when
its speed turns out to be slow (`recoverable`). And beside a fleet whose speed is known one instance of another offer
is worth its boot when what it may save, weighed with its odds, is more than that (`best_try`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_runner.beliefs import KNOWN, Machine
from gpu_runner.offers import HOUR
from gpu_runner.planner import Held, Option, Target, Work, possible

BOOTS = 1.25  # a boot may take this much longer than expected
MEASURING = 120.0  # seconds of work after which a speed is known


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the world around the controller is, in real seconds. The default: a sensor that looks every 30 s.

    `tick`: that may pass until the next decision counts. `measuring`: of work, after which a speed is known. `reserve`:
    that instances may cost on after the decision to end them.
    """

    tick: float = 60.0
    measuring: float = MEASURING
    reserve: float = 150.0

    @classmethod
    def of_sensor(cls, seconds: float) -> Pace:
        """For a sensor that looks so often. Leases that nobody renews and the sweep after them take their time."""
        return cls(2 * seconds, 4 * seconds, max(40.0, 5 * seconds))


PACE = Pace()


def unsure(option: Option) -> bool:
    """Whether its speed is an estimate."""
    return option.spread > KNOWN


def machine(option: Option) -> Machine:
    """What has one speed. Spot or not, it is as fast."""
    return option.machine or Machine(option.name.removesuffix(" spot"), 0.0, 0)


def recoverable(
    work: Work,
    options: Sequence[Option],
    fleet: Sequence[Held],
    target: Target,
    caution: float = 1.0,
    pace: Pace = PACE,
) -> bool:
    """Whether the deadline can be met even if this fleet turns out to be slow, which is known once it has worked.

    What could then be added are offers that are not spot. `caution`: 1 means slow at P95.
    """
    waits = [BOOTS * one.ready_in + pace.measuring for one in fleet if unsure(one.option)]
    if target.deadline is None or not waits:
        return target.deadline is None
    wait = max(waits)
    later = [replace(one, ready_in=max(0.0, one.ready_in - wait)) for one in fleet]
    sure = [one for one in options if not one.spot]
    return possible(work, sure, later, replace(target, deadline=target.deadline - wait), caution=caution)


def booted(fleet: Sequence[tuple[Option, int]], held: Sequence[Held]) -> list[Held]:
    """A fleet as if it were all ordered now: what is held, and the rest booting."""
    found = list(held)
    for option, number in fleet:
        there = sum(one.option.name == option.name for one in held)
        found += [Held(f"new {option.name} {i}", option, option.boot_seconds) for i in range(number - there)]
    return found


@dataclass(frozen=True, slots=True)
class Try:
    """An offer worth an instance to learn its speed: what that may save, weighed with its odds, and its cost."""

    option: Option
    saves_usd: float
    costs_usd: float


def best_try(
    work: Work,
    options: Sequence[Option],
    base: Sequence[tuple[Option, int]],
    deadline: float | None,
    pace: Pace = PACE,
) -> Try | None:
    """The offer that is most worth a try beside a fleet, or None.

    Its price per token is lognormal around the belief. Changing over to it is an option in the financial sense, and
    worth E[max(0, K - X)] with X its price per token and K the fleet's, less the boots of the change (Black and
    Scholes, 1973; Margrabe, 1978, where the fleet's own speed is an estimate too), for all tokens that are left then.
    """
    speed = sum(option.tokens_per_second * number for option, number in base)
    if speed <= 0:
        return None
    usd_per_token = sum(_usd_per_token(o) * o.tokens_per_second * n for o, n in base) / speed
    own = max((option.spread for option, _ in base if unsure(option)), default=0.0)
    names = {machine(option) for option, _ in base}
    best: Try | None = None
    for one in options:
        if not unsure(one) or one.capacity == 0 or machine(one) in names:
            continue
        found = _worth(one, work, speed, usd_per_token, own, deadline, pace.measuring)
        if found is not None and (best is None or found.saves_usd - found.costs_usd > best.saves_usd - best.costs_usd):
            best = found
    return best


def _worth(
    one: Option,
    work: Work,
    speed: float,
    usd_per_token: float,
    own: float,
    deadline: float | None,
    measuring: float,
) -> Try | None:
    wait = one.boot_seconds + measuring
    seconds = work.tokens / speed if deadline is None else max(work.tokens / speed, deadline)
    left = work.tokens * max(0.0, 1 - wait / seconds)
    boot = one.usd_per_hour / HOUR * one.boot_seconds
    number = max(1.0, left / one.tokens_per_second / max(seconds - wait - one.boot_seconds, one.boot_seconds, 1.0))
    if one.capacity is not None and number > one.capacity:
        left, number = left * one.capacity / number, float(one.capacity)
    if left <= 0:
        return None
    spread = math.hypot(one.spread, own) * (math.sqrt(0.5) if own else 1.0)
    gain = _put(_usd_per_token(one), usd_per_token - (number - 1) * boot / left, spread) * left
    cost = boot + max(0.0, _usd_per_token(one) - usd_per_token) * one.tokens_per_second * measuring
    return Try(one, gain, cost) if gain > cost else None


def _put(mean: float, strike: float, spread: float) -> float:
    """E[max(0, strike - X)] of a lognormal X with this mean."""
    if strike <= 0:
        return 0.0
    high = (math.log(mean / strike) + spread**2 / 2) / spread
    return strike * _normal(spread - high) - mean * _normal(-high)


def _normal(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def _usd_per_token(option: Option) -> float:
    loss = option.interruptions_per_hour / HOUR * option.boot_seconds
    return option.usd_per_hour / HOUR * (1 + loss) / option.tokens_per_second
