"""A whole platform for one test: home, store, dataset, a simulated engine with its own log, a real Dagster stack."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from support.timing import PATIENCE

from batch_assets.catalog import ledger
from batch_assets.local_dagster.home import prepare_home
from batch_assets.local_dagster.stack import Stack
from batch_assets.webserver import token as web_token
from e2e.platform_report import reported
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.engine_process import free_port
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

REPOSITORY = Path(__file__).resolve().parents[2]

LAUNCH_BACKFILL = """mutation($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
POLL_BACKFILL = """query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill {
  status assetBackfillData { assetBackfillStatuses { ... on AssetPartitionsStatusCounts {
  numPartitionsTargeted numPartitionsMaterialized numPartitionsFailed } } } } } }"""
LAUNCH_RUN = """mutation($p: ExecutionParams!) { launchRun(executionParams: $p) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
TERMINATE = (
    """mutation($ids: [String!]!) { terminateRuns(runIds: $ids, terminatePolicy: SAFE_TERMINATE) { __typename } }"""
)


def shared_data() -> Path:
    """Folder of the shared test data; the calling test is skipped when there is none."""
    folder = Path(os.environ.get("BATCH_ASSETS_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "gsm8k" / "train.jsonl").exists():
        pytest.skip("needs GSM8K: set BATCH_ASSETS_TEST_DATA to a folder with gsm8k/train.jsonl")
    return folder


def eventually(check: Callable[[], Any], seconds: float, what: str, every: float = 0.2) -> Any:
    """The first true value of `check`, within `seconds`, or what they are on a slow machine."""
    deadline = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < deadline:
        if found := check():
            return found
        time.sleep(every)
    raise AssertionError(f"not within {PATIENCE * seconds:.0f} s: {what}")


@dataclass
class Simulator:
    """The simulated engine as a process of its own, on a port that it keeps when it is started again."""

    folder: Path
    arguments: list[str]
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "engine.jsonl"

    def start(self) -> None:
        command = [sys.executable, "-m", "gpu_runner.simulator", "--model", "test-model", "--port", str(self.port)]
        command += ["--request-log", str(self.log), "--exit-with-parent", *self.arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline()

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._close_pipes()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=10)
        self._close_pipes()

    def _close_pipes(self) -> None:
        if self.process is not None:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def events(self) -> list[dict[str, Any]]:
        """The engine's own log, oldest first."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def finished(self) -> Counter[str]:
        """How often the engine finished each prompt, by its hash."""
        return Counter(event["prompt"] for event in self.events() if event.get("event") == "finished")

    def received(self) -> Counter[str]:
        """How often each prompt arrived."""
        return Counter(event["prompt"] for event in self.events() if event.get("event") == "received")


@dataclass
class Platform:
    """One dataset on one home. `stack` is running while the `platform` context is open."""

    home: Path
    name: str
    spec: dict[str, Any]
    simulator: Simulator
    instance: dg.DagsterInstance
    store: DatasetStore
    stack: Stack

    def gql(self, query: str, **variables: Any) -> dict[str, Any]:
        """One GraphQL request to the webserver."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        headers = {"Content-Type": "application/json", **web_token.headers(self.home)}
        request = urllib.request.Request(f"{self.stack.url}/graphql", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.loads(answer.read())
        assert "errors" not in found, found["errors"]
        data: dict[str, Any] = found["data"]
        return data

    def launch_job(self, job: str, tags: Mapping[str, str] | None = None, run_config: Any = None) -> str:
        """Launch a job; returns its run id."""
        selector = {"repositoryLocationName": "batch_assets", "repositoryName": "__repository__", "jobName": job}
        params = {
            "selector": selector,
            "mode": "default",
            "runConfigData": run_config or {},
            "executionMetadata": {"tags": [{"key": k, "value": v} for k, v in (tags or {}).items()]},
        }
        found = self.gql(LAUNCH_RUN, p=params)["launchRun"]
        assert found["__typename"] == "LaunchRunSuccess", found
        return str(found["run"]["runId"])

    def finish(self, run_id: str, seconds: float = 120) -> dg.DagsterRunStatus:
        """Wait for a run to end; returns its status."""

        def ended() -> dg.DagsterRunStatus | None:
            run = self.instance.get_run_by_id(run_id)
            return run.status if run is not None and run.is_finished else None

        status: dg.DagsterRunStatus = eventually(ended, seconds, f"end of run {run_id}")
        return status

    def take_snapshot(self) -> None:
        """Materialize prompts alone: no refresh tag, so nothing else starts."""
        params = {
            "selector": {
                "repositoryLocationName": "batch_assets",
                "repositoryName": "__repository__",
                "jobName": "__ASSET_JOB",
                "assetSelection": [{"path": [self.name, "prompts"]}],
            },
            "mode": "default",
            "runConfigData": {},
            "executionMetadata": {"tags": []},
        }
        found = self.gql(LAUNCH_RUN, p=params)["launchRun"]
        assert found["__typename"] == "LaunchRunSuccess", found
        assert self.finish(found["run"]["runId"]) == dg.DagsterRunStatus.SUCCESS

    def launch_backfill(
        self, first: str | None = None, last: str | None = None, asset: Sequence[str] | None = None
    ) -> str:
        """A UI backfill over a range of batches, or all; returns its id. `asset`: another than the rows."""
        start, end = first or self.keys()[0], last or self.keys()[-1]
        target = {
            "assetKey": {"path": list(asset or [self.name, "rows"])},
            "partitions": {"range": {"start": start, "end": end}},
        }
        found = self.gql(LAUNCH_BACKFILL, p={"partitionsByAssets": [target]})["launchPartitionBackfill"]
        assert found["__typename"] == "LaunchBackfillSuccess", found
        return str(found["backfillId"])

    def finish_backfill(self, backfill: str, seconds: float = 240) -> dict[str, Any]:
        """Wait for a backfill to end; returns status and counts."""

        def ended() -> dict[str, Any] | None:
            state: dict[str, Any] = self.gql(POLL_BACKFILL, id=backfill)["partitionBackfillOrError"]
            done = state["status"].startswith("COMPLETED") or state["status"] in ("FAILED", "CANCELED")
            return state if done else None

        found: dict[str, Any] = eventually(ended, seconds, f"end of backfill {backfill}", every=0.5)
        if found["status"] == "FAILED" and (known := self.instance.get_backfill(backfill)) is not None:
            print(f"backfill {backfill}: {known.error}")
        return found

    def terminate(self, *run_ids: str) -> None:
        """What the UI's cancel does."""
        self.gql(TERMINATE, ids=list(run_ids))

    def keys(self) -> list[str]:
        """Batch keys of the current snapshot."""
        snapshot = self.store.current_snapshot()
        assert snapshot is not None
        return [entry.key for entry in self.store.entries(snapshot)]

    def rows_runs(self, *statuses: dg.DagsterRunStatus) -> list[dg.DagsterRun]:
        """Runs over batches, newest first."""
        runs = self.instance.get_runs(dg.RunsFilter(statuses=list(statuses) or None))
        return [run for run in runs if ledger.rows_key(self.name) in (run.asset_selection or ())]

    def worker(self, run_id: str) -> int | None:
        """Process id of the run's worker, as its heartbeat row says."""
        with contextlib.closing(self.fleet_db()) as fleet_db:
            return next((beat.pid for beat in fleet_db.runs() if beat.run_id == run_id), None)

    def fleet_db(self) -> FleetDatabase:
        """The fleet's tables."""
        return FleetDatabase(f"sqlite:///{self.home}/fleet.db")

    def published_rows(self) -> list[dict[str, Any]]:
        """Every line of the published table."""
        import polars as pl

        version = self.store.current_published()
        assert version is not None
        pattern = self.store.objects.uri(f"{self.name}/published/{version}/part-*.parquet")
        return pl.scan_parquet(pattern, storage_options=self.store.objects.storage_options()).collect().to_dicts()


@contextlib.contextmanager
def platform(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: Mapping[str, Any],
    *,
    simulator: list[str] | None,
    fleet: Mapping[str, Any] | None = None,
    store_root: str | None = None,
    dagster_yaml: str | None = None,
) -> Iterator[Platform]:
    """Everything started; everything ended afterwards, whatever happened. `simulator=None`: engines are rented."""
    name = str(spec["name"])
    home, defs = folder / "home", folder / "defs"
    (defs / name).mkdir(parents=True, exist_ok=True)
    home.mkdir(exist_ok=True)
    document = {"type": "batch_assets.GeneratedDataset", "attributes": {"model": "test-model", **spec}}
    (defs / name / "defs.yaml").write_text(yaml.safe_dump(document))
    if dagster_yaml is not None:
        (home / "dagster.yaml").write_text(dagster_yaml)
    root = store_root or str(folder / "store")
    for variable, value in {
        "DAGSTER_HOME": str(home),
        "BATCH_ASSETS_DEFS": str(defs),
        "BATCH_ASSETS_STORE": root,
        "BATCH_ASSETS_FLEET": str(home / "fleet.yaml"),
    }.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("BATCH_ASSETS_FLEET_DB", raising=False)
    monkeypatch.delenv("BATCH_ASSETS_ENDPOINT", raising=False)
    engine = Simulator(folder, simulator or [])
    if simulator is not None:
        engine.start()
    entry = {"name": "simulator", "kind": "endpoint", "url": engine.url, "max_num_seqs": 256}
    (home / "fleet.yaml").write_text(yaml.safe_dump(dict(fleet or {"engines": [entry]})))
    prepare_home()
    try:
        with Stack(home) as stack, dg.DagsterInstance.from_config(str(home)) as instance:
            stack.wait_ready()
            with reported(home, instance):
                yield Platform(home, name, dict(spec), engine, instance, DatasetStore(open_objects(root), name), stack)
    finally:
        engine.stop()
