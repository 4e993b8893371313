"""The GPUs of this computer: each instance of a provider with several slots gets its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.machines import ORDER, ended_machines, eventually, first_offer, local_provider, part, parts

from gpu_runner.providers.base import NoCapacity, ProviderError
from gpu_runner.providers.local import LocalProvider, LocalProviderConfig

ENGINE = "gpu_runner.simulator"


def config(**settings: Any) -> LocalProviderConfig:
    return LocalProviderConfig.model_validate({"gpu": "H100", "gpu_memory_gib": 80, **settings})


def devices(machine_id: str) -> str | None:
    """What the engine of a machine sees."""
    eventually(lambda: parts(machine_id, ENGINE))
    return part(machine_id, ENGINE).environ().get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("settings", "ours", "expected"),
    [
        ({}, None, ()),
        ({}, "3", ()),
        ({"gpu_devices": ["1"]}, "3", ("1",)),
        ({"capacity": 2}, None, ("0", "1")),
        ({"capacity": 2, "gpus": 2}, None, ("0,1", "2,3")),
        ({"capacity": 2}, "4, 5,6", ("4", "5")),
        ({"capacity": 2, "gpu_devices": ["GPU-a", "GPU-b"]}, "4,5", ("GPU-a", "GPU-b")),
        ({"capacity": 2, "environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "4,5", ()),
    ],
)
def test_gpus_are_divided_unless_the_environment_says_which(
    settings: dict[str, Any], ours: str | None, expected: tuple[str, ...]
):
    assert config(**settings).gpu_sets(ours) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 2, "gpu_devices": ["0"]},
        {"capacity": 2, "gpu_devices": ["0", "0"]},
        {"gpu_devices": ["0 "]},
        {"gpu_devices": ["0"], "environment": {"CUDA_VISIBLE_DEVICES": "0"}},
    ],
)
def test_devices_that_cannot_be_divided_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValidationError, match="gpu_devices: expected"):
        config(**settings)


@pytest.mark.slow
def test_each_instance_gets_gpus_of_its_own_and_frees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def provider() -> LocalProvider:
        return local_provider(tmp_path, capacity=2, gpus=2)

    with ended_machines(tmp_path):
        offer = first_offer(provider())
        first, second = (provider().create(offer, name, ORDER) for name in ("ba-1", "ba-2"))
        assert (devices(first), devices(second)) == ("0,1", "2,3")
        with pytest.raises(NoCapacity):
            provider().create(offer, "ba-3", ORDER)
        provider().terminate("ba-1")
        eventually(lambda: first_offer(provider()).capacity == 1)
        assert devices(provider().create(offer, "ba-4", ORDER)) == "0,1"
        for name in ("ba-2", "ba-4"):
            provider().terminate(name)
        eventually(lambda: first_offer(provider()).capacity == 2)


def test_too_few_gpus_of_our_own_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    provider = local_provider(tmp_path, capacity=2)
    with pytest.raises(ProviderError, match="expected 2 GPUs, capacity × gpus, found CUDA_VISIBLE_DEVICES='5'"):
        provider.create(first_offer(provider), "ba-1", ORDER)
    assert not provider.list("")
