"""Request fields of a row's own: templates under `sampling`, tools in columns, their bounds, and what is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dataset_project import MODEL, dataset_project
from support.plain_engine import plain_engine
from typer.testing import CliRunner

from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.cli.main import app
from batch_assets.component import spec_version
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.prompts.row_keys import RowKeys
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import BY_ROW, GeneratedDatasetSpec, SamplingSpec, load_spec
from batch_assets.spec.sampling_values import NUMBERS, Unfit, read_field
from gpu_runner.client.answers.answer_limit import answer_limit
from gpu_runner.client.llama_cpp import llama_cpp_generation
from gpu_runner.client.protocol import Requests, RowRejected
from gpu_runner.rows import Generation, Row, row_key
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
FIND = {"type": "function", "function": {"name": "find"}}
SAMPLING = {"temperature": "{{ t }}", "max_tokens": "{{ n or '' }}", "stop": "{{ s | tojson }}", "top_p": 0.5}


def spec_of(folder: Path, **attributes: Any) -> GeneratedDatasetSpec:
    least = {"name": "d", "source": {"path": "a.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "tiny"}
    return load_spec(least | attributes, folder / "defs.yaml")


def write(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "a.jsonl").write_text("".join(f"{json.dumps({'q': f'q{i}'} | row)}\n" for i, row in enumerate(rows)))


def rows_of(folder: Path, objects: Objects, **attributes: Any) -> list[Row]:
    store, spec = DatasetStore(objects, "d"), spec_of(folder, **attributes)
    number = len(list(folder.glob("work-*")))
    manifest = build_snapshot(spec, store, now=1.0, workdir=folder / f"work-{number}", base=folder)
    return [row for _, rows in store.rows(manifest, store.entries(manifest.snapshot)) for row in rows]


def test_fields_of_a_row_are_typed_hashed_kept_and_sent(tmp_path: Path, local_objects: Objects) -> None:
    write(tmp_path, {"t": 0, "n": 2000, "s": ["a", "b"]}, {"t": "0.70", "n": None, "s": ["a"]})
    rows = {orjson.loads(row.prompt)[0]["content"]: row for row in rows_of(tmp_path, local_objects, sampling=SAMPLING)}
    generation = spec_of(tmp_path, sampling=SAMPLING).generation()
    assert dict(generation.sampling) == {"top_p": 0.5, "max_tokens": 1024}
    first, second = rows["q0"], rows["q1"]
    assert orjson.loads(first.fields) == {"temperature": 0.0, "max_tokens": 2000, "stop": ["a", "b"]}
    assert orjson.loads(second.fields) == {"temperature": 0.7, "stop": ["a"]}
    body = orjson.loads(Requests(generation).body(second.prompt, fields=second.own_fields))
    assert (body["temperature"], body["max_tokens"], body["top_p"], body["stop"]) == (0.7, 1024, 0.5, ["a"])
    assert first.row_key == row_key(generation, orjson.loads(first.prompt), orjson.loads(first.fields))
    alike = Generation("chat", "tiny", {"top_p": 0.5, "max_tokens": 1024, "temperature": 0.7, "stop": ["a"]})
    assert second.row_key == row_key(alike, orjson.loads(second.prompt))
    larger = Requests(generation).with_fields(first.fields)
    assert answer_limit(larger) > answer_limit(generation)


def test_what_differs_only_in_a_field_is_another_row(tmp_path: Path, local_objects: Objects) -> None:
    write(tmp_path, {"q": "same", "s": 1}, {"q": "same", "s": 2}, {"q": "same", "s": 2})
    rows = rows_of(tmp_path, local_objects, sampling={"seed": "{{ s }}", "temperature": 0})
    assert len({row.row_key for row in rows}) == len(rows) == 2  # equal requests are asked once
    rows = rows_of(tmp_path, local_objects, sampling={"seed": "{{ s }}"})
    assert [orjson.loads(row.seeded(None).own_fields)["seed"] for row in rows] == [1, 2, 2]


@pytest.mark.parametrize(
    ("name", "cell", "words"),
    [
        ("temperature", 2.1, "sampling.temperature: expected a number from 0 to 2, found 2.1"),
        ("temperature", "warm", "found a text of 4 characters that is no number"),
        ("temperature", 1e300, "expected a number from 0 to 2, found 1e+300"),
        ("temperature", None, "sampling.temperature: column 'v' is null"),
        ("temperature", "nan", "that is no number"),
        ("max_tokens", 0, "a whole number from 1 to 1,048,576, found 0"),
        ("max_tokens", 1.5, "found 1.5"),
        ("max_tokens", "9" * 5000, "found a text of 5,000 characters"),
        ("top_p", 0, "a number above 0, up to 1, found 0"),
        ("seed", -1, "found -1"),
        ("stop", [1], "found a list of 1 values"),
        ("stop", ["x"], "({{ [column] | tojson }}), found neither"),
        ("stop", "[1]", "expected 1 to 16 texts, found a list of 1 values"),
        ("stop", "[" * 10_000, "found neither"),
        ("stop", json.dumps(["x"] * 17), "found a list of 17 values"),
    ],
)
def test_a_value_out_of_bounds_makes_its_row_bad(tmp_path: Path, name: str, cell: Any, words: str) -> None:
    write(tmp_path, {"v": cell})
    (row,) = first_rows(spec_of(tmp_path, sampling={name: "{{ v }}"}), tmp_path, 1)
    assert words in row.refused and len(row.refused) < 200


def test_fewest_tokens_are_held_against_most_tokens_of_the_row(tmp_path: Path) -> None:
    write(tmp_path, {"a": 5, "b": 4})
    (row,) = first_rows(spec_of(tmp_path, sampling={"min_tokens": "{{ a }}", "max_tokens": "{{ b }}"}), tmp_path, 1)
    assert row.refused == "sampling.min_tokens: expected at most max_tokens (4), found 5"


@given(
    st.sampled_from(list(NUMBERS)),
    st.integers(-(1 << 64), 1 << 64) | st.floats(-3, 3, allow_nan=False) | st.sampled_from([0, 1, 2, -1, 1 << 20]),
)
def test_a_row_and_the_file_have_the_same_bounds(name: str, value: float) -> None:
    if NUMBERS[name].whole and isinstance(value, float):
        return
    try:
        SamplingSpec.model_validate({name: value})
        fits = True
    except ValueError:
        fits = False
    try:
        found = read_field(name, str(value))
        assert fits and found == value
    except Unfit:
        assert not fits


@pytest.mark.parametrize("name", BY_ROW)
def test_every_field_of_rows_takes_a_template(name: str) -> None:
    assert SamplingSpec.model_validate({name: "{{ x }}"}).templates() == {name: "{{ x }}"}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"sampling": {"temperature": "{{ t"}}, "sampling.temperature: expected a Jinja template"),
        ({"sampling": {"temperature": "warm"}}, "sampling.temperature: expected"),
        ({"sampling": {"max_tokens": "{{ t }}", "extra": {"max_completion_tokens": 5}}}, "expected one of max_tokens"),
        ({"sampling": {"seed": "{{ t }}"}, "samples": 2}, "samples: expected 1 with a seed from a column"),
        ({"sampling": {"seed": "{{ t }}"}, "reuse": True}, "reuse: expected sampling whose answers are the same"),
        ({"task": "embedding", "sampling": {"temperature": "{{ t }}"}}, "only dimensions and extra for task embedding"),
        ({"task": "completion", "sampling": {"tools_from": "t"}}, "no tools for task completion"),
        ({"sampling": {"tools_from": "t", "extra": {"tools": [TOOL]}}}, "one of tools_from and extra.tools"),
        ({"sampling": {"tool_choice_from": "t"}}, "tools beside tool_choice_from"),
        ({"sampling": {"tools_from": "t"}, "output": {"json_schema": {"type": "object"}}}, "no tools beside output"),
    ],
)
def test_a_file_whose_fields_do_not_fit_each_other_is_refused(
    tmp_path: Path, attributes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError) as found:
        spec_of(tmp_path, **attributes)
    assert words in str(found.value)


def test_a_file_without_such_keys_has_the_code_version_and_settings_that_it_had(tmp_path: Path) -> None:
    sampling = {"temperature": 0.5, "max_tokens": 7, "stop": ["x"], "seed": 3}
    spec = spec_of(tmp_path, sampling=sampling)
    assert dict(spec.generation().sampling) == sampling
    assert spec_version(spec) == "e812cbcb02ed692d"
    prompt = orjson.dumps([{"content": "x", "role": "user"}])
    (digest,) = RowKeys(spec.generation()).digests([prompt])
    assert digest.hex() == "6de4722a1e17090770fcefdf4c0b0781b4e81c3d5efc1eec4f0795de942f0493"
    assert spec_version(spec) != spec_version(spec_of(tmp_path, sampling=sampling | {"tools_from": "t"}))
    assert "tools_from" not in json.dumps(spec.generation().stated())


UNFIT_TOOLS: list[tuple[Any, str]] = [
    (7, "a list of 1 to 128 tools"),
    ("{", "sampling.tools_from: column 'tools': expected JSON"),
    ([TOOL] * 129, "a list of 1 to 128 tools"),
    ([{"type": "function"}], "{type: function, function: {name"),
    ("[" * 10_000, "expected JSON"),
    ("[" * 200 + "]" * 200, "fewer levels"),
    ("[" + " " * (1 << 20) + "]", "at most 1,048,576 characters"),
    ([{**TOOL, "maximum": 1 << 70}], "column 'tools': expected whole numbers of at most 64 bits"),
]


@pytest.mark.parametrize(("cell", "words"), UNFIT_TOOLS, ids=[words[:40] for _, words in UNFIT_TOOLS])
def test_tools_that_are_none_make_their_row_bad(tmp_path: Path, cell: Any, words: str) -> None:
    write(tmp_path, {"tools": cell})
    (row,) = first_rows(spec_of(tmp_path, sampling={"tools_from": "tools"}), tmp_path, 1)
    assert words in row.refused and len(row.refused) < 250


@pytest.mark.slow
def test_tools_of_rows_are_sent_and_their_calls_kept(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "question": "x", "tools": [TOOL], "choice": "required"},
        {
            "id": "b",
            "question": "y",
            "tools": json.dumps([TOOL]),
            "choice": {"type": "function", "function": {"name": "find"}},
        },
        {"id": "c", "question": "z", "tools": None, "choice": None},
        {"id": "d", "question": "w", "tools": [TOOL], "choice": "other"},
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sampling = {"temperature": 0, "tools_from": "tools", "tool_choice_from": "choice"}
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    with (
        plain_engine(MODEL) as engine,
        dataset_project(tmp_path, sampling=sampling, on_bad_row="skip") as site,
    ):
        engine.answer = {"finish_reason": "tool_calls", "message": {"content": None, "tool_calls": [call]}}
        assert site.materialize("prompts").success
        assert site.manifest().rejected == 1
        assert site.run_rows("00000", "00000", engine.url).success
        asked = {one["messages"][0]["content"]: one for one in engine.requests}
        assert asked["x"]["tools"] == asked["y"]["tools"] == [TOOL] and "tools" not in asked["z"]
        assert asked["x"]["tool_choice"] == "required" and asked["y"]["tool_choice"]["function"]["name"] == "find"
        assert site.materialize("dataset").success
        table = published_table(site.store)
        assert table is not None
        (file,) = table.files
        data = pq.read_table(pa.BufferReader(site.store.objects.get(f"{table.path}/{file.name}")))
        assert [line[0]["name"] for line in data.column("tool_calls").to_pylist()] == ["find"] * 3


def test_preview_shows_the_fields_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"t": 0.5, "n": 7})
    attributes = {
        "name": "d",
        "source": {"path": "a.jsonl"},
        "prompt": {"user": "{{ q }}"},
        "model": "tiny",
        "sampling": {"temperature": "{{ t }}", "max_tokens": "{{ n }}"},
    }
    (tmp_path / "defs.yaml").write_text(json.dumps({"type": "batch_assets.GeneratedDataset", "attributes": attributes}))
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(tmp_path))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    shown = CliRunner().invoke(app, ["preview", "d"])
    assert shown.exit_code == 0 and "of its own: max_tokens 7, temperature 0.5" in shown.output
    (row,) = json.loads(CliRunner().invoke(app, ["preview", "d", "--json"]).stdout)["rows"]
    assert row["request_fields"] == {"max_tokens": 7, "temperature": 0.5}


def test_a_field_that_llama_cpp_lacks_refuses_its_row_alone() -> None:
    requests = Requests(Generation("chat", "m", {"max_tokens": 5}), lambda one: llama_cpp_generation(one, 100))
    body = orjson.loads(requests.body(b"[]", fields=b'{"repetition_penalty":1.5}'))
    assert (body["repeat_penalty"], body["repeat_last_n"], body["max_tokens"]) == (1.5, 100, 5)
    with pytest.raises(RowRejected, match="unsupported_field"):
        requests.body(b"[]", fields=b'{"min_tokens":3}')
