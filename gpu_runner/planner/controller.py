"""What the fleet may do for a dataset, decided anew at each tick: the controller around the planner. Pure.

While speeds are only estimated it begins with a pilot, or with the fleet that is expected to cost least in the end
(`gpu_runner.planner.exploration`). Measured speeds replace the estimates. Then it jumps to the planner's fleet and
stays there while staying is good enough.

Spot instances are used as Uniform Progress does (Wu et al., NSDI 2024): as long as reliable instances alone could still
finish everything by the deadline. Work on spot is to be done one reliable boot before the deadline. A plan that meets
both meets them at every moment until then, because what is left falls in a straight line; when it falls behind the
line, or all of it is taken, what cannot wait goes to reliable instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_runner.fleet_database.capacity_plan import Assignment, ControllerState
from gpu_runner.money import format_usd
from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.budget import affordable
from gpu_runner.planner.command import (
    Command,
    CommandKind,
    assign,
    change_to,
    end_beyond_budget,
    fit_budget,
    keep_all,
    order,
    revise,
)
from gpu_runner.planner.exploration import ONE_SCENARIO, Missing, best_probe, choose_initial_fleet, last_resort
from gpu_runner.planner.feasibility import MIN_SAVING, FeasibilityCheck
from gpu_runner.planner.planned_fleet import FleetCandidate
from gpu_runner.planner.planner import in_detail, make_plan, plan_to_stay
from gpu_runner.planner.types import (
    TIMING,
    Candidate,
    ControlTiming,
    HeldInstance,
    Plan,
    PlannedOffer,
    Target,
    Work,
    say_time,
)

__all__ = ["Command", "CommandKind", "ControllerState", "decide"]

MAIN_SHARE = 0.2  # share of a fleet's speed from which on an offer is a main one
STAY_CONFIDENCE = 0.75  # share of the confidence of a plan at which what is held is good enough
UNMEASURED_CONFIDENCE = 0.25  # share at which a fleet that has begun on estimates is left to work


def decide(
    work: Work,
    options: Sequence[PlannedOffer],
    held: Sequence[HeldInstance],
    target: Target,
    memory: ControllerState,
    *,
    measured: bool,
    pilots: int = 1,
    detail: bool = True,
    timing: ControlTiming = TIMING,
    room: int | None = None,
) -> tuple[Command, ControllerState, Plan]:
    """What the fleet may do now, what to remember, and the plan behind it.

    `measured`: the speed of something held was measured on this request's rows. `pilots`: on how many offers speeds may
    be learned. `detail`: with the plan's curve and next-best. `room`: how many more instances the fleet may have.

    An instance whose run waits for the successor that it was assigned counts no more: it is given up already.
    """
    held, moving, target = _without_moving(held, memory, target, timing)
    number_held = len(held)
    most = max(0, min(target.max_instances, work.units))
    useful = sorted(held, key=lambda one: (one.ready_in > 0, one.option.usd_per_token))
    held, surplus = useful[:most], tuple(one.instance for one in useful[most:])
    offered = list(options)
    if target.budget_usd is not None:
        payable = affordable(options, target.budget_usd, timing)
        offered = payable if payable or held else offered  # else they are named as what the budget cannot begin
        target = replace(target, reserve_seconds=0.0 if held else timing.reserve)
    check = FeasibilityCheck(work, tuple(offered), tuple(held), target, timing)
    command, plan = Controller(check, memory, measured, pilots).answer()
    if surplus:
        kind: CommandKind = "shrink" if command.kind in ("steady", "pilot") else command.kind
        reason = f"{len(surplus)} more than the {most} that are allowed or have work are given up; {command.reason}"
        command = replace(command, retire=(*command.retire, *surplus), kind=kind, reason=reason)
    command = _with_moving(assign(command, number_held, room, memory.assignments), moving)
    if detail:
        plan = in_detail(plan, work, options, held, target)
    tried = (*memory.tried, *(name for name, _ in command.offers if command.pilot and name not in memory.tried))
    pairs = tuple(one for one in command.assignments if one.successor is not None)
    return command, ControllerState(command.offers, tried, pairs), plan


def _without_moving(
    held: Sequence[HeldInstance], memory: ControllerState, target: Target, timing: ControlTiming
) -> tuple[list[HeldInstance], list[Assignment], Target]:
    """What is held without instances whose successor boots for the same run, their assignments, and the target.

    What it costs until they are drained is no part of the budget any more.
    """
    begun = {one.replaces for one in held if one.replaces}
    moving = [replace(one, beside=False) for one in memory.assignments if one.instance in begun]
    names = {one.instance for one in moving}
    gone = [one for one in held if one.instance in names]
    if gone and target.budget_usd is not None:
        last = sum(one.option.usd_per_hour for one in gone) / HOUR * timing.reserve
        target = replace(target, budget_usd=target.budget_usd - last)
    moving = [one for one in moving if any(each.instance == one.instance for each in gone)]
    return [one for one in held if one.instance not in names], moving, target


def _with_moving(command: Command, moving: Sequence[Assignment]) -> Command:
    """The command with instances that are given up once their successor answers; at once if nothing may work on."""
    if command.instances == 0:
        moving = [Assignment(one.instance) for one in moving]
    names = tuple(one.instance for one in moving)
    return replace(command, retire=(*command.retire, *names), assignments=(*command.assignments, *moving))


@dataclass
class Controller:
    """What one call of `decide` works with."""

    check: FeasibilityCheck
    state: ControllerState
    measured: bool
    pilots: int

    def __post_init__(self) -> None:
        self.work, self.options, self.held = self.check.work, self.check.options, self.check.held
        self.budget = self.check.target.budget_usd
        self._budget_may_do = False

    def answer(self) -> tuple[Command, Plan]:
        """The command within the budget, and the plan behind it."""
        plain, plan = self._decide()
        command = self._try_last_resort(plain, plan)
        if self.budget is not None:
            bold, command = command, self._fit_budget(command, self.budget)
            if bold is not plain and command is not bold:  # a try that the budget cannot boot is none
                command = self._fit_budget(plain, self.budget)
        return command, plan

    def _fit_budget(self, command: Command, budget: float) -> Command:
        return fit_budget(command, self._fleet(command), budget, self.check.timing)

    def _decide(self) -> tuple[Command, Plan]:
        if self.work.tokens <= 0 or self.work.units <= 0:
            return self._done()
        if (paused := end_beyond_budget(self.check)) is not None:
            return paused
        if not self.options:
            return self._without_offers()
        return self._choose_fleet()

    def _try_last_resort(self, command: Command, plan: Plan) -> Command:
        """What else to try when nothing that is known will do."""
        missing: Missing | None = None
        if self.budget is not None and (plan.chosen is None or plan.chosen.usd.p50 > self.budget):
            missing = "perhaps money" if self._budget_may_do else "money"
        elif not plan.met:
            rest = self.check.run_on(self._fleet(command).projected())
            missing = "time" if rest is None or rest.finish.p50 > self.check.left else None
        if missing is None or self.pilots < 2 or not self.options or command.kind in ("paused", "done"):
            return command
        target = replace(self.check.target, budget_usd=self.budget)
        check = replace(self.check, options=self._untried(), target=target)
        found = last_resort(check, self._fleet(command), self.pilots, missing)
        return command if found is None else revise(command, found[0], self.held, found[1])

    # The ends: nothing left, no money, no offers

    def _done(self) -> tuple[Command, Plan]:
        plan = make_plan(replace(self.work, tokens=0.0), (), (), self.check.target)
        names = tuple(one.instance for one in self.held)
        return Command(0, (), names, kind="done", reason="nothing is left to do"), plan

    def _without_offers(self) -> tuple[Command, Plan]:
        known = "no offers are known" + ("" if self.budget is None else " that the budget pays for")
        command = replace(keep_all(self.held, known), instances=max(1, len(self.held)))
        return command, make_plan(self.work, (), self.held, self.check.target)

    # The way there

    def _choose_fleet(self) -> tuple[Command, Plan]:
        stay = self.check.evaluate_current(STAY_CONFIDENCE) if self.measured else None
        if stay is not None:
            return self._compare(stay, 1.0)
        confidence, plan = self.check.plan()
        if plan.chosen is None:
            return self._short_of_money(plan)
        stay = self.check.evaluate_current((STAY_CONFIDENCE if self.measured else UNMEASURED_CONFIDENCE) * confidence)
        if stay is not None and self.measured:
            return self._compare(stay, confidence)
        if stay is not None:
            return keep_all(self.held, f"speed not measured yet; {plan.reason}", "pilot"), plan
        if plan.met and self.measured:
            plan = self.check.early_plan(confidence) or plan
        if not plan.met and not self.check.improves_finish(plan):
            return keep_all(self.held, f"no fleet is much sooner; {plan.reason}", "infeasible"), plan
        if self.measured:
            return self._explore(self._begin(self.check.fleet_of(plan), plan, confidence)), plan
        pilot = None if self.held else self._pilot(plan, confidence)
        return self._begin(pilot or self.check.fleet_of(plan), plan, confidence), plan

    def _compare(self, stay: Candidate, confidence: float) -> tuple[Command, Plan]:
        """What is held is good enough: it stays unless another fleet, early enough not to change again, is much better.

        Better by the objective: cost, time, or cost × time.
        """
        plan = self.check.early_plan(confidence)
        if plan is None or plan.chosen is None:
            plan = plan_to_stay(self.check.plan()[1], stay, self.held, self.check.target)
            return self._explore(keep_all(self.held, f"any other fleet would be no earlier; {plan.reason}")), plan
        now, then = stay.usd.p50, plan.chosen.usd.p50
        if self.check.objective_value(plan.chosen) < (1 - MIN_SAVING) * self.check.objective_value(stay):
            fleet = self.check.fleet_of(plan)
            why = f"saves {format_usd(now - then)} of {format_usd(now)} $"
            if then > now:
                why = f"takes {say_time(plan.chosen.finish.p50)} instead of {say_time(stay.finish.p50)}"
            for needed in (False, True):
                change = change_to(fleet, self.check, plan, why, needed=needed)
                if needed and not self._is_known(change, plan):
                    break  # at once only for what was to be had, and nothing that is being measured
                after = self._fleet(change).projected()
                if change.kind != "switch" or self.check.meets_deadline(after, STAY_CONFIDENCE * confidence):
                    return self._explore(change), plan
        plan = plan_to_stay(plan, stay, self.held, self.check.target)
        words = f"another fleet would save {format_usd(max(0.0, now - then))} of {format_usd(now)} $; {plan.reason}"
        return self._explore(keep_all(self.held, words)), plan

    def _fleet(self, command: Command) -> FleetCandidate:
        """What is held once the command is carried out."""
        known = {one.name: one for one in (*(one.option for one in self.held), *self.options)}
        kept = tuple(one for one in self.held if one.instance not in command.retire)
        there = Counter(one.option.name for one in kept)
        new = ((known[name], number - there[name]) for name, number in command.offers if name in known)
        return FleetCandidate(kept, tuple(pair for pair in new if pair[1] > 0))

    def _is_known(self, command: Command, plan: Plan) -> bool:
        """Whether the plan is of offers that are held already, and the command ends nothing of unknown speed."""
        had = {one.option.name for one in self.held}
        measured = not any(one.option.is_unmeasured for one in self.held if one.instance in command.retire)
        return measured and all(option.name in had for option, _ in plan.fleet)

    # Speeds that are not known yet

    def _pilot(self, plan: Plan, confidence: float) -> FleetCandidate | None:
        """One instance each of offers to be measured, when the fleet may wait until their speeds are known.

        The deadline must hold even if the main one turns out slow, and waiting must not cost more, if it turns out as
        estimated, than half of the boots that a fleet of unknown speed puts at risk.
        """
        check, now = self.check, self.check.plan_at_expected_speed()
        fleet = (now or plan).fleet
        speed = sum(option.tokens_per_second * number for option, number in fleet)
        large = [one for one, number in fleet if one.tokens_per_second * number >= MAIN_SHARE * speed]
        main = min(large or [option for option, _ in fleet], key=lambda one: one.usd_per_token)
        pilot = FleetCandidate(()).with_probe(main)
        if check.target.deadline is not None:
            if now is None or not check.has_fallback(pilot.projected(), confidence):
                return None
            wait = main.boot_seconds + check.timing.measuring
            target = replace(check.target, deadline=check.target.deadline - wait)
            later = replace(check, held=(HeldInstance("pilot", main),), target=target).plan_at_expected_speed()
            boots = sum(option.usd_per_hour / HOUR * option.boot_seconds * number for option, number in fleet)
            if later is None or later.usd + main.usd_per_hour / HOUR * wait > now.usd + boots / 2:
                return None
        untried = replace(check, options=self._untried())
        while len(pilot.options) < min(self.pilots, check.most) and (found := best_probe(untried, pilot)):
            pilot = pilot.with_probe(found[0])
        return pilot

    def _begin(self, usual: FleetCandidate, plan: Plan, confidence: float) -> Command:
        """The fleet to begin with: the usual one, or what is expected to cost less in the end.

        Where no plan holds at full confidence nothing may be tried that makes it any later.
        """
        best, said = usual, []
        unmeasured = any(one.is_unmeasured for one in self.options) and self.check.target.objective == "cheapest"
        if confidence > 0 and unmeasured and usual.new and self.check.target.deadline is not None:
            check = replace(self.check, target=replace(self.check.target, budget_usd=self.budget))
            found = choose_initial_fleet(check, usual, self.pilots, ONE_SCENARIO if confidence >= 1 else 0.0)
            if found is not None:
                best, cost = found
                said.append(
                    f"expected to cost {format_usd(cost.usd)} $ in the end, tight in {cost.late:.0%} of the cases"
                )
        if said and not best.new and len(best.kept) == len(self.held):
            return keep_all(self.held, f"{said[0]}, any other fleet more; {plan.reason}")
        command = change_to(best, self.check, plan, "is needed for the deadline", needed=True)
        if best.is_probe:
            said.append("to be measured before the fleet grows")
            command = replace(command, pilot=True, kind="pilot")
        if not said:
            return command
        fleet = " + ".join(f"{number} × {name}" for name, number in command.offers)
        return replace(command, reason=f"{fleet} to begin with: {'; '.join(said)}; by the estimates {plan.reason}")

    def _untried(self) -> tuple[PlannedOffer, ...]:
        """Offers without those that were ordered to be measured and lost before they were."""
        tried = {name for name in self.state.tried if name not in dict(self.state.offers)}
        return tuple(
            o for o in self.options if not o.is_unmeasured or not tried & {o.name, o.name.removesuffix(" spot")}
        )

    def _explore(self, command: Command) -> Command:
        """The command, and one instance of another offer where learning its speed is worth its boot.

        At the limit on instances it takes the place of one, if the deadline can do without that one.
        """
        fleet = self._fleet(command)
        if self.pilots < 2 or not fleet.options or fleet.unmeasured:
            return command
        found = best_probe(replace(self.check, options=self._untried()), fleet)
        if found is None:
            return command
        if len(fleet.options) < self.check.most:
            more = fleet.with_probe(found[0])
        else:
            name, number = max(fleet.offers, key=lambda pair: pair[1])
            more = fleet.without(name).with_probe(found[0])
            if number < 2 or not self.check.meets_deadline(more.projected()):
                return command
        return revise(command, more, self.held, found[1])

    def _short_of_money(self, plan: Plan) -> tuple[Command, Plan]:
        """The budget does not pay for all the work: as much as it pays for, where a token is cheapest."""
        free = replace(self.check.target, deadline=None, budget_usd=None, max_instances=1)
        cheapest = make_plan(self.work, self.options, self.held, free)
        if cheapest.chosen is None:
            return keep_all(self.held, plan.reason, "infeasible"), plan
        main, interval, budget = cheapest.chosen.fleet[0][0], cheapest.chosen.usd, self.check.target.budget_usd
        if budget is not None and interval.p50**2 / interval.p95 <= budget:
            # It may yet: the speeds are not known well enough.
            self.check = replace(self.check, target=replace(self.check.target, budget_usd=None))
            self._budget_may_do = True
            command, hoped = self._choose_fleet()
            dear = hoped.chosen is None or hoped.chosen.usd.p50 > budget
            if dear and not self.measured:  # a fleet that is too dear would spend the budget on its boots
                words = f"speed not measured yet; {hoped.reason}"
                pilot = FleetCandidate(()).with_probe(main)
                command = keep_all(self.held, words, "pilot") if self.held else self._begin(pilot, hoped, 0.0)
            return replace(command, reason=f"{command.reason}; the budget may not last: {plan.reason}"), hoped
        least = main.usd_per_token * (1 + MIN_SAVING)
        alike = [one for one in self.held if one.option.usd_per_token <= least or one.option.is_unmeasured]
        new = () if cheapest.keep else ((main, 1),)
        fleet = FleetCandidate(tuple(alike[: self.check.most - len(new)]), new)
        return self._explore(order(fleet, self.held, "infeasible", plan.reason)), plan
