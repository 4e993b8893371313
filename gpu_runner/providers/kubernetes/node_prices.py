"""The price of a pod by the node that it would run on: what its cloud lists for that instance type, by its GPUs.

For offers without a price in fleet.yaml. The cloud is known by the scheme of the node's `providerID`, type and region
by its labels (Kubernetes' documentation, "Well-Known Labels, Annotations and Taints"). A pool without a node has no
price yet. Reading nodes needs a right of the whole cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_runner.offers.offer import Offer
from gpu_runner.providers.kubernetes.api import ApiAway, ApiRefused, ClusterApi, CredentialsError
from gpu_runner.providers.kubernetes.config import KubernetesOffer
from gpu_runner.providers.kubernetes.node_health import read_node, takes

LOOK_SECONDS = 60.0
INSTANCE_TYPE, REGION = "node.kubernetes.io/instance-type", "topology.kubernetes.io/region"
_CLOUDS = {"gce": "gcp"}  # schemes of providerID that price lists spell otherwise

Listed = Callable[[str], Sequence[Offer]]


@dataclass(frozen=True, slots=True)
class NodePrice:
    """US dollars for an hour of one pod, and what it was derived from, for people."""

    price_per_hour: float
    source: str


def no_list(cloud: str) -> Sequence[Offer]:
    """Where nobody lists prices."""
    return ()


def node_price(node: Mapping[str, Any], offer: KubernetesOffer, listed: Iterable[Offer]) -> NodePrice | None:
    """What a pod of the offer costs on this node: the node's price by the share of its GPUs. None: not listed."""
    marks = (node.get("metadata") or {}).get("labels") or {}
    kind, region = marks.get(INSTANCE_TYPE), marks.get(REGION)
    there = read_node(node).capacity.get(offer.gpu_resource, 0)
    fitting = [one for one in listed if (one.instance_type, one.region, one.spot) == (kind, region, offer.spot)]
    if not fitting or there < offer.gpus:
        return None
    cheapest = min(fitting, key=lambda one: one.price_per_hour)
    price = cheapest.price_per_hour * offer.gpus / there
    share = "" if there == offer.gpus else f", {offer.gpus} of {there} {offer.gpu_resource}"
    return NodePrice(price, f"{cheapest.provider} {kind} in {region} by {cheapest.source}{share}")


def cloud_of(node: Mapping[str, Any]) -> str:
    """The cloud that the node is a machine of, as price lists call it; "": none is named."""
    scheme, found, _ = str((node.get("spec") or {}).get("providerID") or "").partition("://")
    return _CLOUDS.get(scheme, scheme) if found else ""


class NodePrices:
    """Prices of offers as they were last derived, at most every LOOK_SECONDS; one found before stays. For threads."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._guard = threading.Lock()
        self._next_at = 0.0
        self._prices: dict[str, NodePrice] = {}
        self.trouble = ""  # why nodes could not be read; "": they could

    def find(self, offers: Sequence[KubernetesOffer], listed: Listed) -> dict[str, NodePrice]:
        """Prices by the offer's name, of those offers that have none of their own. Raises nothing."""
        wanted = [one for one in offers if one.price_per_hour is None]
        if not wanted:
            return {}
        with self._guard:
            if self._clock() >= self._next_at:
                self._next_at = self._clock() + LOOK_SECONDS
                self._look(wanted, listed)
            return dict(self._prices)

    def _look(self, offers: Sequence[KubernetesOffer], listed: Listed) -> None:
        try:
            nodes, _ = self._api.items("/api/v1/nodes")
            self.trouble = ""
        except (ApiRefused, ApiAway, CredentialsError) as error:
            self.trouble = str(error)[:300]
            return
        lists = {cloud: listed(cloud) for cloud in {cloud_of(node) for node in nodes} if cloud}
        for offer in offers:
            fitting = [node for node in nodes if takes(node, offer)]
            found = [node_price(node, offer, lists.get(cloud_of(node), ())) for node in fitting]
            known = [one for one in found if one is not None]
            if known:  # where nodes differ, the dearest one may be had
                self._prices[offer.name] = max(known, key=lambda one: one.price_per_hour)
