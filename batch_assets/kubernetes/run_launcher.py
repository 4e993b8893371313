"""The run launcher that dagster.yaml names: a Job for each run, as Dagster's own, and failures only when they are sure.

run_launcher:
  module: batch_assets.kubernetes.run_launcher
  class: FencedK8sRunLauncher
  config: {service_account_name: run-worker, job_namespace: batch-assets, …}    # as K8sRunLauncher, and ours below

Stock Dagster (1.13) fails every run at one refused request to the API server, also one that is just launched, and
retries runs beside workers that go on. Runs are never resumed here: `max_resume_run_attempts` must be 0.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import dagster as dg
from dagster_k8s import K8sRunLauncher
from dagster_k8s.job import get_job_name_from_run_id

from batch_assets import settings
from batch_assets.dagster_internals import CheckRunHealthResult, WorkerStatus
from batch_assets.kubernetes.job_api import BoundedPods, PatientJobs
from batch_assets.kubernetes.leftover_jobs import Leftover, RunWorker, ended_unbegun, leftovers
from batch_assets.kubernetes.rights import Cluster
from batch_assets.kubernetes.worker_health import (
    Cause,
    Decision,
    Fence,
    FenceState,
    HealthRules,
    Verdict,
    WorkerView,
    decide,
    not_seen,
)
from batch_assets.kubernetes.worker_observation import NotSeen, RunWorkers
from gpu_runner.fleet_database.database import FleetDatabase, FleetDatabaseError
from gpu_runner.providers.kubernetes.api import ClusterApi

LOG = logging.getLogger(__name__)
SWEEP_SECONDS = 30.0
AWAY_SECONDS = 5.0  # an API server that did not answer is not asked about the next run before
MANY = 200  # run ids in one query
OWN_CONFIG = {
    "node_lost_seconds": dg.Field(
        dg.IntSource,
        default_value=300,
        description="A node that was not ready for so long is lost; needs the right to get nodes.",
    ),
    "silent_seconds": dg.Field(
        dg.IntSource,
        default_value=20,
        description="A worker without a heartbeat for so long has lost its leases: twice their time to live.",
    ),
    "fenced_seconds": dg.Field(
        dg.IntSource, default_value=120, description="A worker declared dead is deleted when its pod stays so long."
    ),
    "leftover_seconds": dg.Field(
        dg.IntSource, default_value=120, description="How long after its run a worker may take to end by itself."
    ),
}


class RunFences:
    """Looks at fences and moves them. `url`: SQLAlchemy URL of a fleet's database that workers share, or None."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._database: FleetDatabase | None = None

    def look(self, run_id: str) -> Fence:
        """The run's fence. Never raises: a database that is away, or is not named, is an unknown fence."""
        try:
            database = self._open()
            beat = None if database is None else database.run_beat(run_id)
        except FleetDatabaseError:
            return Fence(FenceState.UNKNOWN)
        if database is None:
            return Fence(FenceState.UNKNOWN)
        if beat is None:
            return Fence(FenceState.NONE)
        age = max(0.0, beat.age)
        if beat.state != "ended":
            return Fence(FenceState.HELD, age)
        return Fence(FenceState.MOVED if beat.declared_dead else FenceState.NONE, age)

    def move(self, run_id: str) -> bool:
        """Declare the run's worker dead: it writes nothing in the run's name any more. False: not written."""
        try:
            database = self._open()
            if database is None:
                return False
            database.declare_dead(run_id)
        except FleetDatabaseError:
            return False
        return True

    def _open(self) -> FleetDatabase | None:
        if self._database is None and self._url is not None:
            self._database = FleetDatabase(self._url)
        return self._database


