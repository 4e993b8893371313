"""CPU and memory of run workers by the size of their range: read when definitions load, and merged into the Job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dataset_project import dataset_project

from batch_assets.kubernetes.run_workers import RunWorkersError, WorkerSizes, read_worker_sizes
from batch_assets.tags import REFRESH_TAG

GOOD = """
- {batches: 2, cpu: 500m, memory: 1Gi}
- {batches: 40, cpu: "1", memory: 2Gi}
- {cpu: "2", memory: 4Gi}
"""


def read(tmp_path: Path, text: str) -> WorkerSizes:
    file = tmp_path / "run-workers.yaml"
    file.write_text(text)
    return read_worker_sizes(file)


def user_defined(tags: Any) -> Any:
    """What Dagster reads from the tags of a run."""
    from dagster_k8s.job import get_user_defined_k8s_config

    return get_user_defined_k8s_config(tags)


@pytest.mark.parametrize(
    ("batches", "cpu", "memory"), [(1, "500m", "1Gi"), (2, "500m", "1Gi"), (3, "1", "2Gi"), (41, "2", "4Gi")]
)
def test_a_range_gets_the_first_size_that_it_fits_into(tmp_path: Path, batches: int, cpu: str, memory: str):
    config = user_defined(read(tmp_path, GOOD).tags(batches))
    assert config.container_config["resources"] == {
        "requests": {"cpu": cpu, "memory": memory},
        "limits": {"memory": memory},
    }


def test_without_a_file_a_run_gets_what_the_launcher_says():
    assert read_worker_sizes(None).tags(7) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{cpu: 1}", "expected a list"),
        ("[]", "expected 1 to 20 sizes"),
        ("- {cpu: '1', memory: 1Gi, batches: 3}", "`batches` in all but the last"),
        ("- {cpu: '1', memory: 1Gi}\n- {cpu: '1', memory: 1Gi}", "`batches` in all but the last"),
        (GOOD.replace("40", "2"), "to grow from line to line, found [2, 2]"),
        ("- {cpu: 1, memory: 1Gi}", "0.cpu: expected a list of"),
        ("- {cpu: '1', memory: lots}", "0.memory: expected a list of"),
        ("- {cpu: '1', memory: 1Gi, gpu: 1}", "0.gpu: expected a list of"),
        ("- {cpu: '1', memory: 1Gi", "line 2, column 1: expected YAML"),
    ],
)
def test_a_mistake_is_found_when_definitions_load(tmp_path: Path, text: str, said: str):
    with pytest.raises(RunWorkersError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value) and "run-workers.yaml" in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(RunWorkersError, match="No such file"):
        read_worker_sizes(tmp_path / "none.yaml")


def test_the_launcher_sensor_tags_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "run-workers.yaml"
    file.write_text(GOOD)
    monkeypatch.setenv("BATCH_ASSETS_RUN_WORKERS", str(file))
    with dataset_project(tmp_path) as site:
        site.source([f"What is {i}?" for i in range(20)])
        assert site.materialize("prompts", tags={REFRESH_TAG: "d"}).success
        requests: Any = site.tick("launcher").run_requests
        (config,) = [user_defined(request.tags) for request in requests]
    assert config.container_config["resources"]["requests"] == {"cpu": "500m", "memory": "1Gi"}
