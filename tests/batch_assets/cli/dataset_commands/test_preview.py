"""`batch-assets preview`: rendered prompts, token counts, answers of a real engine process; and nothing is written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from support import tiny_gguf
from support.simulated_engine import simulated_engine
from typer.testing import CliRunner, Result

from batch_assets import settings
from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.capacity_planning.token_count import token_counter, tokenizer_file
from batch_assets.cli.main import app
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import load_spec
from gpu_runner.fleet_database.database import FleetDatabase
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

SPEC = {
    "name": "haiku",
    "source": {"path": "words.jsonl"},
    "prompt": {"system": "You write haiku.", "user": "A haiku about {{ word }}."},
    "model": "tiny",
    "sampling": {"temperature": 0, "max_tokens": 32},
    "on_bad_row": "skip",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_ENDPOINT", "BATCH_ASSETS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("BATCH_ASSETS_FLEET", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    declare(tmp_path, SPEC)
    words = tmp_path / "defs" / "haiku" / "words.jsonl"
    words.write_text("".join(json.dumps({"word": f"word {i}", "rank": i}) + "\n" for i in range(40)))
    return tmp_path


def declare(home: Path, attributes: object) -> None:
    file = home / "defs" / "haiku" / "defs.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": attributes}))


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, ["preview", "haiku", *words], env={"COLUMNS": "200"})


def nothing_is_written(home: Path) -> bool:
    written = [file for file in (home / "store").rglob("*") if file.is_file()]
    runs = home / "home" / "history" / "runs"
    return not written and not list(runs.glob("*")) and not list((home / "home").rglob("event_logs*"))


def test_prompts_are_shown_with_estimated_tokens_and_nothing_is_asked(home: Path) -> None:
    found = ask("--rows", "2")
    assert found.exit_code == 0, found.output
    assert "row 2  words.jsonl, line 2" in found.stdout
    assert "You write haiku." in found.stdout and "A haiku about word 1." in found.stdout
    assert "word 2" not in found.stdout
    assert "17 prompt tokens" in found.stdout  # (16 + 20 bytes) / 4, and 4 per message
    assert "estimated, a token per 4 bytes: no tokenizer.json of tiny" in found.stdout
    assert "nothing was asked" in found.stdout
    assert nothing_is_written(home)


WRONG_ROWS = {
    "a null id": ([{"word": "a", "id": None}], {"id": "id"}, "id: expected text or a whole number, found null"),
    "a fraction as id": ([{"word": "a", "id": 1.5}], {"id": "id"}, "found a value of type float"),
    "true as id": ([{"word": "a", "id": True}], {"id": "id"}, "found a value of type bool"),
    "an id twice": (
        [{"word": "a", "id": 1}, {"word": "b", "id": 1}],
        {"id": "id"},
        "the same as in words.jsonl, line",
    ),
    "no id": ([{"word": "a"}], {"id": "idd"}, "expected column 'idd', found 'word'"),
    "no kept column": ([{"word": "a", "note": 1}], {"keep_columns": ["nte"]}, "Did you mean 'note'?"),
    "a mixed column": ([{"word": "a", "n": 1}, {"word": "b", "n": "x"}], {"keep_columns": ["n"]}, "found text"),
    "a mixed column later": (
        [*({"word": "a", "n": i} for i in range(500)), {"word": "b", "n": "x"}],
        {"keep_columns": ["n"]},
        "words.jsonl, line 501",
    ),
    "nothing passes": (
        [{"word": "a"}],
        {"source": {"path": "words.jsonl", "where": "word = 'b'"}},
        "none of 1",
    ),
    "an empty file": ([], {}, "the file is empty (0 bytes)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_preview_refuses_what_a_run_refuses(home: Path, wrong: str) -> None:
    rows, more, said = WRONG_ROWS[wrong]
    attributes = {**SPEC, "on_bad_row": "fail", **more}
    declare(home, attributes)
    folder = home / "defs" / "haiku"
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = ask("--rows", "2")
    assert shown.exit_code != 0
    assert said in " ".join(shown.output.split())
    (home / "work").mkdir()
    (home / "other").mkdir()
    store = DatasetStore(open_objects(str(home / "other")), "haiku")
    with pytest.raises(SourceError) as refused:
        build_snapshot(load_spec(attributes, "f"), store, now=0.0, workdir=home / "work", base=folder)
    assert said in str(refused.value)


def test_rows_that_a_run_would_leave_out_do_not_fail_the_preview_of_others(home: Path) -> None:
    folder = home / "defs" / "haiku"
    (folder / "words.jsonl").write_text('{"word": "a"}\nnot json\n')
    assert ask("--rows", "1").exit_code == 0


@pytest.mark.parametrize("key", ["secret-1\n", " secret-1\r\n"])
def test_a_line_end_behind_a_key_does_not_count(home: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret-1")
    with simulated_engine("--api-key-env", "THE_KEY") as engine:
        monkeypatch.setenv("BATCH_ASSETS_API_KEY", key)
        found = ask("--rows", "1", "--endpoint", engine.url)
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("key", ["secret\n-1", "ключ"])
def test_a_key_that_no_header_holds_is_named_by_its_variable(
    home: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_ASSETS_API_KEY", key)
    with simulated_engine() as engine:
        found = ask("--rows", "1", "--endpoint", engine.url)
    assert (found.exit_code, found.exception and type(found.exception)) == (2, SystemExit)
    assert "BATCH_ASSETS_API_KEY: expected an API key in one line of ASCII" in found.output
    assert key not in found.output and "Traceback" not in found.output


def test_an_engine_answers_and_the_whole_is_extrapolated(home: Path) -> None:
    with simulated_engine("--speed", "50", "--output-tokens", "fixed:12") as engine:
        found = ask("--rows", "4", "--endpoint", engine.url, "--json")
        assert found.exit_code == 0, found.output
        shown = ask("--rows", "4", "--endpoint", engine.url)
    said = json.loads(found.stdout)
    assert [row["answer"]["completion_tokens"] for row in said["rows"]] == [12] * 4
    assert [row["prompt"][1]["content"] for row in said["rows"]] == [f"A haiku about word {i}." for i in range(4)]
    assert all(row["answer"]["output"] for row in said["rows"])
    tokens = sum(row["answer"]["prompt_tokens"] for row in said["rows"]) / 4 + 12
    assert said["dataset_rows"] == 40
    assert said["dataset_tokens"] == round(40 * tokens)
    assert 0 < said["usd"]["p50"] <= said["usd"]["p95"]
    assert 0 < said["seconds_rented"]["p50"] <= said["seconds_rented"]["p95"]
    assert said["seconds_here_at_most"] == pytest.approx(10 * said["seconds"], abs=0.06)
    assert shown.exit_code == 0
    for words in ("completion tokens, stop", "whole dataset: 40 rows", "rented as", "on this engine: at most"):
        assert words in shown.stdout, words
    assert nothing_is_written(home)


def test_an_engine_of_the_fleet_is_taken_by_its_name(home: Path) -> None:
    with simulated_engine("--speed", "50") as engine:
        entry = {"name": "lab", "kind": "endpoint", "url": engine.url}
        (home / "home").mkdir(exist_ok=True)
        (home / "home" / "fleet.yaml").write_text(yaml.safe_dump({"engines": [entry], "simulated": None}))
        found = ask("--rows", "1", "--engine", "lab", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["rows"][0]["answer"]["finish_reason"]
    unknown = ask("--engine", "home")
    assert unknown.exit_code == 2 and "known: lab" in unknown.stderr


def test_another_model_is_refused_with_what_is_served(home: Path) -> None:
    with simulated_engine(model="other") as engine:
        found = ask("--endpoint", engine.url)
    assert found.exit_code == 2
    assert "expected model tiny, found other" in found.stderr


def test_rows_that_cannot_be_used_are_shown_with_their_reason_and_not_asked(home: Path) -> None:
    words = home / "defs" / "haiku" / "words.jsonl"
    words.write_text('{"word": "rain"}\n{"word": null}\n{torn\n{"word": "snow"}\n')
    with simulated_engine("--speed", "50") as engine:
        found = ask("--endpoint", engine.url, "--json")
    assert found.exit_code == 1
    rows = json.loads(found.stdout)["rows"]
    assert [row["line"] for row in rows] == [1, 2, 3, 4]
    assert "column 'word' is null" in rows[1]["refused"]
    assert rows[2]["refused"] and rows[1]["answer"] is rows[2]["answer"] is None
    assert rows[0]["answer"] and rows[3]["answer"]


def test_an_answer_that_the_engine_refuses_is_told_beside_its_row(home: Path) -> None:
    with simulated_engine("--speed", "50", "--max-model-len", "10") as engine:
        found = ask("--rows", "1", "--endpoint", engine.url, "--json")
    assert found.exit_code == 1
    assert "context_length_exceeded" in json.loads(found.stdout)["rows"][0]["problem"]


def test_an_output_is_held_against_its_schema(home: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "never this"}}, "required": ["a"]}
    declare(home, {**SPEC, "sampling": {"temperature": 0, "max_tokens": 2}, "output": {"json_schema": schema}})
    with simulated_engine("--speed", "50") as engine:
        found = ask("--rows", "1", "--endpoint", engine.url, "--json")
    said = json.loads(found.stdout)["rows"][0]
    assert found.exit_code == (1 if said["problem"] else 0)
    if said["answer"]["finish_reason"] == "length":
        assert "does not fit the schema" in said["problem"]


def test_where_and_limit_choose_the_rows(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text("".join(f'{{"word": "w{i}", "rank": {i}}}\n' for i in range(3000)))
    spec = load_spec({**SPEC, "source": {"path": "words.jsonl", "where": "rank >= 2500", "limit": 3}}, "defs.yaml")
    assert [row.line for row in first_rows(spec, tmp_path, 5)] == [2501, 2502, 2503]
    assert first_rows(spec, tmp_path, 1)[0].decoded()[1] == {"role": "user", "content": "A haiku about w2500."}


def test_texts_cannot_steer_the_terminal(home: Path) -> None:
    words = home / "defs" / "haiku" / "words.jsonl"
    words.write_text(json.dumps({"word": "\x1b[2J\x1b]0;title\x07 [red]x[/red]"}) + "\n")
    found = ask()
    assert "\x1b" not in found.stdout and "\x07" not in found.stdout
    assert "[red]x[/red]" in found.stdout


def test_two_engines_are_one_too_many(home: Path) -> None:
    found = ask("--endpoint", "http://127.0.0.1:9", "--engine", "lab")
    assert found.exit_code == 2 and "not both" in found.stderr


def test_a_tokenizer_is_found_in_the_models_folder_and_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert tokenizer_file("Qwen/Qwen3-0.6B") is None
    cached = tmp_path / "hf/hub/models--Qwen--Qwen3-0.6B/snapshots/abc/tokenizer.json"
    cached.parent.mkdir(parents=True)
    cached.write_text("{}")
    assert tokenizer_file("Qwen/Qwen3-0.6B") == cached
    own = tmp_path / "model" / "tokenizer.json"
    own.parent.mkdir()
    own.write_text("{}")
    assert tokenizer_file(str(own.parent)) == own
    assert token_counter(str(own.parent)).basis.startswith("estimated, a token per 4 bytes: ")


def test_a_tokenizer_counts_words_of_its_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counter = token_counter(str(tmp_path))
    assert counter.basis == f"by {tmp_path / 'tokenizer.json'}"
    assert counter.of("a b a") == 3
    assert counter.of([{"role": "user", "content": "a b"}]) == 6


def declare_engines(home: Path, *engines: object) -> None:
    (home / "home").mkdir(exist_ok=True)
    (home / "home" / "fleet.yaml").write_text(yaml.safe_dump({"engines": engines}))


@pytest.mark.slow
def test_an_engine_that_does_not_run_is_started_for_the_rows_and_ended(home: Path) -> None:
    declare_engines(home, {"name": "sim", "kind": "simulated", "models": ["tiny"], "speed": 50})
    named = ask("--rows", "1")
    assert "batch-assets preview haiku --engine sim" in named.stdout
    found = ask("--rows", "2", "--engine", "sim", "--json")
    assert found.exit_code == 0, found.output
    assert all(row["answer"]["output"] for row in json.loads(found.stdout)["rows"])
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        assert fleet_db.holder("sim") is None and not fleet_db.runs()
    assert nothing_is_written(home)


def test_an_engine_that_a_run_has_or_that_serves_another_model_or_does_not_start_is_told(home: Path) -> None:
    broken = {"name": "broken", "kind": "process", "command": ["false"], "start_seconds": 20}
    declare_engines(
        home, {"name": "sim", "kind": "simulated"}, broken, {**broken, "name": "other", "models": ["large"]}
    )
    with contextlib.closing(FleetDatabase(settings.fleet_database())) as fleet_db:
        assert fleet_db.try_lease("sim", "run-1", "haiku", 60.0) is not None
    held, other, ended = (ask("--engine", name) for name in ("sim", "other", "broken"))
    assert (held.exit_code, other.exit_code, ended.exit_code) == (2, 2, 2)
    assert "--engine sim: engine sim is held by run run-1" in held.stderr
    assert "expected one that serves tiny, found other: large" in other.stderr
    assert "--engine broken: the engine ended with status" in ended.stderr and ".log" in ended.stderr


def test_the_llama_cpp_engine_answers(home: Path) -> None:
    pytest.importorskip("xllamacpp")
    tiny_gguf.write_llama(home / "tiny.gguf")
    engine = {"name": "cpu", "kind": "llama_cpp", "gguf": str(home / "tiny.gguf"), "models": ["tiny"], "threads": 1}
    declare_engines(home, engine)
    found = ask("--rows", "1", "--engine", "cpu", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["rows"][0]["answer"]["prompt_tokens"] > 0
