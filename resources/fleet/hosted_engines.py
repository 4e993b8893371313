"""Engines of fleet.yaml as the planner and the list of offers take them: those that are paid by the token, and those
without a price. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpu_runner.money import format_usd
from gpu_runner.offers.offer import HOUR, Objective, Offer, RankedOffer
from gpu_runner.offers.speed import Speed
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.types import PlannedOffer
from gpu_runner.request_limits import BatchLimits
from resources.engine_options import PLAIN, EngineOptions
from resources.fleet.fleet_config import EngineConfig, FleetConfig, FleetConfigError
from resources.fleet.planner_options import SPREAD

ASSUMED_SPEED = 1_000.0  # tokens per second of one that was never used; its cost does not depend on it
SOURCE = "fleet.yaml"
MARGIN = 1.1  # times the windows of batches, that the deadline must leave
ELSEWHERE_MARGIN = 2.0  # times what the work takes elsewhere: then batches that have not come are not waited for


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Whether the work goes to a Batch API. `why`: a sentence for people. `in_time`: whether its batches may come
    before the deadline, and can still be waited for.
    """

    engine: EngineConfig
    taken: bool
    in_time: bool
    why: str
    elsewhere: bool = True  # something else can be had

    def describe(self) -> str:
        """For people."""
        return f"{self.engine.name} {'is taken' if self.taken else 'is not taken'}: {self.why}"


def weigh_batches(
    engine: EngineConfig,
    work: Workload,
    *,
    deadline_in: float | None,
    objective: Objective,
    rivals: Sequence[EngineConfig],
    rented: Sequence[RankedOffer],
    sent_ago: float = 0.0,
) -> BatchVerdict:
    """A Batch API against all else that serves the model: `rivals` of fleet.yaml, and what can be `rented`, best first.

    `deadline_in`: seconds that are left. `sent_ago`: since its batches were sent, of a request under way.
    """
    limits = engine.limits.batches
    assert limits is not None
    usd, window = work.tokens * _usd_per_token(engine, work), _windows(limits, work)
    rounds = round(window / limits.window_seconds)
    hours = limits.completion_window + (f" × {rounds}" if rounds > 1 else "")
    others = [(work.tokens * _usd_per_token(one, work), one.name, work.tokens / ASSUMED_SPEED) for one in rivals]
    others += [(one.usd, one.offer.name, one.seconds) for one in rented]
    said = f"its tokens cost {format_usd(usd)} $"
    if not others:
        return BatchVerdict(engine, True, True, f"{said}; nothing else can be had", elsewhere=False)
    cheapest, name, _ = min(others)
    said += f", {name} {format_usd(cheapest)} $"
    if deadline_in is not None:
        left, needed = f"the {_hours(deadline_in)} that are left", MARGIN * window - sent_ago
        if deadline_in < needed:
            return BatchVerdict(engine, False, False, f"its window of {hours} is longer than {left}; {said}")
        if deadline_in < ELSEWHERE_MARGIN * min(seconds for _, _, seconds in others):
            return BatchVerdict(engine, False, False, f"{left} are needed to do the work elsewhere; {said}")
    if objective == "fastest":
        return BatchVerdict(engine, False, True, f"the fastest is wanted, and its window is {hours}; {said}")
    if cheapest <= usd:
        return BatchVerdict(engine, False, True, said)
    fits = "" if deadline_in is None else f"; its window of {hours} fits the {_hours(deadline_in)} that are left"
    return BatchVerdict(engine, True, True, f"{said}{fits}")


