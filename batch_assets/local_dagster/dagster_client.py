"""What the command line asks of a running Dagster: launch a job, cancel runs, say whether it is there."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_graphql import DagsterGraphQLClient, DagsterGraphQLClientError, ReloadRepositoryLocationStatus
from requests import PreparedRequest
from requests.auth import AuthBase

from batch_assets import settings
from batch_assets.local_dagster.home import StackAddress
from batch_assets.webserver import token as web_token
from gpu_runner.bounded_http.addresses import direct
from gpu_runner.errors import ExitStatus, UserFacingError

LOCATION = "batch_assets"
REPOSITORY = "__repository__"
ANSWER_SECONDS = 5.0
UNKNOWN_JOB = "PipelineNotFoundError"  # type name in Dagster's GraphQL schema


class LaunchError(UserFacingError):
    """Dagster did not accept a launch; says why."""

    exit_status = ExitStatus.WRONG_REQUEST


class TokenAuth(AuthBase):
    """The webserver's token in each request. In place of a header: requests overwrites that with what ~/.netrc has."""

    def __init__(self, home: Path) -> None:
        self._headers = web_token.headers(home)

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        request.headers.update(self._headers)
        return request


class OwnDagster:
    """A Dagster of our own, which may have no webserver yet."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance

    def terminate(self, run_ids: Sequence[str]) -> None:
        """Ask for the end of runs, as the webserver would do it. A run that cannot be asked now may be asked again."""
        for run_id in run_ids:
            with contextlib.suppress(dg.DagsterError):
                self._instance.run_coordinator.cancel_run(run_id)


def _reason(error: DagsterGraphQLClientError) -> str:
    """What went wrong. Of an error in between, Dagster's client keeps the query as text, and the error as the cause."""
    if error.__cause__ is not None:
        return f"{type(error.__cause__).__name__}: {error.__cause__}"
    return "; ".join(str(part) for part in error.args if part)


class DagsterClient:
    """One running Dagster, through its GraphQL API."""

    def __init__(self, address: StackAddress) -> None:
        self.url = address.url
        auth = TokenAuth(settings.dagster_home())
        self._client = DagsterGraphQLClient("127.0.0.1", port_number=address.port, timeout=60, auth=auth)

    def launch(self, job: str, tags: Mapping[str, str], run_config: Mapping[str, Any]) -> str:
        """Queue a run of the job; returns its run id. Raises LaunchError.

        A job that Dagster does not know may be that of a dataset added since it started: then it loads the definitions
        again, once.
        """
        try:
            try:
                return self._submit(job, tags, run_config)
            except DagsterGraphQLClientError as error:
                if error.args[:1] != (UNKNOWN_JOB,):
                    raise
            self.reload()
            return self._submit(job, tags, run_config)
        except DagsterGraphQLClientError as error:
            raise LaunchError(f"Dagster at {self.url} did not start job {job}: {_reason(error)}") from None

    def _submit(self, job: str, tags: Mapping[str, str], run_config: Mapping[str, Any]) -> str:
        found = self._client.submit_job_execution(
            job,
            repository_location_name=LOCATION,
            repository_name=REPOSITORY,
            run_config=dict(run_config),
            tags=dict(tags),
        )
        return str(found)

    def reload(self) -> None:
        """Let the code server read the definitions again, as "Reload" in the UI does. Raises LaunchError."""
        try:
            found = self._client.reload_repository_location(LOCATION)
        except DagsterGraphQLClientError as error:
            raise LaunchError(f"Dagster at {self.url} did not load the definitions again: {_reason(error)}") from None
        if found.status != ReloadRepositoryLocationStatus.SUCCESS:
            raise LaunchError(f"Dagster at {self.url} did not load the definitions again: {found.message}")

    def terminate(self, run_ids: Sequence[str]) -> None:
        """Ask for the end of runs, as the UI's cancel does. A run that cannot be asked now may be asked again."""
        with contextlib.suppress(DagsterGraphQLClientError):
            self._client.terminate_runs(list(run_ids))

    def alive(self) -> bool:
        """Whether the webserver answers."""
        try:
            with direct.open(f"{self.url}/server_info", timeout=ANSWER_SECONDS) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False
