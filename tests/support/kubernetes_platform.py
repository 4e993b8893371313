"""The platform as deploy/kubernetes installs it, on a real cluster, for tests: built images, an S3 server, Postgres.

What a user would write is written: fleet.yaml with engine pods of the simulator, environment.env with the S3 server's
address, a dataset in an image of one's own. Everything else is deploy/kubernetes as it stands.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_runner.bounded_http.addresses import direct
from gpu_runner.fleet_database.database import FleetDatabase
from support import kubernetes_vllm
from support.documents import REPOSITORY
from support.engine_image import IMAGE, engine_command
from support.kubernetes_cluster import OFFER, TOOL, RealCluster, bare_cluster
from support.timing import PATIENCE

BASE = os.environ.get("BATCH_ASSETS_TEST_BASE_IMAGE", "python:3.11-slim-bookworm")
DEPLOY = REPOSITORY / "deploy" / "kubernetes"
PLATFORM, ENGINES, STORAGE = "batch-assets", "batch-assets-engines", "storage"
DATASET = "things"
ROWS, BATCH_ROWS = 2400, 20
DEFS: dict[str, Any] = {
    "type": "batch_assets.GeneratedDataset",
    "attributes": {
        "name": DATASET,
        "source": {
            "grid": {"thing": [f"thing {i}" for i in range(ROWS // 4)], "request": ["Describe", "Sell", "Draw", "Sing"]}
        },
        "prompt": {"user": "{{ request }} {{ thing }}."},
        "model": "Qwen/Qwen3-0.6B",
        "sampling": {"max_tokens": 60},
        "batch_rows": BATCH_ROWS,
        "batches_per_run": 10,
    },
}
CAPITALS = "capitals"
COUNTRIES = (
    *("France", "Italy", "Spain", "Germany", "Japan", "Egypt", "Greece", "Russia"),
    *("Poland", "Norway", "Sweden", "China", "India", "Cuba", "Peru", "Kenya"),
)
REAL: dict[str, Any] = {  # for a real small model
    "type": "batch_assets.GeneratedDataset",
    "attributes": {
        "name": CAPITALS,
        "source": {"grid": {"country": list(COUNTRIES)}},
        "prompt": {"user": "What is the capital of {{ country }}? Say its name."},
        "model": kubernetes_vllm.MODEL,
        "hardware": {"model_facts": kubernetes_vllm.FACTS},
        "sampling": {"temperature": 0, "max_tokens": 12},
        "keep_columns": ["country"],
        "batch_rows": 4,
    },
}
ENGINE = "--weights-ms 40 --max-num-seqs 8"  # some rows per second: the faults must find them at work
PLATFORM_IMAGE, POSTGRES_IMAGE, PROXY_IMAGE = (
    "batch-assets:0.1.0",
    "postgres:17.6",
    "nginxinc/nginx-unprivileged:1.28.0",
)
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
Engines = Callable[[RealCluster], dict[str, Any]]
IDLE_MINUTES = 0.5
OVERLAPS = """select a.run_id || '+' || b.run_id from batch_runs a join batch_runs b
  on a.run_id < b.run_id and a.dataset = b.dataset and a.first_key <= b.last_key and b.first_key <= a.last_key
  where a.state <> 'ended' and b.state <> 'ended'"""
RUNS = """{ runsOrError(limit: 100) { ... on Runs { results {
    runId jobName status startTime endTime tags { key value } assetSelection { path } } } } }"""


class Docker:
    """A Docker engine; `host` is its address, "" for the one of the environment."""

    def __init__(self, host: str = "") -> None:
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "0", **({"DOCKER_HOST": host} if host else {})}

    def has(self, *words: str) -> bool:
        """Whether a command succeeds."""
        return subprocess.run(["docker", *words], capture_output=True, env=self.environment).returncode == 0

    def __call__(self, *words: str) -> None:
        done = subprocess.run(["docker", *words], capture_output=True, text=True, env=self.environment)
        assert done.returncode == 0, f"docker {words[0]}: {done.stderr[-2000:]}"

    def build(self, tag: str, folder: Path, *words: str) -> None:
        self("build", "--network", "host", *words, "-t", tag, str(folder))


@contextlib.contextmanager
def docker_engine() -> Iterator[Docker]:
    """The Docker engine of this machine with a base image; else one that the shared tools start, and end afterwards.

    Its folder is directly below /tmp: containerd's sockets lie in it, and a path of more than 104 bytes is none for
    a socket. Skips with a reason where neither engine can be.
    """
    if not shutil.which("docker"):
        pytest.skip("needs Docker's command")
    if (found := Docker()).has("version"):
        if not found.has("image", "inspect", BASE):
            pytest.skip(f"the Docker engine has no image {BASE}")
        yield found
        return
    tools = TOOL.parent
    if not (tools / "docker-engine").exists() or not all(map(shutil.which, ("dockerd", "debootstrap"))):
        pytest.skip("needs a Docker engine (DOCKER_HOST), or the tool docker-engine with dockerd and debootstrap")
    with tempfile.TemporaryDirectory(prefix="docker-", dir="/tmp") as below:
        folder = Path(below) / "engine"
        started = subprocess.run([tools / "docker-engine", "up", folder], capture_output=True, text=True)
        if started.returncode:
            pytest.skip(f"no Docker engine can be started here: {started.stderr[-200:]}")
        engine = Docker(started.stdout.split("DOCKER_HOST=")[1].split()[0])
        try:
            subprocess.run([tools / "make-base-image", BASE], check=True, capture_output=True, env=engine.environment)
            yield engine
        finally:
            subprocess.run([tools / "docker-engine", "down", folder], capture_output=True, timeout=120)


def write_images(docker: Docker, folder: Path) -> Path:
    """Build the platform's image with datasets of its own, and what stands in for public images; one tar file."""
    made = folder / "image"
    for name, defs in ((DATASET, DEFS), (CAPITALS, REAL)):
        (made / "datasets" / name).mkdir(parents=True)
        (made / "datasets" / name / "defs.yaml").write_text(yaml.safe_dump(defs))
    copy = ("FROM batch-assets-test:platform", "COPY datasets /etc/batch-assets/datasets")
    (made / "Dockerfile").write_text("\n".join([*copy, "ENV BATCH_ASSETS_DEFS=/etc/batch-assets/datasets", ""]))
    docker.build("batch-assets-test:platform", REPOSITORY, "--build-arg", f"BASE_IMAGE={BASE}")
    docker.build(PLATFORM_IMAGE, made)
    for name, stand_in in ((POSTGRES_IMAGE, "postgres"), (PROXY_IMAGE, "proxy")):
        if not docker.has("image", "inspect", name):
            docker.build(name, REPOSITORY / "tests/support/images" / stand_in)
    images = folder / "images.tar"
    docker("save", PLATFORM_IMAGE, POSTGRES_IMAGE, PROXY_IMAGE, "-o", str(images))
    return images


