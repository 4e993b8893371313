"""The cloud's own bill, from the register of machines alone. It knows nothing of the fleet's database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.machine_host.registry import MachineRecord, MachineRegistry

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Bill:
    """What one machine costs so far. `seconds` are billed simulated seconds (real ones where `clock` is 1)."""

    provider: str
    name: str
    id: str
    instance_type: str
    gpu: str
    spot: bool
    price_per_hour: float
    clock: float
    created_at: float
    ended_at: float | None
    reason: EndReason | None
    seconds: float
    usd: float


class CloudMeter:
    """Reads bills. A machine is billed from its accepted create until its end, at the price it was ordered at."""

    def __init__(self, home: Path) -> None:
        self._register = MachineRegistry(home)

    def bills(self, provider: str | None = None, tag: str = "") -> list[Bill]:
        """One bill per machine, oldest first; running ones up to now."""
        self._register.close_dead()
        now = self._register.now()
        return [bill(record, now) for record in self._register.machines(provider, tag)]

    def usd(self, provider: str | None = None, tag: str = "") -> float:
        """Sum of the bills in US dollars."""
        return sum(one.usd for one in self.bills(provider, tag))


def bill(record: MachineRecord, now: float) -> Bill:
    """usd = price per hour / 3600 × real seconds × clock."""
    until = now if record.ended_at is None else record.ended_at
    seconds = max(0.0, until - record.created_at) * record.clock
    return Bill(
        provider=record.provider,
        name=record.name,
        id=record.id,
        instance_type=record.instance_type,
        gpu=record.gpu,
        spot=record.spot,
        price_per_hour=record.price_per_hour,
        clock=record.clock,
        created_at=record.created_at,
        ended_at=record.ended_at,
        reason=record.reason,
        seconds=seconds,
        usd=record.price_per_hour / HOUR * seconds,
    )
