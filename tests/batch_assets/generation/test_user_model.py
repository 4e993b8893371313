"""Conversations whose user is played by a model: who is asked what, and what is kept over kills and redrives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.conversation_runs import answer, finish, found, killed, questions, said, snapshot_of, table_of, write
from support.dataset_project import MODEL
from support.plain_engine import plain_engine
from support.range_runs import a_run
from support.specs import spec

from batch_assets.capacity_planning.preview_rows import ask_rows, first_rows
from batch_assets.capacity_planning.workload_estimate import work_of_source
from batch_assets.component import spec_version
from batch_assets.exports.training_formats import record_of
from batch_assets.generation.range_run import Intent
from batch_assets.publishing.current_rows import find_rows
from batch_assets.publishing.dead_letters import dead_letters
from batch_assets.spec.errors import SpecError
from batch_assets.spec.export_options import checked_options
from gpu_runner.rows import Outcome, row_key
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore
from resources.store.journal import note_furthest

USER = {"system": "You are {{ q }}.", "turns": 3, "opening": "Yes?", "sampling": {"temperature": 1, "max_tokens": 40}}
PROMPT = {"system": "Be kind.", "user": "{{ q }}?", "user_model": USER}


def by_role(request: dict[str, Any]) -> str:
    """The user's model says how many texts it saw, as u2 or u3."""
    if request["messages"][0]["content"].startswith("You are"):
        return f"u{sum(message['role'] == 'assistant' for message in request['messages']) + 1}"
    return answer(request)


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "d")


def test_a_model_plays_the_user_after_the_first_answer(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(5))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT, sampling={"temperature": 0, "max_tokens": 90})
    with plain_engine(MODEL) as engine:
        engine.text = by_role
        finish(store, manifest, engine.url, "run-1")
    asked = {said(request): request for request in engine.requests}
    assert len(engine.requests) == len(asked) == 25
    assert {text for text in asked if "q1" in text} == {
        "Be kind.|q1?",
        "You are q1.|Yes?|q1?|a1",
        "Be kind.|q1?|a1|u2",
        "You are q1.|Yes?|q1?|a1|u2|a2",
        "Be kind.|q1?|a1|u2|a2|u3",
    }
    users = asked["You are q1.|Yes?|q1?|a1|u2|a2"]
    assert [one["role"] for one in users["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert (users["max_tokens"], users["temperature"], asked["Be kind.|q1?"]["max_tokens"]) == (40, 1, 90)
    rows = table_of(store, manifest, tmp_path)
    assert rows["output"].to_list() == ["a3"] * 5 and rows["tries"].to_list() == [5] * 5
    assert rows["prompt_tokens"].to_list() == [25] * 5
    assert [one["content"] for one in rows["prompt"][1]] == ["Be kind.", "q1?", "a1", "u2", "a2", "u3"]
    assert [(one["user"], one["output"], one["tries"]) for one in rows["turns"][1]] == [
        ("q1?", "a1", 1),
        ("u2", "a2", 1),
        ("u3", "a3", 1),
    ]
    written = rows["user_turns"][1].to_list()
    assert [(one["model"], one["completion_tokens"], one["tries"]) for one in written] == [(MODEL, 3, 1)] * 2
    record = record_of(rows.row(1, named=True), checked_options(rows.columns, "messages"))
    assert [one["content"] for one in record["messages"]] == ["Be kind.", "q1?", "a1", "u2", "a2", "u3", "a3"]


def test_each_text_of_a_killed_run_is_asked_once(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(12))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT, batch_rows=6)
    with plain_engine(MODEL) as engine:
        killed(a_run(store, manifest, "run-1"), engine, 27, by_role)
        known: dict[tuple[str, str], Outcome] = {}
        for path in store.journal.segments(("00000", "99999")):
            for rows in store.journal.read(path).values():
                note_furthest(known, rows)
        kept = sum(one.texts - 1 for one in known.values())
        waits = [one for one in known.values() if one.turns and not one.turns[-1].answered]
        assert waits and all(one.begun for one in waits)  # a user's text is kept before it is answered
        states = find_rows(store, manifest, store.entries(manifest.snapshot), lambda rows: rows, 12).rows
        shown = next(row for row in states if row.row_id == waits[0].row_id)
        assert shown.prompt[-1]["content"] == waits[0].turns[-1].user
        engine.requests.clear()
        finish(store, manifest, engine.url, "run-2")
    assert len(engine.requests) == 60 - kept and max(Counter(map(said, engine.requests)).values()) == 1
    whole = found(store, manifest).values()
    assert {(one.output, len(one.turns), one.tries, one.completion_tokens) for one in whole} == {("a3", 3, 5, 15)}
    assert {tuple(turn.user_model is not None for turn in one.turns) for one in whole} == {(False, True, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "left", "code"),
    [
        ("Be kind.|q2?|a1|u2", ["Be kind.|q2?|a1|u2", "You are q2.|Yes?|q2?|a1|u2|a2", "…"], "rejected_400"),
        ("You are q2.|Yes?|q2?|a1", ["You are q2.|Yes?|q2?|a1", "Be kind.|q2?|a1|u2", "…", "…"], "rejected_400"),
        (" ", ["You are q2.|Yes?|q2?|a1", "Be kind.|q2?|a1|u2", "…", "…"], "empty_user_turn"),
    ],
)
def test_a_redrive_goes_on_from_the_text_that_failed(
    tmp_path: Path, store: DatasetStore, fails: str, left: list[str], code: str
) -> None:
    write(tmp_path, *questions(4))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT)

    def failing(request: dict[str, Any]) -> str | None:
        if fails == " ":
            return " " if said(request) == "You are q2.|Yes?|q2?|a1" else by_role(request)
        return None if said(request) == fails else by_role(request)

    with plain_engine(MODEL) as engine:
        engine.text = failing
        finish(store, manifest, engine.url, "run-1")
        dead = found(store, manifest)["r2"]
        assert dead.error == code and dead.turns[0].output == "a1"
        assert [turn.answered for turn in dead.turns] == ([True, False] if "u2" in fails else [True])
        assert dead_letters(store, manifest, workdir=tmp_path).rows == 1
        rows = table_of(store, manifest, tmp_path)
        assert rows["turns"][2][-1]["output"] == (None if "u2" in fails else "a1")
        engine.text = by_role
        engine.requests.clear()
        finish(store, manifest, engine.url, "run-2", Intent("run-2", redrive=True))
    again = [said(request) for request in engine.requests]
    assert len(again) == len(left) and all(text == seen for text, seen in zip(left, again, strict=True) if text != "…")
    whole = found(store, manifest)["r2"]
    assert (whole.output, len(whole.turns), whole.tries) == ("a3", 3, 5)


