"""When a run counts as failed: every fault that was measured on a cluster, as what is then seen of its worker."""

from __future__ import annotations

import itertools

import pytest

from batch_assets.kubernetes.worker_health import (
    Cause,
    Fence,
    FenceState,
    HealthRules,
    JobState,
    Node,
    NodeState,
    Pod,
    Verdict,
    WorkerView,
    decide,
    not_seen,
)

RULES = HealthRules(node_lost=60.0, silent=20.0, fenced=120.0)
BEATS, SILENT = Fence(FenceState.HELD, 2.0), Fence(FenceState.HELD, 25.0)
NONE, UNKNOWN = Fence(FenceState.NONE), Fence(FenceState.UNKNOWN)
JUST_MOVED, MOVED_LONG = Fence(FenceState.MOVED, 3.0), Fence(FenceState.MOVED, 121.0)
WELL = Pod(False, Node(NodeState.READY))
PENDING = Pod(False, None)
ENDED = Pod(True, Node(NodeState.READY))
HICCUP = Pod(False, Node(NodeState.SILENT, 59.0))
LOST = Pod(False, Node(NodeState.SILENT, 60.0))
REMOVED = Pod(False, Node(NodeState.GONE))
BLIND = Pod(False, Node(NodeState.UNKNOWN))
ACTIVE, OVER, MISSING = JobState.ACTIVE, JobState.ENDED, JobState.MISSING

# what happened: job, pods, fence -> verdict, cause
CASES = {
    "it works": (ACTIVE, [WELL], BEATS, Verdict.RUNNING, Cause.ALIVE),
    "a run without a range works": (ACTIVE, [WELL], NONE, Verdict.RUNNING, Cause.ALIVE),
    "pod deleted, the worker cleans up": (ACTIVE, [WELL], BEATS, Verdict.RUNNING, Cause.ALIVE),
    "pod deleted, counted as failed, still cleaning up": (OVER, [WELL], BEATS, Verdict.RUNNING, Cause.ALIVE),
    "pod deleted, the worker has said goodbye": (OVER, [], JUST_MOVED, Verdict.ENDED, Cause.POD_GONE),
    "pod deleted, of a run without a range": (OVER, [], NONE, Verdict.ENDED, Cause.POD_GONE),
    "deleted by force, the process lives": (OVER, [], BEATS, Verdict.RUNNING, Cause.POD_GONE),
    "deleted by force, the process is silent": (OVER, [], SILENT, Verdict.ENDED, Cause.POD_GONE),
    "Job deleted, its pod ends": (MISSING, [WELL], BEATS, Verdict.RUNNING, Cause.ALIVE),
    "Job deleted, its pod has gone": (MISSING, [], JUST_MOVED, Verdict.ENDED, Cause.POD_GONE),
    "Job deleted, its pod orphaned": (MISSING, [WELL], NONE, Verdict.RUNNING, Cause.ALIVE),
    "out of memory": (OVER, [ENDED], BEATS, Verdict.ENDED, Cause.POD_ENDED),
    "ended, the fleet's database away": (OVER, [ENDED], UNKNOWN, Verdict.ENDED, Cause.POD_ENDED),
    "the Job has no pod yet": (ACTIVE, [], NONE, Verdict.RUNNING, Cause.NO_POD_YET),
    "image missing or no room": (ACTIVE, [PENDING], NONE, Verdict.RUNNING, Cause.ALIVE),
    "node silent for a moment": (ACTIVE, [HICCUP], SILENT, Verdict.RUNNING, Cause.ALIVE),
    "node powered off": (ACTIVE, [LOST], SILENT, Verdict.ENDED, Cause.NODE_LOST),
    "node cut from the API server only": (ACTIVE, [LOST], BEATS, Verdict.RUNNING, Cause.NODE_LOST),
    "node lost, the fleet's database too": (ACTIVE, [LOST], UNKNOWN, Verdict.RUNNING, Cause.NODE_LOST),
    "node lost, no range": (ACTIVE, [LOST], NONE, Verdict.ENDED, Cause.NODE_LOST),
    "node lost, declared dead by the watchdog": (ACTIVE, [LOST], JUST_MOVED, Verdict.ENDED, Cause.NODE_LOST),
    "node removed": (OVER, [REMOVED], SILENT, Verdict.ENDED, Cause.NODE_LOST),
    "node removed, the process still writes": (OVER, [REMOVED], BEATS, Verdict.RUNNING, Cause.NODE_LOST),
    "we may not read nodes": (ACTIVE, [BLIND], SILENT, Verdict.RUNNING, Cause.ALIVE),
    "one pod lost, another works": (ACTIVE, [LOST, WELL], SILENT, Verdict.RUNNING, Cause.ALIVE),
    "a hung worker, declared dead": (ACTIVE, [WELL], JUST_MOVED, Verdict.RUNNING, Cause.ALIVE),
    "a hung worker that does not end": (ACTIVE, [WELL], MOVED_LONG, Verdict.RUNNING, Cause.DECLARED_DEAD),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault(name: str):
    job, pods, fence, verdict, cause = CASES[name]
    decision = decide(WorkerView(job, tuple(pods), fence), RULES)
    assert (decision.verdict, decision.cause) == (verdict, cause), decision.reason
    assert decision.delete_job == (cause is Cause.DECLARED_DEAD)


def test_an_api_server_that_does_not_answer_fails_nothing():
    decision = not_seen("the API server does not answer")
    assert (decision.verdict, decision.cause) == (Verdict.RUNNING, Cause.NOT_SEEN)
    assert not (decision.move_fence or decision.delete_job)


FENCED = ("deleted by force, the process is silent", "node powered off", "node removed", "node lost, no range")


@pytest.mark.parametrize("name", FENCED)
def test_a_worker_that_was_not_seen_to_end_is_fenced_before_its_run_fails(name: str):
    job, pods, fence, *_ = CASES[name]
    decision = decide(WorkerView(job, tuple(pods), fence), RULES)
    assert decision.move_fence and decision.fence_needed


def test_of_every_view_a_run_fails_only_when_nobody_can_write():
    pods = [(), *((one,) for one in (WELL, PENDING, ENDED, HICCUP, LOST, REMOVED, BLIND)), (ENDED, WELL), (LOST, ENDED)]
    fences = [BEATS, SILENT, NONE, UNKNOWN, JUST_MOVED, MOVED_LONG]
    failed = 0
    for job, seen, fence in itertools.product(JobState, pods, fences):
        decision = decide(WorkerView(job, seen, fence), RULES)
        if decision.verdict is Verdict.RUNNING:
            assert not decision.move_fence
            continue
        failed += 1
        alive = [pod for pod in seen if not pod.ended]
        assert all(pod in (LOST, REMOVED) for pod in alive)
        seen_to_end = bool(seen) and not alive
        fenced = fence.state is FenceState.MOVED or (decision.move_fence and decision.fence_needed)
        assert seen_to_end or fenced
    assert failed > 30
