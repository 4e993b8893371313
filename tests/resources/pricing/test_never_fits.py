"""A model can never be served only where every provider offers all that its configuration could ever offer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.fake_kubernetes import fake_cluster, pod_provider
from support.market_offers import H100, T4, FakeProvider

from gpu_runner.offers.offer import Offer
from gpu_runner.offers.speed import LengthMix
from gpu_runner.providers.base import Provider, ProviderUnclear
from gpu_runner.providers.ec2.config import Ec2ProviderConfig
from gpu_runner.providers.ec2.prices import Price
from gpu_runner.providers.ec2.provider import Ec2Provider
from gpu_runner.providers.local import LocalProvider, LocalProviderConfig
from gpu_runner.providers.runpod.config import RunPodConfig
from gpu_runner.providers.runpod.provider import RunPodProvider
from gpu_runner.providers.simulated.cloud import SimulatedCloud
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from gpu_runner.providers.ssh.config import SshProviderConfig
from gpu_runner.providers.ssh.host_requests import HostReply, Result
from gpu_runner.providers.ssh.provider import SshProvider
from resources.pricing.market import Market

LARGE = "meta-llama/Llama-3.1-70B"  # 131 GiB of weights
SMALL: dict[str, Any] = {"gpu": "T4", "gpus": 1, "gpu_memory_gib": 16, "price_per_hour": 0.3}
EIGHT: dict[str, Any] = {"gpu": "H100", "gpus": 8, "gpu_memory_gib": 80, "price_per_hour": 20.0}
UNPRICED = {name: value for name, value in EIGHT.items() if name != "price_per_hour"}
IMAGE = "vllm@sha256:" + "0" * 64


def never(*providers: Provider) -> list[str]:
    """GPUs of all offers, if it is known that none of them can ever serve the large model."""
    found = Market(providers, clock=time.time).never_fits(LARGE, "chat", LengthMix(200, 200), 2_000, ())
    return [one.offer.gpu for one in found]


def ssh(home: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, dict[str, Any]], away: Iterable[str]) -> Provider:
    given = [{"name": name, "address": name, "gpus_per_instance": one["gpus"], **one} for name, one in hosts.items()]
    config = SshProviderConfig.model_validate(
        {"name": "lab", "hosts": given, "key_file": "key", "known_hosts": "known_hosts"}
    )
    provider = SshProvider(home, config)
    answers: dict[str, HostReply | ProviderUnclear] = dict.fromkeys(hosts, HostReply(Result.OK, (), frozenset(), ()))
    answers |= {name: ProviderUnclear("time-out") for name in away}
    monkeypatch.setattr(provider, "_ask_all", lambda request: answers)
    return provider


def test_a_host_that_does_not_answer_now_may_serve_it_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"old": SMALL, "new": EIGHT}
    assert never(ssh(tmp_path, monkeypatch, hosts, away=["new"])) == []
    assert never(ssh(tmp_path, monkeypatch, {"old": SMALL, "older": SMALL}, away=["older"])) == ["T4"]


ON_DEMAND = {"instance_type": "g4dn.xlarge", "price_per_hour": 0.5}  # a T4
ONLY_SPOT = {"instance_type": "p5.48xlarge", "on_demand": False, "spot": True, "max_spot_price": 30.0}  # 8 H100


def ec2(home: Path, monkeypatch: pytest.MonkeyPatch, types: list[dict[str, Any]], usd: float | None) -> Provider:
    """`usd`: what an hour of the eight H100 costs as spot now."""
    config = Ec2ProviderConfig.model_validate(
        {
            "regions": [{"region": "us-east-1", "image": "ami-01234567", "security_groups": ["sg-01234567"]}],
            "instance_types": types,
            "engine_image": IMAGE,
        }
    )
    provider = Ec2Provider(home, config, tunnel=cast(Any, None), clients=cast(Any, SimpleNamespace()))
    spot = {} if usd is None else {("us-east-1", "p5.48xlarge", True): Price(usd, time.time(), "EC2")}
    monkeypatch.setattr(provider, "prices", lambda: ({}, spot))
    return provider


@pytest.mark.parametrize("usd", [31.0, None])
def test_spot_that_is_too_dear_or_without_a_price_now_may_serve_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usd: float | None
) -> None:
    provider = ec2(tmp_path, monkeypatch, [ON_DEMAND, ONLY_SPOT], usd)
    assert [one.gpu for one in provider.offers()] == ["T4"] and never(provider) == []
    assert never(ec2(tmp_path, monkeypatch, [ON_DEMAND], usd)) == ["T4"]


def test_a_pool_without_a_node_has_no_price_and_may_serve_it_later(tmp_path: Path) -> None:
    with fake_cluster() as cluster:
        provider = pod_provider(tmp_path, cluster, offers=[{"name": "t4", **SMALL}, {"name": "h100", **UNPRICED}])
        assert [one.gpu for one in provider.offers()] == ["T4"] and never(provider) == []
        assert never(pod_provider(tmp_path, cluster, offers=[{"name": "t4", **SMALL}])) == ["T4"]


def test_a_pod_that_no_list_has_a_price_of_may_serve_it_later(tmp_path: Path) -> None:
    def provider(*gpus: dict[str, Any]) -> Provider:
        given = [{"gpu_type": f"NVIDIA {one['gpu']}", **one} for one in gpus]
        return RunPodProvider(tmp_path, RunPodConfig.model_validate({"gpus": given, "engine_image": IMAGE}))

    assert never(provider(SMALL, UNPRICED)) == []
    assert never(provider(SMALL)) == ["T4"]


def simulated(home: Path, prices: list[Offer] | None) -> Provider:
    offer = {"instance_type": "t4", **SMALL}
    cloud = SimulatedCloudConfig.model_validate({"clock": 1, "providers": [{"name": "tiny", "offers": [offer]}]})
    return SimulatedCloud(home, cloud, None if prices is None else {"tiny": lambda now: prices}).providers["tiny"]


def test_fixed_lists_are_all_that_there_ever_is(tmp_path: Path) -> None:
    assert never(LocalProvider(tmp_path, LocalProviderConfig.model_validate(SMALL))) == ["T4"]
    assert never(simulated(tmp_path, None)) == ["T4"]
    assert never(simulated(tmp_path, [])) == [], "recorded prices have other offers later"


def test_what_a_provider_does_not_state_is_not_known() -> None:
    now = time.time()
    t4, h100 = replace(T4, observed_at=now), replace(H100, observed_at=now)
    assert never(FakeProvider("north", [t4])) == ["T4"]
    assert never(FakeProvider("north", [t4], away=(h100,))) == []
    silent_about_it = SimpleNamespace(name="north", clock=1.0, offers=lambda: [t4])
    assert never(cast(Provider, silent_about_it)) == []
