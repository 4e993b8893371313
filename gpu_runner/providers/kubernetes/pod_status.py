"""What the API server says of a pod, as one of our machines. Pure: times are Unix seconds by the cluster's clock.

Sources: the pod's life cycle and the condition `DisruptionTarget` in Kubernetes' documentation of 1.33, and what a
cluster of that version was seen to answer.
"""

from __future__ import annotations

import datetime
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_runner.providers.base import EndReason, Machine
from gpu_runner.providers.kubernetes.manifests import (
    CONTAINER,
    MANAGED_BY,
    MANAGER,
    OFFER_LABEL,
    PROVIDER_LABEL,
    SLOTS_NOTE,
)

LONGEST_TEXT = 300
FAILING_SECONDS = 60.0  # a machine that fails and still answers is used for so long, while another one is rented
# So long ahead of its active deadline a pod is left, that another one can boot; at most this share of its life.
DEADLINE_NOTICE_SECONDS, DEADLINE_NOTICE_SHARE = 900.0, 0.1
# So long after its grace period a pod that is still there has a node that nobody hears of. After an outage of the API
# server a kubelet was seen to end a pod 60 s late.
LOST_SECONDS = 90.0


class Obstacle(enum.Enum):
    """What keeps a pod from starting."""

    UNSEEN = "the cluster's scheduler has not looked at it"
    NO_ROOM = "no node has room"
    QUEUED = "held back by a queue"
    IMAGE = "image"
    CONFIGURATION = "configuration"  # also for a moment, until the Secret is there
    CONTAINER = "container"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a pod: `at` is when its containers had ended, or when nothing was heard of it any more."""

    reason: EndReason
    at: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class PodState:
    """One pod. `gone_at`: when its grace period is over, once its deletion was asked for. `disruption`: by whom.

    `placed`: it has a node, whose name is `node`. `answered`: its startup probe has passed, so the engine answered
    /health once. `unready`: it does not answer /health now. `deadline_at`: when its active deadline ends it, and
    `leave_at` when that has to be known. `bad_gpus`: devices of its own that its kubelet calls unhealthy.
    """

    name: str
    uid: str
    version: str
    offer: str
    created_at: float
    placed: bool
    answered: bool
    address: str | None = None
    max_num_seqs: int | None = None
    obstacle: Obstacle | None = None
    said: str = ""
    gone_at: float | None = None
    disruption: EndReason | None = None
    end: End | None = None
    node: str = ""
    unready: bool = False
    deadline_at: float | None = None
    leave_at: float = math.inf
    bad_gpus: tuple[str, ...] = ()


def is_ours(pod: Mapping[str, Any], provider: str) -> bool:
    """Whether the pod is a machine of this provider: made by us, with its label."""
    marks = pod.get("metadata", {}).get("labels") or {}
    return marks.get(MANAGED_BY) == MANAGER and marks.get(PROVIDER_LABEL) == provider


def read_pod(pod: Mapping[str, Any]) -> PodState:
    """A pod as JSON of the API. Raises KeyError, TypeError or ValueError for what is none."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    container: Mapping[str, Any] = next(
        (one for one in status.get("containerStatuses") or () if one.get("name") == CONTAINER), {}
    )
    node = str(pod["spec"].get("nodeName") or "")
    placed = bool(node)
    deadline_at, leave_at = _deadline(pod["spec"], status)
    obstacle, said = _obstacle(placed, conditions, (container.get("state") or {}).get("waiting") or {})
    slots = (metadata.get("annotations") or {}).get(SLOTS_NOTE, "")
    return PodState(
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        version=str(metadata.get("resourceVersion", "")),
        offer=str((metadata.get("labels") or {}).get(OFFER_LABEL, "")),
        created_at=unix(metadata["creationTimestamp"]),
        placed=placed,
        answered=bool(container.get("started")),
        address=status.get("podIP"),
        max_num_seqs=int(slots) if slots.isdecimal() else None,
        obstacle=obstacle,
        said=said,
        gone_at=unix(metadata["deletionTimestamp"]) if metadata.get("deletionTimestamp") else None,
        disruption=_disruption(conditions),
        end=_end(metadata, status, conditions, container),
        node=node,
        unready=bool(container.get("started")) and not container.get("ready", True),
        deadline_at=deadline_at,
        leave_at=leave_at,
        bad_gpus=_bad_gpus(container),
    )


def unix(moment: str) -> float:
    """Unix seconds of a time as the API writes it (RFC 3339)."""
    return datetime.datetime.fromisoformat(moment).timestamp()


_IMAGE = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
_CONTAINER = {
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
    "PreStartHookError",
    "PostStartHookError",
}
_DISRUPTIONS = {
    "PreemptionByScheduler": EndReason.PREEMPTED,
    "EvictionByEvictionAPI": EndReason.DRAINED,
    "DeletionByTaintManager": EndReason.TAINTED,
    "DeletionByPodGC": EndReason.NODE_LOST,
}
_REASONS = {
    "Evicted": EndReason.EVICTED,
    "DeadlineExceeded": EndReason.DEADLINE,
    "NodeLost": EndReason.NODE_LOST,
    "Terminated": EndReason.NODE_SHUTDOWN,
    "NodeShutdown": EndReason.NODE_SHUTDOWN,
    "Shutdown": EndReason.NODE_SHUTDOWN,
    "Preempting": EndReason.PREEMPTED,
}


