"""The projects of examples/: each can be used as it stands, and the commands of its README do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.documents import EXAMPLES, REPOSITORY, Block, blocks
from support.served_door import ServedDoor
from support.simulated_engine import simulated_engine
from typer.testing import CliRunner

from batch_assets.cli.main import app

OWN = ("BATCH_ASSETS_", "AWS_", "DAGSTER_")
ADDRESS, SERVICE = "http://127.0.0.1:8000", "http://127.0.0.1:8080"
FOLDERS = sorted(file.parent.name for file in EXAMPLES if file.parent.name != "examples")
DATASETS = sorted(file.parents[2].name for file in REPOSITORY.glob("examples/*/defs/*/defs.yaml"))
# What is printed when the commands of an example have done what they say.
PRINTED = {
    "labels": ["20 rows in 2 batches: 20 ok, 0 dead", "row T-1001", "queue"],
    "conversations": ["6 rows in 1 batch: 6 ok, 0 dead", "row c-1", "temperature"],
    "embeddings": ["12 rows in 1 batch: 12 ok, 0 dead", "Owls"],
    "refresh_from_s3": ["8 rows in 1 batch: 8 ok, 0 dead", "the last one: haircut", "1 rows generated"],
    "own_gpus": ["1× RTX4090", "lab does not say what it offers", "done in"],
    "chain": ["scores: all 3 steps are up to date", "8 are wanted", "'train': "],
    "downstream_asset": ["10 rows in 1 batch: 10 ok, 0 dead", "product,tone,output"],
}
LONG = ("conversations", "embeddings", "labels", "refresh_from_s3")  # other slow tests do what they do


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and a store in a folder."""
    for name in [name for name in os.environ if name.startswith(OWN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "data"))
    return tmp_path


def commands(folder: str, mark: str = "example") -> list[Block]:
    return blocks(mark, files=[REPOSITORY / "examples" / folder / "README.md"])


def printed(block: Block, text: str) -> str:
    """What the commands print, in the environment of this process, from the repository."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DAGSTER_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        ["bash", "-euc", text], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{block.name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def bucket(s3_endpoint: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The S3 server's bucket, and the credentials for it."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield


def test_the_list_of_examples_names_each_of_them() -> None:
    listed = (REPOSITORY / "examples" / "README.md").read_text()
    assert len(FOLDERS) >= 6
    assert [folder for folder in FOLDERS if f"[{folder}]({folder}/README.md)" not in listed] == []
    assert sorted(PRINTED) == sorted(folder for folder in FOLDERS if commands(folder))


@pytest.mark.parametrize("folder", DATASETS)
def test_the_datasets_of_an_example_can_be_used(folder: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(REPOSITORY / "examples" / folder / "defs"))
    checked = CliRunner().invoke(app, ["check"])
    assert checked.exit_code == 0, checked.output
    assert "can be used" in checked.output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "folder", [pytest.param(name, marks=[pytest.mark.soak("dagster")] * (name in LONG)) for name in sorted(PRINTED)]
)
def test_the_commands_of_an_example(folder: str, home: Path, bucket: None) -> None:
    found = ""
    model = "BAAI/bge-m3" if folder == "embeddings" else "Qwen/Qwen3-0.6B"
    with simulated_engine("--speed", "20", model=model) as engine:
        for block in commands(folder):
            found += printed(block, block.text.replace(ADDRESS, engine.url))
    assert [text for text in PRINTED[folder] if text not in found] == [], found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_batch_by_the_stock_client(home: Path) -> None:
    with simulated_engine("--speed", "20", model="tiny") as engine:
        door = ServedDoor(home, engine.url)
        door.start()
        try:
            for block in commands("openai_client", "client"):
                assert SERVICE in block.text
                found = printed(block, block.text.replace(SERVICE, door.url))
        finally:
            door.close()
    assert "completed: 20 of 20 requests" in found and "q19 " in found
