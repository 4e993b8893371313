"""What the API server says of run workers, as `worker_health` and `leftovers` take it.

The labels are those that dagster-k8s gives its Jobs and their pods (dagster_k8s/job.py, launcher.py). Pods of a Job
are found by the label that Kubernetes' Job controller gives them: a run's tag can overwrite Dagster's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from batch_assets.kubernetes.leftover_jobs import RunWorker, WorkerPhase
from batch_assets.kubernetes.worker_health import JobState, Node, NodeState, Pod
from gpu_runner.providers.kubernetes.api import ApiAway, ApiRefused, ClusterApi, CredentialsError, Verb

Json = Mapping[str, Any]
API_ERRORS = (ApiAway, ApiRefused, CredentialsError)
RUN_LABEL = "dagster/run-id"
JOB_LABEL = "job-name"
WORKERS = {"labelSelector": "app.kubernetes.io/component=run_worker"}
NOT_FOUND = 404
LONGEST_REASON = 200
ENDED_PHASES = ("Succeeded", "Failed")

GET_STATUS = Verb("get", "jobs", "batch", "status")
LIST_JOBS, DELETE_JOBS = Verb("list", "jobs", "batch"), Verb("delete", "jobs", "batch")
LIST_PODS, DELETE_PODS = Verb("list", "pods"), Verb("delete", "pods")
GET_NODES = Verb("get", "nodes")


class NotSeen(Exception):
    """The API server gave no answer, or refused one; says which right is missing where that is why."""


class RunWorkers:
    """The run workers of one namespace."""

    def __init__(self, api: ClusterApi, namespace: str) -> None:
        self._api = api
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"

    def look(self, job: str) -> tuple[JobState, tuple[Pod, ...]]:
        """One Job and its pods. Raises NotSeen."""
        state = self._job(job)
        nodes: dict[str, Node] = {}
        found = []
        for pod in self._list(self._pods, {"labelSelector": f"{JOB_LABEL}={job}"}, LIST_PODS):
            ended, name = pod_ended(pod), str((pod.get("spec") or {}).get("nodeName") or "")
            if not ended and name and name not in nodes:
                nodes[name] = self._node(name)
            found.append(Pod(ended, nodes.get(name)))
        return state, tuple(found)

    def all(self) -> list[RunWorker]:
        """Every Job of a run worker, and every pod whose Job is gone. Raises NotSeen."""
        return workers(self._list(self._jobs, WORKERS, LIST_JOBS), self._list(self._pods, WORKERS, LIST_PODS))

    def delete(self, worker: RunWorker) -> None:
        """Delete the Job and its pods, each with its own grace period. What is gone is no error. Raises NotSeen."""
        background = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        self._delete(f"{self._jobs}/{worker.job}", background, DELETE_JOBS)
        for pod in worker.pods:
            self._delete(f"{self._pods}/{pod}", {"apiVersion": "v1", "kind": "DeleteOptions"}, DELETE_PODS)

    def delete_job(self, job: str, run_id: str) -> None:
        """Delete a Job by its name, and the pods that it has. Raises NotSeen."""
        pods = self._list(self._pods, {"labelSelector": f"{JOB_LABEL}={job}"}, LIST_PODS)
        names = tuple(str(pod["metadata"]["name"]) for pod in pods)
        self.delete(RunWorker(job, run_id, WorkerPhase.RUNNING, names))

    def _delete(self, path: str, options: dict[str, Any], right: Verb) -> None:
        with self._asking(right):
            try:
                self._api.delete(path, options)
            except ApiRefused as error:
                if error.status != NOT_FOUND:
                    raise

    def _list(self, path: str, query: Mapping[str, str], right: Verb) -> list[dict[str, Any]]:
        with self._asking(right):
            return self._api.items(path, query)[0]

    def _job(self, job: str) -> JobState:
        with self._asking(GET_STATUS):
            try:
                status = self._api.get(f"{self._jobs}/{job}/status").get("status") or {}
            except ApiRefused as error:
                if error.status == NOT_FOUND:
                    return JobState.MISSING
                raise
        counted = status.get("failed") or status.get("succeeded")
        return JobState.ENDED if counted and not status.get("active") else JobState.ACTIVE

    def _node(self, name: str) -> Node:
        """Reading nodes is a right that not everybody gives: without it every node counts as unknown."""
        try:
            return read_node(self._api.get(f"/api/v1/nodes/{name}"), self._api.now())
        except ApiRefused as error:
            return Node(NodeState.GONE if error.status == NOT_FOUND else NodeState.UNKNOWN)
        except API_ERRORS:
            return Node(NodeState.UNKNOWN)

    @contextlib.contextmanager
    def _asking(self, right: Verb) -> Iterator[None]:
        try:
            yield
        except API_ERRORS as error:
            raise NotSeen(str(self._api.failure(error, right))) from error


def pod_ended(pod: Json) -> bool:
    """Whether its containers are over, as its kubelet says.

    A pod that is being deleted is not, before its phase says so. Nor is one whose node is gone: the pod garbage
    collector writes Failed for it, and has not seen its process end.
    """
    status = pod.get("status") or {}
    collected = any(one.get("reason") == "DeletionByPodGC" for one in status.get("conditions") or ())
    return status.get("phase") in ENDED_PHASES and not collected


def read_node(node: Json, now: float) -> Node:
    """A node by its condition `Ready`; `now` is Unix time by the API server's clock."""
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready":
            if condition.get("status") == "True":
                return Node(NodeState.READY)
            since = _unix(condition.get("lastTransitionTime"))
            return Node(NodeState.SILENT, max(0.0, now - since)) if since is not None else Node(NodeState.UNKNOWN)
    return Node(NodeState.UNKNOWN)