@pytest.mark.slow
def test_the_row_key_covers_who_the_user_is(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(1))
    keys = set()
    for change in ({}, {"turns": 4}, {"opening": "Well?"}, {"system": "You were {{ q }}."}, {"sampling": {}}):
        made = {**PROMPT, "user_model": {**USER, **change}}
        manifest = snapshot_of(tmp_path, store, prompt=made)
        ((_, (row,)),) = store.rows(manifest, store.entries(manifest.snapshot))
        assert row.user is not None and (row.turns, row.user.turns) == (("q0?",), 4 if "turns" in change else 3)
        key = row_key(manifest.settings(), orjson.loads(row.prompt), turns=row.turns, user_system=row.user.system)
        assert key == row.row_key
        keys.add(key)
    assert len(keys) == 5
    plain = {"user": "{{ q }}"}
    assert spec_version(spec(prompt=plain)) == spec_version(spec(prompt={**plain, "user_model": None}))


def test_a_preview_asks_the_whole_conversation_and_a_plan_counts_it(tmp_path: Path) -> None:
    write(tmp_path, *questions(2))
    made = spec(prompt=PROMPT, model=MODEL, id="id", sampling={"max_tokens": 10})
    rows = first_rows(made, tmp_path, 2)
    with plain_engine(MODEL) as engine:
        engine.text = by_role
        (first, _), _ = ask_rows(rows, made.generation(), engine.url, None)
    assert [one["content"] for one in first.decoded()] == ["Be kind.", "q0?", "a1", "u2", "a2", "u3"]
    assert first.answer is not None and first.answer.completion is not None
    assert (first.answer.completion.output, first.answer.completion.prompt_tokens) == ("a3", 25)
    work = work_of_source(made, tmp_path)
    assert work.mix.output_tokens == 5 * 20  # five texts, each half of the larger limit


