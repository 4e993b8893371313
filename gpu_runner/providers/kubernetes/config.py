"""What stands in fleet.yaml for a Kubernetes cluster: how it is reached, and which pods it takes at which price.

kubernetes:
  - name: gke-eu
    context: gke_project_europe-west4_gpu     # of the kubeconfig; left out in the cluster itself
    namespace: engines
    image: vllm/vllm-openai@sha256:…
    offers:
      - name: l4-spot
        gpu: L4
        gpu_memory_gib: 24
        spot: true
        price_per_hour: 0.28
        node_selector: {cloud.google.com/gke-accelerator: nvidia-l4, cloud.google.com/gke-spot: "true"}
        tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpu_runner.models.facts import Server
from gpu_runner.providers.sglang_server import SGLANG_ENTRY, SGLANG_WORDS

VLLM_COMMAND = ("vllm", "serve", "{model}", "--host", "0.0.0.0", "--port", "{port}")
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123, as Kubernetes uses it
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[KMGTP]i?)?$"
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_RESOURCE = r"^[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
# vLLM's own variables and those that manifests.py sets: a second value would be ambiguous.
_OURS = frozenset({"VLLM_API_KEY", "HOME", "HF_HOME", "XDG_CACHE_HOME"})

Reach = Literal["auto", "pod_ip", "port_forward"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Toleration(_Model):
    """A toleration as in a pod's specification."""

    key: str = Field(default="", max_length=317, description="taint that is tolerated; empty with `Exists`: all")
    operator: Literal["Equal", "Exists"] = Field(default="Equal", description="as in Kubernetes")
    value: str = Field(default="", max_length=63, description="value of the taint, for `Equal`")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(default="", description="empty: all")


class SecretReference(_Model):
    """A key of a Secret that is in the namespace already."""

    secret: str = Field(max_length=253, description="name of the Secret")
    key: str = Field(max_length=253, description="key in it")


class KubernetesOffer(_Model):
    """A kind of pod that the cluster takes: its GPUs, where it may run, and what an hour of it costs."""

    name: str = Field(pattern=DNS_LABEL, description="the instance type, as it is called in plans and bills")
    gpu: str = Field(description="spelled as in `gpu_runner/offers/gpus.py`")
    gpus: int = Field(default=1, ge=1, description="GPUs, or slices of GPUs, of one pod")
    gpu_memory_gib: float = Field(gt=0, description="GiB per GPU, or per slice")
    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        pattern=_RESOURCE,
        description="what the device plugin calls them, such as `nvidia.com/mig-1g.10gb` or `nvidia.com/gpu.shared`",
    )
    node_selector: dict[str, str] = Field(default={}, description="labels of the nodes that it may run on")
    tolerations: tuple[Toleration, ...] = Field(default=(), description="taints of those nodes that it puts up with")
    spot: bool = Field(default=False, description="the nodes may be taken away at any time")
    price_per_hour: float | None = Field(
        default=None,
        gt=0,
        description="US dollars for an hour of one pod; without it, what a price list says of the instance type of its "
        "nodes",
    )
    region: str | None = Field(default=None, max_length=63, description="in place of the cluster's `region`")
    boot_seconds: float = Field(default=300.0, ge=0, description="what ranking assumes of a start, image included")
    reliability: float = Field(
        default=1.0, ge=0, le=1, description="chance that a pod starts and is not taken away within the hour"
    )
    capacity_wait_seconds: float = Field(
        default=60.0,
        gt=0,
        description="how long a pod may wait for a node before the next offer is tried; 600 and more where nodes are "
        "added on demand",
    )
    image: str | None = Field(default=None, max_length=512, description="in place of the cluster's `image`")
    cpu: str = Field(default="4", pattern=QUANTITY, description="CPUs that are asked for")
    memory: str = Field(default="16Gi", pattern=QUANTITY, description="memory that is asked for, and the limit")
    queue: str | None = Field(default=None, pattern=DNS_LABEL, description="Kueue's local queue")
    priority_class: str | None = Field(default=None, max_length=253, description="name of a PriorityClass")

    @field_validator("node_selector")
    @classmethod
    def _label_values(cls, given: dict[str, str]) -> dict[str, str]:
        for key, value in given.items():
            if not _LABEL_VALUE.fullmatch(value):
                raise ValueError(f"expected a label's value for {key:.80}: at most 63 of A-Z a-z 0-9 - _ .")
        return given


