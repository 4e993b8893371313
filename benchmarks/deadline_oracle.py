"""What somebody who knows the future would pay, and what nobody could go below.

`earliest`: the earliest finish that can be had: in every slot of every offer instances start anew after each
interruption, and the best slots up to the limit on instances are used. It is a schedule, so it can be done.

`oracle_usd`: the cost of a schedule that can be done, too: lives of instances between interruptions, known beforehand,
each with its true boot, speed and mean price, chosen by the exact cover (gpu_runner.planner.knapsack); rooms are
rounded down. Three ways to cut time into lives are tried, and the cheapest counts. It is near the optimum, not proven
to be it.

`bound_usd`: no schedule costs less. Interruptions and blackouts are left out, the price is the least over the time up
to the deadline, rooms are rounded up, and the limit on instances becomes a price μ on instance time: for each μ ≥ 0
the cost is at least cover(price + μ) - μ × most × deadline (weak duality); the best μ of a grid counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from benchmarks.deadline_world import Scenario, Truth
from gpu_runner.offers.offer import HOUR
from gpu_runner.planner.knapsack import QUANTA, KnapsackItem, solve_covering_knapsack

LIVES = 60  # of each offer, the longest ones


def earliest(scenario: Scenario) -> float:
    """Seconds of the earliest finish with at most `most` instances."""
    slots = list(_slots(scenario))
    low, high = 0.0, scenario.horizon
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if _most_work(slots, middle, scenario.most) >= scenario.tokens:
            high = middle
        else:
            low = middle
    return high


Slot = tuple[Truth, list[tuple[float, float]]]


def _most_work(slots: list[Slot], until: float, most: int) -> float:
    work = []
    for truth, lives in slots:
        seconds = 0.0
        for start, end in lives:
            if start >= until:
                break
            seconds += max(0.0, min(end, until) - start - truth.boot)
        work.append(truth.speed * seconds)
    return sum(sorted(work, reverse=True)[:most])


def _slots(scenario: Scenario) -> Iterator[Slot]:
    for truth in scenario.offers:
        for slot in range(min(truth.capacity, scenario.most)):
            yield truth, truth.windows(slot, scenario.horizon)


def oracle_usd(scenario: Scenario) -> float | None:
    """US dollars of the cheapest clairvoyant schedule; None where it finds none."""
    found = [_schedule(scenario, cut) for cut in (_lives, _calm, _in_a_row)]
    return min((usd for usd in found if usd is not None), default=None)


Stretches = list[tuple[float, float]]


def _lives(truth: Truth, lives: Stretches) -> list[Stretches]:
    """Each life of an instance for itself."""
    return [[life] for life in lives]


def _calm(truth: Truth, lives: Stretches) -> list[Stretches]:
    """Lives cut where the price changes: an instance may end before a spike, another begin after it."""
    found: list[Stretches] = []
    for start, end in lives:
        edges = [start, *(time for time in truth.usd.times if start < time < end), end]
        found += [[(a, b)] for a, b in pairwise(edges)]
    return found


def _in_a_row(truth: Truth, lives: Stretches) -> list[Stretches]:
    """All lives of a slot, one after the other, as one instance of the limit."""
    return [[(start, end) for start, end in lives if end - start > 2 * truth.boot]]


def _schedule(scenario: Scenario, cut: Callable[[Truth, Stretches], list[Stretches]]) -> float | None:
    kinds: list[KnapsackItem] = []
    for truth in scenario.offers:
        alike: dict[KnapsackItem, int] = {}
        for slot in range(min(truth.capacity, scenario.most)):
            lives = [(a, min(b, scenario.deadline)) for a, b in truth.windows(slot, scenario.horizon)]
            for stretches in cut(truth, [(a, b) for a, b in lives if b - a > truth.boot]):
                kind = _kind(scenario, truth, stretches)
                if kind is not None:
                    alike[kind] = alike.get(kind, 0) + 1
        best = sorted(alike, key=lambda kind: -kind.room)[:LIVES]
        kinds += [KnapsackItem(alike[kind], kind.room, kind.start, kind.each) for kind in best]
    found = solve_covering_knapsack(kinds, scenario.most)
    return None if found is None else found[0]


def _kind(scenario: Scenario, truth: Truth, stretches: Stretches) -> KnapsackItem | None:
    """One slot used in these stretches; what is not the first boot is spread over the work."""
    quantum = scenario.tokens / QUANTA
    seconds = sum(end - start - truth.boot for start, end in stretches)
    room = int(truth.speed * seconds / quantum)
    if room < 1:
        return None
    usd = sum(truth.usd.paid(start, end) for start, end in stretches)
    first = stretches[0]
    start = truth.usd.paid(first[0], first[1]) / (first[1] - first[0]) * truth.boot
    return KnapsackItem(1, min(QUANTA, room), start, (usd - start) / seconds * quantum / truth.speed)


def bound_usd(scenario: Scenario) -> float:
    """US dollars that no schedule goes below."""
    cheapest = [min(_until(truth, scenario.deadline)) / HOUR for truth in scenario.offers]
    best = 0.0
    for step in range(12):
        price = 0.0 if step == 0 else max(cheapest) * 2 * 0.6**step
        kinds = [_relaxed(truth, usd + price, scenario) for truth, usd in zip(scenario.offers, cheapest, strict=True)]
        found = solve_covering_knapsack(kinds, sum(kind.count for kind in kinds))
        if found is not None:
            best = max(best, found[0] - price * scenario.most * scenario.deadline)
    return best


def _until(truth: Truth, deadline: float) -> list[float]:
    return [value for time, value in zip(truth.usd.times, truth.usd.values, strict=True) if time < deadline]


def _relaxed(truth: Truth, usd_per_second: float, scenario: Scenario) -> KnapsackItem:
    quantum = scenario.tokens / QUANTA
    room = -(-truth.speed * max(0.0, scenario.deadline - truth.boot) // quantum)
    count = min(truth.capacity, scenario.most)
    return KnapsackItem(
        count, int(min(QUANTA, room)), usd_per_second * truth.boot, usd_per_second * quantum / truth.speed
    )
