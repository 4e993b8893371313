"""One policy in one world: an event-driven replay of launches, boots, interruptions, prices and work.

The policy sees what the platform's sensor sees: beliefs, measured speeds, prices of now, what is held, money spent. It
is asked at regular ticks and `REACTION` seconds after each event that it can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.deadline_world import BATCH, LENGTHS_UNKNOWN, Scenario, Truth
from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.speed_model import HardwareType, SpeedEstimate, condition_on
from gpu_runner.planner.types import TIMING, HeldInstance, PlannedOffer, Target, Work

REACTION = 30.0  # seconds from an event to the next decision: the sensor's tick
LOST = 20.0  # seconds of an instance's work that are lost when it is taken: rows in flight
DRAIN = 30.0  # seconds that an instance is paid for after it was told to end
LEFT_ALONE = 300.0  # seconds for which an offer that had none is not asked again
LATE = 6.0  # the replay ends at so many times the deadline


@dataclass(frozen=True, slots=True)
class View:
    """What a policy is shown. `spent`: US dollars. `tokens_per_unit` of a batch."""

    now: float
    work: Work
    options: tuple[PlannedOffer, ...]
    held: tuple[HeldInstance, ...]
    target: Target
    measured: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """What a policy wants: how many of each offer in all, and which held ones to end. `reason` for the log."""

    fleet: tuple[tuple[str, int], ...]
    retire: tuple[str, ...] = ()
    reason: str = ""


Policy = Callable[[View], Wish]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it. `finish`: seconds, infinite when the work was never done. `changes`: of the fleet, by wish."""

    finish: float
    usd: float
    launches: int
    taken: int
    changes: int


@dataclass(eq=False, slots=True)
class _Instance:
    name: str
    truth: Truth
    slot: int
    start: float
    ready: float
    taken: float
    worked: float = 0.0