class KubernetesProviderConfig(_Model):
    """A namespace of a cluster as a provider."""

    name: str = Field(
        default="kubernetes", pattern=DNS_LABEL, description="the provider's name, one of its own for each"
    )
    region: str = Field(default="", max_length=63, description="where the cluster is, as datasets ask for it")
    kubeconfig: Path | None = Field(
        default=None, description="file of credentials; without it `KUBECONFIG`, then `~/.kube/config`"
    )
    context: str | None = Field(
        default=None,
        description="context of the kubeconfig; without it, in a pod its service account, else the current",
    )
    namespace: str = Field(default="default", pattern=DNS_LABEL, description="where pods and their Secrets are made")
    reach: Reach = Field(
        default="auto",
        description="`pod_ip` from inside the cluster, `port_forward` through the API server with kubectl; `auto`: by "
        "where this process runs",
    )
    image: str = Field(
        default="vllm/vllm-openai:latest",
        max_length=512,
        description="image of the engine; by digest (`…@sha256:…`) at best",
    )
    sglang_image: str = Field(
        default="lmsysorg/sglang:latest",
        max_length=512,
        description="image of the engine for datasets with `engine.server: sglang`; by digest at best",
    )
    image_pull_secrets: tuple[str, ...] = Field(default=(), description="names of Secrets for a private registry")
    command: tuple[str, ...] = Field(
        default=VLLM_COMMAND, description="`{model}` and `{port}` are filled in; flags of vLLM are added at its end"
    )
    sglang_command: tuple[str, ...] = Field(
        default=(*SGLANG_ENTRY, *SGLANG_WORDS),
        description="as `command`, for datasets with `engine.server: sglang`; flags of SGLang are added",
    )
    port: int = Field(default=8000, ge=1024, le=65535, description="where the engine listens in its pod")
    environment: dict[str, str] = Field(
        default={}, description="further environment variables of the engine; no secrets"
    )
    secret_environment: dict[str, SecretReference] = Field(
        default={}, description="environment variables from Secrets of the namespace, such as `HF_TOKEN`"
    )
    model_cache_claim: str | None = Field(
        default=None, max_length=253, description="PersistentVolumeClaim for model files, shared by all pods"
    )
    cache_size: str = Field(
        default="200Gi", pattern=QUANTITY, description="most disk of a pod's own cache; more of it evicts the pod"
    )
    shared_memory: str = Field(default="8Gi", pattern=QUANTITY, description="size of `/dev/shm`, part of its memory")
    user: int = Field(default=2000, ge=1, description="user id of the engine; never root")
    active_deadline_seconds: int = Field(
        default=86_400, ge=60, description="a pod ends after so long, whatever happens: the dead-man's switch"
    )
    notice_seconds: int = Field(
        default=30,
        ge=0,
        le=600,
        description="how long a pod that is drained or preempted still answers; not more than its nodes grant",
    )
    startup_seconds: int = Field(default=3600, ge=10, description="an engine that does not answer by then is ended")
    keep_ended_seconds: float = Field(default=3600, ge=60, description="pods that have ended are deleted after so long")
    offers: tuple[KubernetesOffer, ...] = Field(min_length=1, description="what can be had, a node pool or slice each")

    @field_validator("command")
    @classmethod
    def _has_port(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not any("{port}" in word for word in command):
            raise ValueError("expected {port} in it, and {model} where it takes one")
        return command

    @model_validator(mode="after")
    def _names_differ(self) -> KubernetesProviderConfig:
        names = [one.name for one in self.offers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"offers: expected a name of its own for each, found twice: {', '.join(twice)}")
        both = self.environment.keys() & self.secret_environment.keys()
        if taken := sorted(both | ((self.environment.keys() | self.secret_environment.keys()) & _OURS)):
            raise ValueError(f"environment: expected names that nothing else sets, found {', '.join(taken)}")
        return self

    def below(self, folder: Path) -> KubernetesProviderConfig:
        """With the path of the kubeconfig from `folder` on."""
        if self.kubeconfig is None:
            return self
        return self.model_copy(update={"kubeconfig": folder.resolve() / self.kubeconfig.expanduser()})

    def image_of(self, offer: KubernetesOffer, server: Server = "vllm") -> str:
        """The image of its pods."""
        return self.sglang_image if server == "sglang" else offer.image or self.image

    def offer_of(self, instance_type: str) -> KubernetesOffer | None:
        """The offer of this name."""
        return next((one for one in self.offers if one.name == instance_type), None)
