"""The counterpart of each provider, for the contract that all of them keep: a cloud of the test's own for each test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_runner.providers.base import Provider
from gpu_runner.providers.engine_process import free_port
from support.fake_kubernetes import fake_cluster, pod_provider
from support.fake_runpod import fake_runpod
from support.guarded_engine import GuardedEngine
from support.machines import H100, ended_machines, eventually, local_provider, processes, simulated_cloud
from support.processes import environment
from support.ssh_hosts import Hosts


def nothing(name: str) -> None:
    """The counterpart does it by itself."""


@dataclass(frozen=True)
class ProviderCloud:
    """A provider's cloud, empty at first.

    `make`: opens the provider anew. `alive`: ids of machines that run, by their cloud. `boots`, `ends`: have a machine
    start that was ordered, and go whose end was accepted, where the counterpart waits to be told. `keys`: engines ask
    for their key. `mute`: the function that tells whether an engine answers, a dotted path; "": engines take long
    enough.
    """

    make: Callable[[], Provider]
    alive: Callable[[], list[str]]
    boots: Callable[[str], None] = nothing
    ends: Callable[[str], None] = nothing
    keys: bool = True
    mute: str = ""


def _of_this_computer(home: Path, make: Callable[[], Provider]) -> ProviderCloud:
    def alive() -> list[str]:
        machines = [one.id for one in make().list("")]
        return sorted(one for one in machines if processes(one))

    return ProviderCloud(make, alive, keys=False)


@contextlib.contextmanager
def simulated(home: Path) -> Iterator[ProviderCloud]:
    """A simulated cloud; its machines are processes of this computer."""
    with ended_machines(home):
        cloud = {"offers": [{**H100, "capacity": 3}]}
        yield _of_this_computer(home, lambda: simulated_cloud(home, **cloud).providers["sim-a"])


@contextlib.contextmanager
def local(home: Path) -> Iterator[ProviderCloud]:
    """This computer, with three GPUs."""
    with ended_machines(home):
        yield _of_this_computer(home, lambda: local_provider(home, capacity=3))


@contextlib.contextmanager
def ssh(home: Path, hosts: Hosts) -> Iterator[ProviderCloud]:
    """A host with sshd in a network namespace, and three GPUs."""

    def make() -> Provider:
        return hosts.provider(home, folder=str(home / "machines"), host={"gpus": 3})

    def alive() -> list[str]:
        names = {environment(process).get("GPU_RUNNER_MACHINE") for process in hosts.processes()}
        return sorted(name for name in names if name)

    yield ProviderCloud(make, alive, mute="gpu_runner.providers.ssh.connections.HostConnection.engine_answers")
    for machine in make().list(""):
        make().terminate(machine.name)
    eventually(lambda: not alive())


@contextlib.contextmanager
def ec2(home: Path, moto: str) -> Iterator[ProviderCloud]:
    """An account of moto's server."""
    from support.fake_ec2 import fake_ec2  # and with it moto

    with fake_ec2(moto, home) as site:
        alive = lambda: sorted(one.id for one in site.running())  # noqa: E731
        yield ProviderCloud(site.provider, alive, mute="gpu_runner.providers.ec2.provider.answers")


@contextlib.contextmanager
def runpod(home: Path) -> Iterator[ProviderCloud]:
    """A server of the shape of RunPod's API."""
    with fake_runpod(home) as site:
        alive = lambda: sorted(one.id for one in site.running())  # noqa: E731
        yield ProviderCloud(site.provider, alive, mute="gpu_runner.providers.runpod.provider.answers")


@contextlib.contextmanager
def kubernetes(home: Path) -> Iterator[ProviderCloud]:
    """A server of the shape of Kubernetes' API. Nobody but the test runs its pods."""
    with fake_cluster() as cluster, contextlib.ExitStack() as engines:
        port = free_port()

        def boots(name: str) -> None:
            key = cluster.secrets[name]["stringData"]["api-key"]
            engines.enter_context(contextlib.closing(GuardedEngine(key, "tiny", port)))
            cluster.run(name)

        def ends(name: str) -> None:
            if name in cluster.pods:
                cluster.remove(name)

        yield ProviderCloud(
            lambda: pod_provider(home, cluster, port=port),
            lambda: sorted(str(pod["metadata"]["uid"]) for pod in cluster.pods.values()),
            boots,
            ends,
        )


SITES = {"simulated": simulated, "local": local, "runpod": runpod, "kubernetes": kubernetes}
