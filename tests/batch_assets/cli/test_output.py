"""What goes into a file or a pipe is not wrapped: ids and paths stay whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.capacity_fleet import SPEC, fleet_yaml
from typer.testing import CliRunner

from batch_assets.cli.main import app
from batch_assets.cli.output import output_console, print_json

NAME = "a_dataset_with_a_name_that_is_as_long_as_it_may_be"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "defs" / NAME
    folder.mkdir(parents=True)
    document = {"type": "batch_assets.GeneratedDataset", "attributes": {**SPEC, "name": NAME}}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document))
    (folder / "questions.jsonl").write_text('{"question": "a"}\n')
    fleet_yaml(tmp_path)
    names = {"DAGSTER_HOME": "", "BATCH_ASSETS_DEFS": "defs", "BATCH_ASSETS_STORE": "store"}
    for variable, value in {**names, "BATCH_ASSETS_FLEET": "fleet.yaml"}.items():
        monkeypatch.setenv(variable, str(tmp_path / value))
    monkeypatch.delenv("BATCH_ASSETS_FLEET_DB", raising=False)
    return tmp_path


def test_a_long_line_of_a_table_or_a_sentence_is_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/data/{'folder/' * 60}file.parquet"
    output_console().print(f"wrote {path}", highlight=False)
    assert capsys.readouterr().out == f"wrote {path}\n"


def test_nothing_in_json_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"output": "\x1b[2J\x9b2J\x7f\u202eabc\u2066\u2028 é 東 \\u009b"}
    print_json(value)
    said = capsys.readouterr().out
    assert said[:-1].isprintable() and "é 東" in said
    assert json.loads(said) == value


@pytest.mark.slow
@pytest.mark.parametrize("columns", [None, "40"])
def test_the_name_of_a_dataset_is_whole_in_the_table_of_status(
    home: Path, columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)  # of the terminal in which the command was given
    said = CliRunner().invoke(app, ["status"]).stdout
    (line,) = [line for line in said.splitlines() if NAME in line and "not read yet" not in line][:1]
    heads = next(line for line in said.splitlines() if "dataset" in line)
    assert len(heads.split()) > 5 and len(line.split()) > 5, said
