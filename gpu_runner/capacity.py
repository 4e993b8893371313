"""What the fleet may do for a dataset, decided anew at each tick: the controller around the planner. Pure.

It starts with one instance, the pilot, whose measured speed replaces the estimate before the fleet grows, unless even
that wait endangers the deadline. Then it jumps to the planner's fleet and stays there while staying is good enough.

Spot instances are used as Uniform Progress does (Wu et al., NSDI 2024): as long as reliable instances alone could still
finish everything by the deadline. Work on spot is to be done one reliable boot before the deadline. A plan that meets
both meets them at every moment until then, because what is left falls in a straight line; when it falls behind the
line, or all of it is taken, what cannot wait goes to reliable instances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gpu_runner.offers import HOUR
from gpu_runner.planner import Candidate, Held, Option, Plan, Target, Work, make_plan, say_fleet, say_time

Kind = Literal["pilot", "steady", "grow", "shrink", "switch", "infeasible", "paused", "done"]

WORTH = 0.05  # a change of the fleet must save this share of what is left to pay
TICK = 60.0  # seconds that may pass until the next decision counts
MEASURING = 120.0  # seconds of work after which a pilot's speed is known
RESERVE = 150.0  # seconds that held instances may cost on after the decision to end them
BOOTS = 1.25  # a reliable boot may take this much longer than expected
EARLY = 0.05  # share of the time left that a growing fleet is to be early, so that it need not grow again


@dataclass(frozen=True, slots=True)
class Command:
    """What the fleet may do: `instances` in all, of which `offers` (name and number, held ones included) come first.

    `retire`: held instances that are to be drained and ended. `pause`: why nothing may be rented, "" otherwise.
    """

    instances: int
    offers: tuple[tuple[str, int], ...]
    retire: tuple[str, ...] = ()
    pause: str = ""
    pilot: bool = False
    kind: Kind = "steady"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept from tick to tick: the last command's fleet, and the offers that had a pilot."""

    instances: int = 0
    offers: tuple[tuple[str, int], ...] = ()
    tried: tuple[str, ...] = ()
    changed_at: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Memory:
        """From `as_json`; an empty one is the beginning."""
        return cls(
            instances=int(values.get("instances", 0)),
            offers=tuple((str(name), int(number)) for name, number in values.get("offers", ())),
            tried=tuple(str(name) for name in values.get("tried", ())),
            changed_at=float(values.get("changed_at", 0.0)),
        )


def decide(
    work: Work,
    options: Sequence[Option],
    held: Sequence[Held],
    target: Target,
    memory: Memory,
    now: float,
    *,
    measured: bool,
    pilots: int = 1,
    detail: bool = True,
) -> tuple[Command, Memory, Plan]:
    """What the fleet may do now, what to remember, and the plan behind it.

    `now`: seconds of any steady clock, only remembered. `measured`: the speed of something held was measured on this
    request's rows. `pilots`: on how many offers speeds may be learned. `detail`: as in `make_plan`.
    """
    tick = _Tick(work, options, held, target, memory, measured, pilots, detail)
    command, plan = tick.decide()
    changed = (command.instances, command.offers) != (memory.instances, memory.offers)
    tried = (*memory.tried, *(name for name, _ in command.offers if command.pilot and name not in memory.tried))
    kept = Memory(command.instances, command.offers, tried, now if changed else memory.changed_at)
    return command, kept, plan


