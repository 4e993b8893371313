"""Jobs for the stock launcher: each call ends, and Jobs are created also when the API server is away for a while.

Stock Dagster (1.13) fails a run whose Job cannot be created at once, so every run of the queue while the API server is
started again. Here creating is tried for some seconds, then the run goes back to the queue of the coordinator, which
tries it as often as `max_user_code_failure_retries` says. A Job is named by its run: one that exists is the run's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from dagster_k8s.client import PatchedApiClient
from kubernetes.client import BatchV1Api, Configuration, CoreV1Api
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from batch_assets.dagster_internals import DagsterUserCodeUnreachableError

CALL_SECONDS = 20.0
CREATE_SECONDS = 10.0  # one call
TRY_SECONDS = 15.0  # with one more call less than the daemon's terminationGracePeriodSeconds
WAIT_SECONDS = 2.0  # between two attempts
RUN_LABEL = "dagster/run-id"
# HTTP's; 0: no answer. 401: also what a pod gets that was deleted by force, until its kubelet has ended it. 403: what
# an API server says to everybody while it starts.
_AWAY = frozenset({0, 401, 403, 409, 429, 500, 502, 503, 504})
_FORBIDDEN, _NOT_FOUND, _CONFLICT, _EXISTS = 403, 404, 409, "AlreadyExists"

Told = Callable[[str, str], None]


class JobNotCreated(DagsterUserCodeUnreachableError):
    """The API server was away. QueuedRunCoordinator queues a run again whose launch raises this class of errors."""


class _BoundedClient(PatchedApiClient):
    """Calls without a time-out of their own get one. Each is sent once: urllib3 would wait four times for an answer."""

    def __init__(self) -> None:
        configuration = Configuration.get_default_copy()
        configuration.retries = False
        super().__init__(configuration)

    def call_api(self, *args: Any, _request_timeout: Any = None, **more: Any) -> Any:
        return super().call_api(*args, _request_timeout=_request_timeout or CALL_SECONDS, **more)


class _Bounded:
    """An API that connects at its first call, by the configuration that is loaded then."""

    @cached_property
    def api_client(self) -> PatchedApiClient:
        return _BoundedClient()


class BoundedPods(_Bounded, CoreV1Api):  # type: ignore[misc]
    """The core API of the official client."""

    def __init__(self) -> None:
        pass


class PatientJobs(_Bounded, BatchV1Api):  # type: ignore[misc]
    """`batch/v1` of the official client.

    told: hears of a run's id and why its Job has to wait, once for each launch. seconds: how long a launch tries.
    """

    def __init__(
        self,
        told: Told,
        seconds: float = TRY_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._told, self._seconds, self._clock, self._sleep = told, seconds, clock, sleep

    def create_namespaced_job(self, namespace: str, body: Any, **options: Any) -> Any:
        """Create it, or find the one that an earlier attempt has created.

        Raises JobNotCreated when the API server is away for too long, and ApiException when it refuses.
        """
        began, attempts = self._clock(), 0
        options = {"_request_timeout": CREATE_SECONDS, **options}
        run = (body.metadata.labels or {}).get(RUN_LABEL, "")
        while True:
            attempts += 1
            cause: Exception | None = None
            try:
                if (made := self._create(namespace, body, options)) is not None:
                    return made
                status = _CONFLICT
            except (ApiException, HTTPError) as error:
                status, cause = (error.status or 0 if isinstance(error, ApiException) else 0), error
                if status not in _AWAY:
                    raise
            answer = f"it answers {status}" if status else "it does not answer"
            if self._clock() - began >= self._seconds:
                if status == _FORBIDDEN and cause is not None:
                    raise cause
                raise JobNotCreated(f"the API server of Kubernetes made no Job of run {run}: {answer}") from cause
            if attempts == 1:
                self._told(run, f"the API server of Kubernetes makes no Job now ({answer}): it is asked again")
            self._sleep(WAIT_SECONDS)

    def _create(self, namespace: str, body: Any, options: dict[str, Any]) -> Any:
        """The Job, or its body when it exists; None when one had to be deleted that was over before its run began."""
        try:
            return super().create_namespaced_job(namespace=namespace, body=body, **options) or body
        except ApiException as error:
            if error.status != _CONFLICT or _reason(error) != _EXISTS:
                raise
        try:
            status = self.read_namespaced_job_status(body.metadata.name, namespace).status
            if not (status.succeeded or status.failed):
                return body
            # Its worker found the run in the queue, where no worker begins it, and ended.
            self.delete_namespaced_job(body.metadata.name, namespace, propagation_policy="Background")
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise
        return None


def _reason(error: Exception) -> str:
    """`reason` of the Status that the API server answered; empty where there is none."""
    try:
        return str(json.loads(getattr(error, "body", None) or "{}").get("reason", ""))
    except (ValueError, AttributeError):
        return ""
