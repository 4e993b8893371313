"""What the nodes under our pods say of themselves: whether they report, and how many of their GPUs are healthy.

A GPU that fails under a pod shows nothing at the pod: the node's allocatable count falls below its capacity, and which
device it was is not said (measured on 1.33; newer clusters may say it at the pod, see `pod_status`). So only what
follows from the count is concluded: a pod with more GPUs than its node has healthy ones has a failed one. It has to
last. A device plugin that starts again (an upgrade, a crash) takes all of its devices away, and pods on them work on:
while none is healthy a pod is left after RESTART_SECONDS only; some healthy ones beside failed ones are no restart.

Reading nodes needs a right of the whole cluster. Without it nothing is known of them, and renting works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_runner.providers.kubernetes.api import ApiAway, ApiRefused, ClusterApi, CredentialsError
from gpu_runner.providers.kubernetes.config import KubernetesOffer, Toleration

LOOK_SECONDS = 5.0
FORBIDDEN_SECONDS = 600.0  # the right may be given later
LASTING_SECONDS = 15.0
RESTART_SECONDS = 120.0  # an operator's upgrade of a device plugin: its image is pulled, its pod starts
MOST_NODES = 50  # at one look


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node. `silent`: its kubelet does not report (condition Ready is Unknown). Counts by resource, such as GPUs."""

    name: str
    ready: bool = True
    silent: bool = False
    allocatable: Mapping[str, int] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)

    def trouble(self) -> str:
        """What is wrong with it, in words; "": nothing that it says."""
        if self.silent:
            return f"node {self.name} does not report any more: it has no power, is cut off, or its kubelet has stopped"
        return "" if self.ready else f"node {self.name} is not ready"

    def failed_gpus(self, resource: str, gpus: int) -> str:
        """Why a pod with so many of `resource` must have one that failed; "": it need not."""
        healthy, there = self.allocatable.get(resource, 0), self.capacity.get(resource, 0)
        if not self.ready or there < gpus or healthy >= gpus:
            return ""
        return f"of its node's {there} {resource} {healthy} are healthy, and it has {gpus}: one of its own has failed"


def read_node(node: Mapping[str, Any]) -> NodeState:
    """A node as JSON of the API."""
    status = node.get("status") or {}
    conditions = [one for one in status.get("conditions") or () if one.get("type") == "Ready"]
    said = str(conditions[0].get("status")) if conditions else "True"
    return NodeState(
        name=str((node.get("metadata") or {}).get("name", "")),
        ready=said == "True",
        silent=said == "Unknown",
        allocatable=_counts(status.get("allocatable")),
        capacity=_counts(status.get("capacity")),
    )


def takes(node: Mapping[str, Any], offer: KubernetesOffer) -> bool:
    """Whether the scheduler could place a pod of the offer there: labels, taints, ready, not cordoned."""
    spec, metadata = node.get("spec") or {}, node.get("metadata") or {}
    marks = metadata.get("labels") or {}
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    refusing = [one for one in spec.get("taints") or () if one.get("effect") in ("NoSchedule", "NoExecute")]
    return (
        ready
        and not spec.get("unschedulable")
        and all(marks.get(key) == value for key, value in offer.node_selector.items())
        and all(any(_tolerates(one, taint) for one in offer.tolerations) for taint in refusing)
    )


def _tolerates(toleration: Toleration, taint: Mapping[str, Any]) -> bool:
    """As in Kubernetes' documentation, "Taints and Tolerations"."""
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    if toleration.key and toleration.key != taint.get("key"):
        return False
    if toleration.operator == "Exists":
        return True
    return bool(toleration.key) and toleration.value == (taint.get("value") or "")


def _counts(given: Mapping[str, Any] | None) -> dict[str, int]:
    """Those that are whole numbers, as extended resources are."""
    return {name: int(text) for name, text in (given or {}).items() if str(text).isdecimal()}


class NodeHealth:
    """Nodes as they were last read, at most every LOOK_SECONDS. For several threads."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._guard = threading.Lock()
        self._next_at = 0.0
        self._nodes: dict[str, NodeState] = {}
        self._failing_since: dict[str, float] = {}  # by the pod's uid

    def look(self, names: Iterable[str]) -> None:
        """Read these nodes again if it is time. Raises nothing: what cannot be read is not known."""
        with self._guard:
            if self._clock() < self._next_at:
                return
            self._next_at = self._clock() + LOOK_SECONDS
            found = {}
            for name in sorted({name for name in names if name})[:MOST_NODES]:
                try:
                    found[name] = read_node(self._api.get(f"/api/v1/nodes/{name}"))
                except ApiRefused as error:
                    if error.status in (401, 403):
                        self._next_at = self._clock() + FORBIDDEN_SECONDS
                        break
                except (ApiAway, CredentialsError):
                    break
                except (KeyError, TypeError, ValueError, AttributeError):
                    continue  # no node as Kubernetes has them
            self._nodes = found

    def find(self, name: str) -> NodeState | None:
        """The node of this name, if it could be read."""
        with self._guard:
            return self._nodes.get(name)

    def failing(self, uid: str, node: str, resource: str, gpus: int) -> str:
        """Why this pod has to be left, once that has lasted; "": it has not."""
        with self._guard:
            state = self._nodes.get(node)
            if state is None:
                return ""  # not known is no change
            why = state.failed_gpus(resource, gpus)
            if not why:
                self._failing_since.pop(uid, None)
                return ""
            since = self._failing_since.setdefault(uid, self._clock())
            lasting = LASTING_SECONDS if state.allocatable.get(resource, 0) else RESTART_SECONDS
            return why if self._clock() - since >= lasting else ""

    def forget(self, uids: Iterable[str]) -> None:
        """Keep only what concerns these pods."""
        with self._guard:
            kept = set(uids)
            self._failing_since = {uid: at for uid, at in self._failing_since.items() if uid in kept}
