"""A fleet of every provider at once, for one test: each with the most real counterpart there is, and its own meter.

local and simulated machines are processes of this computer; ssh hosts are network namespaces with sshd; EC2 is moto's
server, whose VMs run an SSH server and the simulator as their user data says; RunPod is a server of its API's shape,
whose pods run the simulator. The meters know nothing of the fleet's database.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.fake_ec2 import HOME_REGION, FakeEc2, Orders, Vm, fake_ec2, moto_server
from support.fake_runpod import FakeRunPod, engine_words, fake_runpod
from support.machines import SIMULATOR
from support.rented_engine import RentedEngine
from support.ssh_hosts import Hosts, ssh_hosts
from support.vm_sshd import VmSshd

from e2e.witness import left_running
from gpu_runner.providers.cloud.engine_container import ENGINE_PORT
from gpu_runner.providers.ec2.launch import NAME_TAG
from gpu_runner.providers.ec2.user_data import USER
from gpu_runner.providers.simulated.meter import CloudMeter

HOUR = 3600.0
OUTPUT = ("--output-tokens", "fixed:256")
# A simulated machine is as slow as a real L40S; with so few tokens a row takes it as long as it takes the others.
SHORT_OUTPUT = ("--output-tokens", "fixed:48")
GPU = {"gpu": "L40S", "gpu_memory_gib": 48}
PRICES = {"local": 1.0, "sim-a": 1.1, "lab": 1.2, "runpod": 1.3, "aws": 1.4}


class SshdVm(Vm):
    """A VM with an SSH server on an address of its own, and the simulator behind it."""

    sshd: VmSshd

    def power_off(self) -> None:
        if self.ended_at is None:
            self.sshd.close()
        super().power_off()


def began_at(pid: int) -> float:
    """Unix seconds, to a hundredth: psutil's are off by up to a second, as the kernel's time of boot has no fraction.

    proc(5), /proc/pid/stat: `starttime` is the 22nd field, in clock ticks since the boot.
    """
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class Lifetime:
    """Of a process: Unix seconds. A thread waits for its end."""

    pid: int
    began_at: float
    ended_at: float | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._wait, args=(os.pidfd_open(self.pid),), daemon=True).start()

    def _wait(self, pidfd: int) -> None:
        select.select([pidfd], [], [])
        self.ended_at = time.time()
        os.close(pidfd)


@dataclass
class EveryProvider:
    """The counterparts."""

    home: Path
    hosts: Hosts
    ec2: FakeEc2
    runpod: FakeRunPod

    def __post_init__(self) -> None:
        self._engines: dict[str, dict[int, Lifetime]] = {}
        self._looked_at = 0.0

    def fleet(self, seed: int, idle_seconds: float) -> dict[str, Any]:
        """fleet.yaml. A machine boots in a second or two; each provider has room for few."""
        offers = [
            {"instance_type": "sim.l40s", "gpu": "L40S", "price_per_hour": PRICES["sim-a"], "capacity": 1},
            {"instance_type": "sim.spot", "gpu": "L40S", "price_per_hour": 0.95, "spot": True, "capacity": 1},
        ]
        log = ("--request-log", "{home}/{name}.requests")
        simulated = {
            "clock": 1.0,
            "seed": seed,
            "arguments": [*SHORT_OUTPUT, *log],
            "providers": [{"name": "sim-a", "boot_seconds": 1.0, "offers": offers}],
        }
        command = [*SIMULATOR, *OUTPUT, "--request-log", f"{self.home}/local-{{port}}.requests"]
        local = {"name": "local", "price_per_hour": PRICES["local"], "boot_seconds": 1.0, "command": command, **GPU}
        host = {"price_per_hour": PRICES["lab"], "boot_seconds": 1.0, **GPU}
        lab = self.hosts.config(orphan_seconds=120, host=host).model_dump(mode="json")
        lab["command"] += [*OUTPUT, "--request-log", f"{self.home}/{{name}}.requests"]
        kind = {"instance_type": "g6e.xlarge", "on_demand": False, "spot": True}
        aws = self.ec2.config(instance_types=[kind], boot_seconds=2.0, address="private").model_dump(mode="json")
        pods = self.runpod.provider(
            gpus=[{"gpu_type": "NVIDIA L40S", "price_per_hour": PRICES["runpod"], **GPU}], boot_seconds=2.0, reach="tcp"
        ).config.model_dump(mode="json")
        aws["engine_image"] = pods["engine_image"] = f"gpu_runner.simulator@sha256:{'0' * 64}"  # else sim-a is left out
        rented = {"local": [local], "ssh": [lab], "ec2": [aws], "runpod": [pods]}
        return {"simulated": simulated, **rented, "idle_minutes": idle_seconds / 60, "move_seconds": 600}

    # meters

    def look(self) -> None:
        """Notice which engines of the SSH hosts run. Machines are looked for twice a second."""
        now = time.time()
        if now - self._looked_at > 0.5:
            self._looked_at = now
            for process in self.hosts.processes():
                with contextlib.suppress(psutil.Error, OSError):
                    engines = self._engines.setdefault(process.environ()["GPU_RUNNER_MACHINE"], {})
                    if process.pid not in engines:
                        engines[process.pid] = Lifetime(process.pid, began_at(process.pid))

    def seconds(self) -> dict[str, dict[str, float]]:
        """Seconds that each machine was there, by provider and its id there. All must have ended."""
        ended = [*self.ec2.vms.values(), *self.runpod.pods]
        assert all(one.ended_at is not None for one in ended), "a machine of a cloud is still billed"
        bills = CloudMeter(self.home).bills()
        assert all(one.ended_at is not None for one in bills), "a machine of this computer is still billed"
        ssh = {
            machine_id: max(one.ended_at or time.time() for one in lives.values())
            - min(one.began_at for one in lives.values())
            for machine_id, lives in self._engines.items()
        }
        return {
            "local": {one.id: one.seconds for one in bills if one.provider == "local"},
            "sim-a": {one.id: one.seconds for one in bills if one.provider == "sim-a"},
            "lab": ssh,
            "aws": {one: (vm.ended_at or 0.0) - vm.booted_at for one, vm in self.ec2.vms.items()},
            "runpod": {pod.id: (pod.ended_at or 0.0) - pod.created_at for pod in self.runpod.pods},
        }

    def names(self) -> dict[str, str]:
        """Names of machines by id, where the counterpart knows them: also of those whose order lost its reply."""
        found = {one.id: one.name for one in CloudMeter(self.home).bills()}
        found |= {one.id: self.ec2.tags(one)[NAME_TAG] for one in self.ec2.instances()}
        return found | {pod.id: str(pod.body["name"]) for pod in self.runpod.pods}

    def left(self) -> list[str]:
        """What still runs of any machine, or is rented."""
        found = left_running(self.home) + [f"{one.pid}" for one in self.hosts.processes()]
        found += [f"{one.id} of EC2" for one in self.ec2.running()]
        return found + [f"{one.id} of RunPod" for one in self.runpod.running()]


def _vm_maker(folder: Path, home: Path) -> Callable[[str], Vm]:
    """Boots VMs from their user data; each has an address of loopback of its own."""
    numbers = iter(range(1, 250))
    subnet = 100 + os.getpid() % 100

    def boot(user_data: str) -> Vm:
        orders, number = Orders.read(user_data), next(numbers)
        (user,) = orders.document["users"]
        assert user["name"] == USER
        authorized = folder / f"authorized-{number}"
        authorized.write_text("\n".join(user["ssh_authorized_keys"]) + "\n")
        name = f"vm-{number}"
        engine = RentedEngine(orders.variables["VLLM_API_KEY"], orders.words, home / f"{name}.requests", *OUTPUT)
        vm = SshdVm(orders.document, engine, address=f"127.77.{subnet}.{number}")
        key = orders.document["ssh_keys"]["ed25519_private"]
        assert vm.address is not None
        vm.sshd = VmSshd(key, authorized, ENGINE_PORT, engine.port, vm.address, 22)
        return vm

    return boot


@contextlib.contextmanager
def every_provider(folder: Path) -> Iterator[EveryProvider]:
    """All counterparts, with `folder / "home"` as the fleet's home; nothing of them runs afterwards."""
    home, vms = folder / "home", folder / "vm"
    for made in (home, vms):
        made.mkdir()
    with (
        ssh_hosts(folder, 1) as hosts,
        moto_server() as url,
        fake_ec2(url, folder) as ec2,
        fake_runpod(folder) as runpod,
    ):
        ec2.boot, ec2.most, ec2.spot_usd = _vm_maker(vms, home), 1, PRICES["aws"]
        runpod.boot = lambda body: RentedEngine(
            body["env"]["VLLM_API_KEY"], engine_words(body), home / f"{body['name']}.requests", *OUTPUT
        )
        runpod.most, runpod.usd_per_hour = 1, PRICES["runpod"]
        ec2.clients.get("ec2", HOME_REGION).describe_instances()  # moto's first answers take seconds
        yield EveryProvider(home, hosts, ec2, runpod)
