"""What the API server says, read; and which Jobs are left over."""

from __future__ import annotations

from typing import Any

import pytest

from batch_assets.kubernetes.leftover_jobs import RunWorker, WorkerPhase, ended_unbegun, leftovers
from batch_assets.kubernetes.worker_health import NodeState
from batch_assets.kubernetes.worker_observation import pod_ended, read_node, workers

NOW = 1_800_000_000.0
Object = dict[str, Any]


def job(name: str, run: str, *conditions: str, going: bool = False) -> Object:
    metadata: Object = {"name": name, "labels": {"dagster/run-id": run}}
    if going:
        metadata["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    return {"metadata": metadata, "status": {"conditions": [{"type": kind, "status": "True"} for kind in conditions]}}


def pod(name: str, of: str, run: str, phase: str, *, going: bool = False) -> Object:
    labels = {"job-name": of, "dagster/run-id": run}
    metadata: Object = {"name": name, "labels": labels}
    if going:
        metadata["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    return {"metadata": metadata, "status": {"phase": phase}}


def node(status: str, since: str = "2027-01-15T08:00:00Z") -> Object:
    ready = {"type": "Ready", "status": status, "lastTransitionTime": since}
    return {"status": {"conditions": [{"type": "MemoryPressure", "status": "False"}, ready]}}


@pytest.mark.parametrize(
    ("found", "state", "seconds"),
    [
        (node("True"), NodeState.READY, 0.0),
        (node("Unknown", "2027-01-15T07:58:20Z"), NodeState.SILENT, 100.0),
        (node("False", "2027-01-15T07:59:20Z"), NodeState.SILENT, 40.0),
        (node("False", "2027-01-15T08:00:09Z"), NodeState.SILENT, 0.0),
        (node("False", "soon"), NodeState.UNKNOWN, 0.0),
        ({}, NodeState.UNKNOWN, 0.0),
    ],
)
def test_a_node_is_read_by_its_condition(found: Object, state: NodeState, seconds: float):
    read = read_node(found, NOW)
    assert (read.state, read.silent_seconds) == (state, seconds)


def test_jobs_are_read_with_their_pods():
    found = workers(
        [
            job("a", "run-a"),
            job("b", "run-b"),
            job("c", "run-c", "Complete"),
            job("d", "run-d"),
            job("e", "run-e", going=True),
            job("f", "run-f"),
        ],
        [
            pod("a-1", "a", "run-a", "Running"),
            pod("b-1", "b", "run-b", "Pending"),
            pod("c-1", "c", "run-c", "Succeeded"),
            pod("e-1", "e", "run-e", "Running", going=True),
            pod("f-1", "f", "run-f", "Running", going=True),
            pod("g-1", "g", "run-g", "Running"),
            pod("h-1", "h", "run-h", "Running", going=True),
            {"metadata": {"name": "somebody-else"}},
        ],
    )
    assert found == [
        RunWorker("a", "run-a", WorkerPhase.RUNNING, ("a-1",)),
        RunWorker("b", "run-b", WorkerPhase.WAITING, ("b-1",)),
        RunWorker("c", "run-c", WorkerPhase.ENDED, end="it ended by itself"),
        RunWorker("d", "run-d", WorkerPhase.WAITING),
        RunWorker("f", "run-f", WorkerPhase.RUNNING),
        RunWorker("g", "run-g", WorkerPhase.RUNNING, ("g-1",)),
    ]


def test_workers_of_ended_runs_are_left_over():
    found = [
        RunWorker("works", "going", WorkerPhase.RUNNING, ("p",)),
        RunWorker("never-began", "just-ended", WorkerPhase.WAITING, ("p",)),
        RunWorker("says-goodbye", "just-ended", WorkerPhase.RUNNING, ("p",)),
        RunWorker("zombie", "long-ended", WorkerPhase.RUNNING, ("p",)),
        RunWorker("over", "long-ended", WorkerPhase.ENDED),
        RunWorker("of-somebody-else", "unknown", WorkerPhase.WAITING),
    ]
    ended = {"just-ended": 5.0, "long-ended": 130.0}
    assert [(one.worker.job, one.reason) for one in leftovers(found, ended, 120.0)] == [
        ("never-began", "its run has ended before it began"),
        ("zombie", "its run ended 130 s ago"),
    ]


def test_a_pod_that_was_collected_with_its_node_has_not_been_seen_to_end():
    assert pod_ended({"status": {"phase": "Failed"}}) and not pod_ended({"status": {"phase": "Running"}})
    collected = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
    assert not pod_ended({"status": {"phase": "Failed", "conditions": [collected]}})


OOM = {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
BROKEN = {"state": {"terminated": {"reason": "StartError", "exitCode": 128}}}
DONE = {"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"containerStatuses": [DONE, OOM]}, "out of memory"),
        ({"containerStatuses": [BROKEN]}, "exit status 128 (StartError)"),
        ({"containerStatuses": [DONE]}, "it ended by itself"),
        ({"reason": "Evicted"}, "Evicted"),
    ],
)
def test_how_a_worker_ended_is_said_where_its_pods_were_seen_to_end(status: Object, words: str):
    ended = pod("p", "j", "r", "Failed")
    ended["status"].update(status)
    (found,) = workers([job("j", "r", "Failed")], [ended])
    assert found.phase is WorkerPhase.ENDED and words in found.end
    (vanished,) = workers([job("j", "r", "Failed")], [])
    assert (vanished.phase, vanished.end) == (WorkerPhase.ENDED, "")
    assert list(ended_unbegun([found, vanished], ["r"])) == [found]
    assert list(ended_unbegun([found], ["another"])) == []