def _obstacle(
    placed: bool, conditions: Mapping[str, Mapping[str, Any]], waiting: Mapping[str, Any]
) -> tuple[Obstacle | None, str]:
    scheduled = conditions.get("PodScheduled", {})
    if not placed:
        kinds = {"SchedulingGated": Obstacle.QUEUED, None: Obstacle.UNSEEN}
        kind = kinds.get(scheduled.get("reason"), Obstacle.NO_ROOM)
        return kind, str(scheduled.get("message", ""))[:LONGEST_TEXT]
    reason, said = waiting.get("reason", ""), f"{waiting.get('reason', '')}: {waiting.get('message', '')}"
    for kind, known in ((Obstacle.IMAGE, _IMAGE), (Obstacle.CONTAINER, _CONTAINER)):
        if reason in known:
            return kind, said[:LONGEST_TEXT]
    return (Obstacle.CONFIGURATION, said[:LONGEST_TEXT]) if reason == "CreateContainerConfigError" else (None, "")


def _deadline(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[float | None, float]:
    """When the cluster ends it by its active deadline, which counts from the start of the pod, and when to leave it."""
    seconds, started = spec.get("activeDeadlineSeconds"), status.get("startTime")
    if not seconds or not started:
        return None, math.inf
    at = unix(started) + float(seconds)
    return at, at - min(DEADLINE_NOTICE_SECONDS, DEADLINE_NOTICE_SHARE * float(seconds))


def _bad_gpus(container: Mapping[str, Any]) -> tuple[str, ...]:
    """Its devices that are unhealthy: `allocatedResourcesStatus`, KEP-4680, where the cluster has that switched on."""
    devices = [one for given in container.get("allocatedResourcesStatus") or () for one in given.get("resources") or ()]
    return tuple(str(one.get("resourceID", "?"))[:64] for one in devices if one.get("health") == "Unhealthy")


def _disruption(conditions: Mapping[str, Mapping[str, Any]]) -> EndReason | None:
    found = conditions.get("DisruptionTarget", {})
    if found.get("status") != "True":
        return None
    # TerminationByKubelet: eviction for want of memory or disk, a node's shutdown, a critical pod that needs the place
    return _DISRUPTIONS.get(str(found.get("reason", "")), EndReason.EVICTED)


def _end(
    metadata: Mapping[str, Any],
    status: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    container: Mapping[str, Any],
) -> End | None:
    if status.get("phase") not in ("Failed", "Succeeded"):
        return None
    ended = (container.get("state") or {}).get("terminated") or {}
    moments = [ended.get("finishedAt"), *(one.get("lastTransitionTime") for one in conditions.values())]
    at = unix(next((one for one in moments if one), metadata["creationTimestamp"]))
    text = str(status.get("message") or "")[:LONGEST_TEXT]
    disruption = _disruption(conditions)
    if reason := _REASONS.get(str(status.get("reason", ""))):
        return End(reason, at, text)
    if disruption is not None:
        return End(disruption, at, text)
    if ended.get("reason") == "OOMKilled":
        return End(EndReason.OUT_OF_MEMORY, at, "OOMKilled: raise `memory` of the offer")
    if not ended:  # no container was ever started
        return End(EndReason.NOT_ADMITTED, at, f"{status.get('reason', '')}: {text}"[:LONGEST_TEXT])
    if metadata.get("deletionTimestamp"):
        return End(EndReason.DELETED, at, "")
    return End(EndReason.EXITED, at, f"exit status {ended.get('exitCode')} ({ended.get('reason', 'no reason')})")


def vanished(pod: PodState, now: float, *, by_us: bool) -> End:
    """The end of a pod that the API server has no more: what its last state says of it."""
    if pod.end is not None:
        return End(EndReason.TERMINATED, pod.end.at) if by_us else pod.end
    if by_us:
        return End(EndReason.TERMINATED, now)
    if pod.disruption is not None:
        return End(pod.disruption, now)
    return End(EndReason.DELETED if pod.gone_at is not None else EndReason.VANISHED, now)


def as_machine(pod: PodState, port: int, now: float, *, by_us: bool = False, failing: str = "") -> Machine:
    """What the fleet is told. `by_us`: its deletion was ours, which is an order and no notice.

    `failing`: why it has to be left although it runs, such as a GPU of its own that failed.
    """
    end = pod.end
    if end is not None and by_us:
        end = End(EndReason.TERMINATED, end.at)
    if end is None and pod.gone_at is not None and now > pod.gone_at + LOST_SECONDS:
        end = End(EndReason.NODE_LOST, pod.gone_at, "its grace period is over and its node does not say that it ended")
    if end is not None:
        seconds = max(0.0, now - end.at)
        detail = end.text[:LONGEST_TEXT]
        billed = max(0.0, end.at - pod.created_at)
        return Machine(
            pod.name, pod.uid, "ended", None, pod.max_num_seqs, None, seconds, end.reason, detail, billed_seconds=billed
        )
    notice, why = (None, "") if by_us else _notice(pod, now, failing)
    billed = max(0.0, now - pod.created_at)
    if not (pod.answered and pod.address):
        return Machine(pod.name, pod.uid, "booting", None, pod.max_num_seqs, notice, detail=why, billed_seconds=billed)
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    endpoint = f"http://{host}:{port}"
    return Machine(pod.name, pod.uid, "running", endpoint, pod.max_num_seqs, notice, detail=why, billed_seconds=billed)


def _notice(pod: PodState, now: float, failing: str) -> tuple[float | None, str]:
    """Seconds until it is taken away, and why; None: nobody takes it away."""
    if pod.gone_at is not None:
        return max(0.0, pod.gone_at - now), (pod.disruption or EndReason.DELETED).value
    if pod.bad_gpus:
        failing = f"its node calls its GPU unhealthy: {', '.join(pod.bad_gpus)}"[:LONGEST_TEXT]
    if failing:
        return FAILING_SECONDS, failing
    if pod.deadline_at is not None and now >= pod.leave_at:
        return max(0.0, pod.deadline_at - now), EndReason.DEADLINE.value
    return None, ""
