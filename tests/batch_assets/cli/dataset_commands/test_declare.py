"""`new` and `check`, and what every command says of a dataset whose file cannot be used, beside one that can."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.defs_folders import WRONG, write, write_text
from typer.testing import CliRunner, Result

from batch_assets.cli.main import app
from batch_assets.spec.discovery import declarations


@pytest.fixture
def defs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the datasets, with `good` in it."""
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_FLEET", "BATCH_ASSETS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "defs", "good")
    return tmp_path / "defs"


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


COMMANDS = [
    ["run", "bad"], ["status", "bad"], ["offers", "bad"], ["plan", "bad"], ["preview", "bad"], ["verify", "bad"],
    ["adjust", "bad", "--budget-usd", "1"], ["rebuild-ledger", "bad"], ["check", "bad"],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_every_command_on_the_dataset_itself_says_what_is_wrong_and_ends_with_status_2(defs: Path, wrong: str):
    break_it, word = WRONG[wrong]
    break_it(defs)
    for words in COMMANDS:
        found = ask(*words)
        assert (found.exit_code, found.stdout) == (2, ""), words
        assert word in found.stderr and str(defs / "bad") in found.stderr and "Traceback" not in found.stderr


@pytest.mark.slow
def test_commands_on_other_datasets_work(defs: Path):
    """That they are declared whatever is wrong: tests/batch_assets/test_broken_files.py."""
    WRONG["no source"][0](defs)
    for words in (["status", "good"], ["offers", "good"], ["plan", "good"], ["preview", "good"], ["check", "good"]):
        found = ask(*words)
        assert (found.exit_code, found.stderr) == (0, ""), words
    assert ask("verify", "good").exit_code == 1  # it was never made


def test_the_status_of_all_names_the_broken_one_with_its_errors(defs: Path):
    WRONG["no source"][0](defs)
    found = ask("status")
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["dataset", "good"]
    assert lines[2].startswith(f"bad cannot be used: {defs}/bad/defs.yaml: 1 problem")
    assert lines[3] == "  source: expected a value, found nothing. Where the rows come from."
    answer = json.loads(ask("status", "--json").stdout)
    assert [one["dataset"] for one in answer["datasets"]] == ["good"]
    assert answer["broken"] == [
        {
            "name": "bad",
            "file": f"{defs}/bad/defs.yaml",
            "problems": ["source: expected a value, found nothing. Where the rows come from."],
        }
    ]


def test_where_only_a_broken_one_is_declared_or_none_the_status_is_no_traceback(defs: Path):
    (defs / "good" / "defs.yaml").unlink()
    assert ask("status").exit_code == 0
    WRONG["no YAML"][0](defs)
    assert "bad cannot be used" in ask("status").stdout


def test_a_dataset_that_nobody_declared_is_answered_with_all_names(defs: Path):
    WRONG["no source"][0](defs)
    said = ask("status", "goood").stderr
    assert said.startswith("no dataset is called 'goood'. Did you mean 'good'? Known: bad, good")


def test_a_new_dataset_can_be_used_and_lies_where_datasets_are_read_from(defs: Path):
    found = ask("new", "capitals")
    assert found.exit_code == 0
    assert found.stdout.splitlines()[0] == f"{defs}/capitals/defs.yaml"
    assert declarations().datasets["capitals"][1] == defs / "capitals"
    assert ask("check", "capitals").stdout == f"{defs}/capitals/defs.yaml: can be used\n"
    assert ask("preview", "capitals").exit_code == 0


@pytest.mark.slow
def test_the_file_of_a_new_dataset_is_as_open_as_the_folder_around_it(defs: Path):
    """The command line's own files are for its user alone."""
    defs.chmod(0o750)
    command = [sys.executable, "-m", "batch_assets.cli.main", "new", "capitals"]
    subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=Path(__file__).parents[4])
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (defs / "capitals", defs / "capitals" / "defs.yaml")]
    assert modes == [0o750, 0o640]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("good", "expected one that no dataset has"),
        ("bad", "expected none of this name, found one; it is left as it is"),
        ("../x", "expected 1 to 63 characters"),
        ("Capitals", "expected 1 to 63 characters"),
    ],
)
def test_a_new_dataset_takes_no_name_that_is_taken_or_cannot_be(defs: Path, name: str, words: str):
    WRONG["no source"][0](defs)
    before = sorted(path for path in defs.parent.rglob("*"))
    found = ask("new", name)
    assert (found.exit_code, found.stdout) == (2, "")
    assert words in found.stderr
    assert sorted(path for path in defs.parent.rglob("*")) == before


