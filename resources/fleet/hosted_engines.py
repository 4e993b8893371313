"""Engines of fleet.yaml as the planner and the list of offers take them: those that are paid by the token, and those
without a price. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_runner.offers.offer import HOUR, Offer, RankedOffer
from gpu_runner.offers.speed import Speed
from gpu_runner.offers.workload import Workload
from gpu_runner.planner.types import PlannedOffer
from resources.engine_options import PLAIN, EngineOptions
from resources.fleet.fleet_config import EngineConfig, FleetConfig, FleetConfigError

ASSUMED_SPEED = 1_000.0  # tokens per second of one that was never used; its cost does not depend on it
ASSUMED_SPREAD = 0.5  # relative standard deviation of that speed, as of any that is estimated
SOURCE = "fleet.yaml"


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


def unpriced_options(engines: Sequence[EngineConfig]) -> tuple[PlannedOffer, ...]:
    """As the planner sees them: they cost nothing, and nobody knows how fast they are."""
    return tuple(
        PlannedOffer(engine.name, 0.0, ASSUMED_SPEED, 0.0, capacity=1, spread=ASSUMED_SPREAD, row_usd=0.0)
        for engine in engines
    )


def hosted_options(
    engines: Sequence[EngineConfig], work: Workload, speeds: Mapping[str, float]
) -> tuple[PlannedOffer, ...]:
    """As the planner sees them. `speeds`: tokens per second, by name, of those that were used."""
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
    engines: Sequence[EngineConfig], work: Workload, speeds: Mapping[str, float], now: float
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
        basis = Speed(speed, "measured" if engine.name in speeds else "estimate")
        found.append(RankedOffer(offer, basis, work.tokens / speed, work.tokens * price))
    return found


def _speed(engine: EngineConfig, work: Workload, speeds: Mapping[str, float]) -> float:
    """Tokens per second. What goes out as batches takes as long as the provider may take, however much it is."""
    if (batches := engine.limits.batches) is not None:
        return max(1.0, work.tokens) / batches.window_seconds
    return speeds.get(engine.name, ASSUMED_SPEED)


def _usd_per_token(engine: EngineConfig, work: Workload) -> float:
    """The price of a token of this work, prompts and completions as they are mixed."""
    price, tokens = engine.token_price, work.mix.tokens
    return 0.0 if price is None or not tokens else price.usd(work.mix.prompt_tokens, work.mix.output_tokens) / tokens
