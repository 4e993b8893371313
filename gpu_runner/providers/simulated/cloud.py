"""All simulated providers of one home, and what a person or a test may do to them from any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_runner.providers.machine_host.registry import MachineRegistry
from gpu_runner.providers.simulated.config import FaultRule, OfferChange, SimulatedCloudConfig
from gpu_runner.providers.simulated.meter import CloudMeter
from gpu_runner.providers.simulated.offers_at import Prices
from gpu_runner.providers.simulated.provider import SimulatedProvider
from gpu_runner.providers.simulated.provider_faults import inject


@dataclass(frozen=True, slots=True)
class Call:
    """One API call as the cloud saw it. `result`: ok or an error, then the fault if any; None: its caller died."""

    at: float
    provider: str
    call: str
    name: str
    result: str | None


class SimulatedCloud:
    """The cloud of `<home>/cloud.db`. Opening it again, anywhere, is the same cloud; its time goes on.

    `prices`: further offers of a provider, by its name.
    """

    def __init__(self, home: Path, config: SimulatedCloudConfig, prices: Mapping[str, Prices] | None = None) -> None:
        self.home = Path(home).resolve()
        self.config = config
        self._register = MachineRegistry(self.home)
        with self._register.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO settings VALUES ('started_at', ?)", (self._register.now(),))
            (started,) = connection.execute("SELECT value FROM settings WHERE key = 'started_at'").fetchone()
        self.started_at = float(started)
        self.providers = {
            one.name: SimulatedProvider(self._register, self.started_at, config, one, (prices or {}).get(one.name))
            for one in config.providers
        }

    def elapsed(self) -> float:
        """Simulated seconds since the cloud began."""
        return (self._register.now() - self.started_at) * self.config.clock

    def meter(self) -> CloudMeter:
        """The bill."""
        return CloudMeter(self.home)

    def change(
        self, provider: str, offer: str, *, price_per_hour: float | None = None, capacity: int | None = None
    ) -> None:
        """A new price or capacity of an instance type from now on."""
        change = OfferChange(at=self.elapsed(), offer=offer, price_per_hour=price_per_hour, capacity=capacity)
        with self._register.transaction() as connection:
            connection.execute(
                "INSERT INTO changes (at, provider, change) VALUES (?, ?, ?)",
                (change.at, provider, change.model_dump_json()),
            )

    def inject(self, rule: FaultRule, provider: str | None = None) -> None:
        """Have a fault in force from now on, at one provider or at all."""
        with self._register.transaction() as connection:
            inject(connection, rule, provider)

    def clear_faults(self) -> None:
        """Take back what was injected."""
        with self._register.transaction() as connection:
            connection.execute("DELETE FROM faults")

    def interrupt(self, provider: str, name: str, *, notice_seconds: float | None = None) -> bool:
        """Take a machine away: now, or after a notice of real seconds. False: it has ended, or never was."""
        record = self._register.find(provider, name)
        return record is not None and self._register.take(
            record.id, self._register.now() + (notice_seconds or 0.0), notice_seconds
        )

    def calls(self, call: str | None = None) -> list[Call]:
        """The log of API calls, oldest first."""
        query = "SELECT at, provider, call, name, result FROM calls WHERE ? IS NULL OR call = ? ORDER BY number"
        return [Call(*line) for line in self._register.connection().execute(query, (call, call))]
