"""Jobs for the stock launcher: each call ends, and Jobs are created also when the API server is away for a while.

Stock Dagster (1.13) fails a run whose Job cannot be created at once, so every run of the queue while the API server is
started again. A Job is named by its run: where an answer was lost, 409 says that the Job is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from dagster_k8s.client import PatchedApiClient
from kubernetes.client import BatchV1Api
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

CALL_SECONDS = 20.0
WAIT_SECONDS = 2.0  # between two attempts
RUN_LABEL = "dagster/run-id"
_AWAY = frozenset({0, 429, 500, 502, 503, 504})  # HTTP's; 0: no answer
_EXISTS = 409

Told = Callable[[str, str], None]


class _BoundedClient(PatchedApiClient):
    """Calls without a time-out of their own get one."""

    def call_api(self, *args: Any, _request_timeout: Any = None, **more: Any) -> Any:
        return super().call_api(*args, _request_timeout=_request_timeout or CALL_SECONDS, **more)


class PatientJobs(BatchV1Api):  # type: ignore[misc]
    """`batch/v1` of the official client. Made before its configuration is read, it connects at its first call.

    told: hears of a run's id and why its Job has to wait, once. seconds: how long a Job is tried for.
    """

    def __init__(
        self,
        told: Told,
        seconds: float = 120.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._told, self._seconds, self._clock, self._sleep = told, seconds, clock, sleep

    @cached_property
    def api_client(self) -> PatchedApiClient:
        """By the configuration that is loaded now."""
        return _BoundedClient()

    def create_namespaced_job(self, namespace: str, body: Any, **options: Any) -> Any:
        """Create it, or find the one that an earlier attempt has created. Raises what the last attempt raised."""
        began, attempts = self._clock(), 0
        while True:
            attempts += 1
            try:
                return super().create_namespaced_job(namespace=namespace, body=body, **options)
            except (ApiException, HTTPError) as error:
                status = error.status or 0 if isinstance(error, ApiException) else 0
                if status == _EXISTS and attempts > 1:
                    return body
                if status not in _AWAY or self._clock() - began >= self._seconds:
                    raise
                if attempts == 1:
                    why = f"it answers {status}" if status else "it does not answer"
                    words = f"the API server of Kubernetes is away ({why}): the Job is created when it is back"
                    self._told((body.metadata.labels or {}).get(RUN_LABEL, ""), words)
                self._sleep(WAIT_SECONDS)
