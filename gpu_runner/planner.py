"""How many instances of which offers finish the work by the deadline at the least cost. Pure.

The cost of a fleet is what its parts cost: each instance's boot, and each token at the price and speed of the instance
that does it, because an instance is ended when its share is done. Doing the work faster therefore costs boots and the
dearer offers that it takes, nothing else. For a given finish time the least cost is exact (`gpu_runner.cover`), so more
time, more offers, more capacity or more money can never make it worse.

Risk. A spot instance that is taken is replaced, and the boot is paid again: `interruptions_per_hour` boots of money and
of time per productive hour. Speeds and the amount of work are lognormal; the room of an instance is what it does at the
95th percentile (speed × exp(-1.645 σ), σ² = speed's variance + work's), so the deadline is held against P95. That is
the percentile itself for a fleet of one kind and on the careful side for a mixed one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_runner.cover import QUANTA, Kind, cheapest_cover
from gpu_runner.offers import HOUR, Objective

P95 = 1.645  # standard deviations
GRID = 1.1  # ratio of the finish times that are looked at where time is not given
FIRST = 60.0  # seconds; the first of them
NEARLY = 1.02  # when the deadline is lost, so much later than the earliest finish is as good, and may cost much less
ENDLESS = 10 * 365 * 24 * HOUR  # stands for no deadline


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


@dataclass(frozen=True, slots=True)
class _Group:
    """Instances that are alike: new ones of an option, or held ones that are ready at the same time."""

    option: Option
    count: int
    wait: float
    until: float  # seconds before the finish time at which they are not counted on any more
    held: tuple[str, ...]
    speed: float  # tokens per second of wall time, replaced when interrupted
    slow: float  # the same at P95
    counted: float  # the same at the caution that the plan is made with
    usd_per_token: float
    start: float

    def room(self, seconds: float) -> float:
        """Tokens that one can be counted on to do within so many seconds."""
        return max(0.0, self.counted * (seconds - self.until - self.wait))


def make_plan(
    work: Work,
    options: Sequence[Option],
    held: Sequence[Held],
    target: Target,
    *,
    detail: bool = True,
    ramp: float = 0.0,
    caution: float = 1.0,
    anyway: bool = True,
) -> Plan:
    """The plan with the best value of the objective.

    `cheapest`: least cost within deadline and budget. `efficient`: least cost × time within both. `fastest`: the
    earliest finish within the budget. When the deadline cannot be met within the budget: the earliest finish within
    the budget. `detail` False leaves out `next_best` and `curve`, which cost most of the time.
    `ramp`: seconds before the deadline by which spot instances must be done, so that others can still be started.
    `caution`: 1 counts on speeds at P95, 0 on speeds as expected; `met` says whether the deadline holds with it.
    `anyway` False: nothing is chosen when it does not.
    """
    desk = _Desk(work, options, held, target, ramp, caution)
    if work.tokens <= 0 or desk.most < 1:
        return _idle(work, target)
    earliest = desk.earliest()
    if earliest is None:
        return Plan(None, 0, False, None, (), (), "no offer that can do the work is to be had and nothing is held")
    chosen = desk.choose(earliest, anyway=anyway)
    deadline = (ENDLESS if target.deadline is None else target.deadline) + 1e-6
    met = chosen is not None and chosen.finish <= deadline
    within = target.deadline is None or (chosen is not None and chosen.candidate.finish.p95 <= deadline)
    curve = desk.curve(earliest) if detail else ()
    others = desk.others(chosen.candidate) if detail and chosen else ()
    return Plan(
        chosen=chosen.candidate if chosen else None,
        instances=chosen.candidate.instances if chosen else 0,
        feasible=chosen is not None and within,
        earliest=earliest.candidate,
        next_best=others,
        curve=curve,
        reason=_explain(chosen.candidate if chosen else None, within, earliest.candidate, target),
        keep=chosen.keep if chosen else (),
        met=met,
    )


def run_on(work: Work, held: Sequence[Held]) -> Candidate | None:
    """What happens when all that is held works to the end; None when it cannot end."""
    desk = _Desk(work, (), held, Target(max_instances=len(held)), 0.0, 1.0)
    return desk.all_of_it() if desk.groups else None


def _idle(work: Work, target: Target) -> Plan:
    nothing = Candidate((), Interval(0.0, 0.0), Interval(0.0, 0.0))
    if work.tokens <= 0:
        return Plan(nothing, 0, True, nothing, (), (nothing,), "nothing is left to do")
    limit = f"{target.max_instances} instances allowed, {work.units} batches left"
    return Plan(None, 0, False, None, (), (), f"no instance may work: {limit}")


@dataclass(frozen=True, slots=True)
class _Found:
    """A candidate, its cost in US dollars, the held instances in it, and the finish that can be counted on."""

    usd: float
    candidate: Candidate
    keep: tuple[str, ...]
    finish: float


class _Desk:
    """What one call of make_plan works with."""

    def __init__(
        self,
        work: Work,
        options: Sequence[Option],
        held: Sequence[Held],
        target: Target,
        ramp: float,
        caution: float,
    ) -> None:
        self.work = work
        self.target = target
        self.most = max(0, min(target.max_instances, work.units))
        self.ramp = ramp
        self.caution = caution
        self.groups = self._held(held) + [
            self._group(one, self.most if one.capacity is None else one.capacity, one.boot_seconds, ())
            for one in options
        ]
        self.groups = [group for group in self.groups if group.count > 0 and group.slow > 0]

    def _held(self, held: Sequence[Held]) -> list[_Group]:
        alike: dict[tuple[Option, float], list[str]] = {}
        for one in held:
            alike.setdefault((one.option, max(0.0, one.ready_in)), []).append(one.instance)
        return [self._group(option, len(names), wait, tuple(names)) for (option, wait), names in alike.items()]

    def _group(self, option: Option, count: int, wait: float, names: tuple[str, ...]) -> _Group:
        loss = option.interruptions_per_hour / HOUR * option.boot_seconds  # boots per productive second, in seconds
        speed = option.tokens_per_second / (1 + loss)
        usd_per_second = option.usd_per_hour / HOUR
        paid = usd_per_second * (1 + loss) / option.tokens_per_second if option.tokens_per_second > 0 else 0.0
        doubt = P95 * math.hypot(option.spread, self.work.spread)
        slow, counted = speed * math.exp(-doubt), speed * math.exp(-self.caution * doubt)
        until = self.ramp if option.spot else 0.0
        return _Group(option, count, wait, until, names, speed, slow, counted, paid, usd_per_second * wait)

    def choose(self, earliest: _Found, *, anyway: bool = True) -> _Found | None:
        """What is to be done, or None when the budget allows nothing."""
        deadline = ENDLESS if self.target.deadline is None else self.target.deadline
        if self.target.objective == "cheapest":
            found = self.at(deadline)
            if found is not None and self._affordable(found):
                return found
        elif self.target.objective == "efficient":
            found = self._efficient(earliest, deadline)
            if found is not None:
                return found
        return self._soonest(earliest) if anyway or self.target.objective == "fastest" else None

    def at(self, seconds: float) -> _Found | None:
        """The least cost of a finish within so many seconds."""
        quantum = self.work.tokens / QUANTA
        kinds = [
            Kind(
                count=group.count,
                room=int(min(QUANTA, group.room(seconds) / quantum + 1e-9)),
                start=group.start,
                each=group.usd_per_token * quantum,
            )
            for group in self.groups
        ]
        found = cheapest_cover(kinds, self.most)
        return None if found is None else self._found(found[1], found[0])

    def _affordable(self, found: _Found) -> bool:
        return self.target.budget_usd is None or found.usd <= self.target.budget_usd

    def _efficient(self, earliest: _Found, deadline: float) -> _Found | None:
        best: tuple[float, _Found] | None = None
        for seconds in _grid(earliest.finish, min(deadline, 40 * earliest.finish + 10 * HOUR)):
            found = self.at(seconds)
            if found is not None and self._affordable(found):
                value = found.usd * found.candidate.finish.p50
                if best is None or value < best[0]:
                    best = value, found
        return best[1] if best else None

    def _soonest(self, earliest: _Found) -> _Found | None:
        """The earliest finish that the budget allows, or nearly so. All finish times of the grid are looked at from the
        first that it pays for (bisection, because cost falls as time grows) to where more time saves nothing."""
        soon = NEARLY * earliest.finish
        first = self.at(soon) or earliest
        if self._affordable(first):
            return first
        low = max(0, math.ceil(math.log(max(FIRST, soon) / FIRST, GRID)))
        high = math.ceil(math.log(ENDLESS / FIRST, GRID))
        least = self.at(FIRST * GRID**high)
        if least is None or not self._affordable(least):
            return None
        while low < high:
            middle = (low + high) // 2
            found = self.at(FIRST * GRID**middle)
            low, high = (low, middle) if found is not None and self._affordable(found) else (middle + 1, high)
        best = self.at(FIRST * GRID**low) or least
        for found in self._later(low + 1, least):
            if found.finish < best.finish:
                best = found
        return best

    def _later(self, step: int, least: _Found) -> Iterator[_Found]:
        """What is chosen for each finish time of the grid, up to the least cost of all."""
        while (found := self.at(FIRST * GRID**step)) is not None:
            yield found
            if found.usd <= least.usd * (1 + 1e-9):
                return
            step += 1

    def earliest(self) -> _Found | None:
        """The fleet with the earliest finish that can be counted on.

        Newton's method on the most work that can be done by a time: that function is convex and piecewise linear in
        time, so from above the method ends at the root.
        """
        if not self.groups:
            return None
        counts = self._fastest(ENDLESS)
        finish = self._finish(counts, 1)
        for _ in range(100):
            counts = self._fastest(finish)
            sooner = self._finish(counts, 1)
            if not sooner < finish * (1 - 1e-9):
                break
            finish = sooner
        return self._found(counts, self._filled(counts, finish)) if finish < math.inf else None

    def all_of_it(self) -> Candidate:
        """All instances that there are, paid until the expected finish."""
        counts = [group.count for group in self.groups]
        rate = sum(group.count * group.option.usd_per_hour for group in self.groups) / HOUR
        return self._candidate(counts, rate * self._finish(counts, 0))

    def _fastest(self, seconds: float) -> list[int]:
        counts, left = [0] * len(self.groups), self.most
        for i in sorted(range(len(self.groups)), key=lambda i: -self.groups[i].room(seconds)):
            if self.groups[i].room(seconds) > 0:
                counts[i] = min(left, self.groups[i].count)
                left -= counts[i]
        return counts

    def _finish(self, counts: Sequence[int], how: int) -> float:
        """Seconds until all work is done when all of them work to the end; speeds 0: expected, 1: counted, 2: P95."""
        used = sorted(
            (group.wait + group.until, number * (group.speed, group.counted, group.slow)[how])
            for group, number in zip(self.groups, counts, strict=True)
            if number
        )
        speed = done = 0.0
        for place, (wait, pace) in enumerate(used):
            speed += pace
            done -= pace * wait
            finish = (self.work.tokens - done) / speed
            if place + 1 == len(used) or finish <= used[place + 1][0]:
                return finish
        return math.inf

    def _filled(self, counts: Sequence[int], seconds: float) -> float:
        """US dollars of a given fleet that finishes within so many seconds: the cheapest per token do most."""
        used = [(group, number) for group, number in zip(self.groups, counts, strict=True) if number]
        left, usd = self.work.tokens, sum(group.start * number for group, number in used)
        for group, number in sorted(used, key=lambda pair: pair[0].usd_per_token):
            tokens = min(left, number * group.room(seconds))
            left -= tokens
            usd += tokens * group.usd_per_token
        return usd + left * max((group.usd_per_token for group, _ in used), default=0.0)

    def _found(self, counts: Sequence[int], usd: float) -> _Found:
        names = tuple(name for group, number in zip(self.groups, counts, strict=True) for name in group.held[:number])
        return _Found(usd, self._candidate(counts, usd), names, self._finish(counts, 1))

    def _candidate(self, counts: Sequence[int], usd: float) -> Candidate:
        used = [(group, number) for group, number in zip(self.groups, counts, strict=True) if number]
        merged: dict[Option, int] = {}
        for group, number in used:
            merged[group.option] = merged.get(group.option, 0) + number
        worst = max((group.speed / group.slow for group, _ in used), default=1.0)
        finish = Interval(self._finish(counts, 0), self._finish(counts, 2))
        fleet = sorted(merged.items(), key=lambda pair: pair[0].usd_per_hour / pair[0].tokens_per_second)
        return Candidate(tuple(fleet), finish, Interval(usd, usd * worst))

    def curve(self, earliest: _Found, points: int = 12) -> tuple[Candidate, ...]:
        """Pareto points from the earliest finish to where more time saves nothing."""
        found, least = [earliest.candidate], self.at(ENDLESS)
        last = max(earliest.finish, least.finish if least else 0.0) * 1.0001
        for step in range(1, points):
            one = self.at(earliest.finish * (last / earliest.finish) ** (step / (points - 1)))
            if one is not None and one.usd < found[-1].usd.p50 * (1 - 1e-6):
                found.append(one.candidate)
        return tuple(found)

    def others(self, chosen: Candidate) -> tuple[Candidate, ...]:
        """The best plans that do without one of the chosen offers, and without any spot."""
        kept = self.groups
        found: list[Candidate] = []
        without = [{option.name} for option, _ in chosen.fleet[:2]]
        without.append({group.option.name for group in kept if group.option.spot})
        for names in without:
            self.groups = [group for group in kept if group.option.name not in names]
            if names and self.groups:
                earliest = self.earliest()
                other = self.choose(earliest) if earliest else None
                if other is not None and other.candidate not in (chosen, *found):
                    found.append(other.candidate)
        self.groups = kept
        return tuple(sorted(found, key=lambda one: one.usd.p50)[:3])


def _grid(first: float, last: float) -> list[float]:
    """Finish times of a fixed geometric grid within bounds; the last bound alone where none lies between."""
    step = math.ceil(math.log(max(first, FIRST) / FIRST, GRID))
    found = []
    while FIRST * GRID**step <= last:
        found.append(FIRST * GRID**step)
        step += 1
    return found or [last]


def say_fleet(candidate: Candidate) -> str:
    """`3 × aws/p4d spot + 1 × lambda/a10`."""
    return " + ".join(f"{number} × {option.name}" for option, number in candidate.fleet) or "nothing"


def say_time(seconds: float) -> str:
    """Hours, or minutes when there are few."""
    return f"{seconds / HOUR:.1f} h" if abs(seconds) >= 2 * HOUR else f"{seconds / 60:.0f} min"


def _explain(chosen: Candidate | None, within: bool, earliest: Candidate, target: Target) -> str:
    budget = "" if target.budget_usd is None else f", budget {target.budget_usd:.2f} $"
    soonest = (
        f"the earliest possible finish is in {say_time(earliest.finish.p95)} (P95) with {say_fleet(earliest)} "
        f"for {earliest.usd.p50:.2f} $"
    )
    if chosen is None and target.budget_usd is None:
        return f"the deadline in {say_time(target.deadline or 0.0)} cannot be met: {soonest}"
    if chosen is None:
        return f"the budget of {target.budget_usd or 0.0:.2f} $ does not pay for all the work: {soonest}"
    figures = (
        f"{say_fleet(chosen)}: done in {say_time(chosen.finish.p50)} (P95 {say_time(chosen.finish.p95)}) "
        f"for {chosen.usd.p50:.2f} $ (P95 {chosen.usd.p95:.2f} $)"
    )
    if target.deadline is None:
        return figures + budget
    wanted = f"deadline in {say_time(target.deadline)}{budget}"
    return f"{figures}; {wanted}" if within else f"too late: {figures}; {wanted}; {soonest}"
