"""The worlds of benchmarks/deadline.py: recorded prices, and everything that no price list records, seeded.

What is drawn, and from which ranges, is said in the docstring of benchmarks/deadline.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from gpu_runner.offers.gpus import WITHOUT_BFLOAT16
from gpu_runner.offers.offer import HOUR, Offer
from gpu_runner.offers.speed import LengthMix, ModelFacts, Speed, Throughput
from gpu_runner.planner.speed_model import CARD, COMMON, KNOWN_STD, HardwareType, SpeedEstimate
from resources.pricing.sources import PriceHistory

ROWS = (50_000, 20_000_000)
SLACK = (1.1, 10.0)
BUDGET = (1.25, 4.0)  # times the oracle's cost
BATCH = 250
MODELS = (
    ModelFacts("8B", weight_bytes=16.4e9, active_parameters=8.2e9, kv_bytes_per_token=147_456),
    ModelFacts("32B", weight_bytes=65.5e9, active_parameters=32.8e9, kv_bytes_per_token=262_144),
)
TAKEN = {"aws": 0.05, "azure": 0.05, "gcp": 0.08, "jarvislabs": 0.12}  # believed interruptions per instance and hour
SPREADS = (0.5, 0.2, 0.05)  # of an estimate, a scaled and a measured speed
SPREAD_CHANCES = (0.5, 0.25, 0.25)
LENGTHS_UNKNOWN = 0.15  # relative standard deviation of the work before lengths are measured

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Steps:
    """A price over time: `values[i]` from `times[i]` on; seconds from the start, US dollars per hour."""

    times: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, time: float) -> float:
        return self.values[bisect_right(self.times, time) - 1]

    def paid(self, start: float, end: float) -> float:
        """US dollars from `start` to `end`."""
        usd, place = 0.0, bisect_right(self.times, start) - 1
        while start < end:
            until = min(end, self.times[place + 1]) if place + 1 < len(self.times) else end
            usd += self.values[place] / HOUR * (until - start)
            start, place = until, place + 1
        return usd


@dataclass(eq=False, slots=True)
class Truth:
    """An offer as it really is, and as it is believed to be."""

    name: str
    hardware: HardwareType
    spot: bool
    usd: Steps
    believed: SpeedEstimate
    speed: float
    boot_believed: float
    boot: float
    capacity: int
    taken_believed: float
    taken: float
    blackouts: tuple[tuple[float, float], ...]  # nothing new is to be had; spot instances are all taken as it begins
    seed: int
    _kills: dict[int, list[float]] = field(default_factory=dict)

    def kills(self, slot: int, horizon: float) -> list[float]:
        """When whatever stands in this slot is taken. On demand: never."""
        if not self.spot:
            return []
        if slot not in self._kills:
            dice = np.random.default_rng((self.seed, slot))
            count = dice.poisson(self.taken / HOUR * horizon)
            alone = dice.uniform(0, horizon, count).tolist()
            self._kills[slot] = sorted([*alone, *(start for start, _ in self.blackouts)])
        return self._kills[slot]

    def dark(self, time: float) -> bool:
        """Whether nothing new is to be had."""
        return any(start <= time < end for start, end in self.blackouts)

    def windows(self, slot: int, horizon: float) -> list[tuple[float, float]]:
        """The stretches of time in which an instance in this slot can live."""
        edges = [0.0]
        found = []
        for kill in [*self.kills(slot, horizon), horizon]:
            start = max([edges[-1], *(end for begin, end in self.blackouts if begin <= edges[-1] < end)])
            if kill > start:
                found.append((start, kill))
            edges.append(kill)
        return found


@dataclass(eq=False, slots=True)
class Scenario:
    """One world. Times in seconds from the start; `deadline` and `budget` are set once the oracle has spoken."""

    number: int
    offers: tuple[Truth, ...]
    tokens: float
    tokens_believed: float
    rows: int
    most: int
    horizon: float
    slack: float
    budget_factor: float | None
    noise: float  # of measured speeds
    deadline: float = math.inf
    budget: float | None = None

    @property
    def batches(self) -> int:
        return -(-self.rows // BATCH)


@cache
def recorded(path: Path) -> tuple[tuple[float, tuple[Offer, ...]], ...]:
    """Moments and what was offered then."""
    history = PriceHistory(path)
    return tuple((moment, tuple(history.offers(moment))) for moment in history.times())


def draw(path: Path, seed: int, number: int) -> Scenario:
    """The world of this number."""
    for attempt in range(100):
        dice = np.random.default_rng((seed, number, attempt))
        scenario = _draw(path, dice, number)
        if scenario is not None:
            return scenario
    raise RuntimeError(f"{path}: expected offers that can serve a model of 8B, found too few")


def _draw(path: Path, dice: Rng, number: int) -> Scenario | None:
    moments = recorded(path)
    place = int(dice.integers(0, len(moments)))
    facts = MODELS[int(dice.integers(0, len(MODELS)))]
    mix = LengthMix(_log_uniform(dice, 150, 800), _log_uniform(dice, 80, 500))
    throughput = Throughput()
    able: dict[str, list[tuple[Offer, float]]] = {}
    for offer in moments[place][1]:
        if offer.gpu in WITHOUT_BFLOAT16 or not 1 <= offer.gpus <= 8:
            continue
        speed = throughput.speed(facts, offer.gpu, offer.gpu_memory_gib, offer.gpus, mix)
        if isinstance(speed, Speed):
            found = able.setdefault(offer.name.removesuffix(" spot"), [])
            if offer.name not in [other.name for other, _ in found]:  # a name without an instance type can be two
                found.append((offer, speed.tokens_per_second))
    names = sorted(able)
    if len(names) < 2:
        return None
    names = [str(name) for name in dice.permutation(names)[: int(dice.integers(3, 11))]]
    with_spot = dice.random() < 0.85
    picked = [pair for name in names for pair in able[name] if with_spot or not pair[0].spot]
    if all(offer.spot for offer, _ in picked):
        return None
    rows = round(_log_uniform(dice, *ROWS))
    most = int(dice.choice([8, 20, 50]))
    tokens = rows * mix.tokens
    horizon = 40 * tokens / max(speed for _, speed in picked) + 40 * HOUR
    speeds = _Speeds(dice)
    offers = _truths(dice, moments[place:], picked, most, horizon, speeds)
    return Scenario(
        number=number,
        offers=tuple(offers),
        tokens=tokens,
        tokens_believed=tokens * float(np.exp(dice.normal(0, LENGTHS_UNKNOWN))),
        rows=rows,
        most=most,
        horizon=horizon,
        slack=_log_uniform(dice, *SLACK),
        budget_factor=_log_uniform(dice, *BUDGET) if dice.random() < 0.5 else None,
        noise=float(dice.normal(0, 0.02)),
    )


def _log_uniform(dice: Rng, low: float, high: float) -> float:
    return float(np.exp(dice.uniform(math.log(low), math.log(high))))


class _Speeds:
    """True speeds: estimates err together, by card, and each for itself, whoever rents the machine out."""

    def __init__(self, dice: Rng) -> None:
        self._dice = dice
        self._common = float(dice.normal())
        self._cards: dict[tuple[str, float], float] = {}
        self._machines: dict[HardwareType, tuple[float, float]] = {}

    def of(self, hardware: HardwareType, estimate: float) -> tuple[SpeedEstimate, float]:
        if hardware not in self._machines:
            card = self._cards.setdefault((hardware.gpu, hardware.memory_gib), float(self._dice.normal()))
            own, spread = float(self._dice.normal()), float(self._dice.choice(SPREADS, p=SPREAD_CHANCES))
            if spread > KNOWN_STD:
                own = COMMON**0.5 * self._common + CARD**0.5 * card + (1 - COMMON - CARD) ** 0.5 * own
            self._machines[hardware] = spread, own
        spread, error = self._machines[hardware]
        return SpeedEstimate(estimate, spread), estimate * math.exp(spread * error)


def _truths(
    dice: Rng,
    moments: Sequence[tuple[float, tuple[Offer, ...]]],
    picked: Sequence[tuple[Offer, float]],
    most: int,
    horizon: float,
    speeds: _Speeds,
) -> list[Truth]:
    boots = {offer.provider: float(dice.choice([240.0, 480.0, 900.0])) for offer, _ in picked}
    on_demand = {offer.name: offer.price_per_hour for offer, _ in picked if not offer.spot}
    found = []
    for offer, estimate in picked:
        hardware = HardwareType(offer.gpu, offer.gpu_memory_gib, offer.gpus)
        believed, speed = speeds.of(hardware, estimate)
        blackouts = _stretches(dice, 1 / (200 * HOUR) if offer.spot else 1 / (300 * HOUR), horizon, 1 * HOUR, 4 * HOUR)
        boot = boots[offer.provider]
        taken = TAKEN.get(offer.provider, 0.1) if offer.spot else 0.0
        found.append(
            Truth(
                name=offer.name,
                hardware=hardware,
                spot=offer.spot,
                usd=_prices(dice, offer, moments, horizon, on_demand.get(offer.name.removesuffix(" spot"), math.inf)),
                believed=believed,
                speed=speed,
                boot_believed=boot,
                boot=boot * float(np.exp(dice.normal(0, 0.25))),
                capacity=most if dice.random() < 0.5 else int(dice.choice([2, 4, 8, 16])),
                taken_believed=taken,
                taken=taken * float(np.exp(dice.normal(0, 0.7))),
                blackouts=blackouts,
                seed=int(dice.integers(0, 2**31)),
            )
        )
    return found


def _stretches(dice: Rng, rate: float, horizon: float, low: float, high: float) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    time = float(dice.exponential(1 / rate))
    while time < horizon:
        end = time + float(dice.uniform(low, high))
        found.append((time, end))
        time = end + float(dice.exponential(1 / rate))
    return tuple(found)


def _prices(
    dice: Rng, offer: Offer, moments: Sequence[tuple[float, tuple[Offer, ...]]], horizon: float, ceiling: float
) -> Steps:
    """The recorded price and its recorded changes; on spot, spikes on top, up to the price on demand."""
    start = moments[0][0]
    steps = [(0.0, offer.price_per_hour)]
    for moment, offers in moments[1:]:
        if moment - start > horizon:
            break
        price = next((one.price_per_hour for one in offers if one.name == offer.name), steps[-1][1])
        if price != steps[-1][1]:
            steps.append((moment - start, price))
    base = Steps(tuple(time for time, _ in steps), tuple(price for _, price in steps))
    if not offer.spot:
        return base
    edges = set(base.times)
    spikes = [
        (begin, end, float(dice.uniform(1.3, 3.0)))
        for begin, end in _stretches(dice, 1 / (60 * HOUR), horizon, 1 * HOUR, 4 * HOUR)
    ]
    edges |= {edge for begin, end, _ in spikes for edge in (begin, end)}
    times = tuple(sorted(edges))
    values = []
    for time in times:
        factor = next((factor for begin, end, factor in spikes if begin <= time < end), 1.0)
        values.append(min(base.at(time) * factor, max(ceiling, base.at(time))))
    return Steps(times, tuple(values))
