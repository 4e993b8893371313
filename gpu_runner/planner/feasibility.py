"""Which fleet is good enough for a deadline, and which is best: the part of the controller that looks ahead. Pure.

A fleet meets a deadline at a confidence (`make_plan`). The highest one is taken at which any fleet can. Spot instances
are used while reliable ones could still do everything in time if all spot were lost (`gpu_runner.planner.controller`).
A fleet whose speed is only estimated may start on the estimate, while there is a fallback if it turns out slow
(`has_fallback`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gpu_runner.planner.planned_fleet import FleetCandidate
from gpu_runner.planner.planner import make_plan
from gpu_runner.planner.search import PlanSearch
from gpu_runner.planner.types import TIMING, Candidate, ControlTiming, HeldInstance, Plan, PlannedOffer, Target, Work

BOOTS = 1.25  # a boot may take this much longer than expected
MIN_SAVING = 0.05  # a change of the fleet must save this share of what is left to pay
CONFIDENCES = (1.0, 0.75, 0.5, 0.25)  # shares of P95's distance; less is only counted on where more cannot be had
BOLDER_COST_SHARE = 0.6  # at this share of the cost the next lower confidence is accepted while speeds are not measured
EARLY_SHARE = 0.03  # share of the time left that a changed fleet is to be early, so that it need not change again


@dataclass(frozen=True)
class FeasibilityCheck:
    """The state of things at a tick, and the plans that can be made from it."""

    work: Work
    options: tuple[PlannedOffer, ...]
    held: tuple[HeldInstance, ...]
    target: Target
    timing: ControlTiming = TIMING

    @property
    def on_demand(self) -> tuple[PlannedOffer, ...]:
        """Offers that nobody takes away."""
        return tuple(one for one in self.options if not one.spot)

    @property
    def most(self) -> int:
        """Instances that there may be."""
        return min(self.target.max_instances, self.work.units)

    @property
    def spot_cutoff(self) -> float:
        """Seconds before the deadline by which spot must be done: a reliable boot, late, and the next decision."""
        boots = [one.boot_seconds for one in self.on_demand if one.capacity != 0]
        return BOOTS * min(boots) + self.timing.tick if boots and self.target.deadline is not None else 0.0

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return math.inf if self.target.deadline is None else self.target.deadline

    def plan(self) -> tuple[float, Plan]:
        """The cheapest plan that is safe, and the highest confidence at which any plan meets the deadline."""
        if self.target.deadline is None:
            return 1.0, self._any_plan(1.0)
        for level, lower in zip(CONFIDENCES, (*CONFIDENCES[1:], None), strict=True):
            plan = self._at(level)
            if plan is None:
                continue
            if lower is not None and any(option.is_unmeasured for option, _ in plan.fleet):
                bolder = self._at(lower)
                if bolder is not None and bolder.usd <= BOLDER_COST_SHARE * plan.usd:
                    return lower, bolder
            return level, plan
        return 0.0, self._any_plan(CONFIDENCES[-1])

    def early_plan(self, confidence: float) -> Plan | None:
        """The same at this confidence and so early that it need not change again soon; None: not possible."""
        if self.target.deadline is None:
            return self._any_plan(1.0)
        return self._at(confidence, EARLY_SHARE * self.target.deadline)

    def plan_at_expected_speed(self, early: float = 0.0) -> Plan | None:
        """The plan for speeds as estimated, if it is safe, with `early` seconds in hand, while they are right."""
        return self._with_spot(0.0, early, early)

    def cheapest(
        self, options: Sequence[PlannedOffer], held: Sequence[HeldInstance], confidence: float = 1.0, early: float = 0.0
    ) -> Plan:
        """The plan within deadline and budget at this confidence; else nothing is chosen. Spot ends at its cutoff.

        `early`: seconds before the deadline by which it is to end.
        """
        target, cutoff = self._target(early), self.spot_cutoff
        return make_plan(self.work, options, held, target, spot_cutoff=cutoff, confidence=confidence, allow_late=False)

    def _target(self, early: float) -> Target:
        deadline = self.target.deadline
        return self.target if deadline is None else replace(self.target, deadline=deadline - early)

    def _any_plan(self, confidence: float, early: float = 0.0, *, allow_late: bool = True) -> Plan:
        """The plan that lets spot work up to the deadline."""
        target = self._target(early)
        return make_plan(self.work, self.options, self.held, target, confidence=confidence, allow_late=allow_late)

    def _at(self, confidence: float, early: float = 0.0) -> Plan | None:
        """The plan at this confidence: with spot where reliable instances could still step in, else without."""
        careful = self._with_spot(confidence, early)
        if careful is not None and not any(option.is_unmeasured for option, _ in careful.fleet):
            return careful
        expected = self.plan_at_expected_speed(early)
        saves = expected is not None and (careful is None or careful.usd > (1 + MIN_SAVING) * expected.usd)
        if expected and saves and self.has_fallback(self.fleet_of(expected).projected(), confidence):
            return expected
        if careful is not None:
            return careful
        plan = self._reliable(confidence, early)
        if not plan.met:
            plan = self._any_plan(confidence, early, allow_late=False)
        return plan if plan.met else None

    def _reliable(self, confidence: float, early: float) -> Plan:
        """Without counting on spot; what is held of it stays on top where the limit on instances allows that."""
        kept = [one for one in self.held if not one.option.spot]
        most = self.target.max_instances - (len(self.held) - len(kept))
        beside = replace(self, target=replace(self.target, max_instances=most))
        plan = beside.cheapest(self.on_demand, kept, confidence, early)
        return plan if plan.met else self.cheapest(self.on_demand, kept, confidence, early)

    def _with_spot(self, confidence: float, early: float, in_hand: float = 0.0) -> Plan | None:
        """The plan that counts on spot, if it is safe; else with the spot that is held and no more of it."""
        spot = any(one.option.spot for one in self.held)
        for options in (self.options, self.on_demand) if spot else (self.options,):
            plan = self.cheapest(options, self.held, confidence, early)
            if plan.met and self._is_safe(plan, in_hand):
                return plan
        return None

    def _is_safe(self, plan: Plan, in_hand: float) -> bool:
        """Whether reliable instances could still do everything if all spot instances were lost once they work."""
        if self.target.deadline is None or not plan.has_spot:
            return True
        boots = [option.boot_seconds for option, _ in self.fleet_of(plan).new if option.spot]
        return self._lead - in_hand >= max(boots, default=0.0) + self.timing.tick

    @cached_property
    def _lead(self) -> float:
        """Seconds from the earliest finish on reliable instances alone (as expected) to the deadline."""
        kept = [one for one in self.held if not one.option.spot]
        earliest = PlanSearch(self.work, self.on_demand, kept, self.target, confidence=0.0).earliest()
        return -math.inf if earliest is None else self.left - earliest.candidate.finish.p50

    def fleet_of(self, plan: Plan) -> FleetCandidate:
        """What a plan keeps and orders."""
        kept = tuple(one for one in self.held if one.instance in plan.keep)
        left = Counter({one.name: 0 for one in self.options})
        for option, number in plan.fleet:
            left[option.name] += number
        left.subtract(one.option.name for one in kept)
        new = tuple((one, left[one.name]) for one in self.options if left[one.name] > 0)
        alone = bool(new) and all(number == 1 and option.is_unmeasured for option, number in new)
        return FleetCandidate(kept, new, is_probe=alone and plan.met)

    def run_on(self, held: Sequence[HeldInstance]) -> Candidate | None:
        """What happens when all of these work to the end; None when they cannot end."""
        search = PlanSearch(self.work, (), held, Target(max_instances=len(held), idle_seconds=self.target.idle_seconds))
        return search.all_of_it() if search.groups else None

    def evaluate_current(self, confidence: float) -> Candidate | None:
        """What happens when all that are held work to the end; None: not good enough at this confidence."""
        rest = self.run_on(self.held)
        if rest is None or len(self.held) > self.most:
            return None
        if rest.finish.p95 <= min(self.spot_cutoff, self.left):
            return rest  # done before another one could have booted
        if any(one.option.spot for one in self.held) and self._lead < self.timing.tick:
            return None
        good = self.meets_deadline(self.held, confidence) or self.has_fallback(self.held, confidence)
        return rest if good else None

    def has_fallback(self, fleet: Sequence[HeldInstance], confidence: float = 1.0) -> bool:
        """Whether the deadline can be met even if this fleet turns out to be slow, which is known once it has worked.

        What could then be added are offers that are not spot. `confidence`: 1 means slow at P95.
        """
        if self.target.deadline is None:
            return True
        waits = [BOOTS * one.ready_in + self.timing.measuring for one in fleet if one.option.is_unmeasured]
        if not waits:
            return False
        wait = max(waits)
        later = [replace(one, ready_in=max(0.0, one.ready_in - wait)) for one in fleet]
        search = PlanSearch(self.work, self.on_demand, later, self.target, confidence=confidence)
        return search.possible(self.target.deadline - wait)

    def meets_deadline(self, fleet: Sequence[HeldInstance], confidence: float = 1.0) -> bool:
        """Whether such a fleet makes the deadline at this confidence, without any other."""
        return self.cheapest((), fleet, confidence).met

    def objective_value(self, one: Candidate) -> float:
        """What the objective compares; less is better."""
        if self.target.objective == "fastest":
            return one.finish.p50
        return one.usd.p50 * (one.finish.p50 if self.target.objective == "efficient" else 1.0)

    def improves_finish(self, plan: Plan) -> bool:
        """Whether a plan that is too late anyway is at least much sooner than what is held."""
        if not self.held or plan.chosen is None:
            return True
        now = self.run_on(self.held)
        return now is None or plan.chosen.finish.p95 < (1 - MIN_SAVING) * now.finish.p95
