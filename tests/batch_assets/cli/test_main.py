"""The command line's answers to what is asked of it wrongly. What it does when asked rightly: tests/e2e."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from batch_assets.catalog.progress import Figures
from batch_assets.cli.demos.demo import CPU_MODEL, GPU_MODEL, Gpu, choose, gpu_with_vllm
from batch_assets.cli.demos.demo_fleet import CLOCK, SPOT_SECONDS, demo_cloud
from batch_assets.cli.demos.demo_fleet import write_fleet as write_demo_fleet
from batch_assets.cli.main import app
from batch_assets.request_status.display import counts_line
from resources.fleet.resource import FleetConfig

KEYS = ["dataset", "rows", "ok", "dead", "batches", "batches_done", "prompt_tokens", "completion_tokens", "table"]
SPEC = {
    "name": "haiku",
    "source": {"grid": {"topic": ["rain", "snow"]}},
    "prompt": {"user": "A haiku about {{ topic }}."},
    "model": "m",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home with one dataset, `haiku`."""
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("BATCH_ASSETS_FLEET_DB", raising=False)
    monkeypatch.delenv("BATCH_ASSETS_ENDPOINT", raising=False)
    monkeypatch.setenv("BATCH_ASSETS_FLEET", str(tmp_path / "fleet.yaml"))
    declare(tmp_path, SPEC)
    return tmp_path


def declare(home: Path, attributes: object) -> None:
    file = home / "defs" / "haiku" / "defs.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": attributes}))


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refused(result: Result) -> str:
    """What was said on standard error by a command that ended with status 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_help_needs_neither_dagster_nor_a_second():
    code = "import sys, batch_assets.cli.main as cli\ntry:\n cli.app(['--help'])\nexcept SystemExit: pass\n"
    code += (
        "heavy = {'dagster', 'polars', 'pyarrow', 'sqlalchemy', 'pydantic'} & set(sys.modules)\nassert not heavy, heavy"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stderr
    for command in ("run", "status", "verify", "demo", "ui"):
        assert command in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "ui"])
def test_the_code_server_is_started_before_dagster_is_imported(home: Path, command: str):
    code = f"""
import os, sys
from batch_assets.local_dagster import stack
def start(self, child):
    print(child.name, *sorted({{"dagster", "polars", "pyarrow", "sqlalchemy"}} & set(sys.modules)), flush=True)
    os._exit(0)
stack.Stack._start = start
import batch_assets.cli.main as cli
cli.app([{command!r}, *(["haiku", "--simulate"] if {command!r} == "run" else [])])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert found.stdout.split() == ["code-server"], found.stderr


def test_an_unknown_dataset_gets_the_near_miss(home: Path):
    assert "Did you mean 'haiku'? Known: haiku." in refused(ask("run", "haiko"))
    assert "Known here: haiku" in refused(ask("status", "zzz"))
    assert "no dataset is called 'other'" in refused(ask("verify", "other"))


def test_without_any_dataset_it_says_where_one_is_declared(home: Path):
    (home / "defs" / "haiku" / "defs.yaml").unlink()
    assert "batch_assets/defs/NAME/defs.yaml" in refused(ask("run", "haiku"))


def test_a_wrong_spec_is_shown_in_our_words(home: Path):
    declare(home, {**SPEC, "modell": "m"})
    for words in (["run", "haiku"], ["status", "haiku"], ["ui"]):
        with taken_port() as port:
            said = refused(ask(*words, *(["--port", str(port)] if words == ["ui"] else [])))
        assert "defs.yaml: 1 problem" in said
        assert "modell: expected a known key" in said
        assert "Did you mean 'model'?" in said
    assert f"port {port} on 127.0.0.1 is taken" in said, "the UI would have been served all the same"


