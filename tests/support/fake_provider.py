"""A provider in memory with the ways of a real one: replies get lost, lists lag, machines vanish. Its own meter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import (
    EndReason,
    EngineOrder,
    Machine,
    MachineState,
    NoCapacity,
    ProviderError,
    ProviderUnclear,
)
from gpu_runner.providers.engine_process import EngineStartError


@dataclass
class FakeMachine:
    """What the provider itself knows. `stubborn`: so many terminations are accepted without effect (fault P4)."""

    name: str
    price_per_hour: float
    created_at: float
    ended_at: float | None = None
    reason: EndReason | None = None
    taken_at: float | None = None
    taken_why: str = ""
    stubborn: int = 0
    boots: bool = True
    at_risk: bool = False
    leftover: str = ""

    @property
    def alive(self) -> bool:
        return self.ended_at is None


class FakeProvider:
    """Five calls over a dictionary. `fault` is asked before each: "error", "unclear", "lost" or None."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        name: str = "sim-north",
        lag: float = 0.0,
        kept: float = 1e9,
        capacity: int = 100,
        clock: float = 60.0,
    ) -> None:
        self.now, self.name, self.lag, self.kept, self.capacity, self.clock = now, name, lag, kept, capacity, clock
        self.machines: dict[str, FakeMachine] = {}
        self.fault: Callable[[str], str | None] = lambda call: None
        self.calls: list[tuple[str, str]] = []

    def _begin(self, call: str, name: str = "") -> bool:
        """Count the call and play its fault; True when it shall take effect and lose its reply."""
        self.calls.append((call, name))
        fault = self.fault(call)
        if fault == "error":
            raise ProviderError("503")
        if fault == "unclear":
            raise ProviderUnclear("time-out")
        return fault == "lost"

    def offers(self) -> list[Offer]:
        return []

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        lost = self._begin("create", name)
        if name not in self.machines:
            if sum(machine.alive for machine in self.machines.values()) >= self.capacity:
                raise NoCapacity("none left")
            self.machines[name] = FakeMachine(name, offer.price_per_hour, self.now())
        if not self.machines[name].alive:
            raise ProviderError(f"{name} has ended")
        if lost:
            raise ProviderUnclear("reply lost")
        return f"id of {name}"

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        self._begin("wait_ready", name)
        machine = self.machines.get(name)
        if machine is None or not machine.alive or not machine.boots:
            raise EngineStartError(f"{name} does not answer")
        return Machine(name, f"id of {name}", "running", "http://127.0.0.1:1", 256)

    def list(self, tag: str) -> list[Machine]:
        self._begin("list")
        return [self._describe(one) for one in self.machines.values() if one.name.startswith(tag) and self._listed(one)]

    def terminate(self, name: str) -> None:
        lost = self._begin("terminate", name)
        machine = self.machines.get(name)
        if machine is not None and machine.alive:
            if machine.stubborn > 0:
                machine.stubborn -= 1
            else:
                machine.ended_at, machine.reason = self.now(), EndReason.TERMINATED
        if lost:
            raise ProviderUnclear("reply lost")

    def lose(self, name: str, reason: EndReason = EndReason.INTERRUPTED) -> None:
        """Take the machine away."""
        machine = self.machines[name]
        if machine.alive:
            machine.ended_at, machine.reason = self.now(), reason

    def alive(self) -> list[str]:
        return [machine.name for machine in self.machines.values() if machine.alive]

    def billed(self, name: str) -> float:
        """The meter: real seconds."""
        machine = self.machines.get(name)
        if machine is None:
            return 0.0
        return (self.now() if machine.ended_at is None else machine.ended_at) - machine.created_at

    def _listed(self, machine: FakeMachine) -> bool:
        if self.now() - machine.created_at < self.lag:
            return False
        return machine.ended_at is None or self.now() - machine.ended_at < self.kept

    def _describe(self, machine: FakeMachine) -> Machine:
        if machine.ended_at is not None and self.now() - machine.ended_at >= self.lag:
            ended = self.now() - machine.ended_at
            told = Machine(machine.name, f"id of {machine.name}", "ended", None, None, None, ended, machine.reason)
            return replace(told, leftover=machine.leftover)
        state: MachineState = "running"
        notice = None if machine.taken_at is None else max(0.0, machine.taken_at - self.now())
        told = f"id of {machine.name}", state, "http://127.0.0.1:1", 256, notice
        return Machine(machine.name, *told, detail=machine.taken_why, at_risk=machine.at_risk)
