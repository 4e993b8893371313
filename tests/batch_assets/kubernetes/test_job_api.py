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

QUOTA = 1409  # a conflict that is not the Job's: of a quota's count
REASONS = {409: "AlreadyExists", QUOTA: "Conflict"}
LOST, REFUSED = 0, -1  # answers of a server that hangs up after it has created, and before


class ApiServer:
    """Creates Jobs, after it has answered as it is told. `over`: Jobs that have ended."""

    def __init__(self, answers: list[int]) -> None:
        self.answers, self.jobs, self.asked = answers, list[str](), 0
        self.over: set[str] = set()

    def create(self, name: str) -> int:
        self.asked += 1
        status = self.answers.pop(0) if self.answers else 201
        if status in (201, LOST):
            if name in self.jobs:
                return 409
            self.jobs.append(name)
        return status

    def status_of(self, name: str) -> dict[str, Any] | None:
        if name not in self.jobs:
            return None
        return {"metadata": {"name": name}, "status": {"succeeded": 1} if name in self.over else {"active": 1}}

    def delete(self, name: str) -> None:
        self.jobs.remove(name)
        self.over.discard(name)


@contextmanager
def served(site: ApiServer) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = site.create(body["metadata"]["name"])
            if status in (LOST, REFUSED):
                self.close_connection = True
                return
            answer = body if status == 201 else {"kind": "Status", "code": status, "reason": REASONS.get(status)}
            self.answer(409 if status == QUOTA else status, answer)

        def do_GET(self) -> None:
            found = site.status_of(self.path.split("/")[-2])  # …/jobs/NAME/status
            self.answer(404 if found is None else 200, found or {"kind": "Status", "code": 404})

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            site.delete(self.path.split("?")[0].split("/")[-1])
            self.answer(200, {"kind": "Status"})

        def answer(self, status: int, answer: object) -> None:
            said = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
        ([401, 401], 3),  # a token that is not known yet
        ([QUOTA], 2),
        ([403, 403], 3),  # of a server that starts
    ],
)
def test_a_job_is_created_once_however_long_the_server_is_away(
    make: Make, told: list[tuple[str, str]], answers: list[int], asked: int
) -> None:
    jobs, site = make(list(answers))
    jobs.create_namespaced_job(namespace="runs", body=job())
    assert site.jobs == ["dagster-run-1"] and site.asked == asked
    assert len(told) == bool(answers)
    assert all(run == "1" and "it is asked again" in words for run, words in told)


def test_a_job_that_exists_is_the_runs(make: Make, told: list[tuple[str, str]]) -> None:
    """An earlier launch made it, and did not hear of it: its run went back to the queue."""
    jobs, site = make([])
    site.jobs.append("dagster-run-1")
    jobs.create_namespaced_job(namespace="runs", body=job())
    assert site.jobs == ["dagster-run-1"] and site.asked == 1 and told == []


def test_a_job_that_was_over_before_its_run_began_is_made_anew(make: Make) -> None:
    """Its worker came while the run was back in the queue, and ended: Dagster begins no run that is queued."""
    jobs, site = make([])
    site.jobs.append("dagster-run-1")
    site.over.add("dagster-run-1")
    jobs.create_namespaced_job(namespace="runs", body=job())
    assert site.jobs == ["dagster-run-1"] and site.over == set() and site.asked == 2


@pytest.mark.parametrize(("status", "asked"), [(403, 31), (422, 1)])
def test_a_job_that_is_refused_is_an_error(make: Make, status: int, asked: int) -> None:
    from kubernetes.client.exceptions import ApiException

    jobs, site = make([status] * 100)
    with pytest.raises(ApiException) as raised:
        jobs.create_namespaced_job(namespace="runs", body=job())
    assert raised.value.status == status and site.asked == asked and site.jobs == []


@pytest.mark.parametrize("status", [503, 401, REFUSED, QUOTA])
def test_a_job_that_is_not_created_for_long_sends_its_run_back_to_the_queue(make: Make, status: int) -> None:
    from batch_assets.kubernetes.job_api import JobNotCreated

    jobs, site = make([status] * 100)
    with pytest.raises(JobNotCreated, match="no Job of run 1"):
        jobs.create_namespaced_job(namespace="runs", body=job())
    assert site.asked == 31 and site.jobs == []


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
