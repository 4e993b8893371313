"""The provider `local`: this computer's own GPUs, running `vllm serve` or whatever the command template says.

    name: local
    gpu: H100                       # spelled as in gpu_runner/gpus.py
    gpus: 1                         # of one instance
    gpu_memory_gib: 80
    price_per_hour: 1.0             # what an hour of the instance costs you: power, space, depreciation
    capacity: 1                     # instances at once; a slot is free when the engine's processes are gone
    boot_seconds: 120               # what ranking assumes; the real boot takes as long as it takes
    command: [vllm, serve, "{model}", --host, 127.0.0.1, --port, "{port}"]
    environment: {HF_HUB_OFFLINE: "1"}
    orphan_seconds: 120

The engine is the child of a detached host (`host.py`), so it survives the run that ordered it and serves the next one.
It sees our environment without the keys of the store and where our databases are.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpu_runner.offers import Offer
from gpu_runner.providers.base import EngineOrder, Machine, NoCapacity, ProviderError
from gpu_runner.providers.hosting import Hosting, new_record
from gpu_runner.providers.register import HostPlan, MachineRecord, MachineRegister

VLLM_COMMAND = ("vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}")

# vLLM closes idle connections after 5 s by default; a client that reuses one then meets a reset.
_KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"}


class LocalProviderConfig(BaseModel):
    """What stands in fleet.yaml. The default price is a guess: power and depreciation of one data-centre GPU."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(
        default="local",
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="the provider's name, one of its own for each",
    )
    gpu: str = Field(description="spelled as in `gpu_runner/gpus.py`")
    gpus: int = Field(default=1, ge=1, description="GPUs of one instance")
    gpu_memory_gib: float = Field(gt=0, description="GiB per GPU")
    price_per_hour: float = Field(default=1.0, gt=0, description="what an hour of one instance costs you")
    capacity: int = Field(default=1, ge=1, description="instances at once; all of them see the same environment")
    boot_seconds: float = Field(default=120.0, ge=0, description="what ranking assumes of a start")
    command: tuple[str, ...] = Field(
        default=VLLM_COMMAND, description="`{model}` and `{port}` are filled in; flags of vLLM are added at its end"
    )
    environment: dict[str, str] = Field(default={}, description="further environment variables of the engine")
    orphan_seconds: float = Field(
        default=120.0, gt=0, description="without a sign of life of the fleet for so long, instances end themselves"
    )

    @field_validator("command")
    @classmethod
    def _has_port(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not any("{port}" in word for word in command):
            raise ValueError("command: expected {port} in it, and {model} where it takes one")
        return command


class LocalProvider:
    """See `gpu_runner.providers.base.Provider`. `<home>/cloud.db` holds its machines for every process."""

    clock = 1.0

    def __init__(self, home: Path, config: LocalProviderConfig) -> None:
        self.name = config.name
        self.config = config
        self._register = MachineRegister(Path(home).resolve())
        self._hosting = Hosting(self._register, config.name)

    def offers(self) -> list[Offer]:
        """The one offer, with the slots that are free now."""
        offer = self._offer()
        try:
            self._register.close_dead()
            taken = self._hosting.occupied(self._register.connection(), offer)
        except sqlite3.OperationalError as error:
            raise ProviderError(f"{self._register.path}: {error}") from error
        return [self._offer(max(0, self.config.capacity - taken))]

    def _offer(self, capacity: int | None = None) -> Offer:
        config = self.config
        return Offer(
            provider=config.name,
            region="",
            instance_type=f"{config.gpus}x{config.gpu}",
            gpu=config.gpu,
            gpus=config.gpus,
            gpu_memory_gib=config.gpu_memory_gib,
            spot=False,
            price_per_hour=config.price_per_hour,
            boot_seconds=config.boot_seconds,
            reliability=1.0,
            observed_at=time.time(),
            source="fleet.yaml",
            capacity=capacity,
        )

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        """Start an engine. `max_num_seqs` and further arguments of the order are added to the command."""
        own = self._offer()
        if (offer.instance_type, offer.price_per_hour) != (own.instance_type, own.price_per_hour):
            raise ProviderError(f"{offer.name}: there is no such offer at {offer.price_per_hour:.4g} $/h")
        slots = ("--max-num-seqs", str(order.max_num_seqs)) if order.max_num_seqs else ()
        plan = HostPlan(
            command=(*self.config.command, *slots, *order.arguments),
            model=order.model,
            orphan_seconds=self.config.orphan_seconds,
        )
        record = new_record(own, name, plan, provider=self.name, clock=self.clock, max_num_seqs=order.max_num_seqs)

        def admit(connection: sqlite3.Connection, record: MachineRecord) -> MachineRecord:
            if self._hosting.occupied(connection, own) >= self.config.capacity:
                raise NoCapacity(f"{own.name}: all {self.config.capacity} are taken")
            return record

        return self._hosting.rent(record, admit, {**_KEEP_ALIVE, **self.config.environment})

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """Wait for the engine."""
        return self._hosting.wait_ready(name, seconds, pause)

    def list(self, tag: str) -> list[Machine]:
        """Machines by tag."""
        return self._hosting.machines(tag)

    def terminate(self, name: str) -> None:
        """End the machine of this name, if there is one."""
        self._hosting.end(name)
