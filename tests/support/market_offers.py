"""Offers, and a provider that lists what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpu_runner.offers.offer import Offer, SpeedOf
from gpu_runner.offers.speed import LengthMix, ModelFacts, Throughput
from gpu_runner.providers.base import EngineOrder, Machine

NOW = 1_900_000_000.0


H100 = Offer("north", "eu", "h100.1x", "H100", 1, 80, False, 2.50, 120.0, 0.99, NOW, "north")


L4 = replace(H100, instance_type="l4.1x", gpu="L4", gpu_memory_gib=24, price_per_hour=0.60)


T4 = replace(H100, instance_type="t4.1x", gpu="T4", gpu_memory_gib=16, price_per_hour=0.30)


@dataclass
class FakeProvider:
    """A provider that only offers; counts how often it is asked. `away`: what it could offer, beside what it lists."""

    name: str
    listed: list[Offer]
    clock: float = 1.0
    asked: int = 0
    failure: Exception | None = field(default=None)
    away: tuple[Offer, ...] = ()

    def offers(self) -> list[Offer]:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return list(self.listed)

    def all_hardware(self) -> frozenset[tuple[str, int, int]]:
        return frozenset(offer.hardware for offer in (*self.listed, *self.away))

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        raise AssertionError("the market rents nothing")

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        raise AssertionError("the market rents nothing")

    def list(self, tag: str) -> Sequence[Machine]:
        raise AssertionError("the market rents nothing")

    def terminate(self, name: str) -> None:
        raise AssertionError("the market ends nothing")


def speed_of(throughput: Throughput, facts: ModelFacts, mix: LengthMix) -> SpeedOf:
    """The speed of any offer for this model and length mix."""
    return lambda offer: throughput.speed(facts, offer.gpu, offer.gpu_memory_gib, offer.gpus, mix)