def test_an_endpoint_must_be_a_url_and_somebody_must_answer_there(home: Path):
    assert "expected a URL" in refused(ask("run", "haiku", "--endpoint", "localhost:8000"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert "nobody answers" in refused(ask("run", "haiku", "--endpoint", url))


def test_ui_refuses_a_port_that_is_taken(home: Path):
    with taken_port() as port:
        assert f"port {port} on 127.0.0.1 is taken" in refused(ask("ui", "--port", str(port)))


def test_status_of_a_dataset_that_was_never_run(home: Path):
    found = json.loads(ask("status", "haiku", "--json").stdout)
    assert list(found)[: len(KEYS)] == KEYS
    assert (found["dataset"], found["rows"], found["table"], found["runs"]) == ("haiku", 0, None, [])
    assert [item["dataset"] for item in json.loads(ask("status", "--json").stdout)["datasets"]] == ["haiku"]
    assert "no snapshot" in ask("status").stdout


def test_verify_of_a_dataset_that_was_never_run_says_what_to_do(home: Path):
    found = ask("verify", "haiku", "--json")
    assert found.exit_code == 1
    answer = json.loads(found.stdout)
    assert list(answer)[: len(KEYS)] == KEYS
    assert [difference["kind"] for difference in answer["differences"]] == ["no_snapshot"]
    assert [difference["todo"] for difference in answer["differences"]] == ["`batch-assets run haiku` makes one"]
    shown = ask("verify", "haiku")
    assert shown.exit_code == 1
    assert "no snapshot" in shown.stdout
    assert shown.stdout.endswith("haiku: 1 difference\n")


def test_a_store_root_that_cannot_be_is_an_error_of_the_user(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATCH_ASSETS_STORE", "ftp://somewhere")
    assert "expected a folder or s3://bucket/prefix" in refused(ask("status"))


def test_the_figures_fit_one_line():
    counts = Figures(
        rows=5000, batches=20, batches_done=6, rows_committed=1500, ok=1498, dead=2, prompt_tokens=0,
        completion_tokens=150_000, open_rows=100,
    )  # fmt: skip
    assert counts_line(counts, 412.0) == (
        "1,600 of 5,000 rows · 1,498 ok · 2 dead · 6 of 20 batches · 412 rows/s · 41,200 tokens/s · ETA 8 s"
    )


def tools(folder: Path, gpu: str) -> Path:
    """A PATH with an nvidia-smi that names `gpu` (or fails) and a vllm."""
    folder.mkdir()
    answer = f"echo '{gpu}'" if gpu else "exit 9"
    for name, body in {"nvidia-smi": answer, "vllm": "exit 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def test_the_demo_takes_vllm_only_with_a_gpu_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tools(tmp_path / 'one', '')}:/usr/bin:/bin")
    assert gpu_with_vllm() is None
    monkeypatch.setenv("PATH", f"{tools(tmp_path / 'two', 'NVIDIA H200')}:/usr/bin:/bin")
    found = gpu_with_vllm()
    assert found == Gpu("NVIDIA H200", str(tmp_path / "two" / "vllm"))


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_ASSETS_ENDPOINT", raising=False)
    monkeypatch.setattr("batch_assets.cli.demos.demo.gpu_with_vllm", lambda: Gpu("NVIDIA H200", "/somewhere/vllm"))


@pytest.fixture
def with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_ASSETS_ENDPOINT", raising=False)
    monkeypatch.setattr("batch_assets.cli.demos.demo.gpu_with_vllm", lambda: None)
    monkeypatch.setattr("batch_assets.cli.demos.demo.weights_file", lambda: Path("/weights/model.gguf"))


def test_with_a_gpu_the_demo_starts_vllm_and_generates_the_large_example(tmp_path: Path, with_gpu: None):
    config = tmp_path / "fleet.yaml"
    demo = choose(config)
    assert (demo.dataset, demo.model) == ("example", GPU_MODEL)
    assert "vLLM on NVIDIA H200" in demo.engine
    (engine,) = FleetConfig.load(config).engines
    assert (engine.kind, engine.instance_type, engine.command[:3]) == (
        "process",
        "nvidia-h200",
        ["/somewhere/vllm", "serve", "{model}"],
    )


def test_the_demo_leaves_a_fleet_yaml_that_is_there(tmp_path: Path, with_gpu: None):
    config = tmp_path / "fleet.yaml"
    config.write_text("engines: [{name: mine, kind: simulated}]")
    assert str(config) in choose(config).engine
    assert FleetConfig.load(config).engines[0].name == "mine"


def test_the_demo_says_where_its_weights_lie(tmp_path: Path, with_weights: None):
    said = "; its weights lie in /weights/model.gguf"
    assert choose(tmp_path / "fleet.yaml").engine.endswith(said)
    assert choose(tmp_path / "fleet.yaml").engine.endswith(said)  # and of the file that is there then


def test_the_demo_on_a_gpu_says_where_its_weights_will_lie(
    tmp_path: Path, with_gpu: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/models")
    assert choose(tmp_path / "fleet.yaml").engine.endswith("; its weights lie in Hugging Face's cache, /models/hub")


def test_without_a_gpu_the_demo_starts_llama_cpp_and_generates_the_small_example(tmp_path: Path, with_weights: None):
    config = tmp_path / "fleet.yaml"
    first, second = choose(config), choose(config)
    assert (first.dataset, first.model) == (second.dataset, second.model) == ("small_example", None)
    assert "llama.cpp on this computer's CPU" in first.engine and "llama-cpp" in second.engine
    found = FleetConfig.load(config)
    (engine,) = found.engines
    assert (engine.kind, engine.gguf, engine.models) == ("llama_cpp", Path("/weights/model.gguf"), [CPU_MODEL])
    assert found.simulated == FleetConfig.embedded().simulated  # for all other models


def test_the_demos_fleet_has_three_providers_that_compete_and_a_price_that_falls(tmp_path: Path):
    write_demo_fleet(tmp_path / "fleet.yaml")
    found = FleetConfig.load(tmp_path / "fleet.yaml").simulated
    assert found == demo_cloud()
    prices = {one.name: one.offers[0].price_per_hour for one in found.providers}
    assert sorted(prices, key=lambda name: prices[name]) == ["sim-spot", "sim-north", "sim-east"]
    assert [one.taken_after_seconds for one in found.providers] == [None, None, SPOT_SECONDS * CLOCK]
    ((cut,),) = [one.changes for one in found.providers if one.changes]
    assert cut.price_per_hour is not None and cut.price_per_hour < prices["sim-spot"]
