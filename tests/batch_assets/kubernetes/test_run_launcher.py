"""The launcher in Dagster's own monitoring, with a cluster that says what a test lets it say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.test_utils import create_run_for_test, environ, instance_for_test
from dagster._daemon.monitoring.run_monitoring import execute_run_monitoring_iteration
from support.fleet_databases import sqlite_url

from batch_assets.dagster_internals import WorkerStatus
from batch_assets.dagster_internals.daemon import SweepingLauncher, SweepingMonitoringDaemon, daemons_of
from batch_assets.kubernetes.leftover_jobs import RunWorker, WorkerPhase
from batch_assets.kubernetes.worker_health import JobState, Node, NodeState, Pod
from batch_assets.kubernetes.worker_observation import NotSeen
from gpu_runner.fleet_database.database import FleetDatabase, RunEnded

if TYPE_CHECKING:  # it imports the client of Kubernetes: a second
    from batch_assets.kubernetes.run_launcher import FencedK8sRunLauncher

WELL = (JobState.ACTIVE, (Pod(False, Node(NodeState.READY)),))
ENDED = (JobState.ENDED, (Pod(True),))
GONE = (JobState.ENDED, ())
KUBECONFIG = """
{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {token: t}}],
 clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}],
 contexts: [{name: c, context: {cluster: c, user: u}}]}
