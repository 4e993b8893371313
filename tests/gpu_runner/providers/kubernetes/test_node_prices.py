"""Prices of pods by the instance type of their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubernetes import OFFER, FakeCluster, fake_cluster, pod_provider
from support.machines import ORDER

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.checks import CheckOutcome, CheckSubject
from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.node_prices import cloud_of
from gpu_runner.providers.kubernetes.provider import KubernetesProvider

GPU = "nvidia.com/gpu"
UNPRICED = {name: value for name, value in OFFER.items() if name != "price_per_hour"}


def node(kind: str, provider: str = "aws:///eu-central-1a/i-0ab", gpus: int = 8) -> dict[str, Any]:
    labels = {"node.kubernetes.io/instance-type": kind, "topology.kubernetes.io/region": "eu-central-1"}
    counts = {GPU: str(gpus)}
    status = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "allocatable": counts,
        "capacity": counts,
    }
    return {"metadata": {"name": kind, "labels": labels}, "spec": {"providerID": provider}, "status": status}


def price(kind: str, dollars: float, *, spot: bool = False, region: str = "eu-central-1") -> Offer:
    return Offer("aws", region, kind, "H100", 8, 80.0, spot, dollars, 300.0, 1.0, 0.0, "gpuhunt")


LIST = [
    price("p5.48xlarge", 64.0),
    price("p5.48xlarge", 24.0, spot=True),
    price("p5.48xlarge", 99.0, region="us-east-1"),
    price("p5e.48xlarge", 80.0),
]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster() as found:
        yield found


def provider(tmp_path: Path, cluster: FakeCluster, asked: list[str], **offer: Any) -> KubernetesProvider:
    config = pod_provider(tmp_path, cluster, offers=[{**UNPRICED, **offer}]).config

    def listed(cloud: str) -> Sequence[Offer]:
        asked.append(cloud)
        return LIST if cloud == "aws" else []

    return KubernetesProvider(tmp_path, KubernetesProviderConfig.model_validate(config), listed=listed)


def test_a_pod_costs_its_share_of_the_node(tmp_path: Path, cluster: FakeCluster):
    cluster.nodes = [node("p5.48xlarge")]
    asked: list[str] = []
    (offer,) = provider(tmp_path, cluster, asked).offers()
    assert offer.price_per_hour == 8.0
    assert offer.source == "aws p5.48xlarge in eu-central-1 by gpuhunt, 1 of 8 nvidia.com/gpu"
    found = provider(tmp_path, cluster, asked)
    assert found.create(found.offers()[0], "ba-1", ORDER)
    assert asked == ["aws"]


def test_a_spot_offer_has_the_spot_price_and_of_unlike_nodes_the_dearest_counts(tmp_path: Path, cluster: FakeCluster):
    cluster.nodes = [node("p5.48xlarge")]
    (offer,) = provider(tmp_path, cluster, [], spot=True, gpus=8, name="whole").offers()
    assert offer.price_per_hour == 24.0


def test_of_unlike_nodes_the_dearest_counts(tmp_path: Path, cluster: FakeCluster):
    cluster.nodes = [node("p5.48xlarge"), node("p5e.48xlarge")]
    (offer,) = provider(tmp_path, cluster, [], gpus=8).offers()
    assert offer.price_per_hour == 80.0


@pytest.mark.parametrize(
    "nodes", [[], [node("g4dn.xlarge")], [node("p5.48xlarge", "kind://docker/x")], [node("p5.48xlarge", "", 8)]]
)
def test_what_has_no_price_is_not_offered_and_the_check_says_so(
    tmp_path: Path, cluster: FakeCluster, nodes: list[dict[str, Any]]
):
    cluster.nodes = nodes
    found = provider(tmp_path, cluster, [])
    assert found.offers() == []
    (said,) = [one for one in found.check() if one.subject is CheckSubject.PRICES]
    assert said.outcome is CheckOutcome.WARNING
    assert said.found.startswith("h100: no price")


def test_a_price_of_fleet_yaml_counts_and_nothing_is_asked(tmp_path: Path, cluster: FakeCluster):
    asked: list[str] = []
    (offer,) = provider(tmp_path, cluster, asked, price_per_hour=3.6).offers()
    assert (offer.price_per_hour, offer.source, asked) == (3.6, "fleet.yaml", [])
    assert not [path for _, path in cluster.asked if path.endswith("/nodes")]


def test_clouds_are_spelled_as_in_price_lists():
    assert [cloud_of(node("x", given)) for given in ("gce://p/z/n", "azure:///s", "aws:///z/i", "", "k3s")] == [
        *("gcp", "azure", "aws"),
        *("", ""),
    ]
