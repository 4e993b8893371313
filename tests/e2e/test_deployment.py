"""The image and compose.yaml for real: built, brought up from nothing, a dataset through the proxy, a kill.

Needs a Docker engine (DOCKER_HOST, or the usual socket) with an image to build on, and docker-compose. Postgres and
nginx are the images that compose.yaml names where the engine has them, else stand-ins from tests/support/images.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.documents import REPOSITORY

from gpu_runner.bounded_http.addresses import direct

BASE = os.environ.get("BATCH_ASSETS_TEST_BASE_IMAGE", "python:3.11-slim-bookworm")
LARGEST_BYTES = 900_000_000
STATUS = "{ runsOrError(filter: {}, limit: 20) { ... on Runs { results { jobName status } } } }"


def docker(*words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=check, env=environment, **options)


def missing() -> str:
    """Why this cannot be shown here, or ""."""
    if not shutil.which("docker") or docker("version", check=False).returncode:
        return (
            "needs a Docker engine; `docker-engine up DIR` of the shared tools starts one, and `make-base-image` a base"
        )
    if docker("image", "inspect", BASE, check=False).returncode:
        return f"the Docker engine has no image {BASE}"
    return "" if shutil.which("docker-compose") else "needs docker-compose"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if reason := missing():
        pytest.skip(reason)
    tag = f"batch-assets-test:{os.getpid()}"
    docker("build", "--network", "host", "--build-arg", f"BASE_IMAGE={BASE}", "-t", tag, str(REPOSITORY))
    yield tag
    docker("rmi", tag, check=False)


def image_or_stand_in(name: str, stand_in: str) -> str:
    if docker("image", "inspect", name, check=False).returncode == 0:
        return name
    docker(
        "build",
        "--network",
        "host",
        "-t",
        f"stand-in-{stand_in}:1",
        str(REPOSITORY / "tests/support/images" / stand_in),
    )
    return f"stand-in-{stand_in}:1"


@dataclass(frozen=True)
class Deployment:
    """The platform as compose.yaml brings it up."""

    folder: Path
    project: str
    url: str
    password: str

    def compose(self, *words: str) -> str:
        command = ["docker-compose", "-p", self.project, *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def ask(self, query: str, variables: Any = None, password: str | None = None, **headers: str) -> Any:
        login = base64.b64encode(f"admin:{self.password if password is None else password}".encode()).decode()
        sent = {"Content-Type": "application/json", "Authorization": f"Basic {login}", **headers}
        body = json.dumps({"query": query, "variables": variables or {}}).encode()
        with direct.open(urllib.request.Request(f"{self.url}/graphql", body, sent), timeout=30) as answer:
            return json.load(answer)["data"]

    def launch(self, job: str) -> None:
        selector = {"repositoryLocationName": "batch_assets", "repositoryName": "__repository__", "jobName": job}
        mutation = "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename } }"
        found = self.ask(mutation, {"p": {"selector": selector, "runConfigData": {}}})
        assert found["launchRun"]["__typename"] == "LaunchRunSuccess"

    def wait_run(self, job: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            runs = self.ask(STATUS)["runsOrError"]["results"]
            assert not [run for run in runs if run["status"] == "FAILURE"], runs
            if any((run["jobName"], run["status"]) == (job, "SUCCESS") for run in runs):
                return
            time.sleep(1)
        raise AssertionError(f"no successful run of {job} within {seconds:.0f} s: {runs}")


@pytest.fixture(scope="module")
def site(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    from gpu_runner.providers.engine_process import free_port

    folder = tmp_path_factory.mktemp("site") / "compose"
    shutil.copytree(
        REPOSITORY / "deploy" / "compose", folder, ignore=shutil.ignore_patterns(".env", "fleet.env", "htpasswd")
    )
    datasets = folder / "datasets"
    shutil.copytree(REPOSITORY / "batch_assets" / "defs" / "small_example", datasets / "small_example")
    for path in (folder.parent, folder, datasets, datasets / "small_example"):
        path.chmod(0o755)
    said = subprocess.run(["./make-secrets"], cwd=folder, capture_output=True, text=True, check=True).stdout
    port = free_port()
    chosen = {
        "BATCH_ASSETS_IMAGE": image,
        "POSTGRES_IMAGE": image_or_stand_in("postgres:17.6", "postgres"),
        "PROXY_IMAGE": image_or_stand_in("nginxinc/nginx-unprivileged:1.28.0", "proxy"),
        "UI_ADDRESS": f"127.0.0.1:{port}",
        "UI_HOSTS": f"127.0.0.1:{port}",
        "DATASETS": str(datasets),
    }
    with (folder / ".env").open("a") as file:
        file.writelines(f"{name}={value}\n" for name, value in chosen.items())
    (folder / "fleet.env").write_text("BATCH_ASSETS_CAPACITY_SECONDS=5\n")
    made = Deployment(folder, f"ba{os.getpid()}", f"http://127.0.0.1:{port}", said.split("the password ")[1].split()[0])
    try:
        made.compose("up", "-d")
        yield made
    finally:
        made.compose("down", "-v", "--timeout", "20")


def test_the_image_is_small_and_not_root(image: str) -> None:
    (found,) = json.loads(docker("image", "inspect", image).stdout)
    assert found["Config"]["User"] == "10001:10001"
    print(f"{found['Size']:,} bytes")
    assert found["Size"] <= LARGEST_BYTES
    confined = ("run", "--rm", "--read-only", "--network", "none", "--cap-drop", "ALL", "--tmpfs", "/tmp")
    assert docker(*confined, image, "dagster", "--version").stdout.startswith("dagster, version 1.13")
    assert "Commands" in docker(*confined, image, "--help").stdout


def test_compose_comes_up_from_nothing_to_a_green_dataset(site: Deployment) -> None:
    wait_answer(site)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        site.ask("{ version }", password="wrong")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        site.ask("{ version }", Origin="http://elsewhere.example")
    site.launch("small_example_refresh")
    site.wait_run("small_example_publish", 120)
    said = site.compose("exec", "-T", "code", "batch-assets", "verify", "small_example")
    assert "80 rows, 80 ok, 0 dead" in said


def test_the_code_server_comes_back_after_it_was_killed(site: Deployment) -> None:
    site.compose("kill", "code")
    site.compose("up", "-d", "code")
    wait_answer(site)
    assert "80 rows, 80 ok" in site.compose("exec", "-T", "code", "batch-assets", "verify", "small_example")


def wait_answer(site: Deployment, seconds: float = 90) -> None:
    """Until the webserver answers and has loaded the definitions."""
    query = "{ workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError { __typename } } } } }"
    deadline, found = time.monotonic() + seconds, "no answer"
    while time.monotonic() < deadline:
        try:
            found = str(site.ask(query))
        except OSError as error:
            found = str(error)
        if "RepositoryLocation" in found:
            return
        time.sleep(1)
    raise AssertionError(f"not loaded within {seconds:.0f} s: {found}")
