"""What a first fleet costs on average before anybody knows the speeds: a two-stage stochastic program. Pure.

A first fleet is ordered on beliefs. Once it has worked, its speeds and the amount of work are known, and the rest is
planned anew. So its expected cost is the mean over drawn speeds of what it costs until then and what the plan for the
rest costs, given what was learned (sample average approximation; Birge and Louveaux, Introduction to Stochastic
Programming, 2011, ch. 9). All fleets are tried on the same draws, so that their differences are not noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gpu_runner.beliefs import CARD, COMMON, KNOWN, Belief, Machine, sharpen
from gpu_runner.offers import HOUR
from gpu_runner.pilots import Pace, machine
from gpu_runner.plan_search import ENDLESS, Desk
from gpu_runner.plans import Held, Option, Target, Work

DRAWS = 16
SETTLED = 0.02  # relative standard deviation of the work once some of it was done
QUANTA = 128  # of the plan for the rest

Fleet = Sequence[tuple[Option, int]]


@dataclass(frozen=True, slots=True)
class Draw:
    """One way the world may be: true ÷ believed speed of each machine, and true ÷ believed amount of work."""

    speeds: Mapping[Machine, float]
    work: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect of a first fleet: mean US dollars for all the work, and the share of draws that are late."""

    usd: float
    late: float


@dataclass(frozen=True)
class Rehearsal:
    """The state of things before anything is rented. `ramp`: as in `make_plan`; so is `caution`, of the plan for the
    rest."""

    work: Work
    options: tuple[Option, ...]
    held: tuple[Held, ...]
    target: Target
    ramp: float
    caution: float
    pace: Pace

    @cached_property
    def _beliefs(self) -> dict[Machine, Belief]:
        """Relative to what is believed: providers may have clocks of their own."""
        known = (*self.options, *(one.option for one in self.held))
        return {machine(one): Belief(1.0, one.spread) for one in known}

    @cached_property
    def _draws(self) -> list[Draw]:
        """The same for the same question: half of the draws are the mirror image of the other half."""
        cards = sorted({(one.gpu, one.memory_gib) for one in self._beliefs})
        half = np.random.default_rng(0).standard_normal((DRAWS // 2, 2 + len(cards) + len(self._beliefs)))
        return [self._draw(list(row), cards) for row in (*half, *-half)]

    def _draw(self, row: list[float], cards: list[tuple[str, float]]) -> Draw:
        speeds = {}
        for place, (one, belief) in enumerate(sorted(self._beliefs.items())):
            own = row[2 + len(cards) + place]
            if belief.spread > KNOWN:
                card = row[2 + cards.index((one.gpu, one.memory_gib))]
                own = COMMON**0.5 * row[1] + CARD**0.5 * card + (1 - COMMON - CARD) ** 0.5 * own
            speeds[one] = math.exp(belief.spread * own)
        return Draw(speeds, math.exp(self.work.spread * row[0]))

    def outlook(self, kept: Sequence[Held], new: Fleet) -> Outlook:
        """The mean over all draws when these go on and those are ordered now."""
        found = [self._play(kept, new, number) for number in range(DRAWS)]
        return Outlook(sum(usd for usd, _ in found) / len(found), sum(late for _, late in found) / len(found))

    def _play(self, kept: Sequence[Held], new: Fleet, number: int) -> tuple[float, bool]:
        """US dollars, and whether it is late, when the speeds are these."""
        draw = self._draws[number]
        deadline = ENDLESS if self.target.deadline is None else self.target.deadline
        tokens = self.work.tokens * draw.work
        fleet = [(one.option, one.ready_in) for one in kept]
        fleet += [(one, one.boot_seconds) for one, count in new for _ in range(count)]
        until = max((wait for _, wait in fleet), default=0.0) + self.pace.measuring + self.pace.tick / 2
        rate = sum(one.usd_per_hour for one, _ in fleet) / HOUR
        speeds = [one.tokens_per_second * draw.speeds[machine(one)] for one, _ in fleet]
        done = sum(speed * (until - wait) for speed, (_, wait) in zip(speeds, fleet, strict=True))
        if done >= tokens:
            until -= (done - tokens) / sum(speeds)
            return rate * until, until > deadline
        spent = rate * until
        beliefs = self._learned(number, frozenset(machine(one) for one, _ in fleet))
        used = {one.name: count for one, count in new}
        options = [_sharper(one, beliefs, used.get(one.name, 0)) for one in self.options]
        held = [Held(str(i), _sharper(one, beliefs, 0)) for i, (one, _) in enumerate(fleet)]
        work = replace(self.work, tokens=tokens - done, spread=SETTLED)
        desk = Desk(work, options, held, self.target, self.ramp, self.caution)
        found = desk.at(deadline - until, QUANTA)
        late = found is None or (self.target.budget_usd is not None and spent + found.usd > self.target.budget_usd)
        if found is None and (found := desk.earliest()) is None:
            return spent, True
        ended = sum(one.option.usd_per_hour for one in held if one.instance not in found.keep) / HOUR
        return spent + found.usd + ended * self.pace.tick, late

    def _learned(self, number: int, seen: frozenset[Machine]) -> Mapping[Machine, Belief]:
        """What is believed in this draw once these machines have worked."""
        if (number, seen) not in self._cache:
            speeds = self._draws[number].speeds
            self._cache[number, seen] = sharpen(self._beliefs, {one: speeds[one] for one in seen})
        return self._cache[number, seen]

    @cached_property
    def _cache(self) -> dict[tuple[int, frozenset[Machine]], Mapping[Machine, Belief]]:
        return {}


def _sharper(option: Option, beliefs: Mapping[Machine, Belief], used: int) -> Option:
    belief = beliefs[machine(option)]
    speed = option.tokens_per_second * belief.tokens_per_second
    capacity = None if option.capacity is None else max(0, option.capacity - used)
    return replace(option, tokens_per_second=speed, spread=belief.spread, capacity=capacity)
