"""Which fleet to try while speeds are only estimated: candidates, and what each is expected to cost. Pure.

Candidates come from plans on one axis of optimism (`plan_at`: by how many standard deviations unmeasured speeds are
better than estimated) and from single instances that are cheap to measure. One scorer, `FleetSimulation`, says what a
candidate costs on average and how often it is late. `choose_initial_fleet` takes the cheapest candidate that is hardly
ever late and leaves a fallback. `last_resort` is for work that nothing known can do: it follows the least optimistic
plan that can.

The scorer is a two-stage stochastic program. A fleet is ordered on estimates; once it has worked, its speeds and the
amount of work are known, and the rest is planned anew. The expected cost is the mean over drawn scenarios of what is
paid until then and what the plan for the rest costs (sample average approximation; Birge and Louveaux, Introduction to
Stochastic Programming, 2011, ch. 9). All candidates see the same scenarios, so that their differences are not noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np

from gpu_runner.money import format_usd
from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.feasibility import FeasibilityCheck
from gpu_runner.planner.planned_fleet import FleetCandidate
from gpu_runner.planner.search import ENDLESS, P95, PlanSearch
from gpu_runner.planner.speed_model import CARD, COMMON, KNOWN_STD, HardwareType, SpeedEstimate, condition_on
from gpu_runner.planner.types import HeldInstance, Plan, PlannedOffer

OPTIMISM_SIGMAS = (-P95, -1.2, -0.8, -0.4, 0.0, 0.8, P95)  # of the plans that are candidates for a first fleet
LAST_RESORT_SIGMAS = (0.0, 0.5, 1.0, 1.5)
FALLBACK_CONFIDENCE = 0.5  # at which the rest must still be possible, and is planned in the scenarios
SCENARIOS = 16
ONE_SCENARIO = 1.5 / SCENARIOS  # share by which one more scenario may be late
MAX_SHORT_OF_MONEY = 0.2  # above this share of scenarios there is no money for probes
PROBES = 5  # offers that are cheap to measure, at most
MAX_SPEED_GIVEN_UP = 0.2  # share of the fleet's speed that may make room for probes at the limit on instances
WORK_STD = 0.02  # relative standard deviation of the work once some of it was done
QUANTA = 128  # of the plan for the rest

Missing = Literal["time", "money", "perhaps money"]


# Candidates


def plan_at(check: FeasibilityCheck, sigmas: float, options: Sequence[PlannedOffer] | None = None) -> Plan:
    """The plan at this optimism, with nothing chosen where none is within deadline and budget.

    Above 0 unmeasured speeds are taken to be so many standard deviations better than estimated. Below, the deadline
    holds even if all speeds are so many worse.
    """

    def faster(option: PlannedOffer) -> PlannedOffer:
        if sigmas <= 0 or not option.is_unmeasured:
            return option
        return replace(option, tokens_per_second=option.tokens_per_second * math.exp(sigmas * option.spread))

    offers = [faster(one) for one in (check.options if options is None else options)]
    held = [replace(one, option=faster(one.option)) for one in check.held]
    return check.cheapest(offers, held, confidence=max(0.0, -sigmas / P95))


def _planned(check: FeasibilityCheck) -> Iterator[FleetCandidate]:
    """What the plan would be if speeds were this or that, with and without spot."""
    for sigmas in OPTIMISM_SIGMAS:
        for options in dict.fromkeys((check.options, check.on_demand)):
            plan = plan_at(check, sigmas, options)
            if plan.chosen is not None:
                yield check.fleet_of(plan)


def _cheap_to_measure(check: FeasibilityCheck) -> list[PlannedOffer]:
    """The offer that costs least to measure, of each hardware of unknown speed; the cheapest tokens first."""
    found: dict[HardwareType, PlannedOffer] = {}
    for one in sorted(check.options, key=lambda one: one.usd_per_hour * (one.boot_seconds + check.timing.measuring)):
        if one.is_unmeasured and one.capacity != 0:
            found.setdefault(one.hardware_type, one)
    return sorted(found.values(), key=lambda one: one.usd_per_token)[:PROBES]


# The scorer


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way the world may be: true ÷ estimated speed of each hardware, and true ÷ estimated amount of work."""

    speeds: Mapping[HardwareType, float]
    work: float


