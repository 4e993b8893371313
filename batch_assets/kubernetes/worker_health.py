"""Whether a run's worker still works, from what the cluster and the fleet's database say of it. Pure.

A run is failed only when no worker can write for it any more. That is so when its pod was seen to have ended; or when
the pod is gone, or its node is lost, and the run's fence has moved. The fence is the run's row in the fleet's
database: once the run is declared dead there, that worker renews no lease, claims no batch, deletes nothing
of its range and begins no op (gpu_runner/fleet_database). Whatever is not known leaves the run as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class JobState(Enum):
    """What the API server says of the run's Job."""

    ACTIVE = "active"
    ENDED = "ended"  # its pods were counted as succeeded or failed
    MISSING = "missing"


class NodeState(Enum):
    """What the API server says of a pod's node."""

    READY = "ready"
    SILENT = "silent"  # not ready, or not heard of
    GONE = "gone"  # no such object: it was removed
    UNKNOWN = "unknown"  # we may not ask, or got no answer


class FenceState(Enum):
    """What the fleet's database says of the run."""

    NONE = "none"  # no heartbeat is under way: the run is before, between or after the ops that write one
    HELD = "held"
    MOVED = "moved"  # the run was declared dead there: its worker writes nothing any more
    UNKNOWN = "unknown"


class Verdict(Enum):
    """What Dagster is told."""

    RUNNING = "running"
    ENDED = "ended"


class Cause(Enum):
    """Why it is told so; a change of it is written into the run's log."""

    ALIVE = "alive"
    NOT_SEEN = "not seen"  # the API server gave no answer, or refused one
    NO_POD_YET = "no pod yet"
    POD_ENDED = "pod ended"
    POD_GONE = "pod gone"
    NODE_LOST = "node lost"
    DECLARED_DEAD = "declared dead"


@dataclass(frozen=True, slots=True)
class Node:
    """A node. `silent_seconds`: for how long it has not been ready."""

    state: NodeState
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the Job. `ended`: its containers were seen to have ended. `node`: None before it has one."""

    ended: bool
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Fence:
    """The run's fence. `silent_seconds`: since the worker's last heartbeat, or since the fence moved."""

    state: FenceState
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """All that is known of one run's worker."""

    job: JobState
    pods: tuple[Pod, ...]
    fence: Fence


@dataclass(frozen=True, slots=True)
class HealthRules:
    """How long is long enough, in seconds.

    `node_lost`: a node that was not ready for so long is lost. `silent`: a worker without a heartbeat for so long has
    lost its leases by its own clock. `fenced`: a worker that was declared dead so long ago loses its pod.
    """

    node_lost: float = 300.0
    silent: float = 20.0
    fenced: float = 120.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. `move_fence` comes first: unless it succeeds, a run is not failed where `fence_needed`."""

    verdict: Verdict
    cause: Cause
    reason: str
    move_fence: bool = False
    fence_needed: bool = False
    delete_job: bool = False


def not_seen(problem: str) -> Decision:
    """The decision when the API server does not say how the worker is: unknown is not failed."""
    return _running(Cause.NOT_SEEN, f"it cannot be seen: {problem}")


def decide(view: WorkerView, rules: HealthRules) -> Decision:
    """The verdict on one run's worker."""
    alive = [pod for pod in view.pods if not pod.ended]
    if not alive:
        return _without_pod(view, rules)
    if all(_is_lost(pod.node, rules) for pod in alive):
        return _unless_writing(view.fence, rules, Cause.NODE_LOST, "its pod's node is lost")
    fence = view.fence
    if fence.state is FenceState.MOVED and fence.silent_seconds >= rules.fenced:
        reason = f"it was declared dead {fence.silent_seconds:.0f} s ago, and its pod goes on: the pod is deleted"
        return Decision(Verdict.RUNNING, Cause.DECLARED_DEAD, reason, delete_job=True)
    return _running(Cause.ALIVE, "its pod has not ended")


def _without_pod(view: WorkerView, rules: HealthRules) -> Decision:
    if view.pods:
        held = view.fence.state is FenceState.HELD
        return Decision(Verdict.ENDED, Cause.POD_ENDED, "its pod has ended", move_fence=held)
    if view.job is JobState.ACTIVE:
        return _running(Cause.NO_POD_YET, "its Job has no pod yet")
    return _unless_writing(view.fence, rules, Cause.POD_GONE, "its pod is gone")


def _unless_writing(fence: Fence, rules: HealthRules, cause: Cause, reason: str) -> Decision:
    """A pod that is gone by force, or whose node is not heard of, may still have a process that writes."""
    if fence.state is FenceState.MOVED:
        return Decision(Verdict.ENDED, cause, reason)
    if fence.state is FenceState.NONE:  # its next op must not begin
        return Decision(Verdict.ENDED, cause, reason, move_fence=True, fence_needed=True)
    if fence.state is FenceState.UNKNOWN:
        return _running(cause, f"{reason}, but the fleet's database does not say whether its worker writes")
    if fence.silent_seconds < rules.silent:
        return _running(cause, f"{reason}, but its worker gave a heartbeat {fence.silent_seconds:.0f} s ago")
    silent = f"{reason}, and there was no heartbeat for {fence.silent_seconds:.0f} s"
    return Decision(Verdict.ENDED, cause, silent, move_fence=True, fence_needed=True)


def _is_lost(node: Node | None, rules: HealthRules) -> bool:
    if node is None:
        return False
    silent = node.state is NodeState.SILENT and node.silent_seconds >= rules.node_lost
    return silent or node.state is NodeState.GONE


def _running(cause: Cause, reason: str) -> Decision:
    return Decision(Verdict.RUNNING, cause, reason)
