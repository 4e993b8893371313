"""What `batch-assets fleet check` shows of a cluster: everything that renting needs, asked without making a pod."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_runner.offers.gpus import find_sheet
from gpu_runner.providers.checks import CheckOutcome, CheckResult, CheckSubject
from gpu_runner.providers.kubernetes.api import ApiAway, ApiRefused, ClusterApi, CredentialsError, Verb, inside
from gpu_runner.providers.kubernetes.config import KubernetesOffer, KubernetesProviderConfig
from gpu_runner.providers.kubernetes.node_health import read_node, takes
from gpu_runner.providers.kubernetes.node_prices import NodePrice
from gpu_runner.providers.kubernetes.port_forward import find_kubectl

NEEDED = (
    Verb("create", "pods"),
    Verb("get", "pods"),
    Verb("list", "pods"),
    Verb("watch", "pods"),
    Verb("delete", "pods"),
    Verb("create", "secrets"),
)
FORWARD = (Verb("create", "pods", subresource="portforward"),)
_DIGEST = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")
_OK, _WARNING, _FAILED = CheckOutcome.OK, CheckOutcome.WARNING, CheckOutcome.FAILED
_API = (ApiRefused, ApiAway, CredentialsError)
NO_PRICES: Mapping[str, NodePrice] = {}


def inspect(
    config: KubernetesProviderConfig, api: ClusterApi, prices: Mapping[str, NodePrice] = NO_PRICES
) -> list[CheckResult]:
    """Look at everything. What cannot be asked is said to be so; nothing is raised. `prices`: those of nodes."""
    found = _credentials(api)
    if found.outcome is _FAILED:
        return [found, *_images(config), *_prices(config, prices)]
    parts = (_permissions(config, api), _reach(config), _quotas(config, api), _images(config), _nodes(config, api))
    return [found, *(result for part in parts for result in part), *_prices(config, prices)]


def _credentials(api: ClusterApi) -> CheckResult:
    subject = CheckSubject.CREDENTIALS
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        answer = api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", body)
        user = ((answer.get("status") or {}).get("userInfo") or {}).get("username", "an unknown user")
    except ApiRefused as error:
        if error.status == 401:
            return CheckResult(subject, _FAILED, "the API server does not accept them (401)", "renew the kubeconfig")
        user = "an unknown user"  # before Kubernetes 1.28 there is no such question; the rights show the rest
    except (ApiAway, CredentialsError) as error:
        remedy = (
            "see `kubeconfig` and `context`" if isinstance(error, CredentialsError) else "is the cluster reachable?"
        )
        return CheckResult(subject, _FAILED, str(error)[:300], remedy)
    return CheckResult(subject, _OK, f"{user} at {api.client().configuration.host}, namespace {api.namespace}")


def _permissions(config: KubernetesProviderConfig, api: ClusterApi) -> Iterator[CheckResult]:
    needed = (*NEEDED, *(FORWARD if _from_outside(config) else ()))
    try:
        missing = [str(one) for one in needed if not api.allowed(one)]
    except _API as error:
        yield CheckResult(CheckSubject.PERMISSIONS, _WARNING, f"could not be asked for: {error}"[:300])
        return
    if missing:
        remedy = f"give its account a Role in namespace {api.namespace} with these verbs"
        yield CheckResult(CheckSubject.PERMISSIONS, _FAILED, f"missing: {', '.join(missing)}", remedy)
    else:
        yield CheckResult(CheckSubject.PERMISSIONS, _OK, ", ".join(map(str, needed)))


def _from_outside(config: KubernetesProviderConfig) -> bool:
    return config.reach == "port_forward" or (config.reach == "auto" and not inside(config))


def _reach(config: KubernetesProviderConfig) -> Iterator[CheckResult]:
    if _from_outside(config) and find_kubectl() is None:
        remedy = "install kubectl, or run inside the cluster (`reach: pod_ip`)"
        yield CheckResult(
            CheckSubject.MACHINES, _FAILED, "engines are reached by kubectl, which is not on PATH", remedy
        )


def _quotas(config: KubernetesProviderConfig, api: ClusterApi) -> Iterator[CheckResult]:
    subject = CheckSubject.QUOTA
    try:
        quotas, _ = api.items(f"/api/v1/namespaces/{api.namespace}/resourcequotas")
    except _API as error:
        yield CheckResult(subject, _WARNING, f"could not be read: {error}"[:300], "allow `list resourcequotas`")
        return
    wanted = {"pods", "count/pods"} | {f"requests.{one.gpu_resource}" for one in config.offers}
    limits = []
    full = []
    for quota in quotas:
        status = quota.get("status") or {}
        for resource in sorted(wanted & (status.get("hard") or {}).keys()):
            used, hard = (status.get("used") or {}).get(resource, "0"), status["hard"][resource]
            said = f"{resource} {used} of {hard} used ({quota['metadata']['name']})"
            limits.append(said)
            if _whole(hard) - _whole(used) < 1:
                full.append(said)
    if full:
        yield CheckResult(subject, _WARNING, f"full: {', '.join(full)}", "raise it, or end what uses it")
    else:
        yield CheckResult(subject, _OK, ", ".join(limits) or "no quota on pods or GPUs")


def _images(config: KubernetesProviderConfig) -> Iterator[CheckResult]:
    for image in sorted({config.image_of(one) for one in config.offers}):
        if _DIGEST.fullmatch(image):
            yield CheckResult(CheckSubject.IMAGE, _OK, f"{image}: whether nodes can pull it shows when a pod starts")
        elif "@" in image:
            yield CheckResult(
                CheckSubject.IMAGE, _FAILED, f"{image}: expected @sha256: and 64 hexadecimal digits", "mend `image`"
            )
        else:
            remedy = "name it by digest (`…@sha256:…`), so that every pod runs the same"
            yield CheckResult(CheckSubject.IMAGE, _WARNING, f"{image}: a tag can change", remedy)


def _nodes(config: KubernetesProviderConfig, api: ClusterApi) -> Iterator[CheckResult]:
    try:
        nodes, _ = api.items("/api/v1/nodes")
    except _API as error:
        remedy = "allow `list nodes` (a ClusterRole) to have them shown; renting works without"
        yield CheckResult(CheckSubject.MACHINES, _WARNING, f"nodes could not be listed: {error}"[:300], remedy)
        return
    for offer in config.offers:
        fitting = [node for node in nodes if takes(node, offer)]
        have = [_gpus(node, offer) for node in fitting]
        if any(have):
            found = f"{offer.name}: {sum(map(bool, have))} nodes, {sum(have)} {offer.gpu_resource}"
            if max(have) < offer.gpus:
                yield CheckResult(
                    CheckSubject.MACHINES, _WARNING, f"{found}, none with {offer.gpus} at once", "see `gpus`"
                )
            else:
                yield CheckResult(CheckSubject.MACHINES, _OK, found)
            yield from _failed_gpus(fitting, offer)
        else:
            seen = f"{len(fitting)} nodes match, none with {offer.gpu_resource}" if fitting else "no node matches"
            remedy = "see `node_selector`, `tolerations`, `gpu_resource`; right if nodes are added on demand"
            yield CheckResult(CheckSubject.MACHINES, _WARNING, f"{offer.name}: {seen}", remedy)


def _failed_gpus(nodes: Sequence[Mapping[str, Any]], offer: KubernetesOffer) -> Iterator[CheckResult]:
    """Which device it is, and who has it, the API server does not say."""
    for state in map(read_node, nodes):
        healthy, there = state.allocatable.get(offer.gpu_resource, 0), state.capacity.get(offer.gpu_resource, 0)
        if healthy < there:
            found = f"{offer.name}: node {state.name}: of its {there} {offer.gpu_resource} {healthy} are healthy"
            yield CheckResult(CheckSubject.MACHINES, _WARNING, found, "see the node's device plugin")


def _gpus(node: Mapping[str, Any], offer: KubernetesOffer) -> int:
    return int(_whole(((node.get("status") or {}).get("allocatable") or {}).get(offer.gpu_resource, "0")))


def _whole(quantity: object) -> float:
    """A count as the API writes it: whole numbers, or thousands as `1k`."""
    text = str(quantity)
    try:
        return float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)
    except ValueError:
        return 0.0


def _prices(config: KubernetesProviderConfig, prices: Mapping[str, NodePrice]) -> Iterator[CheckResult]:
    for offer in config.offers:
        derived = prices.get(offer.name)
        price = offer.price_per_hour if derived is None else derived.price_per_hour
        if price is None:
            remedy = "set `price_per_hour`, or allow `list nodes` and name a price list of that cloud under `prices`"
            found = f"{offer.name}: no price: none in fleet.yaml, and no node of it whose instance type is listed"
            yield CheckResult(CheckSubject.PRICES, _WARNING, found, remedy)
            continue
        source = "as fleet.yaml says" if derived is None else derived.source
        found = f"{offer.name}: {price:.4g} $/h for {offer.gpus}x {offer.gpu}, {source}"
        if find_sheet(offer.gpu, offer.gpu_memory_gib) is None:
            remedy = "spell `gpu` as in gpu_runner/offers/gpus.py; its speed is not known before it was measured"
            yield CheckResult(CheckSubject.PRICES, _WARNING, f"{found}; no datasheet of this GPU", remedy)
        else:
            yield CheckResult(CheckSubject.PRICES, _OK, found)
