"""The provider `local`: this computer's own GPUs, running `vllm serve` or whatever the command template says.

    name: local
    gpu: H100                       # spelled as in gpu_runner/offers/gpus.py
    gpus: 1                         # of one instance
    gpu_memory_gib: 80
    price_per_hour: 1.0             # what an hour of the instance costs you: power, space, depreciation
    capacity: 1                     # instances at once; a slot is free when the engine's processes are gone
    gpu_devices: ["0"]              # the GPUs that they divide, as CUDA_VISIBLE_DEVICES names them
    boot_seconds: 120               # what ranking assumes; the real boot takes as long as it takes
    command: [vllm, serve, "{model}", --host, 127.0.0.1, --port, "{port}"]
    environment: {HF_HUB_OFFLINE: "1"}
    orphan_seconds: 120

The engine is the child of a detached host (`machine_host/daemon.py`), so it survives the run that ordered it and
serves the next one. It sees our environment without the keys of the store and where our databases are.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from gpu_runner.offers.offer import Hardware, Offer
from gpu_runner.providers.base import EngineOrder, Machine, NoCapacity, ProviderError
from gpu_runner.providers.machine_host.manager import Hosting, new_record
from gpu_runner.providers.machine_host.registry import HostPlan, MachineRecord, MachineRegistry
from gpu_runner.providers.sglang_server import SGLANG_COMMAND

VLLM_COMMAND = ("vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}")

# vLLM closes idle connections after 5 s by default; a client that reuses one then meets a reset.
_KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"}

_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")


class LocalProviderConfig(BaseModel):
    """What stands in fleet.yaml. The default price is a guess: power and depreciation of one data-centre GPU."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(
        default="local",
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="the provider's name, one of its own for each",
    )
    gpu: str = Field(description="spelled as in `gpu_runner/offers/gpus.py`")
    gpus: int = Field(default=1, ge=1, description="GPUs of one instance")
    gpu_memory_gib: float = Field(gt=0, description="GiB per GPU")
    price_per_hour: float = Field(default=1.0, gt=0, description="what an hour of one instance costs you")
    capacity: int = Field(
        default=1, ge=1, description="instances at once; each gets GPUs of its own in CUDA_VISIBLE_DEVICES"
    )
    gpu_devices: tuple[str, ...] = Field(
        default=(),
        description="the GPUs that instances divide, as CUDA_VISIBLE_DEVICES names them, `capacity` × `gpus` of them. "
        "Without it those of our own CUDA_VISIBLE_DEVICES, or from `0` on; none is set for a `capacity` of 1. Where "
        "`environment` has a CUDA_VISIBLE_DEVICES, all instances share its GPUs",
    )
    boot_seconds: float = Field(default=120.0, ge=0, description="what ranking assumes of a start")
    command: tuple[str, ...] = Field(
        default=VLLM_COMMAND, description="`{model}` and `{port}` are filled in; flags of vLLM are added at its end"
    )
    sglang_command: tuple[str, ...] = Field(
        default=SGLANG_COMMAND,
        description="the same for datasets with `engine.server: sglang`, with flags of SGLang",
    )
    environment: dict[str, str] = Field(default={}, description="further environment variables of the engine")
    orphan_seconds: float = Field(
        default=120.0, gt=0, description="without a sign of life of the fleet for so long, instances end themselves"
    )

    @field_validator("command", "sglang_command")
    @classmethod
    def _has_port(cls, command: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not any("{port}" in word for word in command):
            raise ValueError(f"{info.field_name}: expected {{port}} in it, and {{model}} where it takes one")
        return command

    @model_validator(mode="after")
    def _devices_fit(self) -> LocalProviderConfig:
        wanted, devices = self.capacity * self.gpus, self.gpu_devices
        if devices and (len(devices) != wanted or len(set(devices)) != wanted):
            raise ValueError(f"gpu_devices: expected {wanted} different devices, capacity × gpus")
        if not all(_DEVICE.fullmatch(device) for device in devices):
            raise ValueError("gpu_devices: expected numbers or UUIDs of GPUs")
        if devices and _DEVICES in self.environment:
            raise ValueError(f"gpu_devices: expected it, or {_DEVICES} in environment, not both")
        return self

    def gpu_sets(self, ours: str | None) -> tuple[str, ...]:
        """What each instance gets as CUDA_VISIBLE_DEVICES; none: nothing is set. `ours`: this process's own value.

        Raises ValueError when ours names too few GPUs.
        """
        if _DEVICES in self.environment or (self.capacity == 1 and not self.gpu_devices):
            return ()
        wanted = self.capacity * self.gpus
        inherited = tuple(filter(None, map(str.strip, (ours or "").split(","))))
        if not self.gpu_devices and inherited and len(inherited) < wanted:
            raise ValueError(f"expected {wanted} GPUs, capacity × gpus, found {_DEVICES}={ours!r:.80}")
        devices = self.gpu_devices or inherited or tuple(map(str, range(wanted)))
        return tuple(",".join(devices[at : at + self.gpus]) for at in range(0, wanted, self.gpus))


class LocalProvider:
    """See `gpu_runner.providers.base.Provider`. `<home>/cloud.db` holds its machines for every process."""

    clock = 1.0

    def __init__(self, home: Path, config: LocalProviderConfig) -> None:
        self.name = config.name
        self.config = config
        self._register = MachineRegistry(Path(home).resolve())
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

    def all_hardware(self) -> frozenset[Hardware]:
        """See `gpu_runner.providers.base.HardwareProvider`."""
        return frozenset((self._offer().hardware,))

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
        command = self.config.command if order.server == "vllm" else self.config.sglang_command
        plan = HostPlan(
            command=(*command, *order.words),
            model=order.model,
            orphan_seconds=self.config.orphan_seconds,
        )
        record = new_record(own, name, plan, provider=self.name, clock=self.clock, max_num_seqs=order.max_num_seqs)

        try:
            gpu_sets = self.config.gpu_sets(os.environ.get(_DEVICES))
        except ValueError as error:
            raise ProviderError(f"{self.name}: {error}") from None

        def admit(connection: sqlite3.Connection, record: MachineRecord) -> MachineRecord:
            taken = self._hosting.taken_gpus(connection) if gpu_sets else frozenset()
            free = [one for one in gpu_sets if one not in taken]
            if self._hosting.occupied(connection, own) >= self.config.capacity or (gpu_sets and not free):
                raise NoCapacity(f"{own.name}: all {self.config.capacity} are taken")
            return replace(record, plan=replace(plan, gpus=free[0]).dump()) if free else record

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
