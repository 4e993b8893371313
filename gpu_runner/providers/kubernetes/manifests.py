"""Pod and Secret of a machine, as the API server takes them (Kubernetes v1). Pure.

The pod meets the Pod Security Standard "restricted". Deletion by others (drain, preemption, eviction) is a notice: a
`preStop` sleep keeps the engine answering until shortly before the grace period ends (KEP-3960, Kubernetes 1.30).
"""

from __future__ import annotations

from typing import Any

from gpu_runner.providers.base import EngineOrder
from gpu_runner.providers.kubernetes.config import KubernetesOffer, KubernetesProviderConfig, Toleration

Manifest = dict[str, Any]

MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "batch-assets"
PROVIDER_LABEL, FLEET_LABEL, OFFER_LABEL = "batch-assets/provider", "batch-assets/fleet", "batch-assets/offer"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MODEL_NOTE, SLOTS_NOTE = "batch-assets/model", "batch-assets/max-num-seqs"
CONTAINER = "engine"
CACHE = "/cache"
KEY = "api-key"
STOP_SECONDS = 5  # of the grace period that an engine has to end itself
NODE_LOST_SECONDS = 30  # a pod of a node that is not heard of is given up after this; Kubernetes' default is 300
PROBE_SECONDS = 2


def selector(provider: str) -> str:
    """Label selector of all pods and Secrets of a provider."""
    return f"{MANAGED_BY}={MANAGER},{PROVIDER_LABEL}={provider}"


def labels(provider: str, name: str, offer: str) -> dict[str, str]:
    """Labels of what belongs to the machine `name`."""
    return {
        "app.kubernetes.io/name": "engine",
        MANAGED_BY: MANAGER,
        PROVIDER_LABEL: provider,
        FLEET_LABEL: name.rpartition("-")[0] or name,
        OFFER_LABEL: offer,
    }


def pod_manifest(config: KubernetesProviderConfig, offer: KubernetesOffer, name: str, order: EngineOrder) -> Manifest:
    """The pod of a machine. It waits for the Secret of the same name (see `secret_manifest`)."""
    marks = labels(config.name, name, offer.name)
    notes = {MODEL_NOTE: order.model, **({SLOTS_NOTE: str(order.max_num_seqs)} if order.max_num_seqs else {})}
    spec: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service of a wrong name would set variables that the engine reads
        "activeDeadlineSeconds": config.active_deadline_seconds,
        "terminationGracePeriodSeconds": config.notice_seconds + STOP_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": config.user,
            "runAsGroup": config.user,
            "fsGroup": config.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": dict(offer.node_selector),
        "tolerations": [*map(_toleration, offer.tolerations), *_NODE_LOST],
        "containers": [_container(config, offer, name, order)],
        "volumes": _volumes(config),
    }
    if offer.priority_class:
        spec["priorityClassName"] = offer.priority_class
    if config.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": one} for one in config.image_pull_secrets]
    if offer.queue:
        marks[QUEUE_LABEL] = offer.queue
    metadata = {"name": name, "labels": marks, "annotations": notes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def secret_manifest(config: KubernetesProviderConfig, offer: str, name: str, pod_uid: str, api_key: str) -> Manifest:
    """The engine's key. Owned by the pod: the cluster deletes it with the pod."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod_uid}
    metadata = {"name": name, "labels": labels(config.name, name, offer), "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "immutable": True, "stringData": {KEY: api_key}}


def engine_command(config: KubernetesProviderConfig, order: EngineOrder) -> list[str]:
    """The command line of the engine. No key stands in it.

    The kubelet replaces `$(NAME)` by environment variables, `$$` by `$`: what we are given stays as it is.
    """
    command = config.command if order.server == "vllm" else config.sglang_command
    given = [word.replace("{model}", order.model).replace("{port}", str(config.port)) for word in command]
    return [word.replace("$", "$$") for word in (*given, *order.words)]


def _container(config: KubernetesProviderConfig, offer: KubernetesOffer, name: str, order: EngineOrder) -> Manifest:
    health = {"httpGet": {"path": "/health", "port": config.port}, "timeoutSeconds": 2}
    container: Manifest = {
        "name": CONTAINER,
        "image": config.image_of(offer, order.server),
        "imagePullPolicy": "IfNotPresent",
        "command": engine_command(config, order),
        "env": _environment(config, name),
        "ports": [{"containerPort": config.port, "name": "http"}],
        "resources": {
            "requests": {"cpu": offer.cpu, "memory": offer.memory, offer.gpu_resource: str(offer.gpus)},
            "limits": {"memory": offer.memory, offer.gpu_resource: str(offer.gpus)},
        },
        "startupProbe": {
            **health,
            "periodSeconds": PROBE_SECONDS,
            "failureThreshold": max(1, config.startup_seconds // PROBE_SECONDS),
        },
        "readinessProbe": {**health, "periodSeconds": 5, "failureThreshold": 3},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}, {"name": "shm", "mountPath": "/dev/shm"}],
        "terminationMessagePolicy": "File",  # never the end of the log: it may hold text of rows
    }
    if config.model_cache_claim:
        container["volumeMounts"].append({"name": "models", "mountPath": f"{CACHE}/huggingface"})
    if config.notice_seconds:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": config.notice_seconds}}}
    return container


def _environment(config: KubernetesProviderConfig, name: str) -> list[Manifest]:
    """All caches are in the volume of limited size. A user id without a name in the image needs USER (torch)."""
    plain = {
        "HOME": CACHE,
        "USER": CONTAINER,
        "LOGNAME": CONTAINER,
        "HF_HOME": f"{CACHE}/huggingface",
        "XDG_CACHE_HOME": f"{CACHE}/xdg",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # vLLM closes idle connections after 5 s by default
        **config.environment,
    }
    secrets = {variable: (one.secret, one.key) for variable, one in config.secret_environment.items()}
    secrets["VLLM_API_KEY"] = (name, KEY)
    return [
        *({"name": variable, "value": value.replace("$", "$$")} for variable, value in plain.items()),
        *(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for variable, (secret, key) in secrets.items()
        ),
    ]


def _volumes(config: KubernetesProviderConfig) -> list[Manifest]:
    cache: Manifest = {"name": "cache", "emptyDir": {"sizeLimit": config.cache_size}}
    shm: Manifest = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": config.shared_memory}}
    claim: list[Manifest] = []
    if config.model_cache_claim:
        claim = [{"name": "models", "persistentVolumeClaim": {"claimName": config.model_cache_claim}}]
    return [cache, shm, *claim]


def _toleration(given: Toleration) -> Manifest:
    return {name: value for name, value in given.model_dump().items() if value}


_NODE_LOST: list[Manifest] = [
    {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_SECONDS}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
]