def workers(jobs: list[dict[str, Any]], pods: list[dict[str, Any]]) -> list[RunWorker]:
    """Jobs with their pods, and pods whose Job is gone. What is being deleted already is left out."""
    by_job: dict[str, list[Json]] = {}
    for pod in pods:
        if name := _labels(pod).get(JOB_LABEL):
            by_job.setdefault(name, []).append(pod)
    found = []
    for job in jobs:
        name = str(job["metadata"]["name"])
        if _goes(job):
            continue
        conditions = (job.get("status") or {}).get("conditions") or ()
        over = any(one.get("type") in ("Complete", "Failed") and one.get("status") == "True" for one in conditions)
        found.append(_worker(name, job, by_job.pop(name, []), WorkerPhase.ENDED if over else WorkerPhase.WAITING))
    for name, own in by_job.items():
        if staying := [pod for pod in own if not _goes(pod)]:
            found.append(_worker(name, own[0], staying, WorkerPhase.ENDED))
    return found


def _worker(name: str, labelled: Json, pods: list[Json], without: WorkerPhase) -> RunWorker:
    """`without`: the phase of one that has no pod."""
    alive = [pod for pod in pods if not pod_ended(pod)]
    if alive:
        began = any((pod.get("status") or {}).get("phase") != "Pending" for pod in alive)
        phase = WorkerPhase.RUNNING if began else WorkerPhase.WAITING
    else:
        phase = WorkerPhase.ENDED if pods else without
    names = tuple(str(pod["metadata"]["name"]) for pod in alive if not _goes(pod))
    end = how_ended(pods[-1]) if phase is WorkerPhase.ENDED and pods else ""
    return RunWorker(name, _labels(labelled).get(RUN_LABEL, ""), phase, names, end)


def how_ended(pod: Json) -> str:
    """How a pod that has ended did so, in words."""
    status = pod.get("status") or {}
    for one in status.get("containerStatuses") or ():
        over = (one.get("state") or {}).get("terminated") or {}
        if over.get("reason") == "OOMKilled":
            return "out of memory: give it more in run-workers.yaml or in the run launcher's resources"
        if over and over.get("exitCode") != 0:
            return f"exit status {over.get('exitCode')} ({over.get('reason') or 'no reason is given'})"
    return str(status.get("reason") or "it ended by itself")[:LONGEST_REASON]


def _goes(found: Json) -> bool:
    return bool((found.get("metadata") or {}).get("deletionTimestamp"))


def _labels(found: Json) -> Mapping[str, str]:
    return (found.get("metadata") or {}).get("labels") or {}


def _unix(stamp: object) -> float | None:
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return None
