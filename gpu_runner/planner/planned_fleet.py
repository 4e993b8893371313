"""A fleet that may be ordered: held instances that stay, and new ones. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from gpu_runner.planner.speed_model import HardwareType
from gpu_runner.planner.types import HeldInstance, PlannedOffer


@dataclass(frozen=True, slots=True)
class FleetCandidate:
    """Held instances that stay, and what is ordered. `is_probe`: some of it is ordered to measure its speed."""

    kept: tuple[HeldInstance, ...]
    new: tuple[tuple[PlannedOffer, int], ...] = ()
    is_probe: bool = field(default=False, compare=False)

    @property
    def options(self) -> list[PlannedOffer]:
        """The offer of each instance."""
        return [*(one.option for one in self.kept), *(option for option, number in self.new for _ in range(number))]

    @property
    def offers(self) -> tuple[tuple[str, int], ...]:
        """How many of each offer, the cheapest token first."""
        return tuple(Counter(one.name for one in sorted(self.options, key=lambda one: one.usd_per_token)).items())

    @property
    def speed(self) -> float:
        """Tokens per second of all."""
        return sum(one.tokens_per_second for one in self.options)

    @property
    def unmeasured(self) -> set[HardwareType]:
        """Its hardware of unknown speed."""
        return {one.hardware_type for one in self.options if one.is_unmeasured}

    def projected(self) -> list[HeldInstance]:
        """As if all were ordered now."""
        ordered = [
            HeldInstance(f"new {option.name} {i}", option, option.boot_seconds)
            for option, number in self.new
            for i in range(number)
        ]
        return [*self.kept, *ordered]

    def with_probe(self, option: PlannedOffer) -> FleetCandidate:
        """With one more of it."""
        number = dict(self.new).get(option, 0)
        return FleetCandidate(
            self.kept, (*(pair for pair in self.new if pair[0] != option), (option, number + 1)), True
        )

    def with_held(self, one: HeldInstance) -> FleetCandidate:
        """With a held instance that would have ended."""
        return replace(self, kept=(*self.kept, one))

    def without(self, name: str) -> FleetCandidate:
        """With one less of an offer: one that would be ordered, else the last held one."""
        if any(option.name == name for option, _ in self.new):
            fewer = ((option, number - (option.name == name)) for option, number in self.new)
            return replace(self, new=tuple(pair for pair in fewer if pair[1]))
        last = [one for one in self.kept if one.option.name == name][-1]
        return replace(self, kept=tuple(one for one in self.kept if one is not last))