class _Tick:
    """What one call of decide works with."""

    def __init__(
        self,
        work: Work,
        options: Sequence[Option],
        held: Sequence[Held],
        target: Target,
        memory: Memory,
        measured: bool,
        pilots: int,
        detail: bool,
    ) -> None:
        self.work = work
        self.options = tuple(options)
        self.held = tuple(held)
        self.target = target
        self.memory = memory
        self.measured = measured
        self.pilots = pilots
        self.detail = detail
        reliable = [one.boot_seconds for one in options if not one.spot and one.capacity != 0]
        self.ramp = BOOTS * min(reliable) + TICK if reliable and target.deadline is not None else 0.0

    def decide(self) -> tuple[Command, Plan]:
        if self.work.tokens <= 0 or self.work.units <= 0:
            return self._done()
        if (paused := self._within_budget()) is not None:
            return paused
        if not self.options:
            return self._blind()
        if not self.measured and (pilot := self._pilot()) is not None:
            return pilot
        return self._steer()

    # The ends: nothing left, no money, no offers

    def _done(self) -> tuple[Command, Plan]:
        plan = make_plan(replace(self.work, tokens=0.0), (), (), self.target)
        names = tuple(one.instance for one in self.held)
        return Command(0, (), names, kind="done", reason="nothing is left to do"), plan

    def _within_budget(self) -> tuple[Command, Plan] | None:
        """The command when the money does not even last for what is held and its end, or for a first instance."""
        budget = self.target.budget_usd
        if budget is None:
            return None
        rate = sum(one.option.usd_per_hour for one in self.held) / HOUR
        if self.held and rate * RESERVE <= budget:
            return None
        kept: list[Held] = []
        for one in sorted(self.held, key=lambda one: (one.ready_in > 0, _usd_per_token(one.option))):
            if (sum(other.option.usd_per_hour for other in kept) + one.option.usd_per_hour) / HOUR * RESERVE <= budget:
                kept.append(one)
        first = min((one.usd_per_hour / HOUR * (one.boot_seconds + 2 * RESERVE) for one in self.options), default=0.0)
        if not self.held and first <= budget:
            return None
        plan = make_plan(self.work, self.options, self.held, self.target, detail=self.detail)
        names = tuple(one.instance for one in self.held if one not in kept)
        if kept:
            reason = f"{budget:.2f} $ are left of the budget: {len(kept)} of {len(self.held)} instances go on"
            return Command(len(kept), _counts(kept), names, kind="shrink", reason=reason), plan
        reason = f"budget reached: {budget:.2f} $ are left, the work needs {_needed(plan)}"
        return Command(0, (), names, pause=reason, kind="paused", reason=reason), plan

    def _blind(self) -> tuple[Command, Plan]:
        plan = make_plan(self.work, (), self.held, self.target, detail=self.detail)
        reason = f"no offers are known: the {len(self.held)} instances that are held go on"
        return Command(max(1, len(self.held)), _counts(self.held), reason=reason), plan

    # The pilot

    def _pilot(self) -> tuple[Command, Plan] | None:
        """One instance, while the deadline can still be met for certain after it has been measured."""
        ready = [one for one in self.held if one.ready_in <= 0]
        wait = MEASURING + (0.0 if ready else min((one.ready_in for one in self.held), default=self._boot()))
        later = self.target if self.target.deadline is None else replace(self.target, deadline=self._left() - wait)
        plan = make_plan(self.work, self.options, self.held, later, detail=self.detail, ramp=self.ramp)
        if plan.chosen is None or not plan.feasible or self._lead(self.work) < wait + TICK:
            return None
        if self.held:
            reason = f"{len(self.held)} held, speed not measured yet; {plan.reason}"
            return Command(len(self.held), _counts(self.held), pilot=True, kind="pilot", reason=reason), plan
        main = max(plan.chosen.fleet, key=lambda pair: pair[1])[0]
        reason = f"one instance first, to measure it before the fleet grows; then {plan.reason}"
        return Command(1, ((main.name, 1),), pilot=True, kind="pilot", reason=reason), plan

    def _boot(self) -> float:
        return max((one.boot_seconds for one in self.options), default=0.0)

    # The course

    def _steer(self) -> tuple[Command, Plan]:
        plan = self._plan()
        if plan.chosen is None:
            return self._short_of_money(plan)
        stay = self._stay()
        if stay is not None:
            saved = stay - plan.chosen.usd.p50
            if saved <= WORTH * stay:
                reason = f"{len(self.held)} go on: another fleet would save {max(0.0, saved):.2f} of {stay:.2f} $"
                return Command(len(self.held), _counts(self.held), reason=f"{reason}; {plan.reason}"), plan
            return self._change(plan, f"saves {saved:.2f} of {stay:.2f} $"), plan
        if plan.feasible and self.target.deadline is not None:
            early = self._plan(EARLY * max(0.0, self.target.deadline))
            plan = early if early.feasible else plan
        return self._change(plan, "is needed for the deadline"), plan

    def _plan(self, early: float = 0.0) -> Plan:
        """The cheapest plan that is safe: with spot where reliable instances could still step in, else without."""
        target = replace(self.target, deadline=self._left() - early) if early else self.target
        plan = make_plan(self.work, self.options, self.held, target, detail=self.detail, ramp=self.ramp)
        if self.target.deadline is None or not _spot(plan.chosen):
            return plan
        if plan.feasible and self._safe(plan):
            return plan
        sure = [one for one in self.options if not one.spot]
        kept = [one for one in self.held if not one.option.spot]
        reliable = make_plan(self.work, sure, kept, target, detail=self.detail)
        if reliable.feasible:
            return reliable
        return make_plan(self.work, self.options, self.held, target, detail=self.detail)

    def _safe(self, plan: Plan) -> bool:
        """Whether reliable instances could still do everything if all spot instances were lost once they work."""
        new = {one.name: one.boot_seconds for one in self.options if one.spot}
        kept = _counts([one for one in self.held if one.instance in plan.keep])
        more = {option.name for option, number in _fleet(plan) if number > dict(kept).get(option.name, 0)}
        wait = max((seconds for name, seconds in new.items() if name in more), default=0.0)
        return self._lead(self.work) >= wait + TICK

    def _lead(self, work: Work) -> float:
        """Seconds from the earliest finish on reliable instances alone (P95) to the deadline; infinite without one."""
        if self.target.deadline is None:
            return math.inf
        sure = [one for one in self.options if not one.spot]
        kept = [one for one in self.held if not one.option.spot]
        plan = make_plan(work, sure, kept, replace(self.target, budget_usd=None), detail=False)
        return -math.inf if plan.earliest is None else self._left() - plan.earliest.finish.p95

    def _left(self) -> float:
        return math.inf if self.target.deadline is None else self.target.deadline

    def _stay(self) -> float | None:
        """US dollars when all that are held work to the end; None when that is not good enough."""
        if not self.held or len(self.held) > min(self.target.max_instances, self.work.units):
            return None
        plan = make_plan(self.work, (), self.held, self.target, detail=False, ramp=self.ramp)
        if plan.earliest is None or not plan.feasible or plan.chosen is None:
            return None
        if _spot(plan.chosen) and not self._safe(plan):
            return None
        rate = sum(one.option.usd_per_hour for one in self.held) / HOUR
        return rate * plan.earliest.finish.p50

    def _change(self, plan: Plan, why: str) -> Command:
        fleet = plan.chosen
        assert fleet is not None
        retire = tuple(one.instance for one in self.held if one.instance not in plan.keep)
        offers = tuple((option.name, number) for option, number in fleet.fleet)
        kind: Kind = "steady"
        if not plan.feasible:
            kind = "infeasible"
        elif retire and fleet.instances > len(plan.keep):
            kind = "switch"
        elif retire:
            kind = "shrink"
        elif fleet.instances > len(self.held):
            kind = "grow"
        reason = f"{fleet.instances} instances instead of {len(self.held)}, which {why}; {plan.reason}"
        return Command(fleet.instances, offers, retire, kind=kind, reason=reason)

    def _short_of_money(self, plan: Plan) -> tuple[Command, Plan]:
        """The budget does not pay for all the work: as much as it pays for, where a token is cheapest."""
        cheapest = make_plan(
            self.work, self.options, self.held, replace(self.target, deadline=None, budget_usd=None, max_instances=1)
        )
        if cheapest.chosen is None:
            names = tuple(one.instance for one in self.held)
            return Command(max(1, len(self.held)), _counts(self.held), kind="infeasible", reason=plan.reason), plan
        names = tuple(one.instance for one in self.held if one.instance not in cheapest.keep)
        offers = tuple((option.name, number) for option, number in cheapest.chosen.fleet)
        return Command(cheapest.instances, offers, names, kind="infeasible", reason=plan.reason), plan


def _usd_per_token(option: Option) -> float:
    return option.usd_per_hour / max(option.tokens_per_second, 1e-9)


def _counts(held: Sequence[Held]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for one in sorted(held, key=lambda one: _usd_per_token(one.option)):
        counts[one.option.name] = counts.get(one.option.name, 0) + 1
    return tuple(counts.items())


def _fleet(plan: Plan) -> tuple[tuple[Option, int], ...]:
    return plan.chosen.fleet if plan.chosen else ()


def _spot(candidate: Candidate | None) -> bool:
    return candidate is not None and any(option.spot for option, _ in candidate.fleet)


def _needed(plan: Plan) -> str:
    if plan.chosen is not None:
        return f"{plan.chosen.usd.p50:.2f} $ more ({say_fleet(plan.chosen)}, {say_time(plan.chosen.finish.p50)})"
    return "more" if plan.earliest is None else f"at most {plan.earliest.usd.p50:.2f} $ more"