def _windows(limits: BatchLimits, work: Workload) -> float:
    """Seconds of as many windows as there are rounds of batches."""
    return limits.window_seconds * max(1, -(-work.rows // limits.rows))


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR:.3g} h" if seconds >= 0.1 * HOUR else f"{max(0.0, seconds):.0f} s"


def hosted_engines(
    config: FleetConfig, model: str, endpoint: str | None, options: EngineOptions = PLAIN
) -> Sequence[EngineConfig]:
    """Those that would serve the model, or the one at `endpoint`. None where one of them is not paid by the token: what
    runs take first is not known to cost anything.
    """
    try:
        engines = config.engines_for(model, endpoint, options)
    except FleetConfigError:
        return ()
    return engines if all(engine.token_price is not None for engine in engines) else ()


def unpriced_engines(
    config: FleetConfig, model: str, endpoint: str | None, options: EngineOptions = PLAIN
) -> Sequence[EngineConfig]:
    """Engines without a price that a run takes before it rents: those that would serve the model, or the one at
    `endpoint`.
    """
    try:
        engines = config.engines_for(model, endpoint, options)
    except FleetConfigError:
        return ()
    return [engine for engine in engines if engine.token_price is None]


def engine_speed(name: str, speeds: Mapping[str, Speed]) -> Speed:
    """How fast an engine is taken to be. `speeds`: by name, of those that were used."""
    return speeds.get(name, Speed(ASSUMED_SPEED, "estimate"))


def unpriced_options(
    engines: Sequence[EngineConfig], work: Workload, speeds: Mapping[str, Speed]
) -> tuple[PlannedOffer, ...]:
    """As the planner sees them: they cost nothing but the user's texts at another engine."""
    return tuple(
        PlannedOffer(
            engine.name,
            _usd_per_token(engine, work) * engine_speed(engine.name, speeds).tokens_per_second * HOUR,
            engine_speed(engine.name, speeds).tokens_per_second,
            0.0,
            capacity=1,
            spread=SPREAD[engine_speed(engine.name, speeds).basis],
            row_usd=0.0,
        )
        for engine in engines
    )


def hosted_options(
    engines: Sequence[EngineConfig], work: Workload, speeds: Mapping[str, Speed]
) -> tuple[PlannedOffer, ...]:
    """As the planner sees them. `speeds`: by name, of those that were used."""
    return tuple(
        PlannedOffer(
            name=engine.name,
            usd_per_hour=_usd_per_token(engine, work) * _speed(engine, work, speeds) * HOUR,
            tokens_per_second=_speed(engine, work, speeds),
            boot_seconds=0.0,
            capacity=1,
            row_usd=work.row_usd(engine.token_price) if engine.token_price is not None else 0.0,
        )
        for engine in engines
    )


def hosted_offers(
    engines: Sequence[EngineConfig], work: Workload, speeds: Mapping[str, Speed], now: float
) -> list[RankedOffer]:
    """As offers for this work: the price of an hour is that of the tokens of an hour."""
    found: list[RankedOffer] = []
    for engine in engines:
        speed, price = _speed(engine, work, speeds), _usd_per_token(engine, work)
        offer = Offer(
            provider=engine.name,
            region=engine.region,
            instance_type=engine.kind,
            gpu="",
            gpus=0,
            gpu_memory_gib=0.0,
            spot=False,
            price_per_hour=price * speed * HOUR,
            boot_seconds=0.0,
            reliability=1.0,
            observed_at=now,
            source=SOURCE,
            by_tokens=True,
        )
        known = replace(engine_speed(engine.name, speeds), tokens_per_second=speed)
        found.append(RankedOffer(offer, known, work.tokens / speed, work.tokens * price))
    return found


def _speed(engine: EngineConfig, work: Workload, speeds: Mapping[str, Speed]) -> float:
    """Tokens per second. What goes out as batches takes as long as the provider may take, however much it is."""
    if (batches := engine.limits.batches) is not None:
        return max(1.0, work.tokens) / _windows(batches, work)
    return engine_speed(engine.name, speeds).tokens_per_second


def _usd_per_token(engine: EngineConfig, work: Workload) -> float:
    """The price of a token of this work, prompts and completions as they are mixed, and the user's at its engine."""
    return work.mean_row_usd(engine.token_price) / work.mix.tokens