def test_another_name_that_the_engine_serves_may_play_the_user(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(1))
    user = {**USER, "model": MODEL}
    lora = {"lora": {"name": "tuned", "path": "/adapters/tuned"}}
    generation = spec(prompt={**PROMPT, "user_model": user}, model=MODEL, engine=lora).generation()
    assert generation.of_user is not None
    assert (generation.asked_model, generation.of_user.asked_model) == ("tuned", MODEL)
    same = spec(prompt={**PROMPT, "user_model": user}, model=MODEL).generation()
    assert same == spec(prompt=PROMPT, model=MODEL).generation()


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"prompt": {"user_model": USER}}, "prompt: expected prompt.user"),
        ({"prompt": {"turns": ["{{ q }}"], "user_model": USER}}, "prompt.user alone, found prompt.turns"),
        ({"prompt": {**PROMPT, "messages_from": "m"}}, "prompt.user alone, found prompt.messages_from"),
        ({"prompt": PROMPT, "task": "completion"}, "for task completion"),
        ({"prompt": {**PROMPT, "user_model": {"turns": 3}}}, "prompt.user_model.system"),
        ({"prompt": {**PROMPT, "user_model": {**USER, "turns": 1}}}, "prompt.user_model.turns"),
        ({"prompt": {**PROMPT, "user_model": {**USER, "turns": 101}}}, "prompt.user_model.turns"),
        ({"prompt": {**PROMPT, "user_model": {**USER, "opening": ""}}}, "prompt.user_model.opening"),
        ({"prompt": {**PROMPT, "user_model": {**USER, "endpoint": "http://a"}}}, "prompt.user_model.endpoint"),
        ({"prompt": {**PROMPT, "user_model": {**USER, "model": "other"}}}, "A run rents engines for one model"),
        (
            {"prompt": {**PROMPT, "user_model": {**USER, "sampling": {"temperature": "{{ t }}"}}}},
            "prompt.user_model.sampling.temperature: expected no column in it",
        ),
        (
            {"prompt": {**PROMPT, "user_model": {**USER, "sampling": {"tools_from": "t"}}}},
            "prompt.user_model.sampling.tools_from",
        ),
        ({"prompt": {**PROMPT, "user_model": {**USER, "sampling": {"extra": {"tools": [1]}}}}}, "tools"),
        ({"prompt": {**PROMPT, "user_model": {**USER, "sampling": {"extra": {"n": 2}}}}}, "prompt.user_model.sampling"),
        ({"prompt": PROMPT, "sampling": {"tools_from": "t"}}, "prompt.user_model: expected no tools beside it"),
        ({"prompt": PROMPT, "keep_columns": ["user_turns"]}, "no such column beside prompt.user_model"),
        ({"prompt": PROMPT, "reuse": True, "sampling": {"temperature": 0}}, "reuse"),
    ],
)
def test_what_a_users_model_cannot_be_is_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec(**attributes)


def test_the_columns_of_conversations_can_be_filtered_and_exported() -> None:
    rule = {"long": {"where": "turns IS NULL OR user_turns IS NULL"}}
    made = spec(prompt=PROMPT, filter=rule)
    assert {"turns", "user_turns"} <= made.table_columns
    assert "user_turns" not in spec(prompt={"turns": ["{{ q }}"]}).table_columns
    assert not {"turns", "user_turns"} & spec(prompt={"user": "{{ q }}"}).table_columns


def test_a_user_without_a_system_message_is_a_bad_row(tmp_path: Path) -> None:
    write(tmp_path, {"id": "a", "q": "q", "who": ""}, {"id": "b", "q": "q", "who": "me"})
    made = spec(prompt={**PROMPT, "user_model": {**USER, "system": "{{ who or '' }}"}}, id="id")
    first, second = first_rows(made, tmp_path, 2)
    assert first.refused == "user_model.system: nothing but blanks" and second.user_system == "me"
