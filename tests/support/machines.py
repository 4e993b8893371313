"""Machines for tests: a small simulated cloud, this computer as a provider, and what of a machine still runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.base import EngineOrder, Machine, Provider
from gpu_runner.providers.local import LocalProvider, LocalProviderConfig
from gpu_runner.providers.machine_host.registry import MARK, MachineRegistry, kill_marked
from gpu_runner.providers.process_marks import marked
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from support.processes import command_line
from support.timing import PATIENCE

ORDER = EngineOrder(model="tiny", task="chat", max_num_seqs=8)
H100 = {"instance_type": "h100", "gpu": "H100", "price_per_hour": 3.6}
SIMULATOR = [sys.executable, "-m", "gpu_runner.simulator", "--model", "{model}", "--port", "{port}"]


def simulated_cloud(home: Path, *, clock: float = 600.0, seed: int = 0, **provider: Any) -> SimulatedCloud:
    """A cloud with one provider, `sim-a`, which boots at once and has one offer unless told otherwise."""
    given = {"name": "sim-a", "boot_seconds": 0.0, "offers": [H100], **provider}
    return SimulatedCloud(
        home, SimulatedCloudConfig.model_validate({"clock": clock, "seed": seed, "providers": [given]})
    )


def local_provider(home: Path, **settings: Any) -> LocalProvider:
    """This computer as a provider; its engine is the simulator."""
    given = {"gpu": "H100", "gpu_memory_gib": 80, "price_per_hour": 3.6, "command": SIMULATOR, **settings}
    return LocalProvider(home, LocalProviderConfig.model_validate(given))


def first_offer(provider: Provider) -> Offer:
    """The provider's first offer."""
    return provider.offers()[0]


def get(provider: Provider, name: str) -> Machine:
    """The machine of this name as the provider lists it."""
    (found,) = [one for one in provider.list(name) if one.name == name]
    return found


def processes(machine_id: str) -> list[psutil.Process]:
    """Everything that runs for a machine: its host, the guard, the engine."""
    mark = f"{MARK}={machine_id}".encode()
    found = []
    for pid in marked(lambda entries: mark in entries):
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def part(machine_id: str, module: str) -> psutil.Process:
    """The process of a machine that runs a module, such as its host."""
    (found,) = parts(machine_id, module)
    return found


def parts(machine_id: str, module: str) -> list[psutil.Process]:
    """The processes of a machine that run a module: a guard has two, the outer one first."""
    found = [process for process in processes(machine_id) if module in command_line(process)[:3]]
    return sorted(found, key=lambda process: process.create_time())


def eventually(true: Callable[[], object], seconds: float = 20) -> None:
    """Wait until the condition holds; fail when it seems that it never will."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@contextmanager
def ended_machines(home: Path) -> Iterator[None]:
    """Ends, at the end, whatever a failed test left running below the home."""
    try:
        yield
    finally:
        for record in MachineRegistry(home).machines():
            if record.gone_at is None:
                kill_marked(record.id)
