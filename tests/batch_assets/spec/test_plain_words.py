"""Words without quotes: read by the core schema of YAML 1.2, by our loader and by Dagster's, or an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from pydantic import BaseModel
from support.defs_folders import own_folder, write_text

from batch_assets import component
from batch_assets.component import GeneratedDataset
from batch_assets.definitions import defs
from batch_assets.orchestration import assets
from batch_assets.spec.discovery import declarations, read_file
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.errors import UserFacingError
from resources.fleet.fleet_config import FleetConfig
from resources.yaml_files import YamlProblem, dump, load, read_settings

HEAD = """\
type: batch_assets.GeneratedDataset
attributes:
  name: words
  model: m
  prompt: {user: "{{ x }}"}
"""
GRID = "  source: {grid: {x: [a]}}\n"


def spec_of(folder: Path, more: str) -> GeneratedDatasetSpec:
    read = read_file(write_text(folder / "words", HEAD + more))
    assert read.error is None, str(read.error)
    (spec,) = read.specs
    return spec


def problem(folder: Path, more: str) -> str:
    read = read_file(write_text(folder / "words", HEAD + more))
    assert read.error is not None
    assert len(read.error.problems) == 1, str(read.error)
    return str(read.error.problems[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            (word, word)
            for word in ("yes", "no", "On", "OFF", "NO", "y", "12:30", "01234", "-007", "1_000", "0b1", "=")
        ),
        *((word, word) for word in ("=", "2026-01-31", "2026-01-31T06:00:00Z", "190:20:30", "1e", ".", "e5", "0123e4")),
        *((word, True) for word in ("true", "True", "TRUE")),
        *((word, None) for word in ("null", "Null", "~")),
        *(("0", 0), ("-5", -5), ("+5", 5), ("0x1F", 31), ("0o17", 15)),
        *(("1.10", 1.1), ("1e3", 1000.0), (".5", 0.5), ("1.", 1.0), ("-2E-2", -0.02), (".inf", float("inf"))),
        *(('"1"', "1"), ("'true'", "true"), ("!!str 5", "5"), ("!!int '12'", 12)),
    ],
)
def test_words_are_read_by_the_core_schema(text: str, value: object):
    found = load(f"[{text}]")[0]
    assert (type(found), found) == (type(value), value)


def test_merge_keys_work():
    assert load("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("text", ["!!int 0b1", "!!float x", "!!timestamp 2026-13-01", "!!bool x"])
def test_a_tag_that_the_word_does_not_fit_is_a_problem_with_its_place(text: str):
    with pytest.raises(YamlProblem, match="line 1, column 4"):
        load(f"x: {text}")


@pytest.mark.parametrize("word", ["1e3", "0o17", "no", "12:30", "01234", "1_000", "true", "2026-01-31", "~", "1.10"])
def test_what_is_written_is_read_as_the_same_text_by_both_versions(word: str):
    text = dump({word: [word]})
    assert load(text) == yaml.safe_load(text) == {word: [word]}


@pytest.fixture(params=["BATCH_ASSETS_DEFS", "the project's own folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of datasets, loaded by us or by Dagster."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCH_ASSETS_STORE", str(tmp_path / "store"))
    if request.param == "BATCH_ASSETS_DEFS":
        monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path / "defs"))
        return tmp_path / "defs"
    return own_folder(tmp_path / "project", monkeypatch)


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
def test_labels_stay_what_was_typed_in_commands_and_in_dagster(folder: Path, monkeypatch: pytest.MonkeyPatch):
    write_text(
        folder / "words",
        HEAD
        + """\
  source: {grid: {x: [NO, SE, 12:30, 01234, 2026-01-31, yes, 5, 1.5]}}
  sampling: {stop: [no, off], max_tokens: 16}
  output: {json_schema: {type: object, properties: {no: {enum: [yes, no]}, at: {const: 12:30}}, required: [no]}}
