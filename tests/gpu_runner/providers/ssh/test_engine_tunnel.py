"""A tunnel to a rented VM, through an SSH server that has the keys which EC2's user data gives it."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.guarded_engine import GuardedEngine
from support.machines import eventually
from support.vm_sshd import VmSshd

from gpu_runner.providers.cloud.tunnels import TunnelTarget
from gpu_runner.providers.ec2.ssh_keys import SshKeys, ssh_keys
from gpu_runner.providers.engine_process import answers
from gpu_runner.providers.ssh.engine_tunnel import open_engine_tunnel
from gpu_runner.providers.ssh.login import ConnectProblem, NotConnected

SECRET = "s" * 64


class Vm(VmSshd):
    """sshd of a VM with the keys of `keys`, and its engine."""

    def __init__(self, folder: Path, keys: SshKeys) -> None:
        self.engine = GuardedEngine("key", "tiny")
        (folder / "authorized_keys").write_text(keys.client.public + "\n")
        super().__init__(keys.host.private, folder / "authorized_keys", int(self.engine.url.rsplit(":", 1)[1]))

    def close(self) -> None:
        super().close()
        self.engine.close()


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[Vm]:
    with contextlib.closing(Vm(tmp_path, ssh_keys(SECRET, "ba-1"))) as made:
        yield made


def target(vm: Vm, name: str = "ba-1") -> TunnelTarget:
    """What the provider derives from the secret and the name."""
    keys = ssh_keys(SECRET, name)
    return TunnelTarget("127.0.0.1", vm.port, "batch-assets", keys.host.public, keys.client.private, vm.engine_port)


def test_requests_reach_the_engine_and_the_connection_ends_with_the_tunnel(vm: Vm):
    tunnel = open_engine_tunnel(target(vm))
    assert answers(tunnel.endpoint)
    request = urllib.request.Request(f"{tunnel.endpoint}/v1/models", headers={"Authorization": "Bearer key"})
    with urllib.request.urlopen(request, timeout=10) as page:
        assert page.status == 200
    assert len(vm.alive) == 1
    tunnel.close()
    tunnel.close()
    eventually(lambda: not vm.alive)
    assert not answers(tunnel.endpoint)


def test_a_host_with_another_key_is_told_nothing(vm: Vm):
    with pytest.raises(NotConnected) as raised:
        open_engine_tunnel(replace(target(vm), host_key=ssh_keys(SECRET, "ba-2").host.public))
    assert raised.value.problem is ConnectProblem.HOST_KEY


def test_the_key_of_another_machine_is_not_let_in_and_shown_nowhere(vm: Vm):
    wrong = replace(target(vm), client_key=ssh_keys(SECRET, "ba-2").client.private)
    with pytest.raises(NotConnected) as raised:
        open_engine_tunnel(wrong)
    assert raised.value.problem is ConnectProblem.LOGIN
    assert "PRIVATE KEY" not in repr(wrong) + str(raised.value)


def test_no_other_port_of_the_vm_is_reached(vm: Vm):
    tunnel = open_engine_tunnel(replace(target(vm), engine_port=vm.port))
    assert not answers(tunnel.endpoint)
    tunnel.close()
