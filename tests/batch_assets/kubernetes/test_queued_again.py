"""Dagster's own queue, with the settings of deploy/kubernetes: a run whose Job is not created now is queued again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import dagster as dg
import pytest
import yaml
from dagster._core.events import DagsterEvent
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.test_utils import create_run_for_test, instance_for_test
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon
from support.documents import REPOSITORY

from batch_assets.kubernetes.job_api import JobNotCreated

SETTINGS = yaml.safe_load((REPOSITORY / "deploy/kubernetes/dagster.yaml").read_text())["run_coordinator"]
LOCATION = GrpcServerCodeLocationOrigin(host="localhost", port=1, location_name="batch_assets")
ORIGIN = RemoteRepositoryOrigin(LOCATION, "__repository__").get_job_origin("rows")
RETRIES = SETTINGS["config"]["max_user_code_failure_retries"]


class Launcher:
    """Fails as often as it is told."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors, self.launched = errors, list[str]()

    def __call__(self, context: Any) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.launched.append(context.dagster_run.run_id)


Queue = Callable[[list[Exception], int], tuple[dg.DagsterRun, Launcher]]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """Queues a run, and looks at the queue so often."""
    with instance_for_test(overrides={"run_coordinator": SETTINGS}) as instance:

        def of(errors: list[Exception], looks: int) -> tuple[dg.DagsterRun, Launcher]:
            launcher = Launcher(errors)
            monkeypatch.setattr(instance.run_launcher, "launch_run", launcher)
            status = dg.DagsterRunStatus.NOT_STARTED
            run = create_run_for_test(instance, status=status, remote_job_origin=ORIGIN)
            instance.report_dagster_event(DagsterEvent.job_enqueue(run), run.run_id)
            context = MagicMock(instance=instance)
            with QueuedRunCoordinatorDaemon(interval_seconds=1) as daemon:
                for look in range(looks):  # the code location's runs are left alone for a while after each
                    list(daemon.run_iteration(context, fixed_iteration_time=1e9 + 10 * look))
            found = instance.get_run_by_id(run.run_id)
            assert found is not None
            return found, launcher

        yield of


@pytest.mark.slow
def test_a_run_whose_job_was_not_created_is_queued_again_and_launched(queue: Queue) -> None:
    run, launcher = queue([JobNotCreated("away")] * RETRIES, RETRIES)
    assert run.status is dg.DagsterRunStatus.QUEUED and launcher.launched == []
    run, launcher = queue([JobNotCreated("away")] * RETRIES, RETRIES + 1)
    assert run.status is dg.DagsterRunStatus.STARTING and launcher.launched == [run.run_id]


@pytest.mark.slow
def test_it_is_not_tried_for_ever(queue: Queue) -> None:
    run, launcher = queue([JobNotCreated("away")] * 100, RETRIES + 1)
    assert run.status is dg.DagsterRunStatus.FAILURE and launcher.launched == []


def test_another_error_fails_it_at_once(queue: Queue) -> None:
    run, _ = queue([RuntimeError("refused")], 1)
    assert run.status is dg.DagsterRunStatus.FAILURE