@dataclass
class Platform:
    """The installed platform. Times are of this machine."""

    cluster: RealCluster
    folder: Path
    engines: Engines
    password: str = ""
    overlaps: list[str] = field(default_factory=list)  # runs of the same batches that both counted as alive
    looks: int = 0
    database_password: str = ""
    addresses: dict[str, str] = field(default_factory=dict)  # of pods, for while the API server is away

    def kubectl(self, *words: str, given: str | None = None, check: bool = True, seconds: float = 60) -> str:
        """kubectl as administrator; `given` is its standard input."""
        command = [self.cluster.kubectl, "--kubeconfig", self.cluster.admin, *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=PATIENCE * seconds)
        assert not check or done.returncode == 0, f"kubectl {words}: {done.stderr}"
        return done.stdout

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Pods, as JSON."""
        found: list[dict[str, Any]] = json.loads(
            self.kubectl("-n", namespace, "get", "pods", "-l", selector, "-o", "json")
        )["items"]
        return found

    def address(self, component: str) -> str:
        """Pod IP of a ready pod of the platform; looked up once."""
        if component not in self.addresses:
            self.addresses[component] = self._address(component)
        return self.addresses[component]

    def _address(self, component: str) -> str:
        for pod in self.pods(PLATFORM, f"app.kubernetes.io/component={component}"):
            conditions = pod["status"].get("conditions", [])
            if any((one["type"], one["status"]) == ("Ready", "True") for one in conditions):
                return str(pod["status"]["podIP"])
        raise AssertionError(f"no pod of {component} is ready")

    def install(self) -> None:
        """What README.md says."""
        shutil.copytree(DEPLOY, self.folder)
        with (self.folder / "environment.env").open("a") as file:
            file.write(
                f"AWS_ENDPOINT_URL=http://s3.{STORAGE}.svc.cluster.local:9000\nBATCH_ASSETS_CAPACITY_SECONDS=5\n"
            )
        settings = (self.folder / "dagster.yaml").read_text()
        for found, quick in (
            ("poll_interval_seconds: 10", "poll_interval_seconds: 5"),
            ("node_lost_seconds: 300", "node_lost_seconds: 30"),
        ):
            assert found in settings
            settings = settings.replace(found, quick)
        (self.folder / "dagster.yaml").write_text(settings)
        self.kubectl("apply", "-f", str(self.folder / "namespaces.yaml"))
        (self.folder / "fleet.yaml").write_text(
            yaml.safe_dump({"kubernetes": [self.engines(self.cluster)], "idle_minutes": IDLE_MINUTES})
        )
        made = subprocess.run(["./make-secrets"], cwd=self.folder, capture_output=True, text=True, check=True)
        self.password = made.stderr.split("the password ")[1].split()[0]
        self.kubectl("apply", "-f", "-", given=made.stdout)
        secrets = {one["metadata"]["name"]: one["stringData"] for one in yaml.safe_load_all(made.stdout)}
        self.database_password = secrets["database"]["DAGSTER_PG_PASSWORD"]
        keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store-keys", "namespace": PLATFORM}}
        self.kubectl("apply", "-f", "-", given=json.dumps({**keys, "stringData": KEYS}))
        self._storage()
        self.kubectl("apply", "-k", str(self.folder))

    def _storage(self) -> None:
        """moto's S3 server in a pod, from this environment's packages, and its bucket."""
        site = sysconfig.get_path("purelib")
        python = engine_command()[2].split()[1]
        run = "from moto.server import main; main(['-H', '0.0.0.0', '-p', '9000'])"
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "s3", "namespace": STORAGE, "labels": {"app": "s3"}},
            "spec": {
                "enableServiceLinks": False,
                "nodeSelector": {"pool": "on-demand"},
                "containers": [
                    {
                        "name": "s3",
                        "image": IMAGE,
                        "imagePullPolicy": "IfNotPresent",
                        "command": [python, "-c", run],
                        "volumeMounts": [{"name": "site", "mountPath": site, "readOnly": True}],
                        "readinessProbe": {"tcpSocket": {"port": 9000}, "periodSeconds": 1},
                    }
                ],
                "volumes": [{"name": "site", "hostPath": {"path": site}}],
            },
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "s3", "namespace": STORAGE},
            "spec": {"selector": {"app": "s3"}, "ports": [{"port": 9000}]},
        }
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": STORAGE}}
        for one in (namespace, service, pod):
            self.kubectl("apply", "-f", "-", given=json.dumps(one))

    def s3(self) -> Any:
        """A client of the S3 server."""
        import boto3

        if "s3" not in self.addresses:
            self.addresses["s3"] = self.pods(STORAGE)[0]["status"]["podIP"]
        address = self.addresses["s3"]
        keys = {name.lower(): value for name, value in KEYS.items()}
        return boto3.client("s3", endpoint_url=f"http://{address}:9000", region_name="us-east-1", **keys)

    def wait_installed(self, seconds: float = 240) -> float:
        """Until everything is ready and the definitions are loaded; returns how long it took."""
        began = time.monotonic()
        self.kubectl("-n", STORAGE, "wait", "--for=condition=Ready", "pod/s3", "--timeout=150s", seconds=160)
        self.s3().create_bucket(Bucket="batch-assets")
        for name in ("statefulset/postgres", *(f"deployment/{one}" for one in ("code-location", "webserver", "proxy"))):
            self.kubectl(
                "-n", PLATFORM, "rollout", "status", name, f"--timeout={PATIENCE * seconds:.0f}s", seconds=seconds + 10
            )
        query = "{ workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError { __typename } } } } }"
        # Each call goes to any replica, and one that was up before the code location loads its definitions later.
        self.until(lambda: all("RepositoryLocation" in str(self.ask(query)) for _ in range(12)), seconds)
        return time.monotonic() - began

    def ask(self, query: str, variables: Any = None) -> Any:
        """GraphQL through the proxy, with its password."""
        login = base64.b64encode(f"admin:{self.password}".encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}", "Host": "localhost:8080"}
        body = json.dumps({"query": query, "variables": variables or {}}).encode()
        request = urllib.request.Request(f"http://{self.address('proxy')}:8080/graphql", body, headers)
        with direct.open(request, timeout=30) as answer:
            return json.load(answer)["data"]

    def launch(self, job: str, **tags: str) -> str:
        """Start a job by the UI's mutation; its run id."""
        selector = {"repositoryLocationName": "batch_assets", "repositoryName": "__repository__", "jobName": job}
        given = {
            "selector": selector,
            "runConfigData": {},
            "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
        }
        mutation = (
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) "
            "{ __typename ... on LaunchRunSuccess { run { runId } } } }"
        )
        found = self.ask(mutation, {"p": given})["launchRun"]
        assert found["__typename"] == "LaunchRunSuccess", found
        return str(found["run"]["runId"])

    def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first."""
        found: list[dict[str, Any]] = self.ask(RUNS)["runsOrError"]["results"]
        return found

    def range_runs(self, *statuses: str) -> list[dict[str, Any]]:
        """Runs over ranges of batches, of these statuses."""
        found = [run for run in self.runs() if any(one["path"][-1] == "rows" for one in run["assetSelection"] or ())]
        return [run for run in found if not statuses or run["status"] in statuses]

    def ended(self) -> set[tuple[str, str]]:
        """Jobs with the status of each of their runs."""
        return {(run["jobName"], run["status"]) for run in self.runs()}

    def workers(self) -> dict[str, dict[str, Any]]:
        """Pods of run workers that have begun and not ended, by run id."""
        found = self.pods(PLATFORM, "app.kubernetes.io/component=run_worker")
        return {
            pod["metadata"]["labels"]["dagster/run-id"]: pod for pod in found if pod["status"]["phase"] == "Running"
        }

    def started(self) -> list[str]:
        """Run ids of range runs that are under way."""
        return [run["runId"] for run in self.range_runs("STARTED")]

    def status_of(self, run_id: str) -> str:
        """The run's status."""
        return str(next(run["status"] for run in self.runs() if run["runId"] == run_id))

    def failed(self) -> set[str]:
        """Run ids of all runs that failed."""
        return {run["runId"] for run in self.runs() if run["status"] == "FAILURE"}

    def replacement_of(self, run_id: str) -> str | None:
        """The run that does the batches of this one by now: Dagster's retry of it, or the launcher's next."""
        found = self.database(
            f"""select b.run_id from batch_runs a join batch_runs b
            on a.dataset = b.dataset and a.first_key <= b.last_key and b.first_key <= a.last_key
            where a.run_id = '{run_id}' and b.run_id <> a.run_id and b.started_at > a.started_at"""
        )
        return found[0] if found else None

    def database(self, query: str) -> list[str]:
        """First column of a query to Postgres, past the API server."""
        import psycopg2

        address = self.address("postgres")
        with (
            contextlib.closing(
                psycopg2.connect(
                    host=address, user="dagster", dbname="dagster", password=self.database_password, connect_timeout=5
                )
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(query)
            return [str(line[0]) for line in cursor.fetchall()]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look every half second for two runs of the same batches that both count as alive."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.5):
                with contextlib.suppress(Exception):  # not there yet
                    self.overlaps += self.database(OVERLAPS)
                    self.looks += 1

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(15)

    def messages(self, run_id: str) -> list[str]:
        """What stands in the run's log, oldest first."""
        query = """query($id: ID!) { logsForRun(runId: $id, limit: 1000) { ... on EventConnection {
            events { ... on MessageEvent { message } ... on ErrorEvent { error { message } } } } } }"""
        events = self.ask(query, {"id": run_id})["logsForRun"]["events"]
        return [
            f"{one['message']} {(one.get('error') or {}).get('message', '')}".strip()
            for one in events
            if "message" in one
        ]

    def said(self, run_id: str) -> str:
        """What the launcher wrote into the run's log."""
        return "\n".join(words for words in self.messages(run_id) if "FencedK8sRunLauncher" in words)

    def failed_beside(self, before: set[str]) -> dict[str, list[str]]:
        """Runs that have failed since then, and the last that their logs say."""
        return {run: self.messages(run)[-6:] for run in self.failed() - before}

    def batches(self, dataset: str = DATASET) -> int:
        """Committed batches in the store."""
        pages = (
            self.s3()
            .get_paginator("list_objects_v2")
            .paginate(Bucket="batch-assets", Prefix=f"store/{dataset}/batches/")
        )
        return sum(page.get("KeyCount", 0) for page in pages)

    def published_rows(self, dataset: str) -> list[dict[str, Any]]:
        """Lines of the table that lies in the store."""
        import polars as pl

        found = (
            self.s3().list_objects_v2(Bucket="batch-assets", Prefix=f"store/{dataset}/published/").get("Contents", ())
        )
        lines: list[dict[str, Any]] = []
        for name in sorted(one["Key"] for one in found if "/part-" in one["Key"]):
            lines += pl.read_parquet(self.s3().get_object(Bucket="batch-assets", Key=name)["Body"].read()).to_dicts()
        return lines

    def verify(self, dataset: str = DATASET) -> str:
        """`batch-assets verify` in the code location's pod."""
        words = ("exec", "deployment/code-location", "-c", "code-location", "--", "batch-assets", "verify", dataset)
        return self.kubectl("-n", PLATFORM, *words, check=False, seconds=120)

    def billed_seconds(self) -> float:
        """What the fleet's books say that all instances were there for."""
        url = f"postgresql://dagster:{self.database_password}@{self.address('postgres')}/dagster"
        with contextlib.closing(FleetDatabase(url)) as fleet_db:
            return fleet_db.billed().seconds

    def until(self, what: Callable[[], Any], seconds: float = 120, step: float = 0.5) -> float:
        """Wait for it, `seconds` on a quiet machine; returns how long it took. What cannot be asked is asked again."""
        began, last = time.monotonic(), "nothing yet"
        while time.monotonic() - began < PATIENCE * seconds:
            try:
                if what():
                    return time.monotonic() - began
                last = "not so"
            except (OSError, AssertionError, LookupError, TypeError, subprocess.SubprocessError) as error:
                last = f"{type(error).__name__}: {error}"[:500]
            time.sleep(step)
        raise AssertionError(f"not within {PATIENCE * seconds:.0f} s: {last}")


def simulators(_: RealCluster) -> dict[str, Any]:
    """fleet.yaml's entry: engine pods of the simulator."""
    return {
        "name": "cluster",
        "namespace": ENGINES,
        "image": IMAGE,
        "command": [word.replace("--speed 60", ENGINE) for word in engine_command()],
        "cache_size": "50Mi",
        "shared_memory": "16Mi",
        "notice_seconds": 4,
        "offers": [{**OFFER, "price_per_hour": 3.6}],
    }


@contextlib.contextmanager
def installed_platform(images: Path, engines: Engines = simulators) -> Iterator[Platform]:
    """A cluster with the platform on it; taken down at the end. Skips with a reason where there is no cluster.

    engines: prepares what engine pods need, and says what stands for them in fleet.yaml.
    """
    with bare_cluster(images) as cluster, tempfile.TemporaryDirectory(prefix="deploy-", dir="/tmp") as below:
        platform = Platform(cluster, Path(below) / "deploy", engines)
        platform.install()
        yield platform