def test_check_says_of_every_file_whether_it_can_be_used(defs: Path):
    for name, key in (("bad", "no source"), ("bad2", "no YAML")):
        WRONG[key][0](defs)
        (defs / "bad").rename(defs / f"{name}_")
    found = ask("check")
    assert found.exit_code == 2
    assert found.stdout == f"{defs}/good/defs.yaml: can be used\n"
    assert "source: expected a value" in found.stderr and "expected YAML" in found.stderr


def test_check_takes_names_files_and_folders_also_of_another_place(defs: Path, tmp_path: Path):
    other = write(tmp_path / "other", "elsewhere")
    WRONG["no source"][0](defs)
    usable = {"good": "defs/good", "defs/good": "defs/good", "defs/good/defs.yaml": "defs/good"}
    for words, place in (usable | {str(other): "other/elsewhere", "other": "other/elsewhere"}).items():
        assert ask("check", words).stdout == f"{tmp_path}/{place}/defs.yaml: can be used\n"
    for words in ("bad", "defs/bad", "defs/bad/defs.yaml", "defs"):
        assert ask("check", words).exit_code == 2
    both = ask("check", "good", "bad", "defs")
    assert (both.stdout.count("can be used"), both.stderr.count("1 problem")) == (1, 1)


def test_a_name_used_twice_is_seen_when_one_of_the_files_is_checked(defs: Path):
    WRONG["a name used twice"][0](defs)
    assert "a name of its own" in ask("check", "defs/bad/defs.yaml").stderr
    assert ask("check", "defs/good").exit_code == 0


@pytest.mark.parametrize("words", ["nope", "nope/defs.yaml", "empty"])
def test_check_of_nothing_is_an_error(defs: Path, tmp_path: Path, words: str):
    (tmp_path / "empty").mkdir()
    found = ask("check", words)
    assert (found.exit_code, found.stdout) == (2, "")
    assert words in found.stderr


def test_a_file_of_a_component_of_others_declares_no_dataset(defs: Path):
    write_text(defs / "theirs", "type: dagster_dbt.DbtProjectComponent\n")
    assert "no file that declares a dataset" in ask("check", "defs/theirs").stderr
    assert ask("check").exit_code == 0


@pytest.mark.soak("dagster")
def test_dg_scaffold_says_where_datasets_are_read_from_and_leaves_nothing(defs: Path):
    project = Path(__file__).parents[4]
    command = [str(Path(sys.executable).parent / "dg"), "scaffold", "defs", "batch_assets.GeneratedDataset", "zzz"]
    found = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100, env=os.environ)
    assert found.returncode == 1
    assert f"BATCH_ASSETS_DEFS={defs}" in found.stderr and "batch-assets new" in found.stderr
    assert not (project / "batch_assets" / "defs" / "zzz").exists()


@pytest.mark.soak("dagster")
def test_of_dagsters_commands_only_check_defs_sees_a_broken_file_where_datasets_are_read_from(defs: Path):
    """`dg check yaml` passes it, named or not: `docs/datasets.md` sends people to `batch-assets check`."""
    WRONG["no source"][0](defs)
    assert ask("check").exit_code == 2

    def dg(*words: str) -> tuple[int, str]:
        command = [str(Path(sys.executable).parent / "dg"), "check", *words]
        project = Path(__file__).parents[4]
        found = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100, env=os.environ)
        return found.returncode, found.stdout + found.stderr

    for words in (["yaml"], ["yaml", str(defs)], ["yaml", str(defs / "bad")]):
        status, said = dg(*words)
        assert status == 0 and "validated successfully" in said
    status, said = dg("defs")
    assert status == 1 and f"{defs}/bad/defs.yaml" in said
