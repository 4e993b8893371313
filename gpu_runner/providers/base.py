"""What every provider can do: five calls, the same for a pod, a VM, a process and a simulation.

A machine is what a provider says it has; our row about it is an instance. Its name is ours: idempotency token and tag
in one. Calls block for a few seconds at most, `wait_ready` for as long as it is told. Money is US dollars:
price per hour / 3600 × real seconds × `clock`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from gpu_runner.offers import Offer
from gpu_runner.rows import Task

MachineState = Literal["booting", "running", "ended"]


class ProviderError(Exception):
    """The provider said no. Nothing was created or changed by this call."""


class NoCapacity(ProviderError):
    """The offer exists, but there is none left of it now."""


class ProviderUnclear(Exception):
    """No answer (time-out, lost reply): the call may or may not have taken effect."""


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """The engine that a machine shall run. `arguments`: further words of its command line."""

    model: str
    task: Task
    max_num_seqs: int | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """What a provider says of a machine. `id` is the provider's own, `name` is ours. Seconds are real ones.

    `running`: the engine was started and answered once; it may be dead since, as on any VM. `max_num_seqs`: slots of
    its engine where the provider knows them. `notice_seconds`: until it is taken away; None: no notice.
    `ended_seconds`: since billing ended. `reason` of the end: terminated, interrupted, boot failed or orphaned.
    """

    name: str
    id: str
    state: MachineState
    endpoint: str | None
    max_num_seqs: int | None = None
    notice_seconds: float | None = None
    ended_seconds: float | None = None
    reason: str = ""


class Provider(Protocol):
    """Rents machines. `name` is what its offers carry; `clock`: simulated seconds per real second, 1 for real ones."""

    @property
    def name(self) -> str:
        """The provider's name, as in `Offer.provider`."""
        ...

    @property
    def clock(self) -> float:
        """Simulated seconds per real second."""
        ...

    def offers(self) -> list[Offer]:
        """What can be rented now. `boot_seconds` is in simulated seconds, so that price × boot is simulated money."""
        ...

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        """Rent a machine at the offer's price and return the provider's id.

        A second create of a name is the same machine, billed once, also when it has ended since. An offer that is not
        had at this price any more is a ProviderError. Raises NoCapacity, ProviderError, ProviderUnclear.
        """
        ...

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """Wait until the machine's engine answers /health.

        `pause(seconds)` is called in steps of at most half a second and may raise to give up. Raises
        `gpu_runner.providers.local.EngineStartError` when the machine ends or the time is over.
        """
        ...

    def list(self, tag: str) -> list[Machine]:
        """Machines whose name starts with `tag`; ended ones for a while too. Raises as create."""
        ...

    def terminate(self, name: str) -> None:
        """End the machine and its bill. Also for names that were never seen, and again. Raises as create."""
        ...