class FencedK8sRunLauncher(K8sRunLauncher):
    """K8sRunLauncher that fails a run only when no worker writes for it any more, and sweeps Jobs of ended runs."""

    def __init__(
        self,
        *,
        node_lost_seconds: int = 300,
        silent_seconds: int = 20,
        fenced_seconds: int = 120,
        leftover_seconds: int = 120,
        run_workers: RunWorkers | None = None,
        fences: RunFences | None = None,
        **stock: Any,
    ) -> None:
        super().__init__(
            k8s_client_batch_api=PatientJobs(self._tell_of_wait), k8s_client_core_api=BoundedPods(), **stock
        )
        self._rules = HealthRules(node_lost_seconds, silent_seconds, fenced_seconds)
        self._grace = float(leftover_seconds)
        self._workers = run_workers or RunWorkers(self._cluster_api(), self.job_namespace)
        self._fences = fences or RunFences(settings.fleet_database() if settings.fleet_is_shared() else None)
        self._causes: dict[str, Cause] = {}
        self._sweeping = threading.Lock()
        self._swept_at = -SWEEP_SECONDS
        self._away_since, self._away = -AWAY_SECONDS, ""

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        """Stock's keys and ours. Without its own CA file: the service account's is used."""
        stock: Mapping[str, Any] = super().config_type()  # type: ignore[no-untyped-call]
        return {**{name: one for name, one in stock.items() if name != "k8s_api_ssl_ca_cert_file"}, **OWN_CONFIG}

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Mapping[str, Any]) -> Self:
        """Made by Dagster from dagster.yaml."""
        return cls(inst_data=inst_data, **config_value)

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """RUNNING unless it is sure that the worker writes no more. Asked by Dagster's monitoring for started runs."""
        self.sweep()
        decision = self._decide(run)
        if decision.move_fence:
            moved = self._fences.move(run.run_id)
            if decision.fence_needed and not moved:
                decision = Decision(Verdict.RUNNING, decision.cause, f"{decision.reason}; its fence cannot be moved")
        self._tell(run, decision)
        if decision.verdict is Verdict.RUNNING:
            return CheckRunHealthResult(WorkerStatus.RUNNING, decision.reason)
        self._causes.pop(run.run_id, None)
        return CheckRunHealthResult(WorkerStatus.FAILED, decision.reason)

    def sweep(self) -> None:
        """Delete Jobs of ended runs, and fail runs whose workers ended before they began, at most every SWEEP_SECONDS.

        A cluster that is away is left for the next time.
        """
        with self._sweeping:
            if time.monotonic() - self._swept_at < SWEEP_SECONDS:
                return
            self._swept_at = time.monotonic()
            try:
                workers = self._workers.all()
                self._fail_unbegun(workers)
                ended = self._ended({worker.run_id for worker in workers if worker.run_id}, time.time())
                for found in leftovers(workers, ended, self._grace):
                    self._remove(found)
            except NotSeen as error:
                LOG.warning("leftovers of ended runs are not looked for: %s", error)

    def _fail_unbegun(self, workers: Sequence[RunWorker]) -> None:
        """Fail runs whose worker has ended without their first event. Dagster asks nobody about a run that starts."""
        starting = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING])  # asked after the workers were looked at
        runs = {run.run_id: run for run in self._instance.get_runs(starting, limit=MANY)}
        for worker in ended_unbegun(workers, runs):
            words = f"Run worker: its pod has ended before the run began: {worker.end}"
            self._instance.report_run_failed(runs[worker.run_id], words)

    def _decide(self, run: dg.DagsterRun) -> Decision:
        job: str = get_job_name_from_run_id(run.run_id)  # type: ignore[no-untyped-call]
        if time.monotonic() - self._away_since < AWAY_SECONDS:
            return not_seen(self._away)
        try:
            state, pods = self._workers.look(job)
            decision = decide(WorkerView(state, pods, self._fences.look(run.run_id)), self._rules)
            if decision.delete_job:
                self._workers.delete_job(job, run.run_id)
        except NotSeen as error:
            self._away_since, self._away = time.monotonic(), str(error)
            return not_seen(self._away)
        return decision

    def _tell(self, run: dg.DagsterRun, decision: Decision) -> None:
        """Write a change into the run's log: that a worker cannot be seen, and that it is seen again."""
        before = self._causes.pop(run.run_id, Cause.ALIVE)
        if decision.cause is not Cause.ALIVE:
            self._causes[run.run_id] = decision.cause
        if decision.cause is not before:
            self._instance.report_engine_event(f"Run worker: {decision.reason}", run, cls=type(self))

    def _tell_of_wait(self, run_id: str, words: str) -> None:
        run = self._instance.get_run_by_id(run_id)
        if run is not None:
            self._instance.report_engine_event(f"Run worker: {words}", run, cls=type(self))

    def _ended(self, run_ids: set[str], now: float) -> dict[str, float]:
        """Seconds since the end of those runs that have ended. Runs that Dagster does not know are somebody else's."""
        found: dict[str, float] = {}
        for start in range(0, len(ids := sorted(run_ids)), MANY):
            for record in self._instance.get_run_records(dg.RunsFilter(run_ids=ids[start : start + MANY])):
                if record.dagster_run.is_finished:
                    end = record.end_time or record.update_timestamp.timestamp()
                    found[record.dagster_run.run_id] = max(0.0, now - end)
        return found

    def _remove(self, found: Leftover) -> None:
        self._workers.delete(found.worker)
        self._causes.pop(found.worker.run_id, None)
        run = self._instance.get_run_by_id(found.worker.run_id)
        if run is not None:
            words = f"Kubernetes Job {found.worker.job} deleted: {found.reason}"
            self._instance.report_engine_event(words, run, cls=type(self))

    def _cluster_api(self) -> ClusterApi:
        """Our own connection: the official client's calls have no bounds in time."""
        kubeconfig = None if self.load_incluster_config or not self.kubeconfig_file else Path(self.kubeconfig_file)
        return ClusterApi(Cluster(self.job_namespace, "run launcher", kubeconfig))
