"""Datasets of conversations: what is asked, kept over kills and redrives, and published."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.conversation_runs import (
    TURNS,
    answer,
    finish,
    found,
    killed,
    questions,
    said,
    snapshot_of,
    table_of,
    write,
)
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.plain_engine import PlainEngine, plain_engine
from support.range_runs import a_run, generate
from support.specs import spec

from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.component import spec_version
from batch_assets.exports.training_formats import record_of
from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from batch_assets.publishing.current_rows import RowState, find_rows
from batch_assets.publishing.dead_letters import dead_letter_examples, dead_letters
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.prompts.messages import read_turns
from batch_assets.snapshot.reuse import find_reusable
from batch_assets.spec.errors import SpecError
from batch_assets.spec.export_options import checked_options
from batch_assets.spec.sampling_values import Unfit
from gpu_runner.rows import Outcome, row_key
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore
from resources.store.journal import note_furthest


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "d")


def test_a_conversation_is_one_row_with_all_its_turns(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(6))
    manifest = snapshot_of(tmp_path, store)
    with plain_engine(MODEL) as engine:
        engine.text = answer
        finish(store, manifest, engine.url, "run-1")
    asked = Counter(map(said, engine.requests))
    assert len(asked) == 18 and set(asked.values()) == {1}
    assert asked["Be kind.|q1?|a1|Why?|a2|Shorter, q1."] == 1
    rows = table_of(store, manifest, tmp_path)
    assert rows["output"].to_list() == ["a3"] * 6
    assert rows["prompt_tokens"].to_list() == [15] * 6 and rows["tries"].to_list() == [3] * 6
    assert [one["content"] for one in rows["prompt"][1]] == ["Be kind.", "q1?", "a1", "Why?", "a2", "Shorter, q1."]
    turns = rows["turns"][1].to_list()
    assert [(turn["user"], turn["output"], turn["completion_tokens"]) for turn in turns] == [
        ("q1?", "a1", 3),
        ("Why?", "a2", 3),
        ("Shorter, q1.", "a3", 3),
    ]
    assert {one.usd for one in found(store, manifest).values()} == {None}


def test_turns_of_a_killed_run_are_not_asked_again(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(12))
    manifest = snapshot_of(tmp_path, store, batch_rows=6)
    with plain_engine(MODEL) as engine:
        killed(a_run(store, manifest, "run-1"), engine, 16)
        known: dict[tuple[str, str], Outcome] = {}
        for path in store.journal.segments(("00000", "99999")):
            for rows in store.journal.read(path).values():
                note_furthest(known, rows)
        kept = sum(len(one.turns) for one in known.values())
        assert any(one.begun for one in known.values()) and not found(store, manifest)
        states = find_rows(store, manifest, store.entries(manifest.snapshot), lambda rows: rows, 12).rows
        assert sum(row.state is RowState.FINISHED for row in states) == sum(not one.begun for one in known.values())
        waiting = {row.row_id: row.prompt for row in states if row.state is RowState.WAITING}
        begun = next(one for one in known.values() if one.begun)
        assert len(waiting[begun.row_id]) == 2 + 2 * len(begun.turns)  # the conversation so far
        engine.requests.clear()
        finish(store, manifest, engine.url, "run-2")
    assert len(engine.requests) == 36 - kept
    assert {(one.output, len(one.turns)) for one in found(store, manifest).values()} == {("a3", 3)}
    assert not list(store.journal.segments(("00000", "99999")))


def test_a_redrive_goes_on_from_the_turn_that_failed(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(4))
    manifest = snapshot_of(tmp_path, store)
    with plain_engine(MODEL) as engine:
        engine.text = lambda request: None if said(request).endswith("q2?|a1|Why?") else answer(request)
        finish(store, manifest, engine.url, "run-1")
        dead = found(store, manifest)["r2"]
        assert dead.error == "rejected_400" and [turn.output for turn in dead.turns] == ["a1"]
        rows = table_of(store, manifest, tmp_path)
        assert [one["content"] for one in rows["prompt"][2]] == ["Be kind.", "q2?", "a1", "Why?"]
        assert len(rows["turns"][2]) == 1 and dead_letters(store, manifest, workdir=tmp_path).rows == 1
        (example,) = dead_letter_examples(store, manifest)
        assert (example.error, example.says) == ("rejected_400", "")  # it may repeat an answer
        engine.text = answer
        engine.requests.clear()
        finish(store, manifest, engine.url, "run-2", Intent("run-2", redrive=True))
    assert [said(request).split("|")[-1] for request in engine.requests] == ["Why?", "Shorter, q2."]
    whole = found(store, manifest)["r2"]
    assert (whole.output, len(whole.turns), whole.prompt_tokens) == ("a3", 3, 15)


def test_conversations_of_one_batch_may_have_different_numbers_of_turns(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *({"id": f"r{n}", "t": [f"u{i}" for i in range(n)]} for n in range(1, 5)))
    manifest = snapshot_of(tmp_path, store, prompt={"turns_from": "t"})
    with plain_engine(MODEL) as engine:
        engine.text = answer
        finish(store, manifest, engine.url, "run-1")
    rows = table_of(store, manifest, tmp_path)
    assert rows["output"].to_list() == ["a1", "a2", "a3", "a4"] and len(engine.requests) == 10
    assert [len(turns) for turns in rows["turns"].to_list()] == [1, 2, 3, 4]
    assert [len(prompt) for prompt in rows["prompt"].to_list()] == [1, 3, 5, 7]


def test_a_list_of_turns_is_the_same_as_json_text_and_in_parquet(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, {"id": "a", "t": ["x", "y"]}, {"id": "b", "t": '["x", "y"]'})
    prompt = {"system": "s", "turns_from": "t"}
    manifest = snapshot_of(tmp_path, store, prompt=prompt)
    ((_, (first, second)),) = store.rows(manifest, store.entries(manifest.snapshot))
    pq.write_table(pa.table({"id": ["a"], "t": [["x", "y"]]}), tmp_path / "a.parquet")
    other = DatasetStore(store.objects, "e")
    manifest = snapshot_of(tmp_path, other, prompt=prompt, source={"path": "a.parquet"})
    ((_, (third,)),) = other.rows(manifest, other.entries(manifest.snapshot))
    assert first.turns == second.turns == third.turns == ("x", "y")
    assert first.row_key == second.row_key == third.row_key
    asked = orjson.loads(first.prompt)
    assert [one["content"] for one in asked] == ["s", "x"]
    assert first.row_key == row_key(manifest.settings(), asked, turns=["x", "y"])


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ([], "expected 1 to 100 turns, found an empty list"),
        (["u"] * 10_000, "expected 1 to 100 turns, found 10,000"),
        (["u", 3], "expected text in turn 2, found a number"),
        (["u", None], "expected text in turn 2, found nothing"),
        (["u", {"role": "user", "content": "x"}], "expected text in turn 2, found a mapping"),
        (["u", " "], "expected text in turn 2, found nothing but blanks"),
        ("hello", "expected the JSON text of a list of texts, found text that is no JSON"),
        ('{"a": 1}', "expected a list of texts, or its JSON text, found a mapping"),
        (None, "found nothing"),
        (["x" * 600_000, "y" * 600_000], "bytes, more than 1048576"),
        ("[" * 10_000, "expected the JSON text of a list of texts"),
    ],
)
def test_a_cell_that_is_no_list_of_turns_is_a_reject_with_its_reason(tmp_path: Path, cell: Any, reason: str) -> None:
    write(tmp_path, {"id": "a", "t": cell}, {"id": "b", "t": ["fine"]})
    made = spec(prompt={"turns_from": "t"}, id="id")
    first, second = first_rows(made, tmp_path, 2)
    assert reason in first.refused and not second.refused
    assert "x" * 100 not in first.refused


def test_a_blank_turn_of_a_template_is_a_reject_with_its_number(tmp_path: Path) -> None:
    write(tmp_path, {"id": "a", "q": "q", "more": ""}, {"id": "b", "q": " ", "more": "m"})
    made = spec(prompt={"turns": ["{{ q }}", "{{ more or '' }}"]}, id="id")
    refused = [row.refused for row in first_rows(made, tmp_path, 2)]
    assert refused == ["turn 2: nothing but blanks", "turn 1: column 'q' is empty"]


def test_a_turn_that_utf8_cannot_carry_is_a_reject(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, {"id": "a", "q": "q", "lone": True}, {"id": "b", "q": "q", "lone": False})
    prompt = {"turns": ["{{ q }}", "{{ q }}{{ '\\ud800' if lone else '' }}"]}
    first, second = first_rows(spec(prompt=prompt, id="id"), tmp_path, 2)
    assert "surrogates" in first.refused and not second.refused
    assert snapshot_of(tmp_path, store, prompt=prompt, on_bad_row="skip").rows == 1


def test_turns_come_after_examples_and_conversations_and_lone_surrogates_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"user": "Hi!", "assistant": "Good day."}\n')
    write(tmp_path, {"id": "a", "m": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]})
    prompt = {"system": "s", "examples": "e.jsonl", "messages_from": "m", "turns": ["one", "two"]}
    (row,) = first_rows(spec(prompt=prompt, id="id"), tmp_path, 1)
    assert [one["content"] for one in row.decoded()] == ["s", "Hi!", "Good day.", "u", "v", "one"]
    assert row.fields == b"" and row.turns == ["one", "two"]
    with pytest.raises(Unfit):
        read_turns(["ok", 1])


def test_each_sample_is_a_conversation_of_its_own(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(2))
    manifest = snapshot_of(tmp_path, store, samples=2, sampling={"seed": 7, "temperature": 1})
    with plain_engine(MODEL) as engine:
        engine.text = answer
        finish(store, manifest, engine.url, "run-1")
    seeds = Counter((request["seed"], said(request).split("|")[1]) for request in engine.requests)
    assert set(seeds.values()) == {3} and len(seeds) == 4
    assert all(len(one.turns) == 3 for one in found(store, manifest).values())


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"prompt": {"turns": ["{{ q }}"], "user": "x"}}, "prompt: expected prompt.user, prompt.turns"),
        ({"prompt": {"turns": ["{{ q }}"], "turns_from": "t"}}, "prompt: expected prompt.user, prompt.turns"),
        ({"prompt": {"turns": []}}, "prompt.turns"),
        ({"prompt": {"turns": ["{{ q }}"] * 101}}, "prompt.turns"),
        ({"prompt": {"turns": ["{{ q }}"]}, "task": "completion"}, "for task completion"),
        ({"prompt": TURNS, "sampling": {"tools_from": "t"}}, "prompt.turns: expected no tools beside it"),
        ({"prompt": {"turns_from": "t"}, "keep_columns": ["turns"]}, "no such column beside prompt.turns_from"),
        ({"prompt": {"turns": ["{q}", "no column"]}}, "prompt.turns.0: expected a column in double braces"),
    ],
)
def test_what_has_no_meaning_beside_turns_is_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec(**attributes)


def test_datasets_without_turns_have_the_columns_that_they_had(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, {"id": "a", "turns": "t", "q": "q"})
    plain = {"user": "{{ q }}"}
    manifest = snapshot_of(tmp_path, store, prompt=plain, keep_columns=["turns"])
    with plain_engine(MODEL) as engine:
        finish(store, manifest, engine.url, "run-1")
    rows = table_of(store, manifest, tmp_path)
    assert rows["turns"].to_list() == ["t"] and rows.columns[-1] == "duplicate_of"
    (batch,) = store.current_objects(store.entries(manifest.snapshot)).values()
    written = pq.read_schema(pa.BufferReader(store.objects.get(store.batch_path(batch))))
    assert "turns" not in written.names
    assert spec_version(spec(prompt=plain)) == spec_version(spec(prompt={**plain, "turns": None}))
    assert spec_version(spec(prompt=plain)) != spec_version(spec(prompt={"turns": ["{{ q }}", "x"]}))


@pytest.mark.slow
def test_the_job_of_a_dataset_publishes_conversations_and_shows_them(tmp_path: Path) -> None:
    prompt = {"turns": ["{{ question }}", "Why?"]}
    with plain_engine(MODEL) as engine, dataset_project(tmp_path, prompt=prompt) as site:
        engine.text = answer
        check(site, engine)


def check(site: DatasetProject, engine: PlainEngine) -> None:
    site.source(["one", "one", "two"])  # the second is a duplicate: the temperature is 0
    assert site.materialize("prompts").success
    assert site.run_rows("00000", "00000", engine.url).success
    assert site.materialize("dataset").success
    table = published_table(site.store)
    assert table is not None and (table.rows, table.duplicates, table.prompt_tokens) == (3, 1, 20)
    rows = pl.read_parquet(table.glob(site.store.objects))
    assert len(engine.requests) == 4 and [len(turns) for turns in rows["turns"].to_list()] == [2, 2, 2]
    assert rows["prompt"][2].to_list() == rows["prompt"][0].to_list()


def test_answers_to_the_same_turns_are_taken_from_another_dataset(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(2))
    sampling = {"temperature": 0}
    manifest = snapshot_of(tmp_path, store, sampling=sampling)
    other = DatasetStore(store.objects, "e")
    with plain_engine(MODEL) as engine:
        engine.text = answer
        finish(store, manifest, engine.url, "run-1")
        engine.requests.clear()
        write(tmp_path, *questions(3))
        copy = snapshot_of(tmp_path, other, sampling=sampling, reuse=True)
        find_reusable(other, copy, True, workdir=tmp_path / "reuse")
        entries, intent = other.entries(copy.snapshot), Intent("run-2")
        identity = RunIdentity("run-2", intent, (entries[0].key, entries[-1].key))
        run = RangeRun(other, copy, plan_range(other, entries, intent), identity, reuse=True)
        asyncio.run(generate(run, engine.url))
        run.close()
    assert [said(request).split("|")[1] for request in engine.requests] == ["q2?"] * 3
    taken = found(other, copy)["r1"]
    assert (taken.reused_from, taken.output, taken.tries, len(taken.turns)) == ("d", "a3", 0, 3)
    prompts = table_of(other, copy, tmp_path)["prompt"].to_list()
    assert [one["content"] for one in prompts[1]] == ["Be kind.", "q1?", "a1", "Why?", "a2", "Shorter, q1."]


def test_exports_hold_the_whole_conversation(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(1))
    manifest = snapshot_of(tmp_path, store)
    with plain_engine(MODEL) as engine:
        engine.text = answer
        finish(store, manifest, engine.url, "run-1")
    (line,) = table_of(store, manifest, tmp_path).to_dicts()
    record = record_of(line, checked_options(list(line), "messages"))
    assert [one["content"] for one in record["messages"]] == [
        "Be kind.",
        "q0?",
        "a1",
        "Why?",
        "a2",
        "Shorter, q0.",
        "a3",
    ]
    record = record_of(line, checked_options(list(line), "alpaca"))
    assert record["history"] == [["q0?", "a1"], ["Why?", "a2"]] and record["instruction"] == "Shorter, q0."
