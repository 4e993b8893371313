"""The pod and the Secret of a machine, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_kubernetes import OFFER

from gpu_runner.providers.base import EngineOrder
from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.manifests import pod_manifest, secret_manifest

ORDER = EngineOrder("org/model", "chat", 16, ("--max-model-len", "2048"))


def config(offer: dict[str, Any] | None = None, **settings: Any) -> KubernetesProviderConfig:
    return KubernetesProviderConfig.model_validate({"name": "pods", "offers": [{**OFFER, **(offer or {})}], **settings})


def pod(given: KubernetesProviderConfig, order: EngineOrder = ORDER) -> dict[str, Any]:
    return pod_manifest(given, given.offers[0], "ba-abc123-0001", order)


def test_the_pod_meets_the_restricted_standard_and_gets_no_token():
    spec = pod(config())["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert all("hostPath" not in volume for volume in spec["volumes"])


def test_the_pod_carries_what_the_offer_says():
    offer = {
        "gpus": 2,
        "gpu_resource": "nvidia.com/mig-1g.10gb",
        "node_selector": {"pool": "spot"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "queue": "research",
        "priority_class": "batch",
        "memory": "24Gi",
        "image": "own@sha256:" + "0" * 64,
    }
    made = pod(config(offer, model_cache_claim="models", image_pull_secrets=["pull"], active_deadline_seconds=7200))
    spec, labels = made["spec"], made["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert (labels["batch-assets/provider"], labels["batch-assets/fleet"]) == ("pods", "ba-abc123")
    assert spec["priorityClassName"] == "batch"
    assert spec["nodeSelector"] == {"pool": "spot"}
    assert spec["tolerations"][0] == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert spec["activeDeadlineSeconds"] == 7200
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    (container,) = spec["containers"]
    assert container["image"] == offer["image"]
    assert container["resources"]["limits"] == {"memory": "24Gi", "nvidia.com/mig-1g.10gb": "2"}
    sizes = {volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in spec["volumes"]}
    assert sizes == {"cache": "200Gi", "shm": "8Gi", "models": None}
    assert {"name": "models", "mountPath": "/cache/huggingface"} in container["volumeMounts"]


def test_no_key_stands_in_the_pod_and_the_secret_goes_with_it():
    given = config(secret_environment={"HF_TOKEN": {"secret": "hub", "key": "token"}})
    secret = secret_manifest(given, "h100", "ba-abc123-0001", "uid-1", "the-key")
    assert secret["stringData"] == {"api-key": "the-key"}
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    variables = {one["name"]: one for one in pod(given)["spec"]["containers"][0]["env"]}
    reference = {"name": "ba-abc123-0001", "key": "api-key"}
    assert variables["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == reference
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert "the-key" not in str(pod(given))


def test_the_command_has_model_port_and_the_orders_flags_and_the_kubelet_expands_nothing_in_it():
    made = pod(config(port=9000, environment={"A": "$(HOME)"}), EngineOrder("org/$(HOME)", "chat", 16, ("--x", "$$y")))
    (container,) = made["spec"]["containers"]
    head = ["vllm", "serve", "org/$$(HOME)", "--host", "0.0.0.0", "--port", "9000"]
    assert container["command"] == [*head, "--max-num-seqs", "16", "--x", "$$$$y"]
    assert {"name": "A", "value": "$$(HOME)"} in container["env"]


def test_an_engine_still_answers_between_its_deletion_and_its_end():
    spec = pod(config(notice_seconds=25))["spec"]
    assert spec["terminationGracePeriodSeconds"] == 30
    assert spec["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 25}}}
    assert "lifecycle" not in pod(config(notice_seconds=0))["spec"]["containers"][0]


def test_a_slow_start_is_waited_for_as_long_as_the_configuration_says():
    probe = pod(config(startup_seconds=600))["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600
    assert probe["httpGet"] == {"path": "/health", "port": 8000}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"command": ["vllm", "serve"]}, "expected {port} in it"),
        ({"offers": []}, "at least 1 item"),
        ({"offers": [OFFER, OFFER]}, "found twice: h100"),
        ({"offers": [{**OFFER, "gpu_resource": "gpu"}]}, "gpu_resource"),
        ({"offers": [{**OFFER, "node_selector": {"a": "b c"}}]}, "label's value"),
        ({"offers": [{**OFFER, "memory": "much"}]}, "memory"),
        ({"environment": {"VLLM_API_KEY": "x"}}, "VLLM_API_KEY"),
        ({"environment": {"A": "x"}, "secret_environment": {"A": {"secret": "s", "key": "k"}}}, "found A"),
        ({"namespace": "A"}, "namespace"),
        ({"user": 0}, "user"),
        ({"cluster": "x"}, "cluster"),
    ],
)
def test_a_wrong_configuration_is_refused_with_what_is_wrong(wrong: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        KubernetesProviderConfig.model_validate({"name": "pods", "offers": [OFFER], **wrong})
