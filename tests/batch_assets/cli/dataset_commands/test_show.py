"""`batch-assets show`: rows with prompt and output, dead letters, and rows of batches that are still open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.snapshots import commit, outcome, questions, write_snapshot
from typer.testing import CliRunner, Result

from batch_assets.cli.dataset_commands.run_summary import show_trial
from batch_assets.cli.dataset_commands.show import say_row
from batch_assets.cli.main import app
from batch_assets.filtering.passed_table import filtered
from batch_assets.publishing.current_rows import CurrentRow
from batch_assets.publishing.dataset_card import Card
from batch_assets.publishing.publish import publish
from batch_assets.spec.row_rules import RowRule
from resources.objects.opening import open_objects
from resources.store.dataset_store import DatasetStore

SPEC = {
    "name": "sums",
    "source": {"path": "sums.jsonl"},
    "prompt": {"user": "{{ question }}"},
    "model": "tiny",
    "on_bad_row": "skip",
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetStore:
    """25 rows: ten committed, one of them dead, two finished in an open batch, the others wait."""
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_FLEET"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "defs" / "sums" / "defs.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": SPEC}))
    store = DatasetStore(open_objects(str(tmp_path / "store")), "sums")
    manifest = write_snapshot(store, questions(25))
    commit(store, manifest, keys=["00000"], dead=["id-000003"])
    entries = store.entries(manifest.snapshot)
    (_, rows), *_ = store.rows(manifest, entries[1:2])
    finished = [outcome(row, number, output="\x1b[2Jnearly done") for number, row in enumerate(rows[:2])]
    store.journal.append(("00001", "00002"), "", "run-2", 1, {"00001": finished}, "chat")
    return store


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, ["show", "sums", *words], env={"COLUMNS": "200"})


def ids(found: Result) -> list[str]:
    assert found.exit_code == 0, found.output
    return [row["row_id"] for row in json.loads(found.stdout)["rows"]]


@pytest.mark.parametrize(("engine", "end"), [("vllm 1.0", "tiny on vllm 1.0"), ("", "tiny")])
def test_an_engine_without_a_name_is_left_out(store: DatasetStore, engine: str, end: str) -> None:
    manifest = store.manifest(store.current_snapshot() or "")
    ((_, rows),) = store.rows(manifest, store.entries(manifest.snapshot)[:1])
    answer = outcome(rows[0])
    answer = replace(answer, origin=replace(answer.origin, model="tiny", engine=engine))
    said: list[str] = []
    row = CurrentRow("00000", answer.row_id, "Why?", {}, answer, committed=True)
    say_row(lambda text="", style="": said.append(text), row)
    assert said[-2].endswith(f", 0.25 s, 0.0010 $, {end}")


def test_a_long_value_of_a_column_ends_with_a_sign_that_there_is_more() -> None:
    said: list[str] = []
    row = CurrentRow("00000", "a", "Why?", {"short": "as it is", "long": "word " * 40}, None, committed=False)
    say_row(lambda text="", style="": said.append(text), row)
    assert said[1].startswith("  short: as it is, long: word word") and said[1].endswith(" word…")


def test_rows_are_shown_with_prompt_answer_and_state(store: DatasetStore) -> None:
    found = ask("--rows", "12")
    assert found.exit_code == 0, found.output
    for words in (
        "row id-000000  batch 00000, committed",
        "topic: topic 0, level: 0",
        "What is 2 plus 2?",
        "answer 2 to id-000002",
        "row id-000003  batch 00000, dead",
        "prompt_too_long: the prompt has 9000 tokens",
        "row id-000010  batch 00001, finished",
        "nearly done",
        "12 rows shown, 25 in the snapshot",
    ):
        assert words in found.stdout, words
    assert "\x1b[2J" not in found.stdout  # nothing of a text steers the terminal
    assert "id-000012" not in found.stdout


@pytest.mark.slow
def test_errors_one_row_a_condition_and_a_place_to_begin(store: DatasetStore) -> None:
    assert ids(ask("--errors", "--json")) == ["id-000003"]
    assert ids(ask("--key", "id-000010", "--json")) == ["id-000010"]
    assert ids(ask("--key", "id-000020", "--json")) == ["id-000020"]  # nobody has answered it yet
    assert ids(ask("--where", "level = 4 AND state = 'committed'", "--json")) == ["id-000004", "id-000009"]
    assert ids(ask("--where", "state = 'waiting'", "--rows", "1", "--json")) == ["id-000012"]
    assert ids(ask("--from", "00001", "--json")) == ["id-000010", "id-000011"]
    row = json.loads(ask("--key", "id-000003", "--json").stdout)["rows"][0]
    assert (row["state"], row["error"], row["output"]) == ("dead", "prompt_too_long", None)
    assert row["prompt"] == [{"role": "user", "content": "What is 3 plus 3?"}]
    assert row["origin"]["model"] == "simulated/tiny"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--key", "id-000099"), "--key: no row of the current snapshot has the id 'id-000099'"),
        (("--columns", "output,wisdom"), "--columns: no column is called 'wisdom'. Columns: row_id, batch, state"),
        (("--order", "best"), "--order: expected first, newest, sample, found 'best'"),
        (("--order", "newest", "--from", "00001"), "--from: expected with --order first, found --order newest"),
        (("--where", "lvl = 1"), "--where: no column is called 'lvl'. Columns: row_id, batch, state"),
    ],
)
def test_what_cannot_be_shown_is_said(store: DatasetStore, words: tuple[str, ...], said: str) -> None:
    found = ask(*words)
    assert found.exit_code == 2
    assert said in found.stderr


def test_the_newest_are_those_of_open_batches_and_then_of_the_batch_reported_last(store: DatasetStore) -> None:
    assert ids(ask("--order", "newest", "--json", "--rows", "4")) == [
        "id-000011",
        "id-000010",
        "id-000009",
        "id-000008",
    ]


def test_a_sample_is_the_same_each_time_and_of_every_batch_that_has_rows(store: DatasetStore) -> None:
    sample = ids(ask("--order", "sample", "--json", "--rows", "4"))
    assert len(sample) == 4 and sample == ids(ask("--order", "sample", "--json", "--rows", "4"))
    assert {"id-000010", "id-000011"} < set(sample) and sample != sorted(sample)
    finished = "level = 1 AND state <> 'waiting'"
    assert len(ids(ask("--order", "sample", "--json", "--rows", "4", "--where", finished))) == 3


def test_only_the_columns_that_were_asked_for(store: DatasetStore) -> None:
    rows = json.loads(ask("--columns", "output,usd,topic", "--json", "--rows", "1").stdout)["rows"]
    assert rows == [{"output": "answer 0 to id-000000", "usd": 0.001, "topic": "topic 0"}]
    said = ask("--columns", "row_id, prompt ,finish_reason", "--key", "id-000010").stdout
    assert "row_id: id-000010\nprompt\n  user\n    What is 10 plus 10?\nfinish_reason: stop\n" in said
    assert "\x1b[2J" not in ask("--columns", "output", "--key", "id-000010").stdout


@pytest.mark.slow
def test_a_cell_of_megabytes_is_cut_on_a_terminal(store: DatasetStore) -> None:
    manifest = store.manifest(store.current_snapshot() or "")
    commit(store, manifest, keys=["00002"], answer=lambda row, number: f"\x1b[31m<script>{'x' * (10 << 20)}")
    for words in (("--from", "00002"), ("--from", "00002", "--columns", "output")):
        found = ask(*words, "--rows", "1")
        assert len(found.stdout) < 5000 and "(10,485,773 characters)" in found.stdout
        assert "\x1b" not in found.stdout


def test_without_a_snapshot_the_command_that_makes_one_is_named(store: DatasetStore) -> None:
    store.objects.delete([f"{store.dataset}/snapshots/CURRENT"])
    found = ask()
    assert found.exit_code != 0
    assert "run `batch-assets run sums`" in found.stderr


def test_a_trial_shows_some_of_its_rows(store: DatasetStore, capsys: pytest.CaptureFixture[str]) -> None:
    show_trial("sums", 1)
    said = capsys.readouterr().out
    assert "row id-000002  batch 00000, committed" in said and "answer 2 to id-000002" in said
    assert "id-000004" not in said


SCORED = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "sure": {"type": "boolean"}, "points": {"type": "integer"}},
    "required": ["label", "sure", "points"],
}


def test_the_fields_of_a_rows_json_are_columns_to_show_and_to_ask_for(store: DatasetStore) -> None:
    """They were in the table alone, where `output.columns` puts them."""
    manifest = write_snapshot(store, questions(4), json_schema=SCORED)
    answers = [json.dumps({"label": "a", "sure": True, "points": number}) for number in range(3)]
    commit(store, manifest, answer=lambda _, number: answers[number] if number < 3 else "no JSON")
    found = json.loads(ask("--columns", "row_id,points,label", "--json").stdout)["rows"]
    assert [one["points"] for one in found] == [0, 1, 2, None] and found[0]["label"] == "a"
    assert "sure: true\npoints: 0\n" in ask("--columns", "sure,points", "--rows", "1").stdout
    assert ids(ask("--where", "points > 0 AND sure", "--json")) == ["id-000001", "id-000002"]
    assert (
        "Columns: row_id, batch, state" in (said := ask("--columns", "wisdom").stderr) and "level, label, sure" in said
    )


def test_one_row_says_what_the_filter_made_of_it(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest, dead=["id-000003"])
    publish(store, manifest, card=Card(), now=1.0, workdir=tmp_path)
    rules = {"level": {"where": "level >= 2", "remove": True}, "topic": {"where": "topic = 'topic 0'"}}
    by = {name: RowRule.model_validate(rule) for name, rule in rules.items()}
    filtered(store, by, base=tmp_path, now=2.0, workdir=tmp_path)
    said = {number: ask("--key", f"id-00000{number}").stdout for number in (0, 2, 3, 9)}
    word = "filter, in the published table: "
    assert f"{word}fell out by level\n" in said[0] and f"{word}passes, marked by topic\n" in said[2]
    assert f"{word}fell out by error" in said[3] and f"{word}passes\n" in said[9]
    (row,) = json.loads(ask("--key", "id-000000", "--json").stdout)["rows"]
    table = store.current_published()
    assert row["filter"] == {"fell_out": True, "flags": ["level"], "table": table}
    commit(store, write_snapshot(store, questions(11)))
    publish(store, store.manifest(store.current_snapshot() or ""), card=Card(), now=3.0, workdir=tmp_path)
    assert "filter" not in ask("--key", "id-000000").stdout, "that was of an older table"


def test_a_row_of_the_source_that_is_not_in_the_snapshot_is_explained(store: DatasetStore) -> None:
    manifest = write_snapshot(store, questions(3), duplicates={"id-copy": "id-000001"}, rejected=2)
    found = ask("--key", "id-copy")
    assert found.exit_code == 2
    assert (
        "it asks the same as row 'id-000001' and has its answer (dedupe): `batch-assets show sums --key id-000001`"
        in (" ".join(found.stderr.split()))
    )
    said = " ".join(ask("--key", "id-bad").stderr.split())
    assert "has the id 'id-bad'. 2 of 6 rows of the source are left out (on_bad_row: skip): " in said
    assert f"snapshots/{manifest.snapshot}/rejects.parquet says which, and why" in said
