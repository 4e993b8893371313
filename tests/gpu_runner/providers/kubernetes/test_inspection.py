"""What is looked at in a cluster without making a pod."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_kubernetes import OFFER, FakeCluster, fake_cluster, pod_provider

from gpu_runner.providers.checks import CheckOutcome, CheckResult, CheckSubject
from gpu_runner.providers.kubernetes import inspection
from gpu_runner.providers.kubernetes.config import KubernetesOffer
from gpu_runner.providers.kubernetes.node_health import takes

OK, WARNING, FAILED = CheckOutcome.OK, CheckOutcome.WARNING, CheckOutcome.FAILED
DIGEST = "vllm/vllm-openai@sha256:" + "a" * 64


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster() as found:
        yield found


def node(gpus: int = 4, *, ready: str = "True", cordoned: bool = False, **labels: str) -> dict[str, Any]:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": {"labels": labels}, "spec": {"taints": [taint], "unschedulable": cordoned}, "status": status}


def look(tmp_path: Path, cluster: FakeCluster, **settings: Any) -> dict[CheckSubject, list[CheckResult]]:
    found: dict[CheckSubject, list[CheckResult]] = {}
    for one in pod_provider(tmp_path, cluster, **settings).check():
        found.setdefault(one.subject, []).append(one)
    return found


def test_everything_right_is_all_ok(tmp_path: Path, cluster: FakeCluster):
    offer = {**OFFER, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    cluster.nodes = [node(), node(2), node(ready="Unknown")]
    found = look(tmp_path, cluster, offers=[offer], image=DIGEST)
    assert set(found) == set(CheckSubject)
    assert {one.outcome for results in found.values() for one in results} == {OK}
    assert found[CheckSubject.MACHINES][0].found == "h100: 2 nodes, 6 nvidia.com/gpu"
    assert found[CheckSubject.QUOTA][0].found == "no quota on pods or GPUs"


@pytest.mark.parametrize(
    ("image", "outcome"),
    [(DIGEST, OK), ("vllm/vllm-openai:v0.20", WARNING), ("vllm/vllm-openai@sha256:123", FAILED)],
)
def test_an_image_is_judged_by_its_name(tmp_path: Path, cluster: FakeCluster, image: str, outcome: CheckOutcome):
    assert [one.outcome for one in look(tmp_path, cluster, image=image)[CheckSubject.IMAGE]] == [outcome]


def test_a_full_quota_is_a_warning(tmp_path: Path, cluster: FakeCluster):
    status = {"hard": {"requests.nvidia.com/gpu": "4", "pods": "10"}, "used": {"requests.nvidia.com/gpu": "4"}}
    cluster.quotas = [{"metadata": {"name": "gpus"}, "status": status}]
    (quota,) = look(tmp_path, cluster)[CheckSubject.QUOTA]
    assert (quota.outcome, quota.found) == (WARNING, "full: requests.nvidia.com/gpu 4 of 4 used (gpus)")


def test_rights_for_the_look_itself_are_not_needed(tmp_path: Path, cluster: FakeCluster):
    cluster.forbidden = {("list", "nodes"), ("list", "resourcequotas")}
    found = look(tmp_path, cluster)
    assert found[CheckSubject.QUOTA][0].outcome is found[CheckSubject.MACHINES][0].outcome is WARNING
    assert found[CheckSubject.PERMISSIONS][0].outcome is OK


def test_from_outside_kubectl_and_its_right_are_needed(
    tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inspection, "find_kubectl", lambda: None)
    cluster.forbidden = {("create", "pods/portforward")}
    found = look(tmp_path, cluster, reach="auto")
    assert found[CheckSubject.PERMISSIONS][0].found == "missing: create pods/portforward"
    assert found[CheckSubject.MACHINES][0].outcome is FAILED
    assert look(tmp_path, cluster, reach="pod_ip")[CheckSubject.PERMISSIONS][0].outcome is OK


def test_credentials_that_are_not_accepted_end_the_look(tmp_path: Path, cluster: FakeCluster):
    found = look(tmp_path, cluster, token="wrong")
    assert found[CheckSubject.CREDENTIALS][0].outcome is FAILED
    assert CheckSubject.PERMISSIONS not in found


def test_a_node_is_for_an_offer_as_the_scheduler_sees_it():
    tolerant = {"tolerations": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}

    def offer(**changes: Any) -> KubernetesOffer:
        return KubernetesOffer.model_validate({**OFFER, **tolerant, **changes})

    assert takes(node(pool="a"), offer(node_selector={"pool": "a"}))
    assert not takes(node(pool="b"), offer(node_selector={"pool": "a"}))
    assert not takes(node(), offer(tolerations=[]))
    assert not takes(node(), offer(tolerations=[{"key": "nvidia.com/gpu", "value": "other"}]))
    assert takes(node(), offer(tolerations=[{"operator": "Exists"}]))
    assert not takes(node(cordoned=True), offer())
    assert not takes(node(ready="False"), offer())
