"""Pods as a cluster of version 1.33 was seen to report them, told as machines."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.kubernetes.pod_status import Obstacle, as_machine, is_ours, read_pod, vanished

START = 1_767_225_600.0  # 2026-01-01T00:00:00Z
DELETED = "2026-01-01T00:01:00Z"


def pod(status: dict[str, Any], node: str | None = "node1", **metadata: Any) -> dict[str, Any]:
    known = {"name": "ba-1", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "7"}
    annotations = {"annotations": {"batch-assets/max-num-seqs": "8"}}
    return {"metadata": {**known, **annotations, **metadata}, "spec": {"nodeName": node}, "status": status}


def condition(kind: str, status: str, reason: str) -> dict[str, str]:
    moment = "2026-01-01T00:00:30Z"
    return {"type": kind, "status": status, "reason": reason, "message": "why", "lastTransitionTime": moment}


def container(started: bool = False, **state: Any) -> list[dict[str, Any]]:
    return [{"name": "engine", "state": state, "started": started}]


def ended(reason: str, code: int) -> list[dict[str, Any]]:
    return container(terminated={"reason": reason, "exitCode": code, "finishedAt": "2026-01-01T00:00:40Z"})


RUNNING = {"phase": "Running", "podIP": "10.1.2.3", "containerStatuses": container(True, running={})}


def test_a_pod_is_billed_from_its_creation_to_its_end():
    found = [as_machine(read_pod(pod(one)), 8000, START + 70) for one in ({}, RUNNING)]
    assert [machine.billed_seconds for machine in found] == [70, 70]
    failed = {"phase": "Failed", "containerStatuses": ended("Error", 1)}
    assert as_machine(read_pod(pod(failed)), 8000, START + 70).billed_seconds == 40


def test_a_pod_runs_once_its_engine_has_answered():
    machine = as_machine(read_pod(pod(RUNNING)), 8000, START)
    assert (machine.state, machine.endpoint, machine.max_num_seqs) == ("running", "http://10.1.2.3:8000", 8)
    starting = {**RUNNING, "containerStatuses": container(False, running={})}
    assert as_machine(read_pod(pod(starting)), 8000, START).state == "booting"
    assert as_machine(read_pod(pod({**RUNNING, "podIP": "fd00::3"})), 8000, START).endpoint == "http://[fd00::3]:8000"


@pytest.mark.parametrize(
    ("status", "node", "obstacle"),
    [
        ({"conditions": [condition("PodScheduled", "False", "Unschedulable")]}, None, Obstacle.NO_ROOM),
        ({"conditions": [condition("PodScheduled", "False", "SchedulingGated")]}, None, Obstacle.QUEUED),
        ({}, None, Obstacle.UNSEEN),
        ({"containerStatuses": container(waiting={"reason": "ErrImagePull"})}, "n", Obstacle.IMAGE),
        ({"containerStatuses": container(waiting={"reason": "ImagePullBackOff"})}, "n", Obstacle.IMAGE),
        ({"containerStatuses": container(waiting={"reason": "CreateContainerError"})}, "n", Obstacle.CONTAINER),
        (
            {"containerStatuses": container(waiting={"reason": "CreateContainerConfigError"})},
            "n",
            Obstacle.CONFIGURATION,
        ),
        ({"containerStatuses": container(waiting={"reason": "ContainerCreating"})}, "n", None),
    ],
)
def test_what_keeps_a_pod_from_starting_is_told_apart(status: dict[str, Any], node: str | None, obstacle: object):
    assert read_pod(pod({"phase": "Pending", **status}, node)).obstacle is obstacle


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"containerStatuses": ended("OOMKilled", 137)}, EndReason.OUT_OF_MEMORY),
        ({"containerStatuses": ended("Error", 1)}, EndReason.EXITED),
        ({"reason": "Evicted", "containerStatuses": ended("Error", 137)}, EndReason.EVICTED),
        ({"reason": "DeadlineExceeded", "containerStatuses": ended("Error", 137)}, EndReason.DEADLINE),
        ({"reason": "Terminated", "containerStatuses": ended("Error", 143)}, EndReason.NODE_SHUTDOWN),
        ({"reason": "UnexpectedAdmissionError"}, EndReason.NOT_ADMITTED),
        (
            {"conditions": [condition("DisruptionTarget", "True", "PreemptionByScheduler")]},
            EndReason.PREEMPTED,
        ),
        ({"conditions": [condition("DisruptionTarget", "True", "EvictionByEvictionAPI")]}, EndReason.DRAINED),
        ({"conditions": [condition("DisruptionTarget", "True", "DeletionByTaintManager")]}, EndReason.TAINTED),
        ({"conditions": [condition("DisruptionTarget", "True", "TerminationByKubelet")]}, EndReason.EVICTED),
    ],
)
def test_ends_are_told_apart(status: dict[str, Any], reason: EndReason):
    found = read_pod(pod({"phase": "Failed", **status}))
    assert found.end is not None and found.end.reason is reason
    machine = as_machine(found, 8000, START + 100)
    assert (machine.state, machine.endpoint) == ("ended", None)
    assert machine.reason is reason and machine.describe_end().startswith(reason.value)
    expected = 60 if "containerStatuses" in status else 70 if "conditions" in status else 100
    assert machine.ended_seconds == expected


def test_a_deletion_by_others_is_a_notice_and_one_by_us_is_none():
    found = read_pod(pod(RUNNING, deletionTimestamp=DELETED))
    assert as_machine(found, 8000, START + 40).notice_seconds == 20
    assert as_machine(found, 8000, START + 70).notice_seconds == 0
    assert as_machine(found, 8000, START + 40, by_us=True).notice_seconds is None


def test_a_notice_says_why():
    drained = {**RUNNING, "conditions": [condition("DisruptionTarget", "True", "EvictionByEvictionAPI")]}
    assert as_machine(read_pod(pod(drained, deletionTimestamp=DELETED)), 8000, START).detail == "drained"
    assert as_machine(read_pod(pod(RUNNING, deletionTimestamp=DELETED)), 8000, START).detail == EndReason.DELETED
    assert as_machine(read_pod(pod(RUNNING)), 8000, START, failing="a GPU of it").detail == "a GPU of it"


def test_a_pod_is_left_before_its_active_deadline():
    day = pod({**RUNNING, "startTime": "2026-01-01T00:00:00Z"})
    day["spec"]["activeDeadlineSeconds"] = 86_400
    found = read_pod(day)
    assert as_machine(found, 8000, START + 85_000).notice_seconds is None
    noticed = as_machine(found, 8000, START + 85_600)
    assert (noticed.state, noticed.notice_seconds, noticed.detail) == ("running", 800, EndReason.DEADLINE)
    short = pod({**RUNNING, "startTime": "2026-01-01T00:00:00Z"})
    short["spec"]["activeDeadlineSeconds"] = 600
    assert as_machine(read_pod(short), 8000, START + 500).notice_seconds is None
    assert as_machine(read_pod(short), 8000, START + 560).notice_seconds == 40


def test_a_gpu_that_the_kubelet_calls_unhealthy_is_a_notice():
    devices = [{"resourceID": "GPU-0", "health": "Healthy"}, {"resourceID": "GPU-1", "health": "Unhealthy"}]
    state = {**container(True, running={})[0], "allocatedResourcesStatus": [{"name": "g", "resources": devices}]}
    found = as_machine(read_pod(pod({**RUNNING, "containerStatuses": [state]})), 8000, START)
    assert (found.state, found.notice_seconds) == ("running", 60)
    assert found.detail == "its node calls its GPU unhealthy: GPU-1"


def test_a_pod_that_outlives_its_grace_period_is_on_a_lost_node():
    machine = as_machine(read_pod(pod(RUNNING, deletionTimestamp=DELETED)), 8000, START + 160)
    assert machine.state == "ended" and machine.reason is EndReason.NODE_LOST
    assert machine.describe_end().startswith("node lost: its grace period")
    assert machine.ended_seconds == 100


def test_what_is_gone_ended_for_the_reason_last_heard_of():
    drained = {**RUNNING, "conditions": [condition("DisruptionTarget", "True", "EvictionByEvictionAPI")]}
    assert vanished(read_pod(pod(drained, deletionTimestamp=DELETED)), 5, by_us=False).reason is EndReason.DRAINED
    assert vanished(read_pod(pod(RUNNING, deletionTimestamp=DELETED)), 5, by_us=False).reason is EndReason.DELETED
    assert vanished(read_pod(pod(RUNNING)), 5, by_us=False).reason is EndReason.VANISHED
    assert vanished(read_pod(pod(RUNNING)), 5, by_us=True).reason is EndReason.TERMINATED
    oom = {"phase": "Failed", "containerStatuses": ended("OOMKilled", 137)}
    assert vanished(read_pod(pod(oom)), 5, by_us=False).reason is EndReason.OUT_OF_MEMORY


def test_only_pods_with_both_labels_are_ours():
    ours = {"app.kubernetes.io/managed-by": "batch-assets", "batch-assets/provider": "pods"}
    assert is_ours(pod({}, labels=ours), "pods")
    assert not is_ours(pod({}, labels=ours), "other")
    assert not is_ours(pod({}, labels={"batch-assets/provider": "pods"}), "pods")
    assert not is_ours(pod({}), "pods")
