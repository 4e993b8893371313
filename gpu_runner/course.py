"""Which fleet is good enough for a deadline, and which is best: the part of the controller that looks ahead. Pure.

A fleet meets a deadline at a caution (`make_plan`). The highest caution is taken at which any fleet can. Spot
instances are used while reliable ones could still do everything in time if all spot were lost (`gpu_runner.capacity`).
A fleet whose speed is only estimated may start on the estimate, while there is a way out if it turns out slow
(`gpu_runner.pilots.recoverable`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gpu_runner.pilots import BOOTS, Pace, booted, recoverable, unsure
from gpu_runner.planner import Candidate, Held, Option, Plan, Target, Work, earliest_finish, make_plan, run_on

WORTH = 0.05  # a change of the fleet must save this share of what is left to pay
CAUTIONS = (1.0, 0.75, 0.5, 0.25)  # shares of P95's distance; less is only counted on where more cannot be had
BARGAIN = 0.6  # at this share of the cost a little less caution is accepted while speeds are not measured
EARLY = 0.03  # share of the time left that a changed fleet is to be early, so that it need not change again


@dataclass(frozen=True)
class Course:
    """The state of things at a tick, and the plans that can be made from it."""

    work: Work
    options: tuple[Option, ...]
    held: tuple[Held, ...]
    target: Target
    pace: Pace

    @property
    def sure(self) -> tuple[Option, ...]:
        """Offers that nobody takes away."""
        return tuple(one for one in self.options if not one.spot)

    @property
    def most(self) -> int:
        """Instances that there may be."""
        return min(self.target.max_instances, self.work.units)

    @property
    def ramp(self) -> float:
        """Seconds before the deadline by which spot must be done: a reliable boot, late, and the next decision."""
        boots = [one.boot_seconds for one in self.sure if one.capacity != 0]
        return BOOTS * min(boots) + self.pace.tick if boots and self.target.deadline is not None else 0.0

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return math.inf if self.target.deadline is None else self.target.deadline

    def plan(self) -> tuple[float, Plan]:
        """The cheapest plan that is safe, and the highest caution at which any plan meets the deadline."""
        if self.target.deadline is None:
            return 1.0, self._make(self.target, anyway=True)
        for place, level in enumerate(CAUTIONS):
            plan = self._at(self.target, level)
            if plan is None:
                continue
            if any(unsure(option) for option, _ in fleet_of(plan)) and place + 1 < len(CAUTIONS):
                bolder = self._at(self.target, CAUTIONS[place + 1])
                if bolder is not None and usd(bolder) <= BARGAIN * usd(plan):
                    return CAUTIONS[place + 1], bolder
            return level, plan
        return 0.0, self._make(self.target, caution=CAUTIONS[-1], anyway=True)

    def early_plan(self, caution: float) -> Plan | None:
        """The same at this caution and so early that it need not change again soon; None: not possible."""
        if self.target.deadline is None:
            return self._make(self.target, anyway=True)
        return self._at(replace(self.target, deadline=(1 - EARLY) * self.target.deadline), caution)

    def _make(self, target: Target, *, caution: float = 1.0, anyway: bool = False) -> Plan:
        return make_plan(self.work, self.options, self.held, target, detail=False, caution=caution, anyway=anyway)

    def _at(self, target: Target, caution: float) -> Plan | None:
        """The plan at this caution: with spot where reliable instances could still step in, else without."""
        good = self._with_spot(target, self.held, caution)
        if good is not None and not any(unsure(option) for option, _ in fleet_of(good)):
            return good
        fair = self._if_fair(target, caution)
        if fair is not None and not (good is not None and usd(good) <= (1 + WORTH) * usd(fair)):
            return fair
        if good is not None:
            return good
        plan = self._reliable(target, caution)
        if plan.met:
            return plan
        plan = self._make(target, caution=caution)
        return plan if plan.met else None

    def _reliable(self, target: Target, caution: float) -> Plan:
        """Without counting on spot; what is held of it stays on top where the limit on instances allows that."""
        kept = [one for one in self.held if not one.option.spot]
        spot = len(self.held) - len(kept)
        limits = [target.max_instances - spot, target.max_instances] if spot else [target.max_instances]
        for limit in limits:
            some = replace(target, max_instances=limit)
            plan = make_plan(self.work, self.sure, kept, some, detail=False, caution=caution, anyway=False)
            if plan.met:
                break
        return plan

    def _if_fair(self, target: Target, caution: float) -> Plan | None:
        """The plan for speeds as they are believed, when there is still a way out if they turn out slow."""
        plan = self.fair(target, self.held)
        if plan is None:
            return None
        kept = [one for one in self.held if one.instance in plan.keep]
        fleet = booted(fleet_of(plan), kept)
        return plan if recoverable(self.work, self.options, fleet, self.target, caution, self.pace) else None

    def fair(self, target: Target, held: Sequence[Held]) -> Plan | None:
        """The plan for speeds as they are believed, when it meets the deadline and is safe.

        A target with an earlier deadline than the course's own: the plan begins that much later, or ends earlier.
        """
        late = (self.target.deadline or 0.0) - (target.deadline or 0.0)
        return self._with_spot(target, held, 0.0, late)

    def _with_spot(self, target: Target, held: Sequence[Held], caution: float, late: float = 0.0) -> Plan | None:
        """The plan that counts on spot, if it is safe; else with the spot that is held and no more of it."""
        spot = any(one.option.spot for one in held)
        for options in (self.options, self.sure) if spot else (self.options,):
            plan = make_plan(
                self.work, options, held, target, detail=False, ramp=self.ramp, caution=caution, anyway=False
            )
            if plan.met and self._safe(plan, late):
                return plan
        return None

    def _safe(self, plan: Plan, late: float = 0.0) -> bool:
        """Whether reliable instances could still do everything if all spot instances were lost once they work.

        `late`: seconds from now at which the plan begins.
        """
        if self.target.deadline is None or not has_spot(plan.chosen):
            return True
        kept = dict(counts([one for one in self.held if one.instance in plan.keep]))
        boots = [o.boot_seconds for o, number in fleet_of(plan) if o.spot and number > kept.get(o.name, 0)]
        return self._lead - late >= max(boots, default=0.0) + self.pace.tick

    @cached_property
    def _lead(self) -> float:
        """Seconds from the earliest finish on reliable instances alone (as expected) to the deadline."""
        kept = [one for one in self.held if not one.option.spot]
        earliest = earliest_finish(self.work, self.sure, kept, self.target, caution=0.0)
        return -math.inf if earliest is None else self.left - earliest.finish.p50

    def stay(self, caution: float) -> Candidate | None:
        """What happens when all that are held work to the end; None when that is not good enough at this caution."""
        if not self.held or len(self.held) > self.most:
            return None
        rest = run_on(self.work, self.held)
        if rest is not None and rest.finish.p95 <= min(self.ramp, self.left):
            return rest  # done before another one could have booted
        plan = make_plan(
            self.work, (), self.held, self.target, detail=False, ramp=self.ramp, caution=caution, anyway=False
        )
        if plan.earliest is None or (any(one.option.spot for one in self.held) and self._lead < self.pace.tick):
            return None
        if not plan.met and not recoverable(self.work, self.options, self.held, self.target, caution, self.pace):
            return None
        return rest

    def enough(self, fleet: Sequence[Held], caution: float = 1.0) -> bool:
        """Whether such a fleet makes the deadline at this caution, without any other."""
        return make_plan(
            self.work, (), fleet, self.target, detail=False, ramp=self.ramp, caution=caution, anyway=False
        ).met

    def worth(self, one: Candidate) -> float:
        """What the objective compares; less is better."""
        if self.target.objective == "fastest":
            return one.finish.p50
        return one.usd.p50 * (one.finish.p50 if self.target.objective == "efficient" else 1.0)

    def sooner(self, plan: Plan) -> bool:
        """Whether a plan that is too late anyway is at least much sooner than what is held."""
        if not self.held or plan.chosen is None:
            return True
        now = run_on(self.work, self.held)
        return now is None or plan.chosen.finish.p95 < (1 - WORTH) * now.finish.p95


def usd_per_token(option: Option) -> float:
    """Up to a constant factor."""
    return option.usd_per_hour / max(option.tokens_per_second, 1e-9)


def counts(held: Sequence[Held]) -> tuple[tuple[str, int], ...]:
    """How many of each offer, the cheapest token first."""
    found: dict[str, int] = {}
    for one in sorted(held, key=lambda one: usd_per_token(one.option)):
        found[one.option.name] = found.get(one.option.name, 0) + 1
    return tuple(found.items())


def fleet_of(plan: Plan) -> tuple[tuple[Option, int], ...]:
    """The chosen fleet, or nothing."""
    return plan.chosen.fleet if plan.chosen else ()


def usd(plan: Plan) -> float:
    """Expected cost, infinite without a chosen fleet."""
    return plan.chosen.usd.p50 if plan.chosen else math.inf


def has_spot(candidate: Candidate | None) -> bool:
    """Whether any of it is spot."""
    return candidate is not None and any(option.spot for option, _ in candidate.fleet)
