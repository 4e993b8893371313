"""The five calls on a Kubernetes cluster, how an engine is reached, and what can be asked without renting."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_runner.offers.offer import Hardware, Offer, hardware_of
from gpu_runner.providers.base import (
    EngineAccess,
    EngineOrder,
    Machine,
    NoCapacity,
    ProviderError,
    ProviderUnclear,
)
from gpu_runner.providers.checks import CheckResult
from gpu_runner.providers.engine_keys import engine_key, engine_secret
from gpu_runner.providers.engine_process import EngineStartError
from gpu_runner.providers.kubernetes.api import ApiAway, ApiRefused, CredentialsError, Json, Verb, inside
from gpu_runner.providers.kubernetes.config import DNS_LABEL, KubernetesOffer, KubernetesProviderConfig
from gpu_runner.providers.kubernetes.inspection import inspect
from gpu_runner.providers.kubernetes.manifests import pod_manifest, secret_manifest
from gpu_runner.providers.kubernetes.node_health import NodeState
from gpu_runner.providers.kubernetes.node_prices import Listed, NodePrice, no_list
from gpu_runner.providers.kubernetes.pod_status import Obstacle, PodState, as_machine, is_ours, read_pod
from gpu_runner.providers.kubernetes.pod_watch import PodWatch, shared_watch
from gpu_runner.providers.kubernetes.port_forward import last_trouble, open_forward

STEP_SECONDS = 0.2
END_SECONDS = 5  # grace period of a pod that we end: its engine has nothing to do any more
CONFIGURATION_SECONDS = 20.0  # the kubelet looks for a missing Secret again after about 10 s
SWEPT_AT_ONCE = 20
UNSEEN_SECONDS = 120.0  # after an outage of the API server a scheduler was seen to need 70 s to come back

_API = (ApiRefused, ApiAway, CredentialsError)
_NAME = re.compile(DNS_LABEL)
LONGEST_DIAGNOSIS = 400


def describe_loss(pod: PodState | None, machine: Machine | None, node: NodeState | None, tunnel: str) -> str:
    """Describe the loss of a pod that could be asked for; None: there is none. `tunnel`: the last trouble of the way
    to it.
    """
    if pod is None or machine is None:
        return "there is no such pod any more"
    if machine.state == "ended":
        return f"its pod has ended: {machine.describe_end()}"[:LONGEST_DIAGNOSIS]
    if machine.notice_seconds is not None:
        return f"its pod ends in {machine.notice_seconds:.0f} s: {machine.detail}"[:LONGEST_DIAGNOSIS]
    parts = [f"its pod runs on {pod.node}" + (", not ready" if pod.unready else "")]
    if node is None:
        parts.append("of that node nothing is known (no right to read nodes)")
    else:
        parts.append(node.trouble() or "that node reports itself ready; a lost one is noticed after about 40 s")
    if tunnel:
        parts.append(f"kubectl says: {tunnel}")
    return "; ".join(parts)[:LONGEST_DIAGNOSIS]


def describe_silence(error: ProviderError | ProviderUnclear, *, tunnelled: bool) -> str:
    """Describe the silence of a pod that cannot be asked for. `tunnelled`: engines are reached through the API
    server.
    """
    if isinstance(error, ProviderUnclear):
        ways = ", and the way to its engines leads through it" if tunnelled else ""
        return f"{error}{ways}; what has become of the engine shows when it answers again"[:LONGEST_DIAGNOSIS]
    return str(error)[:LONGEST_DIAGNOSIS]


class KubernetesProvider:
    """See `gpu_runner.providers.base.Provider`. `home`: where the engines' secret lies."""

    clock = 1.0

    def __init__(self, home: Path, config: KubernetesProviderConfig, *, listed: Listed = no_list) -> None:
        """`listed`: what price lists say of a cloud, for offers without a price of their own."""
        self.name = config.name
        self.config = config
        self._listed = listed
        self._home = Path(home)
        self._watch: PodWatch = shared_watch(config)
        self._api = self._watch.api

    def offers(self) -> list[Offer]:
        """The offers of fleet.yaml that have a price. How many there is room for shows when one is asked for."""
        prices = self._prices()
        found = [self._offer(one, prices.get(one.name)) for one in self.config.offers]
        return [offer for offer in found if offer is not None]

    def all_hardware(self) -> frozenset[Hardware]:
        """See `gpu_runner.providers.base.HardwareProvider`."""
        return frozenset(hardware_of(one.gpu, one.gpus, one.gpu_memory_gib) for one in self.config.offers)

    def _prices(self) -> dict[str, NodePrice]:
        return self._watch.prices.find(self.config.offers, self._listed)

    def check(self) -> list[CheckResult]:
        """Credentials, rights, quota, images, nodes of every offer, prices."""
        return inspect(self.config, self._api, self._prices())

    def _offer(self, one: KubernetesOffer, derived: NodePrice | None) -> Offer | None:
        price = derived.price_per_hour if derived is not None else one.price_per_hour
        if price is None:
            return None
        return Offer(
            provider=self.name,
            region=self.config.region if one.region is None else one.region,
            instance_type=one.name,
            gpu=one.gpu,
            gpus=one.gpus,
            gpu_memory_gib=one.gpu_memory_gib,
            spot=one.spot,
            price_per_hour=price,
            boot_seconds=one.boot_seconds,
            reliability=one.reliability,
            observed_at=time.time(),
            source="fleet.yaml" if derived is None else derived.source,
        )

    def create(self, offer: Offer, name: str, order: EngineOrder) -> str:
        """Make the pod and its Secret; the id is the pod's uid. Over quota is NoCapacity."""
        if not _NAME.fullmatch(name):
            raise ProviderError(f"machine name: expected {DNS_LABEL}, found {name!r:.80}")
        own = self._standing(offer)
        if known := self._remembered(name):
            return known
        key = self._key(name)
        asked_at = time.monotonic()
        try:
            made = self._api.create(self._watch.path, pod_manifest(self.config, own, name, order))
        except _API as error:
            if not (isinstance(error, ApiRefused) and error.status == 409 and error.reason == "AlreadyExists"):
                raise self._api.failure(error, Verb("create", "pods")) from error
            made = self._existing(name)
        pod = read_pod(made)
        self._watch.copy.put(pod, asked_at)
        if pod.end is None and pod.gone_at is None:
            self._give_key(own, pod, key)
        return pod.uid

    def _standing(self, offer: Offer) -> KubernetesOffer:
        own = self.config.offer_of(offer.instance_type)
        if own is None:
            raise ProviderError(f"{offer.name}: there is no such offer")
        same = self._offer(own, self._prices().get(own.name))
        if same is None or (same.region, same.spot, same.price_per_hour) != (
            offer.region,
            offer.spot,
            offer.price_per_hour,
        ):
            raise ProviderError(f"{offer.name}: there is no such offer at {offer.price_per_hour:.4g} $/h")
        return own

    def _remembered(self, name: str) -> str | None:
        """The id of a machine of this name that has ended while this process looked on."""
        known = self._watch.copy.find(name)
        return None if known is None or known.end is None else known.uid

    def _key(self, name: str) -> str:
        return engine_key(engine_secret(self._home), name)

    def _existing(self, name: str) -> Json:
        """The pod of this name, which was there before. A pod that is not ours is never touched."""
        try:
            found = self._api.get(f"{self._watch.path}/{name}")
        except _API as error:
            if isinstance(error, ApiRefused) and error.status == 404:
                raise ProviderUnclear(f"{self.name}: {name} was there and went in the same moment") from error
            raise self._api.failure(error, Verb("get", "pods")) from error
        if not is_ours(found, self.name):
            raise ProviderError(f"{self.name}: a pod {name} that is none of ours is there already")
        return found

    def _give_key(self, offer: KubernetesOffer, pod: PodState, key: str) -> None:
        """The Secret that the pod waits for. Where it cannot be had, the pod is deleted again."""
        path = f"/api/v1/namespaces/{self.config.namespace}/secrets"
        try:
            self._api.create(path, secret_manifest(self.config, offer.name, pod.name, pod.uid, key))
        except _API as error:
            if isinstance(error, ApiRefused) and error.status == 409:
                return
            failure = self._api.failure(error, Verb("create", "secrets"))
            if isinstance(failure, ProviderError):
                self._delete(pod)  # ProviderUnclear when that fails: then there is a pod
            raise failure from error

    def wait_ready(self, name: str, seconds: float, pause: Callable[[float], None]) -> Machine:
        """Wait until the startup probe has passed. NoCapacity: no node took the pod in time."""
        deadline = time.monotonic() + seconds
        stuck_at: float | None = None
        if self._watch.copy.find(name) is None:
            self._refresh()
        while True:
            self._watch.follow()
            pod = self._watch.copy.find(name)
            if pod is None:
                raise EngineStartError(f"{self.name} has no machine {name}")
            machine = self._machine(pod)
            if machine.state == "running":
                return machine
            if machine.state == "ended":
                raise EngineStartError(f"{name} at {self.name} has ended: {machine.describe_end()}")
            stuck_at = stuck_at or time.monotonic() if pod.obstacle is Obstacle.CONFIGURATION else None
            self._raise_obstacle(pod, 0.0 if stuck_at is None else time.monotonic() - stuck_at)
            if time.monotonic() >= deadline:
                away = f"; the API server does not answer: {self._watch.trouble}" if self._watch.trouble else ""
                raise EngineStartError(f"{name} at {self.name} was not ready after {seconds:.0f} s{away}")
            pause(STEP_SECONDS)

    def _raise_obstacle(self, pod: PodState, stuck_seconds: float) -> None:
        """What cannot be waited out, or has been for long enough."""
        offer = self.config.offer_of(pod.offer)
        said = f"{pod.name} at {self.name}"
        if pod.obstacle in (Obstacle.NO_ROOM, Obstacle.QUEUED, Obstacle.UNSEEN):
            most = offer.capacity_wait_seconds if offer else 0.0
            if pod.obstacle is Obstacle.UNSEEN:  # every other offer would wait for the same scheduler
                most = max(most, UNSEEN_SECONDS)
            if self._api.now() - pod.created_at >= most and not self._watch.trouble:
                why = f": {pod.said}" if pod.said else ""
                raise NoCapacity(f"{said}: {pod.obstacle.value} after {most:.0f} s{why}")
        elif pod.obstacle is Obstacle.IMAGE:
            image = self.config.image_of(offer) if offer else "its image"
            raise EngineStartError(f"{said}: {image} cannot be pulled: {pod.said}")
        elif pod.obstacle is Obstacle.CONTAINER or (
            pod.obstacle is Obstacle.CONFIGURATION and stuck_seconds >= CONFIGURATION_SECONDS
        ):
            raise EngineStartError(f"{said}: its container cannot be started: {pod.said}")

    def list(self, tag: str) -> list[Machine]:
        """Pods of this provider, asked for now; those that went while this process looked on, for an hour.

        Deletes pods that ended by themselves `keep_ended_seconds` ago.
        """
        self._refresh()
        self._watch.follow()
        pods = self._watch.copy.all()
        self._look_at_nodes(pods)
        self._sweep(pods)
        return [self._machine(pod) for pod in pods if pod.name.startswith(tag)]

    def _refresh(self) -> None:
        try:
            self._watch.refresh()
        except _API as error:
            raise self._api.failure(error, Verb("list", "pods")) from error

    def _look_at_nodes(self, pods: Sequence[PodState]) -> None:
        alive = [pod for pod in pods if pod.end is None and pod.gone_at is None and pod.answered]
        self._watch.nodes.look(pod.node for pod in alive)
        self._watch.nodes.forget(pod.uid for pod in alive)

    def _machine(self, pod: PodState) -> Machine:
        by_us = self._watch.copy.ended_by_us(pod.uid)
        offer = self.config.offer_of(pod.offer)
        failing = ""
        if offer is not None and pod.answered:
            failing = self._watch.nodes.failing(pod.uid, pod.node, offer.gpu_resource, offer.gpus)
        return as_machine(pod, self.config.port, self._api.now(), by_us=by_us, failing=failing)

    def diagnose(self, name: str) -> str:
        """What the cluster says of a machine whose engine does not answer any more: of its pod, its node, the way."""
        tunnelled = self._tunnelled()
        try:
            try:
                found = self._api.get(f"{self._watch.path}/{name}")
            except _API as error:
                if isinstance(error, ApiRefused) and error.status == 404:
                    gone = self._watch.copy.find(name)
                    return describe_loss(gone, None if gone is None else self._machine(gone), None, "")
                raise self._api.failure(error, Verb("get", "pods")) from error
            pod = read_pod(found)
            self._watch.nodes.look([pod.node])
            said = last_trouble(self.config, name) if tunnelled else ""
            return describe_loss(pod, self._machine(pod), self._watch.nodes.find(pod.node), said)
        except (ProviderError, ProviderUnclear) as error:
            return describe_silence(error, tunnelled=tunnelled)
        except (KeyError, TypeError, ValueError):
            return ""  # not a pod as Kubernetes has them

    def _tunnelled(self) -> bool:
        reach = self.config.reach
        return not (reach == "pod_ip" or (reach == "auto" and inside(self.config)))

    def _sweep(self, pods: Sequence[PodState]) -> None:
        horizon = self._api.now() - self.config.keep_ended_seconds
        old = [pod for pod in pods if pod.end is not None and pod.end.at < horizon and pod.gone_at is None]
        for pod in old[:SWEPT_AT_ONCE]:
            try:
                self._delete(pod, by_us=False)
            except (ProviderError, ProviderUnclear):
                return  # the next list tries again

    def terminate(self, name: str) -> None:
        """Delete the pod, and with it the Secret that it owns; its engine has five seconds."""
        if not _NAME.fullmatch(name):
            return
        asked_at = time.monotonic()
        try:
            found = self._api.get(f"{self._watch.path}/{name}")
        except _API as error:
            if isinstance(error, ApiRefused) and error.status == 404:
                return
            raise self._api.failure(error, Verb("get", "pods")) from error
        if is_ours(found, self.name):
            pod = read_pod(found)
            self._watch.follow()  # sees when it is gone
            self._watch.copy.put(pod, asked_at)
            self._delete(pod)

    def _delete(self, pod: PodState, *, by_us: bool = True) -> None:
        """Delete this pod and none of the same name. Gone already is as good."""
        options = {"gracePeriodSeconds": END_SECONDS, "preconditions": {"uid": pod.uid}}
        mine = by_us and pod.end is None  # what has ended by itself keeps its reason
        if mine:
            self._watch.copy.ends_by_us(pod.uid)
        try:
            self._api.delete(f"{self._watch.path}/{pod.name}", options)
        except _API as error:
            if isinstance(error, ApiRefused) and error.status in (404, 409):
                return
            failure = self._api.failure(error, Verb("delete", "pods"))
            if mine and isinstance(failure, ProviderError):
                self._watch.copy.lives_on(pod.uid)
            raise failure from error

    def access(self, name: str, endpoint: str) -> EngineAccess:
        """By the pod's address in the cluster, else through the API server."""
        key = self._key(name)
        if not self._tunnelled():
            return EngineAccess(endpoint, key)
        return open_forward(self.config, self._api, name, key)
