"""A Dagster of our own is asked to cancel runs without its webserver."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.test_utils import create_run_for_test

from batch_assets import settings
from batch_assets.local_dagster.dagster_client import OwnDagster


def test_a_queued_run_is_canceled_and_one_that_is_not_there_is_no_error(tmp_path: Path):
    location = GrpcServerCodeLocationOrigin(host="127.0.0.1", port=1, location_name="here")
    source = settings.PROJECT / "deploy" / "local" / "dagster.yaml"
    (tmp_path / "dagster.yaml").write_text(source.read_text())
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        queued = create_run_for_test(
            instance,
            job_name="j",
            status=dg.DagsterRunStatus.QUEUED,
            remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(location, "r"), "j"),
            job_code_origin=JobPythonOrigin("j", RepositoryPythonOrigin("python", ModuleCodePointer("m", "d"))),
        )
        OwnDagster(instance).terminate(["none", queued.run_id])
        run = instance.get_run_by_id(queued.run_id)
        assert run is not None
        assert run.status == dg.DagsterRunStatus.CANCELED
