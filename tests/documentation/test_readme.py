"""Every command and snippet of the README and of docs/ does what it says. Marks: tests/support/documents.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.documents import REPOSITORY, TUTORIAL, Block, blocks
from support.simulated_engine import simulated_engine
from support.snapshots import commit
from typer.testing import CliRunner

from batch_assets import settings
from batch_assets.cli.dataset_commands.status_command import rebuild
from batch_assets.cli.main import app
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.publishing.publish import publish
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.spec.discovery import declared
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

OWN = ("BATCH_ASSETS_", "AWS_", "DAGSTER_")
DEFS = REPOSITORY / "batch_assets" / "defs"


def limit(file: Path, rows: int) -> None:
    """Let the dataset of a defs.yaml have so many rows at most."""
    file.write_text(file.read_text().replace("  source:\n", f"  source:\n    limit: {rows}\n"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a home, and with the finished dataset `example` (40 rows) in `data`."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(OWN)]:
            patch.delenv(name)
        patch.setenv("DAGSTER_HOME", str(folder / "home"))
        patch.setenv("BATCH_ASSETS_STORE", str(folder / "data"))
        spec, base = declared()["example"]
        spec = spec.model_copy(update={"source": spec.source.model_copy(update={"limit": 40}), "batch_rows": 10})
        store = DatasetStore(open_objects(settings.store_root()), "example")
        work = folder / "work"
        work.mkdir()
        manifest = build_snapshot(spec, store, now=0.0, workdir=work, base=base)
        commit(store, manifest)
        publish(store, manifest, card=Card(), now=0.0, workdir=work)
        dead_letters(store, manifest)
        assert rebuild("example") == 0
        yield folder


def run(block: Block, folder: Path, home: Path, text: str | None = None, **more: str) -> str:
    """Run a bash block as it stands, with the environment's commands first in the path; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DAGSTER_HOME": str(home / "home"),
        "BATCH_ASSETS_STORE": str(home / "data"),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        **more,
    }
    done = subprocess.run(
        ["bash", "-euc", text or block.text], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{block.name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("block", blocks("home"), ids=lambda block: block.name)
def test_the_command_line_does_what_the_readme_says(block: Block, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `batch-assets` of a block, in this process."""
    for name in [name for name in os.environ if name.startswith(OWN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DAGSTER_HOME", str(home / "home"))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(home / "data"))
    lines = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["batch-assets"]]
    assert commands
    ended = [CliRunner().invoke(app, words) for words in commands]
    assert [(one.exit_code, one.stderr) for one in ended if one.exit_code] == []
    assert "example" in "".join(one.stdout for one in ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [pytest.param(one, marks=[pytest.mark.soak("dagster")] * (one.file != TUTORIAL)) for one in blocks("home")],
    ids=lambda block: block.name,
)
def test_a_command_of_the_readme_works(block: Block, home: Path) -> None:
    if "/activate" in block.text and not (REPOSITORY / ".venv" / "bin" / "activate").exists():
        pytest.skip("needs the environment that `make` builds")
    assert "example" in run(block, REPOSITORY, home)


@pytest.mark.slow
def test_the_snippets_of_the_readme_open_the_table(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    monkeypatch.chdir(home)
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
    names: dict[str, object] = {}
    for block in blocks("table"):
        exec(compile(block.text, block.name, "exec"), names)
    assert len(names["rows"]) == 40
    assert "why the sky is blue" in capsys.readouterr().out


def test_what_ci_is_to_run_it_runs() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    commands = [line for block in blocks("ci") for line in block.text.splitlines()]
    assert commands
    assert [line for line in commands if line not in script] == []


@pytest.mark.parametrize("block", blocks("demo"), ids=lambda block: block.name)
def test_a_demo_of_the_readme(block: Block) -> None:
    """The last thing that `make` does is the command that tests/e2e/test_demo.py runs. We may be below a `make`."""
    make, target = block.text.split()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("M")}
    printed = subprocess.run(
        [make, "-n", target], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[-1] == f".venv/bin/batch-assets {target}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_command_of_the_readme_with_a_server_of_your_own(tmp_path: Path) -> None:
    """On the first 1,000 rows of `example`."""
    shutil.copytree(DEFS / "example", tmp_path / "defs" / "example")
    limit(tmp_path / "defs" / "example" / "defs.yaml", 1000)
    more = {"BATCH_ASSETS_API_KEY": "secret", "BATCH_ASSETS_DEFS": str(tmp_path / "defs")}
    for block in blocks("engine"):
        with simulated_engine("--speed", "20", model="Qwen/Qwen3-0.6B") as engine:
            assert "http://127.0.0.1:8000" in block.text
            text = block.text.replace("http://127.0.0.1:8000", engine.url)
            printed = run(block, REPOSITORY, tmp_path, text, **more)
            assert "1,000 rows generated" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_on_a_dataset_of_your_own(tmp_path: Path, home: Path) -> None:
    """In a copy of the project: the commands make files there, and the tutorial's own defs.yaml replaces them.

    `example` is finished in the home: what starts one of its batches finds it there.
    """
    import dagster as dg

    with dg.DagsterInstance.from_config(str(home / "home")) as instance:  # as after `prompts`, in the UI
        instance.add_dynamic_partitions("example", ["00000", "00001", "00002", "00003"])
    copy = tmp_path / "project"
    ignored = shutil.ignore_patterns(".*", "data", "node_modules")
    shutil.copytree(REPOSITORY, copy, ignore=ignored)
    declared_in_pages = {block.yaml()["attributes"]["name"]: block for block in blocks("spec")}
    for block in blocks("project"):
        printed = run(block, copy, home, PYTHONPATH=str(copy))
        for file in (copy / "batch_assets" / "defs").glob("*/defs.yaml"):
            if file.parent.name in declared_in_pages:
                file.write_text(declared_in_pages[file.parent.name].text)
        if "run capitals" in block.text:
            assert "12 rows in 1 batch: 12 ok, 0 dead" in printed
