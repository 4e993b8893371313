"""What every provider can do: five calls, the same for a pod, a VM, a process and a simulation.

A machine is what a provider says it has; our row about it is an instance. Its name is ours: idempotency token and tag
in one. Calls block for a few seconds at most, `wait_ready` for as long as it is told. Money is US dollars:
price per hour / 3600 × real seconds × `clock`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from gpu_runner.models.facts import SLOTS_FLAG, Server
from gpu_runner.offers.offer import Hardware, Offer
from gpu_runner.reachability import Reachability, always_open
from gpu_runner.rows import Task

MachineState = Literal["booting", "running", "ended"]


class ProviderError(Exception):
    """The provider said no. Nothing was created or changed by this call."""


class NoCapacity(ProviderError):
    """The offer exists, but there is none left of it now."""


class ProviderUnclear(Exception):
    """No answer (time-out, lost reply): the call may or may not have taken effect."""


class EndReason(enum.StrEnum):
    """Why a machine ended, as far as providers tell it apart. The value is what people read, and what is stored."""

    TERMINATED = "terminated"  # we asked for it
    DELETED = "deleted by somebody else"
    INTERRUPTED = "interrupted"  # a spot machine that was taken away, or a host that died
    ORPHANED = "orphaned"  # it ended itself, because nobody looked after it
    BOOT_FAILED = "boot failed"
    EXITED = "its engine ended"
    OUT_OF_MEMORY = "out of memory"
    PREEMPTED = "preempted"  # for something of higher priority
    EVICTED = "evicted by its node"
    DRAINED = "drained"
    TAINTED = "its node was tainted or lost"
    NODE_LOST = "node lost"
    NODE_SHUTDOWN = "node shut down"
    NOT_ADMITTED = "refused by its node"
    DEADLINE = "active deadline reached"
    VANISHED = "vanished"  # it is not there any more, and nothing says why
    UNKNOWN = "unknown reason"  # the provider gave one that we do not know; `Machine.detail` has its words


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """The engine that a machine shall run. `arguments`: further words of its command line, as `server` reads them."""

    model: str
    task: Task
    max_num_seqs: int | None = None
    arguments: tuple[str, ...] = ()
    server: Server = "vllm"

    @property
    def words(self) -> tuple[str, ...]:
        """What stands at the end of its command line."""
        slots = (SLOTS_FLAG[self.server], str(self.max_num_seqs)) if self.max_num_seqs else ()
        return (*slots, *self.arguments)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a provider says of a machine. `id` is the provider's own, `name` is ours. Seconds are real ones.

    `running`: the engine was started and answered once; it may be dead since, as on any VM. `max_num_seqs`: slots of
    its engine where the provider knows them. `notice_seconds`: until it is taken away; None: no notice.
    `billed_seconds`: for how long it is, or was, billed; None: the provider does not say. `ended_seconds`: since
    billing ended. `reason`: why it ended (None: it has not); `detail`: what else the provider says of that, or of its
    notice, for people. `at_risk`: the provider recommends to leave it, as it may be taken away before others.
    `leftover`: what of it the provider could not end yet, though its bill has ended, for people; "": nothing.
    """

    name: str
    id: str
    state: MachineState
    endpoint: str | None
    max_num_seqs: int | None = None
    notice_seconds: float | None = None
    ended_seconds: float | None = None
    reason: EndReason | None = None
    detail: str = ""
    at_risk: bool = False
    billed_seconds: float | None = None
    leftover: str = ""

    def describe_end(self) -> str:
        """Why it ended, for people; "" while it has not."""
        return ": ".join(part for part in (self.reason or "", self.detail) if part)


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
        `gpu_runner.providers.engine_process.EngineStartError` when the machine ends or the time is over, and NoCapacity
        when what was accepted waits in vain for a place, as a pod does that no node takes.
        """
        ...

    def list(self, tag: str) -> list[Machine]:
        """Machines whose name starts with `tag`; ended ones for a while too. Raises as create."""
        ...

    def terminate(self, name: str) -> None:
        """End the machine and its bill. Also for names that were never seen, and again. Raises as create."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """A way from this process to a machine's engine: its base URL and the bearer token it asks for.

    `close` ends what was opened for it (a tunnel); it may be called more than once, and from any thread.
    `reachability`: whether the way stands, so that a tunnel that is opened again is not taken for a dead engine.
    """

    endpoint: str
    api_key: str | None = field(default=None, repr=False)
    close: Callable[[], None] = lambda: None
    reachability: Callable[[], Reachability] = always_open


@runtime_checkable
class AccessProvider(Protocol):
    """A provider whose engines are not reached by `Machine.endpoint` alone: by a tunnel, or with a key of their own."""

    def access(self, name: str, endpoint: str) -> EngineAccess:
        """Open a way to the engine of the machine `name`, whose `Machine.endpoint` was `endpoint`.

        The address stays the same until `close`, also when a broken tunnel is opened again behind it; while it is
        broken, requests fail to connect. Raises ProviderError, ProviderUnclear.
        """
        ...


@runtime_checkable
class DiagnosingProvider(Protocol):
    """A provider that can be asked what has become of a machine whose engine does not answer any more."""

    def diagnose(self, name: str) -> str:
        """What is known of it now, as a sentence for people; "": nothing. A few seconds at most; raises nothing."""
        ...


@runtime_checkable
class HardwareProvider(Protocol):
    """A provider that states all hardware that it could ever offer. Of any other it is not known what may come."""

    def all_hardware(self) -> frozenset[Hardware] | None:
        """The hardware of its configuration, also of what has no price, is too dear or does not answer now.

        None: its configuration does not say. Asks nobody, and raises nothing.
        """
        ...


def open_access(provider: Provider, name: str, endpoint: str) -> EngineAccess:
    """The way to a machine's engine: the provider's own, or its address as it stands."""
    return provider.access(name, endpoint) if isinstance(provider, AccessProvider) else EngineAccess(endpoint)
