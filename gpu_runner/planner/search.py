"""The search behind the planner: the cheapest fleet for a finish time, the earliest one, and those in between. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.budget import entry_usd, needed_usd
from gpu_runner.planner.knapsack import QUANTA, KnapsackItem, is_coverable, solve_covering_knapsack
from gpu_runner.planner.types import Candidate, HeldInstance, Interval, PlannedOffer, Target, Work

P95 = 1.645  # standard deviations
GRID = 1.1  # ratio of the finish times that are looked at where time is not given
MANY = 20  # instances; of more than that each does so little that the quanta of work must be smaller
FIRST = 60.0  # seconds; the first of them
NEARLY = 1.02  # when the deadline is lost, so much later than the earliest finish is as good, and may cost much less
ENDLESS = 10 * 365 * 24 * HOUR  # stands for no deadline


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances that are alike: new ones of an option, or held ones that are ready at the same time."""

    option: PlannedOffer
    count: int
    wait: float
    until: float  # seconds before the finish time at which they are not counted on any more
    held: tuple[str, ...]
    speed: float  # tokens per second of wall time, replaced when interrupted
    slow: float  # the same at P95
    counted: float  # the same at the confidence that the plan is made with
    usd_per_token: float
    start: float

    def room(self, seconds: float) -> float:
        """Tokens that one can be counted on to do within so many seconds."""
        return max(0.0, self.counted * (seconds - self.until - self.wait))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A candidate, its cost in US dollars, the held instances in it, and the finish that can be counted on."""

    usd: float
    candidate: Candidate
    keep: tuple[str, ...]
    finish: float


class PlanSearch:
    """Work, what can do it, and what is wanted. `confidence` and `spot_cutoff`: as in `make_plan`."""

    def __init__(
        self,
        work: Work,
        options: Sequence[PlannedOffer],
        held: Sequence[HeldInstance],
        target: Target,
        spot_cutoff: float = 0.0,
        confidence: float = 1.0,
    ) -> None:
        self.work = work
        self.target = target
        self.most = max(0, min(target.max_instances, work.units))
        self.spot_cutoff = spot_cutoff
        self.confidence = confidence
        alike: dict[tuple[PlannedOffer, float], list[str]] = {}
        for one in held:
            alike.setdefault((one.option, max(0.0, one.ready_in)), []).append(one.instance)
        groups = [self._group(option, len(names), wait, tuple(names)) for (option, wait), names in alike.items()]
        for option in options:
            count = self.most if option.capacity is None else option.capacity
            groups.append(self._group(option, count, option.boot_seconds, ()))
        self.groups = [group for group in groups if group.count > 0 and group.slow > 0 and self._may_begin(group)]

    def _group(self, option: PlannedOffer, count: int, wait: float, names: tuple[str, ...]) -> InstanceGroup:
        loss = option.interruptions_per_hour / HOUR * option.boot_seconds  # boots per productive second, in seconds
        speed = option.tokens_per_second / (1 + loss)
        usd_per_second = option.usd_per_hour / HOUR
        paid = usd_per_second * (1 + loss) / option.tokens_per_second if option.tokens_per_second > 0 else 0.0
        doubt = P95 * math.hypot(option.spread, self.work.spread)
        slow, counted = speed * math.exp(-doubt), speed * math.exp(-self.confidence * doubt)
        until = self.spot_cutoff if option.spot else 0.0
        start = option.held_usd_per_hour / HOUR * (wait + self.target.idle_seconds)
        return InstanceGroup(option, count, wait, until, names, speed, slow, counted, paid, start)

    def _may_begin(self, group: InstanceGroup) -> bool:
        """Whether the budget, as far as its reserve is to be seen to here, allows to order one."""
        budget, reserve = self.target.budget_usd, self.target.reserve_seconds
        return budget is None or not reserve or bool(group.held) or entry_usd(group.option, reserve) <= budget

    def choose(self, earliest: SearchResult, *, allow_late: bool = True) -> SearchResult | None:
        """What is to be done, or None when the budget allows nothing."""
        deadline = ENDLESS if self.target.deadline is None else self.target.deadline
        if self.target.objective == "cheapest":
            found = self.at(deadline)
            if found is not None and self._affordable(found):
                return found
        elif self.target.objective == "efficient":
            some = [self.at(deadline), *self._in_more_time(earliest.finish)]
            within = [one for one in some if one and one.finish <= deadline + 1e-6 and self._affordable(one)]
            if within:
                return min(within, key=lambda one: one.usd * one.candidate.finish.p50)
        fastest = self.target.objective == "fastest"
        soonest = self._soonest(earliest) if allow_late or fastest else None
        if not self.target.reserve_seconds or (fastest and soonest and soonest.finish <= deadline + 1e-6):
            return soonest
        frugal = next(filter(self._affordable, self.frugal(deadline)), None)
        if frugal is None and soonest is None and allow_late:
            frugal = next(filter(self._affordable, self.frugal(ENDLESS)), None)
        return frugal or soonest

    def frugal(self, seconds: float) -> list[SearchResult]:
        """The cheapest fleets for a finish time, each without the offers that are dearest to begin with in the last."""
        kept, reserve = self.groups, self.target.reserve_seconds
        results: list[SearchResult] = []
        while self.groups and (found := self.at(seconds)) is not None:
            results.append(found)
            dearest = max(entry_usd(option, reserve) for option, _ in found.candidate.fleet)
            self.groups = [group for group in self.groups if entry_usd(group.option, reserve) < dearest]
        self.groups = kept
        return results

    def at(self, seconds: float, quanta: int = 0) -> SearchResult | None:
        """The least cost of a finish within so many seconds. `quanta` of work; 0: as many as an exact plan takes."""
        quanta = quanta or self._quanta
        found = solve_covering_knapsack(self._kinds(seconds, quanta), self.most, quanta)
        return None if found is None else self._found(found[1], found[0])

    def possible(self, seconds: float) -> bool:
        """Whether `at` finds anything."""
        return is_coverable(self._kinds(seconds, self._quanta), self.most, self._quanta)

    @property
    def _quanta(self) -> int:
        return QUANTA if self.most <= MANY else 2 * QUANTA

    def _kinds(self, seconds: float, quanta: int) -> list[KnapsackItem]:
        quantum = self.work.tokens / quanta
        return [
            KnapsackItem(
                count=group.count,
                room=int(min(quanta, group.room(seconds) / quantum + 1e-9)),
                start=group.start,
                each=group.usd_per_token * quantum,
            )
            for group in self.groups
        ]

    def _affordable(self, found: SearchResult) -> bool:
        budget, reserve = self.target.budget_usd, self.target.reserve_seconds
        needed = needed_usd(found.candidate, reserve) if reserve else found.usd
        return budget is None or needed <= budget

    def _soonest(self, earliest: SearchResult) -> SearchResult | None:
        """The earliest finish that the budget allows, or nearly so."""
        found = self.at(NEARLY * earliest.finish) or earliest
        if self._affordable(found):
            return found
        affordable = filter(self._affordable, self._in_more_time(earliest.finish))
        return min(affordable, key=lambda one: one.finish, default=None)

    def _in_more_time(self, seconds: float) -> Iterator[SearchResult]:
        """What is cheapest for each finish time of a fixed grid, from this one to where more time saves nothing."""
        least = self.at(ENDLESS)
        if least is None or not self._affordable(least):
            return
        step = math.ceil(math.log(max(FIRST, seconds) / FIRST, GRID))
        while FIRST * GRID**step < ENDLESS:
            found = self.at(FIRST * GRID**step)
            if found is not None:
                yield found
                if found.usd <= least.usd * (1 + 1e-9):
                    return
            step += 1

    def earliest(self) -> SearchResult | None:
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
        return self._candidate(counts, rate * (self._finish(counts, 0) + self.target.idle_seconds))

    def _fastest(self, seconds: float) -> list[int]:
        counts, left = [0] * len(self.groups), self.most
        for i in sorted(range(len(self.groups)), key=lambda i: -self.groups[i].room(seconds)):
            if self.groups[i].room(seconds) > 0:
                counts[i] = min(left, self.groups[i].count)
                left -= counts[i]
        return counts

    def _used(self, counts: Sequence[int]) -> list[tuple[InstanceGroup, int]]:
        """Groups of which there is any, and how many."""
        return [(group, number) for group, number in zip(self.groups, counts, strict=True) if number]

    def _finish(self, counts: Sequence[int], how: int) -> float:
        """Seconds until all work is done when all of them work to the end; speeds 0: expected, 1: counted, 2: P95."""
        used = sorted(
            (group.wait + group.until, number * (group.speed, group.counted, group.slow)[how])
            for group, number in self._used(counts)
        )
        speed = done = 0.0
        for place, (wait, added) in enumerate(used):
            speed += added
            done -= added * wait
            finish = (self.work.tokens - done) / speed
            if place + 1 == len(used) or finish <= used[place + 1][0]:
                return finish
        return math.inf

    def _filled(self, counts: Sequence[int], seconds: float) -> float:
        """US dollars of a given fleet that finishes within so many seconds: the cheapest per token do most."""
        used = self._used(counts)
        left, usd = self.work.tokens, sum(group.start * number for group, number in used)
        for group, number in sorted(used, key=lambda pair: pair[0].usd_per_token):
            tokens = min(left, number * group.room(seconds))
            left -= tokens
            usd += tokens * group.usd_per_token
        return usd + left * max((group.usd_per_token for group, _ in used), default=0.0)

    def _found(self, counts: Sequence[int], usd: float) -> SearchResult:
        names = tuple(name for group, number in self._used(counts) for name in group.held[:number])
        return SearchResult(usd, self._candidate(counts, usd), names, self._finish(counts, 1))

    def _candidate(self, counts: Sequence[int], usd: float) -> Candidate:
        merged: Counter[PlannedOffer] = Counter()
        for group, number in self._used(counts):
            merged[group.option] += number
        worst = max((group.speed / group.slow for group, _ in self._used(counts)), default=1.0)
        finish = Interval(self._finish(counts, 0), self._finish(counts, 2))
        fleet = sorted(merged.items(), key=lambda pair: pair[0].usd_per_token)
        return Candidate(tuple(fleet), finish, Interval(usd, usd * worst))

    def curve(self, earliest: SearchResult, points: int = 12) -> tuple[Candidate, ...]:
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
