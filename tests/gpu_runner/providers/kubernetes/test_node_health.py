"""Nodes as a cluster of version 1.33 was seen to report them, and what follows for the pods on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubernetes import FakeCluster, fake_cluster, pod_provider
from support.machines import ORDER, first_offer, get

from gpu_runner.providers.kubernetes.api import ClusterApi
from gpu_runner.providers.kubernetes.node_health import (
    LASTING_SECONDS,
    LOOK_SECONDS,
    RESTART_SECONDS,
    NodeHealth,
    read_node,
)

GPU = "nvidia.com/gpu"


def node(healthy: int = 4, ready: str = "True", name: str = "node1") -> dict[str, Any]:
    counts = {"cpu": "2", "memory": "24Gi", "pods": "110"}
    ready_said = {"type": "Ready", "status": ready, "reason": "NodeStatusUnknown" if ready == "Unknown" else "x"}
    status = {
        "capacity": {**counts, GPU: "4"},
        "allocatable": {**counts, GPU: str(healthy)},
        "conditions": [{"type": "MemoryPressure", "status": "False"}, ready_said],
    }
    return {"metadata": {"name": name}, "spec": {}, "status": status}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster() as found:
        yield found


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def health(tmp_path: Path, cluster: FakeCluster) -> tuple[NodeHealth, Clock]:
    clock = Clock()
    return NodeHealth(ClusterApi(pod_provider(tmp_path, cluster).config), clock), clock


def test_only_a_pod_with_more_gpus_than_are_healthy_must_have_a_failed_one():
    assert read_node(node(3)).failed_gpus(GPU, 4) == (
        "of its node's 4 nvidia.com/gpu 3 are healthy, and it has 4: one of its own has failed"
    )
    assert not read_node(node(3)).failed_gpus(GPU, 3)
    assert not read_node(node(4)).failed_gpus(GPU, 4)
    assert not read_node(node(0)).failed_gpus("nvidia.com/mig-1g.10gb", 1)


def test_a_node_that_does_not_report_says_nothing_of_its_gpus():
    lost = read_node(node(0, "Unknown"))
    assert not lost.failed_gpus(GPU, 4)
    assert lost.trouble().startswith("node node1 does not report any more")
    assert read_node(node(4, "False")).trouble() == "node node1 is not ready"
    assert not read_node(node()).trouble()


def test_a_plugin_that_starts_again_is_no_failure(tmp_path: Path, cluster: FakeCluster):
    found, clock = health(tmp_path, cluster)
    for healthy, seconds in ((0, 0.0), (0, RESTART_SECONDS - 1), (4, 3 * LOOK_SECONDS), (0, LOOK_SECONDS)):
        cluster.nodes = [node(healthy)]
        clock.now += seconds
        found.look(["node1"])
        assert not found.failing("u", "node1", GPU, 4)
    clock.now += RESTART_SECONDS
    found.look(["node1"])
    assert found.failing("u", "node1", GPU, 4)
    cluster.nodes = [node(4)]
    clock.now += LOOK_SECONDS
    found.look(["node1"])
    assert not found.failing("u", "node1", GPU, 4)


def test_one_failed_gpu_beside_healthy_ones_is_no_restart_of_the_plugin(tmp_path: Path, cluster: FakeCluster):
    found, clock = health(tmp_path, cluster)
    cluster.nodes = [node(3)]
    for seconds, failing in ((0.0, False), (LASTING_SECONDS - 1, False), (LOOK_SECONDS, True)):
        clock.now += seconds
        found.look(["node1"])
        assert bool(found.failing("u", "node1", GPU, 4)) is failing


def test_without_the_right_nothing_is_known_and_it_is_not_asked_again_and_again(tmp_path: Path, cluster: FakeCluster):
    cluster.nodes, cluster.forbidden = [node(0)], {("get", "nodes")}
    found, clock = health(tmp_path, cluster)
    for _ in range(3):
        found.look(["node1"])
        clock.now += LOOK_SECONDS
    assert found.find("node1") is None
    assert not found.failing("u", "node1", GPU, 4)
    assert len([path for _, path in cluster.asked if path.endswith("/nodes/node1")]) == 1


def test_a_failed_gpu_is_a_notice_of_its_machine(tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu_runner.providers.kubernetes.node_health.RESTART_SECONDS", 0.0)
    provider = pod_provider(tmp_path, cluster)
    provider.create(first_offer(provider), "ba-1", ORDER)
    cluster.run("ba-1")
    name = cluster.pods["ba-1"]["spec"]["nodeName"]
    cluster.nodes = [node(0, name=name)]
    found = get(provider, "ba-1")
    assert (found.state, found.notice_seconds) == ("running", 60)
    assert found.detail.endswith("0 are healthy, and it has 1: one of its own has failed")
    provider.terminate("ba-1")
    assert not cluster.pods or get(provider, "ba-1").notice_seconds is None


def test_what_became_of_a_lost_engine_is_said(tmp_path: Path, cluster: FakeCluster):
    provider = pod_provider(tmp_path, cluster, reach="port_forward")
    provider.create(first_offer(provider), "ba-1", ORDER)
    cluster.run("ba-1")
    name = cluster.pods["ba-1"]["spec"]["nodeName"]
    cluster.nodes = [node(4, "Unknown", name)]
    assert provider.diagnose("ba-1") == (
        f"its pod runs on {name}; node {name} does not report any more: it has no power, is cut off, or its kubelet "
        "has stopped"
    )
    cluster.disrupt("ba-1", "EvictionByEvictionAPI")
    assert provider.diagnose("ba-1").endswith("s: drained")
    cluster.end("ba-1", "OOMKilled", 137)
    assert "out of memory" in provider.diagnose("ba-1") or "drained" in provider.diagnose("ba-1")
    cluster.remove("ba-1")
    assert provider.diagnose("ba-2") == "there is no such pod any more"
    cluster.fault = lambda method, path: "cut"
    assert "the API server does not answer" in provider.diagnose("ba-1")
    assert "the way to its engines leads through it" in provider.diagnose("ba-1")
