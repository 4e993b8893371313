"""The inventory of fleet.yaml: what it must say, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpu_runner.providers.ssh.config import SshHostConfig, SshProviderConfig
from resources.fleet.fleet_config import FleetConfig, FleetConfigError

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJn0nNbIkjkNUAMoVOZ8I1Hn4IGtKFv7zT0y0mKm0sGT"
HOST = {"name": "a", "address": "10.0.0.5", "gpu": "A100", "gpu_memory_gib": 80, "host_keys": [KEY]}


def config(host: dict[str, Any] | None = None, **settings: Any) -> SshProviderConfig:
    return SshProviderConfig.model_validate({"hosts": [{**HOST, **(host or {})}], "key_env": "KEY", **settings})


def test_gpus_of_a_host_make_sets_of_which_each_is_a_slot():
    host = {**HOST, "gpus": 4, "gpus_per_instance": 2}
    assert SshHostConfig.model_validate(host).gpu_sets == (("0", "1"), ("2", "3"))
    named = SshHostConfig.model_validate({**host, "gpu_devices": ["3", "2", "GPU-1a", "0"]})
    assert named.gpu_sets == (("3", "2"), ("GPU-1a", "0"))


@pytest.mark.parametrize(
    ("host", "settings", "expected"),
    [
        ({"gpus": 4, "gpus_per_instance": 3}, {}, "expected a divisor of gpus, 4"),
        ({"gpus": 2, "gpu_devices": ["0", "0"]}, {}, "expected 2 different devices"),
        ({"gpu_devices": ["../0"]}, {}, "expected numbers or UUIDs"),
        ({"gpu_devices": ["0:0"]}, {}, "expected numbers or UUIDs"),  # the host's list of GPUs has no word for it
        ({"gpu_devices": ["MIG-GPU-1a/1/0"]}, {}, "expected numbers or UUIDs"),
        ({"host_keys": []}, {}, "a has none"),
        ({"host_keys": ["no key"]}, {}, "expected public keys"),
        ({"address": "-oProxyCommand=x"}, {}, "address"),
        ({}, {"key_file": "id"}, "either key_file or key_env"),
        ({}, {"command": ["serve"]}, r"expected \{port\} in it"),
        ({}, {"command": ["serve", "{port}"], "docker_image": "vllm"}, "not both"),
        ({}, {"environment": {"A B": "1"}}, "expected names of variables"),
        ({}, {"hosts": [HOST, HOST]}, "found twice: a"),
        ({}, {"password": "secret"}, "password"),
    ],
)
def test_what_cannot_work_is_refused(host: dict[str, Any], settings: dict[str, Any], expected: str):
    with pytest.raises(ValidationError, match=expected):
        config(host, **settings)


def test_a_container_listens_on_loopback_gets_its_gpus_and_its_key_by_name_and_is_removed():
    docker = config(
        docker_image="vllm/vllm-openai@sha256:00", environment={"HF_HOME": "/w"}, docker_arguments=["-v=/w"]
    )
    words = docker.engine_command
    assert words[:2] == ("docker", "run")
    assert {"127.0.0.1:{port}:8000", '"device={gpus}"', "VLLM_API_KEY", "HF_HOME", "-v=/w"} <= set(words)
    assert words[words.index("--entrypoint") :][:5] == ("--entrypoint", "vllm", docker.docker_image, "serve", "{model}")
    shell, option, script, *rest = docker.engine_end_command
    assert (shell, option, rest) == ("sh", "-c", ["sh", "{name}"]) and script.startswith('docker rm -f "$1"; ')
    assert config().engine_end_command == ()
    assert config().engine_command[:2] == ("vllm", "serve")


def test_files_are_looked_for_beside_fleet_yaml(tmp_path: Path):
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "ssh:\n- key_file: keys/id\n  known_hosts: ../known\n  hosts:\n"
        "  - {name: a, address: a.example, gpu: A100, gpu_memory_gib: 80}\n"
    )
    (found,) = FleetConfig.load(path).ssh
    assert (found.key_file, found.known_hosts) == (tmp_path / "keys/id", tmp_path / "../known")


def test_two_providers_of_one_name_are_refused_whatever_their_kind(tmp_path: Path):
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"local: [{{name: ssh, gpu: A100, gpu_memory_gib: 80}}]\nssh:\n- key_env: KEY\n  hosts:\n"
        f"  - {{name: a, address: a.example, gpu: A100, gpu_memory_gib: 80, host_keys: ['{KEY}']}}\n"
    )
    with pytest.raises(FleetConfigError, match="found twice: ssh"):
        FleetConfig.load(path)