@dataclass(frozen=True, slots=True)
class ExpectedCost:
    """What a candidate costs: mean US dollars for all the work, and the share of scenarios that are late or out of
    money.
    """

    usd: float
    late: float


@dataclass(frozen=True)
class FleetSimulation:
    """Candidates in drawn scenarios, from the state of things in `check` on."""

    check: FeasibilityCheck

    def expected_cost(self, fleet: FleetCandidate) -> ExpectedCost:
        """The mean over all scenarios when this fleet is ordered now."""
        found = [self._play(fleet, scenario) for scenario in self._scenarios]
        return ExpectedCost(sum(usd for usd, _ in found) / len(found), sum(late for _, late in found) / len(found))

    @cached_property
    def _estimates(self) -> dict[HardwareType, SpeedEstimate]:
        """Relative to what is estimated: providers may have clocks of their own."""
        known = (*self.check.options, *(one.option for one in self.check.held))
        return {one.hardware_type: SpeedEstimate(1.0, one.spread) for one in known}

    @cached_property
    def _scenarios(self) -> list[Scenario]:
        """The same for the same question: half of them are the mirror image of the other half."""
        cards = sorted({(one.gpu, one.memory_gib) for one in self._estimates})
        half = np.random.default_rng(0).standard_normal((SCENARIOS // 2, 2 + len(cards) + len(self._estimates)))
        return [self._scenario(list(row), cards) for row in (*half, *-half)]

    def _scenario(self, row: list[float], cards: list[tuple[str, float]]) -> Scenario:
        speeds = {}
        for place, (one, estimate) in enumerate(sorted(self._estimates.items())):
            own = row[2 + len(cards) + place]
            if estimate.spread > KNOWN_STD:
                card = row[2 + cards.index((one.gpu, one.memory_gib))]
                own = COMMON**0.5 * row[1] + CARD**0.5 * card + (1 - COMMON - CARD) ** 0.5 * own
            speeds[one] = math.exp(estimate.spread * own)
        return Scenario(speeds, math.exp(self.check.work.spread * row[0]))

    def _play(self, candidate: FleetCandidate, scenario: Scenario) -> tuple[float, bool]:
        """US dollars, and whether it is late or out of money, in this scenario."""
        check = self.check
        deadline = ENDLESS if check.target.deadline is None else check.target.deadline
        tokens = check.work.tokens * scenario.work
        fleet = candidate.projected()
        until = max((one.ready_in for one in fleet), default=0.0) + check.timing.measuring + check.timing.tick / 2
        rate = sum(one.option.usd_per_hour for one in fleet) / HOUR
        speeds = [one.option.tokens_per_second * scenario.speeds[one.option.hardware_type] for one in fleet]
        done = sum(speed * (until - one.ready_in) for speed, one in zip(speeds, fleet, strict=True))
        if done >= tokens:
            until -= (done - tokens) / sum(speeds)
            return rate * (until + check.target.idle_seconds), until > deadline
        spent = rate * until
        seen = {one.option.hardware_type for one in fleet}
        estimates = condition_on(self._estimates, {one: scenario.speeds[one] for one in seen})
        used = Counter(option.name for option, count in candidate.new for _ in range(count))
        options = [_condition(one, estimates, used[one.name]) for one in check.options]
        held = [HeldInstance(str(i), _condition(one.option, estimates)) for i, one in enumerate(fleet)]
        work = replace(check.work, tokens=tokens - done, spread=WORK_STD)
        search = PlanSearch(work, options, held, check.target, check.spot_cutoff, FALLBACK_CONFIDENCE)
        found = search.at(deadline - until, QUANTA)
        late = found is None or (check.target.budget_usd is not None and spent + found.usd > check.target.budget_usd)
        if found is None and (found := search.earliest()) is None:
            return spent, True
        ended = sum(one.option.usd_per_hour for one in held if one.instance not in found.keep) / HOUR
        return spent + found.usd + ended * check.timing.tick, late


def _condition(option: PlannedOffer, estimates: Mapping[HardwareType, SpeedEstimate], used: int = 0) -> PlannedOffer:
    estimate = estimates[option.hardware_type]
    speed = option.tokens_per_second * estimate.tokens_per_second
    capacity = None if option.capacity is None else max(0, option.capacity - used)
    return replace(option, tokens_per_second=speed, spread=estimate.spread, capacity=capacity)


# The choice


def choose_initial_fleet(
    check: FeasibilityCheck, usual: FleetCandidate, probes: int, more_late: float = ONE_SCENARIO
) -> tuple[FleetCandidate, ExpectedCost] | None:
    """The cheapest candidate and its expected cost; None: the usual one, and it measures nothing or money is short.

    The usual one is a candidate whatever it is.
    Others are candidates while they leave a fallback if they turn out slow. `probes`: hardware of unknown speed that
    there may be to have more added. `more_late`: share of scenarios that more than the least may be late.
    """
    simulation = FleetSimulation(check)
    costs = {usual: simulation.expected_cost(usual)}

    def consider(candidates: Sequence[FleetCandidate]) -> FleetCandidate:
        for one in candidates:
            if one in costs or len(one.options) > check.most:
                continue
            if check.has_fallback(one.projected(), FALLBACK_CONFIDENCE):
                costs[one] = simulation.expected_cost(one)
        least = min(cost.late for cost in costs.values())
        return min((one for one in costs if costs[one].late <= least + more_late), key=lambda one: costs[one].usd)

    if check.target.budget_usd is not None and costs[usual].late > MAX_SHORT_OF_MONEY:
        return None
    wait, cheap = FleetCandidate(check.held), _cheap_to_measure(check)
    alone = [wait.with_probe(one) for one in cheap if one.hardware_type not in wait.unmeasured]
    best = consider([*(one for one in _planned(check) if one.new), *alone, *([wait] if check.held else [])])
    while len(best.unmeasured) < probes:
        before = best
        best = consider([before.with_probe(one) for one in cheap if one.hardware_type not in before.unmeasured])
        if best is before:
            break
    return None if best is usual and not usual.is_probe else (best, costs[best])


def best_probe(check: FeasibilityCheck, fleet: FleetCandidate) -> tuple[PlannedOffer, str] | None:
    """The offer of unknown speed most worth one instance beside a fleet, and why; None: none is.

    Its price per token is lognormal around the estimate. Changing over to it is an option in the financial sense, and
    worth E[max(0, K - X)] with X its price per token and K the fleet's, less the boots of the change (Black and
    Scholes, 1973; Margrabe, 1978, where the fleet's speed is an estimate, too), for all tokens that are left then. That
    is compared with its boot and its dearer tokens.
    """
    there = [one for one in check.options if one.is_unmeasured and one.capacity != 0 and one.tokens_per_second > 0]
    known = {one.hardware_type for one in fleet.options}
    figures = {one: _saving(check, fleet, one) for one in there if one.hardware_type not in known and fleet.speed > 0}
    best = max(figures, key=lambda one: figures[one][0] - figures[one][1], default=None)
    if best is None or figures[best][0] <= figures[best][1]:
        return None
    saves, costs = figures[best]
    return best, f"one {best.name} to learn its speed: {format_usd(costs)} $, may save {format_usd(saves)} $"


def _saving(check: FeasibilityCheck, fleet: FleetCandidate, one: PlannedOffer) -> tuple[float, float]:
    """US dollars that a probe may save, weighed with its odds, and what it costs."""
    tokens, wait = check.work.tokens, one.boot_seconds + check.timing.measuring
    seconds = tokens / fleet.speed if check.target.deadline is None else max(tokens / fleet.speed, check.left)
    left = tokens * max(0.0, 1 - wait / seconds)
    number = max(1.0, left / one.tokens_per_second / max(seconds - wait - one.boot_seconds, one.boot_seconds, 1.0))
    if one.capacity is not None and number > one.capacity:
        left, number = left * one.capacity / number, float(one.capacity)
    boot = one.usd_per_hour / HOUR * one.boot_seconds
    now = sum(_usd_with_boots(other) * other.tokens_per_second for other in fleet.options) / fleet.speed
    then = _usd_with_boots(one)
    costs = boot + max(0.0, then - now) * one.tokens_per_second * check.timing.measuring
    strike = now - (number - 1) * boot / left if left > 0 else 0.0
    if strike <= 0:
        return 0.0, costs
    own = max((other.spread for other in fleet.options if other.is_unmeasured), default=0.0)
    spread = math.hypot(one.spread, own) * (math.sqrt(0.5) if own else 1.0)
    high = (math.log(then / strike) + spread**2 / 2) / spread
    normal = NormalDist().cdf
    return (strike * normal(spread - high) - then * normal(-high)) * left, costs


def _usd_with_boots(option: PlannedOffer) -> float:
    """US dollars per token, the boots after interruptions included."""
    return option.usd_per_token * (1 + option.interruptions_per_hour / HOUR * option.boot_seconds)


def last_resort(
    check: FeasibilityCheck, fleet: FleetCandidate, probes: int, missing: Missing
) -> tuple[FleetCandidate, str] | None:
    """The fleet with one instance each of hardware that can do the work if it is fast, and why; None: there is none.

    `probes`: hardware of unknown speed that there may be in all. `missing`: what makes it impossible as estimated. For
    want of time probes take the place of the slowest where the limit on instances leaves no room. For want of money
    what is no part of the optimistic plan ends. Where money may yet be enough they are only added. What is being
    measured stays in any case.
    """
    plans = ((sigmas, plan_at(check, sigmas)) for sigmas in LAST_RESORT_SIGMAS)
    sigmas, plan = next((pair for pair in plans if pair[1].met), (0.0, None))
    if plan is None or not fleet.options:
        return None
    hopeful: dict[HardwareType, PlannedOffer] = {}  # as fast as it must be
    for option, _ in plan.fleet:
        if option.is_unmeasured:
            hopeful.setdefault(option.hardware_type, option)
    if not hopeful:
        return None
    if missing == "money":
        kept = [one for one in fleet.kept if one.instance in plan.keep or one.option.is_unmeasured]
        fleet = FleetCandidate(tuple(kept))
    known = {one.name: one for one in check.options}
    held = {one.option.hardware_type: one for one in reversed(check.held)}
    trying = any(one in held for one in hopeful)
    spare = 0.0 if missing == "perhaps money" else MAX_SPEED_GIVEN_UP * fleet.speed
    for hardware, option in hopeful.items():
        if hardware in fleet.unmeasured or len(fleet.unmeasured) >= probes:
            continue
        if hardware not in held and trying and sigmas == 0:
            continue  # as estimated it will do: what is being measured is waited for
        room = fleet if len(fleet.options) < check.most else _make_room(fleet, min(spare, option.tokens_per_second))
        if room is None:
            continue
        spare -= fleet.speed - room.speed
        fleet = room.with_held(held[hardware]) if hardware in held else room.with_probe(known[option.name])
    names = " or ".join(one.name for one in hopeful.values())
    what = "in time" if missing == "time" else "for this money"
    return fleet, f"{names} may be faster than estimated, and nothing else is sure to do it {what}"


def _make_room(fleet: FleetCandidate, spare: float) -> FleetCandidate | None:
    """Without its slowest measured instance, if that is no faster than `spare` tokens per second."""
    measured = [one for one in fleet.options if not one.is_unmeasured]
    slowest = min(measured, key=lambda one: one.tokens_per_second, default=None)
    return None if slowest is None or slowest.tokens_per_second > spare else fleet.without(slowest.name)