@dataclass(slots=True)
class Replay:
    """The state of a replay. `log` gets one line for each change when it is a list."""

    scenario: Scenario
    policy: Policy
    log: list[str] | None = None
    now: float = 0.0
    left: float = 0.0
    usd: float = 0.0
    standing: list[_Instance] = field(default_factory=list)
    measured: dict[HardwareType, float] = field(default_factory=dict)
    refused: dict[str, float] = field(default_factory=dict)
    launches: int = 0
    taken: int = 0
    changes: int = 0
    tick: float = 0.0

    def run(self) -> Outcome:
        """Until the work is done, or hopelessly late."""
        world = self.scenario
        self.left = world.tokens
        every = min(max(30.0, world.deadline / 200), 1800.0)
        edges = sorted({edge for truth in world.offers for edge in _edges(truth)} | {world.deadline})
        place = 0
        while self.now < LATE * world.deadline:
            if self.now >= self.tick:
                self._ask()
                self.tick = self.now + every
            while place < len(edges) and edges[place] <= self.now:
                place += 1
            until = min(self.tick, self._next(), edges[place] if place < len(edges) else math.inf)
            if self._advance(max(until, self.now + 1e-6)):
                return self._outcome(self.now)
            if place < len(edges) and self.now >= edges[place]:
                self.tick = min(self.tick, self.now + REACTION)
        return self._outcome(math.inf)

    def _outcome(self, finish: float) -> Outcome:
        return Outcome(finish, self.usd, self.launches, self.taken, self.changes)

    def _next(self) -> float:
        """The next boot, loss, measurement, or moment at which the budget calls for a decision."""
        moments = [math.inf]
        for one in self.standing:
            moments.append(one.taken)
            if one.ready > self.now:
                moments.append(one.ready)
            elif one.truth.hardware not in self.measured:
                moments.append(one.ready + TIMING.measuring)
        if self.scenario.budget is not None:
            rate = sum(one.truth.usd.at(self.now) for one in self.standing) / HOUR
            last = (self.scenario.budget - self.usd) / rate - TIMING.reserve if rate else math.inf
            if last > 0:
                moments.append(self.now + last)
        return min(moments)

    def _advance(self, until: float) -> bool:
        """On to `until`, or to the end of the work; True when it is done."""
        working = [one for one in self.standing if one.ready <= self.now]
        speed = sum(one.truth.speed for one in working)
        done = speed > 0 and self.left <= speed * (until - self.now)
        if done:
            until = self.now + self.left / speed
        for one in self.standing:
            self.usd += one.truth.usd.paid(self.now, until)
        for one in working:
            one.worked += until - self.now
        self.left = 0.0 if done else self.left - speed * (until - self.now)
        self.now = until
        if done:
            return True
        for one in [one for one in self.standing if one.taken <= self.now]:
            self._lose(one)
        for one in self.standing:
            if abs(one.ready - self.now) < 1e-3:
                self.tick = min(self.tick, self.now + REACTION)
            if one.worked >= TIMING.measuring - 1e-3 and one.truth.hardware not in self.measured:
                self.measured[one.truth.hardware] = one.truth.speed * math.exp(self.scenario.noise)
                self.tick = self.now
        if self.scenario.budget is not None:
            rate = sum(one.truth.usd.at(self.now) for one in self.standing) / HOUR
            if self.usd + rate * TIMING.reserve >= self.scenario.budget - 1e-6:
                self.tick = self.now if rate else self.tick
        return False

    def _lose(self, one: _Instance) -> None:
        self.standing.remove(one)
        self.taken += 1
        self.left = min(self.scenario.tokens, self.left + one.truth.speed * min(LOST, one.worked))
        self.tick = min(self.tick, self.now + REACTION)
        self._note(f"{one.name} taken ({one.truth.name})")

    def _ask(self) -> None:
        wish = self.policy(self._view())
        ended = [one for one in self.standing if one.name in wish.retire]
        for one in ended:
            self.standing.remove(one)
            self.usd += one.truth.usd.paid(self.now, min(self.now + DRAIN, one.taken))
        began = sum(self._launch(name, number) for name, number in wish.fleet)
        if ended or began:
            self.changes += 1
            self._note(f"-{len(ended)} +{began}: {wish.reason}")

    def _launch(self, name: str, number: int) -> int:
        truth = next(truth for truth in self.scenario.offers if truth.name == name)
        used = {one.slot for one in self.standing if one.truth is truth}
        began = 0
        while len(used) < min(number, truth.capacity) and len(self.standing) < self.scenario.most:
            if truth.dark(self.now):
                self.refused[name] = self.now + LEFT_ALONE
                self.tick = min(self.tick, self.now + REACTION)
                break
            slot = next(i for i in range(truth.capacity) if i not in used)
            used.add(slot)
            kills = truth.kills(slot, self.scenario.horizon)
            taken = next((kill for kill in kills if kill > self.now), math.inf)
            self.launches += 1
            self.standing.append(_Instance(f"i{self.launches}", truth, slot, self.now, self.now + truth.boot, taken))
            began += 1
        return began

    def _view(self) -> View:
        world = self.scenario
        beliefs = condition_on({truth.hardware: truth.believed for truth in world.offers}, self.measured)
        options = {truth.name: self._option(truth, beliefs[truth.hardware]) for truth in world.offers}
        held = tuple(
            HeldInstance(
                one.name, options[one.truth.name], max(0.0, one.start + one.truth.boot_believed - self.now, 1.0)
            )
            if one.ready > self.now
            else HeldInstance(one.name, options[one.truth.name])
            for one in self.standing
        )
        known = bool(self.measured)
        factor = math.exp(world.noise) if known else world.tokens_believed / world.tokens
        return View(
            now=self.now,
            work=Work(
                tokens=self.left * factor,
                total_tokens=world.tokens * factor,
                started_ago=self.now,
                units=max(
                    len(self.standing), math.ceil(world.rows * self.left / world.tokens / BATCH)
                ),  # each has one open
                spread=0.02 if known else LENGTHS_UNKNOWN,
            ),
            options=tuple(options.values()),
            held=held,
            target=Target(
                deadline=world.deadline - self.now,
                budget_usd=None if world.budget is None else world.budget - self.usd,
                max_instances=world.most,
            ),
            measured=known,
        )

    def _option(self, truth: Truth, belief: SpeedEstimate) -> PlannedOffer:
        used = sum(one.truth is truth for one in self.standing)
        alone = self.refused.get(truth.name, 0.0) > self.now
        return PlannedOffer(
            name=truth.name,
            usd_per_hour=truth.usd.at(self.now),
            tokens_per_second=belief.tokens_per_second,
            boot_seconds=truth.boot_believed,
            capacity=0 if alone else truth.capacity - used,
            spot=truth.spot,
            interruptions_per_hour=truth.taken_believed,
            spread=belief.spread,
            hardware=truth.hardware,
        )

    def _note(self, words: str) -> None:
        if self.log is not None:
            share = 1 - self.left / self.scenario.tokens
            self.log.append(
                f"{self.now / HOUR:8.2f} h of {self.scenario.deadline / HOUR:.2f}  {share:6.1%}  {self.usd:9.2f} $  "
                f"{len(self.standing):3d}  {words}"
            )


def _edges(truth: Truth) -> Sequence[float]:
    return [*truth.usd.times, *(edge for pair in truth.blackouts for edge in pair)]
