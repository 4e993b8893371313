"""What the fleet may do for a dataset, decided anew at each tick: the controller around the planner. Pure.

While speeds are only estimated it begins with a pilot, or with the fleet that is expected to cost least in the end
(`gpu_runner.openings`). Measured speeds replace the estimates. Then it jumps to the planner's fleet and stays there
while staying is good enough.

Spot instances are used as Uniform Progress does (Wu et al., NSDI 2024): as long as reliable instances alone could still
finish everything by the deadline. Work on spot is to be done one reliable boot before the deadline. A plan that meets
both meets them at every moment until then, because what is left falls in a straight line; when it falls behind the
line, or all of it is taken, what cannot wait goes to reliable instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_runner.command import Command, Kind, Memory, affordable, trim, why_no_entry
from gpu_runner.course import WORTH, Course, counts, fleet_of, has_spot, usd, usd_per_token
from gpu_runner.long_shots import Missing, long_shot
from gpu_runner.offers import HOUR
from gpu_runner.openings import HARDLY, Opening, best_opening
from gpu_runner.pilots import PACE, Pace, best_try, booted, recoverable, unsure
from gpu_runner.planner import (
    Candidate,
    Held,
    Option,
    Plan,
    Target,
    Work,
    in_detail,
    make_plan,
    plan_to_stay,
    run_on,
    say_fleet,
    say_time,
)

__all__ = ["Command", "Kind", "Memory", "decide"]

CHURN = 5  # one in so many may be given up at once for others that save money
STAY = 0.75  # share of the caution of a plan at which what is held is good enough
HOLD = 0.25  # share of the caution at which a fleet that has begun on beliefs is left to work
SHARE = 0.2  # share of a fleet's speed from which on an offer is a main one


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
    pace: Pace = PACE,
) -> tuple[Command, Memory, Plan]:
    """What the fleet may do now, what to remember, and the plan behind it.

    `now`: seconds of any steady clock, only remembered. `measured`: the speed of something held was measured on this
    request's rows. `pilots`: on how many offers speeds may be learned. `detail`: as in `make_plan`.
    """
    most = max(0, min(target.max_instances, work.units))
    useful = sorted(held, key=lambda one: (one.ready_in > 0, usd_per_token(one.option)))
    held, surplus = useful[:most], tuple(one.instance for one in useful[most:])

    def ask(offered: Sequence[Option]) -> tuple[Command, Plan]:
        return _Tick(work, offered, held, target, memory, measured, pilots, pace).answer()

    command, plan = ask(options)
    if target.budget_usd is not None and command.kind not in ("paused", "done"):
        payable = affordable(options, target.budget_usd, pace)
        if (not command.instances or _beyond(plan, payable, held)) and (payable or held):
            command, plan = ask(payable)  # it named what the budget cannot order at all: the best of what it can
    if surplus:
        kind: Kind = "shrink" if command.kind in ("steady", "pilot") else command.kind
        reason = f"{len(surplus)} more than the {most} that are allowed or have work are given up; {command.reason}"
        command = replace(command, retire=(*command.retire, *surplus), kind=kind, reason=reason)
    if detail:
        plan = in_detail(plan, work, options, held, target)
    changed = (command.instances, command.offers) != (memory.instances, memory.offers)
    tried = (*memory.tried, *(name for name, _ in command.offers if command.pilot and name not in memory.tried))
    kept = Memory(command.instances, command.offers, tried, now if changed else memory.changed_at)
    return command, kept, plan


def _beyond(plan: Plan, payable: Sequence[Option], held: Sequence[Held]) -> bool:
    """Whether the plan counts on new instances of an offer that may not be ordered."""
    there = dict(counts([one for one in held if one.instance in plan.keep]))
    return any(number > there.get(one.name, 0) and one not in payable for one, number in fleet_of(plan))


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
        pace: Pace,
    ) -> None:
        self.work = work
        self.options = tuple(options)
        self.held = tuple(held)
        self.memory = memory
        self.measured = measured
        self.pilots = pilots
        self.pace = pace
        self.budget = target.budget_usd
        self.course = Course(work, self.options, self.held, target, pace)
        self._perhaps = False  # whether the budget may be enough after all

    @property
    def target(self) -> Target:
        return self.course.target

    def answer(self) -> tuple[Command, Plan]:
        """The command within the budget, and the plan behind it."""
        plain, plan = self._decide()
        command = self._hope(plain, plan)
        if self.budget is not None:
            bold, command = command, self._trim(command, self.budget)
            if bold is not plain and command is not bold:  # a try that the budget cannot boot is none
                command = self._trim(plain, self.budget)
        return command, plan

    def _trim(self, command: Command, budget: float) -> Command:
        return trim(command, self.options, self.held, budget, self.pace)

    def _decide(self) -> tuple[Command, Plan]:
        if self.work.tokens <= 0 or self.work.units <= 0:
            return self._done()
        if (paused := self._within_budget()) is not None:
            return paused
        if not self.options:
            return self._blind()
        return self._steer()

    def _hope(self, command: Command, plan: Plan) -> Command:
        """What else to try when nothing that is known will do."""
        missing: Missing | None = None
        if self.budget is not None and (plan.chosen is None or plan.chosen.usd.p50 > self.budget):
            missing = "perhaps money" if self._perhaps else "money"
        elif not plan.met:
            fleet = run_on(self.work, self._after(command))
            missing = "time" if fleet is None or fleet.finish.p50 > self.course.left else None
        if missing is None or self.pilots < 2 or not self.options or command.kind in ("paused", "done"):
            return command
        tried = {name for name in self.memory.tried if name not in dict(self.memory.offers)}
        options = [
            one for one in self.options if not unsure(one) or not tried & {one.name, one.name.removesuffix(" spot")}
        ]
        target = replace(self.target, budget_usd=self.budget)
        course = replace(self.course, options=tuple(options), target=target)
        return long_shot(course, command, self.pilots, missing)

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
        if self.held and rate * self.pace.reserve <= budget:
            return None
        kept: list[Held] = []
        each = self.pace.reserve / HOUR
        for one in sorted(self.held, key=lambda one: (one.ready_in > 0, usd_per_token(one.option))):
            if (sum(other.option.usd_per_hour for other in kept) + one.option.usd_per_hour) * each <= budget:
                kept.append(one)
        there = [one for one in self.options if one.capacity != 0 and one.tokens_per_second > 0]
        if not self.held and (not there or affordable(there, budget, self.pace)):
            return None
        plan = make_plan(self.work, self.options, self.held, self.target, detail=False)
        names = tuple(one.instance for one in self.held if one not in kept)
        if kept:
            reason = f"{budget:.2f} $ are left of the budget: {len(kept)} of {len(self.held)} instances go on"
            return Command(len(kept), counts(kept), names, kind="shrink", reason=reason), plan
        if self.held:
            least = min(one.option.usd_per_hour for one in self.held) * each
            wait = f"the {self.pace.reserve:.0f} s until an instance that goes on is drained and ended"
            rule = f"{budget:.2f} $ are left, and {least:.2f} $ are held back for {wait}"
        else:
            rule = why_no_entry(there, budget, self.pace)
        reason = f"budget reached: {rule}; the work needs {_needed(plan)}"
        return Command(0, (), names, pause=reason, kind="paused", reason=reason), plan

    def _blind(self) -> tuple[Command, Plan]:
        plan = make_plan(self.work, (), self.held, self.target, detail=False)
        known = "no offers are known" if self.budget is None else "no offers are known that the budget pays for"
        reason = f"{known}: the {len(self.held)} instances that are held go on"
        return Command(max(1, len(self.held)), counts(self.held), reason=reason), plan

    # The way there

    def _steer(self) -> tuple[Command, Plan]:
        stay = self.course.stay(STAY) if self.measured else None
        if stay is not None:
            return self._compare(stay, 1.0)
        caution, plan = self.course.plan()
        if plan.chosen is None:
            return self._short_of_money(plan)
        stay = self.course.stay((STAY if self.measured else HOLD) * caution)
        if not self.measured:
            return self._learn(stay, plan, caution), plan
        if stay is not None:
            return self._compare(stay, caution)
        if plan.met:
            plan = self.course.early_plan(caution) or plan
        elif not self.course.sooner(plan):
            return self._same(f"no fleet is much sooner; {plan.reason}", "infeasible"), plan
        usual = self._change(plan, "is needed for the deadline", needed=True)
        return self._explore(self._begin(usual, plan, caution)), plan

    def _compare(self, stay: Candidate, caution: float) -> tuple[Command, Plan]:
        """What is held is good enough: it stays unless another fleet, early enough not to change again, is much better.

        Better by the objective: cost, time, or cost × time.
        """
        plan = self.course.early_plan(caution)
        if plan is None or plan.chosen is None:
            plan = plan_to_stay(self.course.plan()[1], stay, self.held, self.target)
            return self._explore(self._same(f"any other fleet would be no earlier; {plan.reason}")), plan
        now, then = stay.usd.p50, plan.chosen.usd.p50
        if self.course.worth(plan.chosen) < (1 - WORTH) * self.course.worth(stay):
            why = f"saves {now - then:.2f} of {now:.2f} $"
            if then > now:
                why = f"takes {say_time(plan.chosen.finish.p50)} instead of {say_time(stay.finish.p50)}"
            change = self._change(plan, why)
            if change.kind == "switch" and not self.course.enough(self._after(change), STAY * caution):
                had = {one.option.name for one in self.held}
                new = {name for name, _ in change.offers} | {option.name for option, _ in fleet_of(plan)}
                whole = self._change(plan, why, needed=True)
                if new <= had and not any(unsure(one.option) for one in self.held if one.instance in whole.retire):
                    change = whole
            if change.kind != "switch" or self.course.enough(self._after(change), STAY * caution):
                return self._explore(change), plan
        plan = plan_to_stay(plan, stay, self.held, self.target)
        words = f"another fleet would save {max(0.0, now - then):.2f} of {now:.2f} $; {plan.reason}"
        return self._explore(self._same(words)), plan

    def _after(self, command: Command) -> list[Held]:
        """What is held once the command is carried out."""
        known = {one.name: one for one in self.options}
        kept = [one for one in self.held if one.instance not in command.retire]
        return booted([(known[name], number) for name, number in command.offers if name in known], kept)

    # Speeds that are not known yet

    def _learn(self, stay: Candidate | None, plan: Plan, caution: float) -> Command:
        """One pilot where time allows; else the fleet for speeds as believed; else what makes it if they are slow."""
        if stay is not None:
            return self._same(f"speed not measured yet; {plan.reason}", "pilot")
        if not self.held and (main := self._worth_waiting(plan, caution)) is not None:
            return self._begin(self._pilot(main, plan), plan, caution)
        if self.held and not plan.met and not self.course.sooner(plan):
            return self._same(f"no fleet is much sooner; {plan.reason}", "infeasible")
        return self._begin(self._change(plan, "is needed for the deadline", needed=True), plan, caution)

    def _worth_waiting(self, plan: Plan, caution: float) -> Option | None:
        """The offer for a pilot, when the fleet may wait until its speed is known.

        The deadline must hold even if it turns out slow, and waiting must not cost more, if it turns out as believed,
        than half of the boots that a fleet of unknown speed puts at risk.
        """
        fair = self.course.fair(self.target, self.held)
        fleet = fleet_of(fair or plan)
        speed = sum(option.tokens_per_second * number for option, number in fleet)
        large = [option for option, number in fleet if option.tokens_per_second * number >= SHARE * speed]
        main = min(large or [option for option, _ in fleet], key=usd_per_token)
        if self.target.deadline is None:
            return main
        wait = main.boot_seconds + self.pace.measuring
        first = booted([(main, 1)], ())
        if fair is None or not recoverable(self.work, self.options, first, self.target, caution, self.pace):
            return None
        later = self.course.fair(replace(self.target, deadline=self.course.left - wait), [Held("pilot", main)])
        boots = sum(option.usd_per_hour / HOUR * option.boot_seconds * number for option, number in fleet)
        pilot = main.usd_per_hour / HOUR * wait
        return main if later is not None and usd(later) + pilot <= usd(fair) + boots / 2 else None

    def _begin(self, usual: Command, plan: Plan, caution: float) -> Command:
        """The fleet to begin with: the usual one, or what is expected to cost less in the end.

        Where no plan holds at full caution nothing may be tried that makes it any later.
        """
        unknown = any(unsure(one) for one in self.options)
        if caution <= 0 or not unknown or self.target.deadline is None or self.target.objective != "cheapest":
            return usual
        known = {one.name: one for one in self.options}
        kept = tuple(one for one in self.held if one.instance not in usual.retire)
        there = dict(counts(kept))
        new = tuple((known[name], n - there.get(name, 0)) for name, n in usual.offers if n > there.get(name, 0))
        later = HARDLY if caution >= 1 else 0.0
        found = best_opening(self.course, Opening(kept, new), self.pilots, self.budget, later) if new else None
        if found is None:
            return usual
        opening, outlook = found
        if not opening.new and len(opening.kept) == len(self.held):
            return self._same(f"expected to cost {outlook.usd:.2f} $ in the end, any other fleet more; {plan.reason}")
        words = f"expected to cost {outlook.usd:.2f} $ in the end, tight in {outlook.late:.0%} of the cases"
        if opening.plan is not None:
            command = self._change(opening.plan, "", needed=True)
        else:
            offers = (*counts(opening.kept), *((option.name, number) for option, number in opening.new))
            retire = tuple(one.instance for one in self.held if one not in opening.kept)
            command = Command(sum(number for _, number in offers), offers, retire, pilot=True, kind="pilot")
        fleet = " + ".join(f"{number} × {name}" for name, number in command.offers)
        return replace(command, reason=f"{fleet} to begin with: {words}; by the estimates {plan.reason}")

    def _pilot(self, main: Option, plan: Plan) -> Command:
        fleet = [(main, 1)]
        for _ in range(min(self.pilots, self.course.most) - 1):
            if (found := best_try(self.work, self.options, fleet, self.target.deadline, self.pace)) is None:
                break
            fleet.append((found.option, 1))
        offers = tuple((option.name, number) for option, number in fleet)
        reason = f"{len(fleet)} to be measured before the fleet grows; then {plan.reason}"
        return Command(len(fleet), offers, pilot=True, kind="pilot", reason=reason)

    def _explore(self, command: Command) -> Command:
        """The command, and one instance of another offer where learning its speed is worth its boot.

        At the limit on instances it takes the place of one, if the deadline can do without that one.
        """
        tried = [name for name in self.memory.tried if name not in dict(self.memory.offers)]
        options = [one for one in self.options if one.name not in tried and one.name.removesuffix(" spot") not in tried]
        known = {one.name: one for one in (*(one.option for one in self.held), *self.options)}
        fleet = [(known[name], number) for name, number in command.offers if name in known]
        if self.pilots < 2 or not fleet or any(unsure(option) for option, _ in fleet):
            return command
        found = best_try(self.work, options, fleet, self.target.deadline, self.pace)
        if found is None:
            return command
        retire = command.retire
        if command.instances >= self.course.most:
            largest = max(range(len(fleet)), key=lambda place: fleet[place][1])
            option, number = fleet[largest]
            fleet[largest] = option, number - 1
            staying = [one for one in self.held if one.instance not in retire]
            alike = [one for one in staying if one.option.name == option.name]
            spare = alike[-1:] if len(alike) == number else []
            left = booted(fleet, [one for one in staying if one not in spare])
            if number < 2 or not self.course.enough([*left, Held("try", found.option, found.option.boot_seconds)]):
                return command
            retire = (*retire, *(one.instance for one in spare))
        words = f"one {found.option.name} to learn its speed: {found.costs_usd:.2f} $, may save {found.saves_usd:.2f} $"
        offers = (*((option.name, number) for option, number in fleet), (found.option.name, 1))
        return replace(
            command,
            instances=sum(number for _, number in offers),
            offers=offers,
            retire=retire,
            pilot=True,
            kind="grow" if command.kind == "steady" else command.kind,
            reason=f"{words}; {command.reason}",
        )

    # Commands

    def _same(self, words: str, kind: Kind = "steady") -> Command:
        return Command(
            len(self.held),
            counts(self.held),
            pilot=kind == "pilot",
            kind=kind,
            reason=f"{len(self.held)} go on: {words}",
        )

    def _change(self, plan: Plan, why: str, *, needed: bool = False) -> Command:
        """From what is held to the plan's fleet. What is given up works on until what replaces it was to be had.

        Where the limit leaves no room for both, it goes first: all at once when the change is needed for the deadline
        or to be made at once, else one, and a few at a time once the new offer was to be had.
        """
        fleet: dict[str, int] = {}
        for option, number in fleet_of(plan):  # held at another price than the one it is offered at: two options
            fleet[option.name] = fleet.get(option.name, 0) + number
        kept = [one for one in self.held if one.instance in plan.keep]
        there = dict(counts(kept))
        new = {name: number - there.get(name, 0) for name, number in fleet.items() if number > there.get(name, 0)}
        others = sorted((one for one in self.held if one not in kept), key=lambda one: self._spare(one, plan))
        crowd = max(0, sum(fleet.values()) + len(others) - self.course.most)
        if new:
            plain = sum(self._spare(one, plan)[0] == 0 for one in others)
            had = any(name in there for name in new)
            few = crowd if needed else min(crowd, plain, max(1, self.course.most // CHURN) if had else 1)
            retire = others[:few]
            for _ in range(min(crowd - few, sum(new.values()))):
                most = max(new, key=lambda name: new[name])
                new[most], fleet[most] = new[most] - 1, fleet[most] - 1
        else:
            retire = [one for n, one in enumerate(others) if n < crowd or self._spare(one, plan)[0] == 0]
        for one in others:
            if one not in retire:
                fleet[one.option.name] = fleet.get(one.option.name, 0) + 1
        number = sum(fleet.values())
        reason = f"{number} instances instead of {len(self.held)}, which {why}; {plan.reason}"
        kind = self._kind(plan, number, len(retire))
        offers = tuple((name, count) for name, count in fleet.items() if count)
        return Command(number, offers, tuple(one.instance for one in retire), kind=kind, reason=reason)

    def _spare(self, one: Held, plan: Plan) -> tuple[int, float]:
        """What goes first is what comes first: known and not part of any plan, then by price, the dearest token first.

        What is being measured stays, and so does cheap spot beside a plan that does not count on spot.
        """
        dearest = max((usd_per_token(option) for option, _ in fleet_of(plan)), default=0.0)
        cheap = usd_per_token(one.option) <= (1 + WORTH) * dearest
        helps = one.option.spot and not has_spot(plan.chosen) and cheap
        return int(unsure(one.option) or helps), -usd_per_token(one.option)

    def _kind(self, plan: Plan, number: int, retired: int) -> Kind:
        if not plan.met:
            return "infeasible"
        if retired:
            return "switch" if number > len(self.held) - retired else "shrink"
        return "grow" if number > len(self.held) else "steady"

    def _short_of_money(self, plan: Plan) -> tuple[Command, Plan]:
        """The budget does not pay for all the work: as much as it pays for, where a token is cheapest."""
        free = replace(self.target, deadline=None, budget_usd=None, max_instances=1)
        cheapest = make_plan(self.work, self.options, self.held, free, detail=False)
        if cheapest.chosen is None:
            return self._same(plan.reason, "infeasible"), plan
        interval, budget = cheapest.chosen.usd, self.target.budget_usd
        if budget is not None and interval.p50**2 / interval.p95 <= budget:
            # It may yet: the speeds are not known well enough.
            self.course = replace(self.course, target=replace(self.target, budget_usd=None))
            self._perhaps = True
            command, hoped = self._steer()
            dear = hoped.chosen is None or hoped.chosen.usd.p50 > budget
            if dear and not self.measured:  # a fleet that is too dear would spend the budget on its boots
                words = f"speed not measured yet; {hoped.reason}"
                main = cheapest.chosen.fleet[0][0]
                command = self._same(words, "pilot") if self.held else self._pilot(main, hoped)
            return replace(command, reason=f"{command.reason}; the budget may not last: {plan.reason}"), hoped
        least = usd_per_token(cheapest.chosen.fleet[0][0]) * (1 + WORTH)
        alike = [one for one in self.held if usd_per_token(one.option) <= least or unsure(one.option)]
        alike = alike[: self.course.most - (0 if cheapest.keep else 1)]
        names = tuple(one.instance for one in self.held if one not in alike)
        fleet = dict(counts(alike))
        if not cheapest.keep:
            name = cheapest.chosen.fleet[0][0].name
            fleet[name] = fleet.get(name, 0) + 1
        offers, number = tuple(fleet.items()), sum(fleet.values())
        return self._explore(Command(number, offers, names, kind="infeasible", reason=plan.reason)), plan


def _needed(plan: Plan) -> str:
    if plan.chosen is not None:
        return f"{plan.chosen.usd.p50:.2f} $ more ({say_fleet(plan.chosen)}, {say_time(plan.chosen.finish.p50)})"
    return "more" if plan.earliest is None else f"at most {plan.earliest.usd.p50:.2f} $ more"
