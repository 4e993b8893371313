"""Jobs are created by an API server that is away for a while, once each; by one that refuses them they are not."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # it imports the client of Kubernetes: a second
    from batch_assets.kubernetes.job_api import PatientJobs

LOST, REFUSED = 0, -1  # answers of a server that hangs up after it has created, and before


class ApiServer:
    """Creates Jobs, after it has answered as it is told."""

    def __init__(self, answers: list[int]) -> None:
        self.answers, self.jobs, self.asked = answers, list[str](), 0

    def create(self, name: str) -> int:
        self.asked += 1
        status = self.answers.pop(0) if self.answers else 201
        if status in (201, LOST):
            if name in self.jobs:
                return 409
            self.jobs.append(name)
        return status


@contextmanager
def served(site: ApiServer) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = site.create(body["metadata"]["name"])
            if status in (LOST, REFUSED):
                self.close_connection = True
                return
            said = json.dumps(body if status == 201 else {"kind": "Status", "code": status}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


Make = Callable[[list[int]], tuple["PatientJobs", ApiServer]]


@pytest.fixture
def told() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def make(told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """The API and its server, with a clock that only waiting moves."""
    import contextlib

    from kubernetes.client import Configuration

    from batch_assets.kubernetes.job_api import PatientJobs

    with contextlib.ExitStack() as servers:

        def of(answers: list[int]) -> tuple[PatientJobs, ApiServer]:
            site, now = ApiServer(answers), [0.0]
            configuration = Configuration()
            configuration.host = f"http://127.0.0.1:{servers.enter_context(served(site))}"
            configuration.retries = False
            monkeypatch.setattr(Configuration, "_default", configuration)

            def sleep(seconds: float) -> None:
                now[0] += seconds

            jobs = PatientJobs(lambda run, words: told.append((run, words)), 60.0, clock=lambda: now[0], sleep=sleep)
            return jobs, site

        yield of


def job() -> Any:
    from kubernetes.client import V1Job, V1ObjectMeta

    return V1Job(metadata=V1ObjectMeta(name="dagster-run-1", labels={"dagster/run-id": "1"}))


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([], 1),
        ([REFUSED] * 20, 21),
        ([503, REFUSED, 429, 500], 5),
        ([LOST], 2),  # it was created, and nobody heard of it
        ([REFUSED, LOST, 504], 4),
    ],
)
def test_a_job_is_created_once_however_long_the_server_is_away(
    make: Make, told: list[tuple[str, str]], answers: list[int], asked: int
) -> None:
    jobs, site = make(list(answers))
    jobs.create_namespaced_job(namespace="runs", body=job())
    assert site.jobs == ["dagster-run-1"] and site.asked == asked
    assert len(told) == bool(answers)
    assert all(run == "1" and "the Job is created when it is back" in words for run, words in told)


@pytest.mark.parametrize(("answers", "asked"), [([403], 1), ([422], 1), ([409], 1), ([503] * 100, 31)])
def test_a_job_that_is_refused_or_never_created_is_an_error(make: Make, answers: list[int], asked: int) -> None:
    from kubernetes.client.exceptions import ApiException

    jobs, site = make(list(answers))
    with pytest.raises(ApiException) as raised:
        jobs.create_namespaced_job(namespace="runs", body=job())
    assert raised.value.status == answers[0] and site.asked == asked and site.jobs == []


def test_every_call_has_a_time_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_k8s.client import PatchedApiClient

    from batch_assets.kubernetes.job_api import CALL_SECONDS

    seen: list[Any] = []
    monkeypatch.setattr(PatchedApiClient, "call_api", lambda self, *args, **more: seen.append(more["_request_timeout"]))
    jobs, _ = make([])
    jobs.read_namespaced_job(name="a", namespace="runs")
    jobs.delete_namespaced_job(name="a", namespace="runs")
    jobs.create_namespaced_job(namespace="runs", body=job(), _request_timeout=7)
    assert seen == [CALL_SECONDS, CALL_SECONDS, 7]