"""


@dataclass
class Workers:
    """In the place of `RunWorkers`."""

    seen: Any = WELL
    there: list[RunWorker] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def look(self, job: str) -> Any:
        if isinstance(self.seen, Exception):
            raise self.seen
        return self.seen

    def all(self) -> list[RunWorker]:
        if isinstance(self.seen, Exception):
            raise self.seen
        return self.there

    def delete(self, worker: RunWorker) -> None:
        self.deleted.append(worker.job)
        self.there.remove(worker)

    def delete_job(self, job: str, run_id: str) -> None:
        self.deleted.append(job)


@dataclass
class LaunchedCluster:
    instance: dg.DagsterInstance
    launcher: FencedK8sRunLauncher
    workers: Workers
    fleet_db: FleetDatabase

    def started(self) -> dg.DagsterRun:
        return create_run_for_test(self.instance, status=dg.DagsterRunStatus.STARTED)

    def look(self, run: dg.DagsterRun) -> WorkerStatus:
        return self.launcher.check_run_worker_health(run).status

    def status(self, run: dg.DagsterRun) -> dg.DagsterRunStatus:
        found = self.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.status

    def monitor(self) -> None:
        process: Any = SimpleNamespace(instance=self.instance, create_request_context=lambda: None)
        problems = execute_run_monitoring_iteration(process, logging.getLogger("test"))
        assert [one for one in problems if one is not None] == []

    def said(self, run: dg.DagsterRun) -> list[str]:
        entries = self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        said = [entry.dagster_event.message or "" for entry in entries if entry.dagster_event]
        return [words.removeprefix("[FencedK8sRunLauncher] ") for words in said]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedCluster]:
    kubeconfig = tmp_path / "kubeconfig"
    from batch_assets.kubernetes import run_launcher

    kubeconfig.write_text(KUBECONFIG)
    config = {
        "service_account_name": "run-worker",
        "instance_config_map": "none",
        "job_namespace": "runs",
        "load_incluster_config": False,
        "kubeconfig_file": str(kubeconfig),
        "silent_seconds": 0,
    }
    settings = {
        "run_launcher": {"module": run_launcher.__name__, "class": "FencedK8sRunLauncher", "config": config},
        "run_monitoring": {"enabled": True, "max_resume_run_attempts": 0, "poll_interval_seconds": 7},
    }
    monkeypatch.setattr(run_launcher, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(run_launcher, "AWAY_SECONDS", 0.0)
    with sqlite_url(tmp_path) as url, environ({"BATCH_ASSETS_FLEET_DB": url}), instance_for_test(settings) as instance:
        launcher = instance.run_launcher
        assert isinstance(launcher, run_launcher.FencedK8sRunLauncher)
        workers: Any = Workers()
        launcher._workers = workers
        fleet_db = FleetDatabase(url)
        yield LaunchedCluster(instance, launcher, workers, fleet_db)
        fleet_db.close()


def test_dagster_yaml_makes_it_with_stock_keys_and_its_own(site: LaunchedCluster):
    assert site.launcher.job_namespace == "runs"
    assert (site.launcher._rules.silent, site.launcher._rules.node_lost) == (0, 300)
    assert site.launcher.supports_check_run_worker_health
    assert "k8s_api_ssl_ca_cert_file" not in type(site.launcher).config_type()


def test_an_api_server_that_is_away_fails_no_run_and_is_told_once(site: LaunchedCluster):
    runs = [site.started() for _ in range(3)]
    site.workers.seen = NotSeen("connection refused")
    site.monitor()
    site.monitor()
    assert {site.status(run) for run in runs} == {dg.DagsterRunStatus.STARTED}
    assert site.said(runs[0]) == ["Run worker: it cannot be seen: connection refused"]
    site.workers.seen = WELL
    site.monitor()
    assert site.said(runs[0])[1:] == ["Run worker: its pod has not ended"]


def test_an_api_server_that_hangs_is_asked_about_one_run_not_about_each(
    site: LaunchedCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("batch_assets.kubernetes.run_launcher.AWAY_SECONDS", 3600.0)
    first, second = site.started(), site.started()
    site.workers.seen = NotSeen("no answer")
    assert site.look(first) is WorkerStatus.RUNNING
    site.workers.seen = ENDED
    assert site.look(second) is WorkerStatus.RUNNING
    monkeypatch.setattr("batch_assets.kubernetes.run_launcher.AWAY_SECONDS", 0.0)
    assert site.look(second) is WorkerStatus.FAILED


def test_a_run_fails_when_its_pod_has_ended_and_its_leases_are_free(site: LaunchedCluster):
    run = site.started()
    site.fleet_db.begin_run(run.run_id, "d", "00000", "00003")
    site.monitor()
    assert site.status(run) is dg.DagsterRunStatus.STARTED
    site.workers.seen = ENDED
    site.monitor()
    assert site.status(run) is dg.DagsterRunStatus.FAILURE
    beat = site.fleet_db.run_beat(run.run_id)
    assert beat is not None and beat.state == "ended"


def test_a_run_between_its_ops_keeps_its_pod_and_one_that_was_declared_dead_does_not(site: LaunchedCluster):
    site.workers.seen = WELL
    between, dead = site.started(), site.started()
    for run, end in ((between, site.fleet_db.end_run), (dead, site.fleet_db.declare_dead)):
        site.fleet_db.begin_run(run.run_id, "d", "00000", "00003")
        end(run.run_id)
        site.fleet_db.end_run(run.run_id)  # what a worker says that was declared dead and thaws
        with site.fleet_db.engine.begin() as connection:
            connection.execute(sa.text("UPDATE batch_runs SET beat_at = beat_at - 200"))
        site.look(run)
    (job,) = site.workers.deleted
    assert dead.run_id in job


def test_a_worker_whose_pod_is_gone_is_fenced_before_its_run_fails(site: LaunchedCluster):
    run = site.started()
    site.fleet_db.begin_run(run.run_id, "d", "00000", "00003")
    site.workers.seen = GONE
    assert site.look(run) is WorkerStatus.FAILED
    beat = site.fleet_db.run_beat(run.run_id)
    assert beat is not None and beat.state == "ended"


def test_a_worker_whose_pod_is_gone_between_its_ops_or_before_them_begins_none_any_more(site: LaunchedCluster):
    before, between = site.started(), site.started()
    site.fleet_db.begin_run(between.run_id, "d", "00000", "00003")
    site.fleet_db.end_run(between.run_id)
    site.workers.seen = GONE
    for run in (before, between):
        assert site.look(run) is WorkerStatus.FAILED
        with pytest.raises(RunEnded, match=run.run_id):
            site.fleet_db.begin_run(run.run_id, "d", "00000", "00003")


def test_without_an_answer_of_the_fleets_database_a_vanished_worker_is_not_failed(site: LaunchedCluster):
    run = site.started()
    site.launcher._fences._url = None
    site.workers.seen = GONE
    assert site.look(run) is WorkerStatus.RUNNING
    site.workers.seen = ENDED
    assert site.look(run) is WorkerStatus.FAILED


def test_jobs_of_ended_runs_are_deleted_and_told(site: LaunchedCluster):
    canceled = create_run_for_test(site.instance, status=dg.DagsterRunStatus.CANCELED)
    running = site.started()
    site.workers.there = [
        RunWorker("never-began", canceled.run_id, WorkerPhase.WAITING, ("pod",)),
        RunWorker("works", running.run_id, WorkerPhase.RUNNING, ("pod",)),
        RunWorker("of-somebody-else", "unknown", WorkerPhase.WAITING),
    ]
    site.launcher.sweep()
    assert site.workers.deleted == ["never-began"]
    assert site.said(canceled) == ["Kubernetes Job never-began deleted: its run has ended before it began"]
    site.workers.seen = NotSeen("connection refused")
    site.launcher.sweep()


def test_a_run_whose_worker_ended_before_it_began_fails_at_once_and_says_why(site: LaunchedCluster):
    starting = [create_run_for_test(site.instance, status=dg.DagsterRunStatus.STARTING) for _ in range(3)]
    begun = site.started()
    oom = "out of memory"
    site.workers.there = [
        RunWorker("died", starting[0].run_id, WorkerPhase.ENDED, end=oom),
        RunWorker("pulls-its-image", starting[1].run_id, WorkerPhase.WAITING, ("pod",)),
        RunWorker("gone-by-force", starting[2].run_id, WorkerPhase.ENDED),  # its process may be alive
        RunWorker("has-begun", begun.run_id, WorkerPhase.ENDED, end=oom),  # looked at with its fence
    ]
    site.launcher.sweep()
    assert site.status(starting[0]) is dg.DagsterRunStatus.FAILURE
    assert [site.status(run) for run in starting[1:]] == [dg.DagsterRunStatus.STARTING] * 2
    assert site.status(begun) is dg.DagsterRunStatus.STARTED
    entries = site.instance.all_logs(starting[0].run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    (said,) = [entry.dagster_event.message for entry in entries if entry.dagster_event]
    assert said == "Run worker: its pod has ended before the run began: out of memory"


def test_our_daemon_sweeps_also_when_no_run_has_started(site: LaunchedCluster):
    assert isinstance(site.launcher, SweepingLauncher)
    (daemon,) = (one for one in daemons_of(site.instance) if isinstance(one, SweepingMonitoringDaemon))
    assert (daemon.interval_seconds, daemon.daemon_type()) == (7, "MONITORING")
    run = create_run_for_test(site.instance, status=dg.DagsterRunStatus.FAILURE)
    site.workers.there = [RunWorker("never-began", run.run_id, WorkerPhase.WAITING)]
    process: Any = SimpleNamespace(instance=site.instance, create_request_context=lambda: None)
    assert [one for one in daemon.run_iteration(process) if one is not None] == []
    assert site.workers.deleted == ["never-began"]


def test_a_job_that_has_to_wait_for_the_api_server_is_told_in_its_runs_log(site: LaunchedCluster) -> None:
    from batch_assets.kubernetes.job_api import PatientJobs

    jobs = site.launcher._api_client.batch_api  # what stock's launcher creates Jobs with
    assert isinstance(jobs, PatientJobs)
    run = create_run_for_test(site.instance, status=dg.DagsterRunStatus.STARTING)
    jobs._told(run.run_id, "the API server of Kubernetes is away")
    jobs._told("nobody's", "the API server of Kubernetes is away")
    assert site.said(run) == ["Run worker: the API server of Kubernetes is away"]