---
type: batch_assets.GeneratedDataset
attributes: {name: more, model: m, prompt: {user: no}, source: {grid: {on: [a]}}, keep_columns: [on]}
""",
    )
    built: list[GeneratedDatasetSpec] = []

    def prompts_asset(spec: GeneratedDatasetSpec, *rest: Any) -> Any:
        built.append(spec)
        return assets.prompts_asset(spec, *rest)

    monkeypatch.setattr(component, "prompts_asset", prompts_asset)
    with warnings.catch_warnings(action="ignore", category=dg.BetaWarning):
        defs().get_repository_def()
    words, more = sorted(built, key=lambda spec: spec.name, reverse=True)
    assert {spec.name: spec for spec in built} == {name: one for name, (one, _) in declarations().datasets.items()}
    assert words.source.grid == {"x": ["NO", "SE", "12:30", "01234", "2026-01-31", "yes", 5, 1.5]}
    assert words.sampling.stop == ["no", "off"]
    schema = words.output.json_schema or {}
    assert schema["properties"] == {"no": {"enum": ["yes", "no"]}, "at": {"const": "12:30"}}
    assert schema["required"] == ["no"]
    assert (more.prompt.user, more.keep_columns) == ("no", ["on"])


def test_a_component_without_a_file_takes_what_it_is_given(tmp_path: Path):
    class Given(BaseModel, extra="allow"): ...

    given = Given(name="words", model="m", prompt={"user": "{{ x }}"}, source={"grid": {"x": ["a"]}})
    assert GeneratedDataset.load(given, _Place(tmp_path)).spec.name == "words"  # type: ignore[arg-type]


class _Place:
    """Where Dagster says that a component is."""

    component_path = None

    def __init__(self, path: Path) -> None:
        self.path = path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "  source: {grid: {x: [1.10]}}\n",
            "source.grid.x.0: expected a number as it is printed, or text in quotes, found 1.10. It would become 1.1: "
            "write '1.10' for the text, 1.1 for the number.",
        ),
        ("  source: {grid: {x: [1e3]}}\n", "write '1e3' for the text, 1000.0 for the number"),
        ("  source: {grid: {x: [0x1F]}}\n", "write '0x1F' for the text, 31 for the number"),
        (GRID + "  output: {json_schema: {enum: [1.0, 2.50]}}\n", "output.json_schema.enum.1: expected a number as"),
        (GRID + "  output: {json_schema: {properties: {v: {const: +5}}}}\n", "output.json_schema.properties.v.const"),
        (GRID + "  sampling: {stop: [5]}\n", "sampling.stop.0: expected text, found 5 (a number). Put it in quotes"),
        (GRID + "  description: 1.10\n", "Put it in quotes"),
        (
            GRID + "  sampling: {chat_template_kwargs: {enable_thinking: no}}\n",
            "sampling.chat_template_kwargs.enable_thinking: expected a word that is read in one way, found 'no'. "
            "YAML 1.1 and 1.2 read this word differently: write 'no' for the text, or true or false.",
        ),
        (GRID + "  sampling: {extra: {priority: 010}}\n", "write '010' for the text, or the number in decimal digits"),
        (GRID + "  sampling: {extra: {priority: 1e3}}\n", "sampling.extra.priority"),
        (GRID + "  sampling: {extra: {tools: [{type: function, function: {name: f, strict: yes}}]}}\n", "strict"),
        (GRID + "  batch_rows: 010\n", "batch_rows: expected a whole number, found '010' (text)"),
    ],
)
def test_a_word_that_would_not_stay_what_was_typed_is_named_with_how_to_quote_it(tmp_path: Path, more: str, said: str):
    assert said in problem(tmp_path, more)


def test_labels_of_tools_stay_what_was_typed(tmp_path: Path):
    tool = "{type: function, function: {name: f, parameters: {properties: {x: {enum: [yes, NO]}}}}}"
    extra = spec_of(tmp_path, f"{GRID}  sampling: {{extra: {{tools: [{tool}]}}}}\n").sampling.extra or {}
    assert extra["tools"][0]["function"]["parameters"]["properties"]["x"]["enum"] == ["yes", "NO"]


def test_a_property_called_enum_is_no_list_of_labels(tmp_path: Path):
    schema = "{properties: {enum: {type: number, minimum: 1.10}}}"
    assert spec_of(tmp_path, f"{GRID}  output: {{json_schema: {schema}}}\n")


def test_truth_values_of_yaml_1_1_still_count_where_nothing_else_can_be_meant(tmp_path: Path):
    spec = spec_of(
        tmp_path, GRID + "  include_prompt: no\n  show_samples: Off\n  dedupe: yes\n  hardware: {spot: On}\n"
    )
    assert (spec.include_prompt, spec.show_samples, spec.dedupe, spec.hardware.spot) == (False, False, True, True)


def test_honest_words_of_a_grid_make_the_rows_of_before(tmp_path: Path):
    grid = "{x: [a, 'no', 5, -3, 1.5, 0.0, true, null, a b, '01'], y: [1.0e+20, x]}"
    spec = spec_of(tmp_path, f"  source: {{grid: {grid.replace('1.0e+20', '1e+20')}}}\n")
    before = yaml.safe_load(grid)
    assert spec.source.grid == {name: list(values) for name, values in before.items()}


def test_settings_are_read_alike(tmp_path: Path):
    class Regions(BaseModel):
        regions: list[str] = []
        spot: bool = False

    (tmp_path / "x.yaml").write_text("regions: [NO, SE]\nspot: yes\n")
    assert read_settings(tmp_path / "x.yaml", Regions, UserFacingError) == Regions(regions=["NO", "SE"], spot=True)


def test_the_fleet_is_read_alike(tmp_path: Path):
    file = tmp_path / "fleet.yaml"
    file.write_text("engines: [{name: no, kind: endpoint, url: 'http://127.0.0.1:9', models: [on, 12:30]}]\n")
    (engine,) = FleetConfig.load(file).engines
    assert (engine.name, list(engine.models)) == ("no", ["on", "12:30"])
