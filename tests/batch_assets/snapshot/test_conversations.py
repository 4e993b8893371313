"""Conversations in a column, system texts and examples in files: what is asked, and which rows cannot be used."""

from __future__ import annotations

import json
import os
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

from batch_assets.asset_metadata.sample_rows import sample_markdown
from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.ingest import ingest
from batch_assets.snapshot.prompts.messages import read_conversation
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec
from batch_assets.spec.sampling_values import Unfit
from gpu_runner.client.protocol import CONTINUES_ANSWER, Repair, Requests
from gpu_runner.rows import Row, row_key
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}
ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
WITH_TOOLS = [
    {"role": "user", "content": "find it"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
]


def spec_of(folder: Path, **attributes: Any) -> GeneratedDatasetSpec:
    least = {"name": "d", "source": {"path": "a.jsonl"}, "prompt": {"messages_from": "m"}, "model": "tiny"}
    return load_spec(least | attributes, folder / "defs.yaml")


def write(folder: Path, *cells: Any, **more: Any) -> None:
    lines = [json.dumps({"m": cell, "q": f"q{i}", **more}) for i, cell in enumerate(cells)]
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))


def rows_of(folder: Path, objects: Objects, **attributes: Any) -> list[Row]:
    store, spec = DatasetStore(objects, "d"), spec_of(folder, **attributes)
    number = len(list(folder.glob("work-*")))
    manifest = build_snapshot(spec, store, now=1.0, workdir=folder / f"work-{number}", base=folder)
    return [row for _, rows in store.rows(manifest, store.entries(manifest.snapshot)) for row in rows]


def messages(row: Row) -> list[Any]:
    return list(orjson.loads(row.prompt))


def refused(folder: Path, *cells: Any, **attributes: Any) -> list[str]:
    write(folder, *cells)
    return [row.refused for row in first_rows(spec_of(folder, **attributes), folder, len(cells))]


def test_a_conversation_is_the_same_prompt_as_json_text_objects_and_structs(
    tmp_path: Path, local_objects: Objects
) -> None:
    write(tmp_path, WITH_TOOLS, json.dumps(WITH_TOOLS))
    first, second = rows_of(tmp_path, local_objects)
    pq.write_table(pa.table({"m": [WITH_TOOLS]}), tmp_path / "a.parquet")
    (third,) = rows_of(tmp_path, local_objects, source={"path": "a.parquet"})
    assert first.prompt == second.prompt == third.prompt and first.row_key == third.row_key
    assert messages(first) == [WITH_TOOLS[0], {"role": "assistant", "tool_calls": [CALL]}, WITH_TOOLS[2]]
    assert first.row_key == row_key(spec_of(tmp_path).generation(), messages(first))
    assert first.fields == b""


def test_a_system_text_and_examples_stand_before_the_column_and_a_user_message_after_it(
    tmp_path: Path, local_objects: Objects
) -> None:
    (tmp_path / "system.md").write_text("You know {{ q }}.\n")
    (tmp_path / "shots.jsonl").write_text('{"user": "{{ a }}", "assistant": "b"}\n\n{"user": "c", "assistant": "d"}\n')
    write(tmp_path, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}])
    prompt = {"system_from": "system.md", "examples": "shots.jsonl", "messages_from": "m", "user": "And {{ q }}?"}
    (row,) = rows_of(tmp_path, local_objects, prompt=prompt)
    assert [(one["role"], one["content"]) for one in messages(row)] == [
        ("system", "You know q0."),
        ("user", "{{ a }}"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", "hi"),
        ("assistant", "yes?"),
        ("user", "And q0?"),
    ]
    assert row.fields == b""
    (tmp_path / "system.md").write_text("You knew {{ q }}.\n")
    (changed,) = rows_of(tmp_path, local_objects, prompt=prompt)
    assert changed.row_key != row.row_key


def test_a_row_whose_last_message_is_the_assistant_s_is_continued_and_others_are_not(
    tmp_path: Path, local_objects: Objects
) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "Well"}]
    write(tmp_path, ASKED, begun)
    rows = {len(messages(row)): row for row in rows_of(tmp_path, local_objects)}
    requests, generation = Requests(spec_of(tmp_path).generation()), spec_of(tmp_path).generation()
    assert rows[2].own_fields == b"" and orjson.loads(rows[3].fields) == CONTINUES_ANSWER
    body = orjson.loads(requests.body(rows[3].prompt, fields=rows[3].own_fields))
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert rows[3].row_key == row_key(generation, messages(rows[3]), CONTINUES_ANSWER)
    repair = orjson.loads(requests.body(rows[3].prompt, Repair(" no", "bad", 1), rows[3].own_fields))
    assert not CONTINUES_ANSWER.keys() & repair.keys()
    assert [one["content"] for one in repair["messages"][2:3]] == ["Well no"]


def test_messages_of_the_file_that_end_with_the_assistant_s_are_continued_in_every_row(tmp_path: Path) -> None:
    ends = {"messages": [{"role": "user", "content": "{{ q }}"}, {"role": "assistant", "content": "Sure:"}]}
    sampling = spec_of(tmp_path, prompt=ends).generation().sampling
    assert sampling["continue_final_message"] is True and sampling["add_generation_prompt"] is False
    own = {"extra": {"continue_final_message": False, "add_generation_prompt": True}}
    assert spec_of(tmp_path, prompt=ends, sampling=own).generation().sampling["continue_final_message"] is False
    with pytest.raises(SpecError, match=r"messages.0.role: expected a last message of role user, or of assistant"):
        spec_of(tmp_path, prompt={"messages": [{"role": "system", "content": "{{ q }}"}]})


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages_from": "m", "text": "{{ q }}"},
        {"messages_from": "m", "messages": [{"role": "user", "content": "{{ q }}"}]},
        {"system": "a", "system_from": "b", "user": "{{ q }}"},
        {"examples": "a", "messages": [{"role": "user", "content": "{{ q }}"}]},
        {"system_from": "a"},
        {"examples": "a"},
    ],
)
def test_ways_to_write_a_prompt_that_exclude_each_other_are_refused(tmp_path: Path, prompt: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"prompt: expected prompt\.user, prompt\.turns, "):
        spec_of(tmp_path, prompt=prompt)
    if "text" not in prompt:
        with pytest.raises(SpecError, match=r"prompt\.text \(or prompt\.user\) alone for task completion"):
            spec_of(tmp_path, prompt=prompt, task="completion")


def deep(levels: int) -> str:
    return '[{"role": "user", "content": ' + "[" * levels + "]" * levels + "}]"


CALLS = {"role": "assistant", "tool_calls": [CALL]}
UNFIT: list[tuple[Any, str]] = [
    (None, "expected a list of messages, or its JSON text, found nothing"),
    (7, "found a number"),
    ("no json", "found text that is no JSON"),
    ('{"role": "user"}', "found a mapping"),
    ([], "found an empty list"),
    ([{"role": "user", "content": "x"}] * 10_000, "expected at most 2,000 messages, found 10,000"),
    (deep(10_000), "found text that is no JSON"),
    (deep(500), "message 1: part 1: expected type text"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": json.loads("[" * 99 + "]" * 99)}]}],
        "fewer levels",
    ),
    ("[" + " " * (1 << 20) + "]", "expected JSON text of at most 1,048,576 characters"),
    (
        [{"role": "bot", "content": "x"}],
        "expected role system, developer, user, assistant or tool, found bot",
    ),
    ([{"from": "human", "value": "x"}], "found none, but 'from', 'value'"),
    (["x"], "message 1: expected role and content, found text"),
    ([{"role": "user"}], "expected content in a message of role user, found none"),
    ([{"role": "user", "content": " "}], "found nothing but blanks"),
    ([{"role": "user", "content": 3}], "text or a list of parts, found a number"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "part 1: expected text in text, found a number"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "expected image_url, found nothing"),
    ([{"role": "user", "content": "x", "weight": 1}], "found 'weight'"),
    ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "found 'tool_calls'"),
    ([{"role": "assistant"}, ASKED[1]], "expected content in a message of role assistant"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, ASKED[1]], "tool call 1: expected text in id"),
    ([{"role": "assistant", "tool_calls": [CALL, CALL]}, ASKED[1]], "found one id twice"),
    ([{"role": "assistant", "tool_calls": [{"id": "a"}]}, ASKED[1]], "expected {id, type: function"),
    (
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}, ASKED[1]],
        "expected text in function.arguments, found a mapping",
    ),
    ([{"role": "assistant", "tool_calls": [CALL] * 200}, ASKED[1]], "expected at most 128 tool_calls, found 200"),
    ([{"role": "tool", "content": "x"}], "found no tool_call_id"),
    ([CALLS, {"role": "tool", "content": "x", "tool_call_id": "c2"}], "found the id of none"),
    ([ASKED[1], ASKED[0]], "expected a last message of role user, tool or assistant, found system"),
    ([ASKED[1], CALLS], "which the model continues, found tool calls"),
    ([{"role": "user", "content": "x" * (1 << 20)}], "bytes, more than"),
    ([{"role": "user", "content": [{"type": "file", "file": {"n": 1 << 70}}]}], "whole numbers of at most 64 bits"),
    *[
        ([{"role": "assistant", "content": "x", "tool_calls": calls}, ASKED[1]], "expected a list of tool_calls")
        for calls in ("", 0, False, {})
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "words"), UNFIT, ids=[words[:50] for _, words in UNFIT])
def test_a_row_with_no_conversation_is_refused_with_one_reason(tmp_path: Path, cell: Any, words: str) -> None:
    (reason,) = refused(tmp_path, cell)
    assert words in reason and len(reason) < 300
    (tmp_path / "w").mkdir()
    with pytest.raises(SourceError, match="1 row cannot be used"):
        ingest(spec_of(tmp_path), tmp_path, tmp_path / "w")


def test_a_second_system_message_is_refused(tmp_path: Path) -> None:
    (reason,) = refused(tmp_path, ASKED, prompt={"system": "Be {{ q }}.", "messages_from": "m"})
    assert reason == "column 'm': message 1: expected no system message behind prompt.system, found one"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("system_from", None, "expected a file for prompt.system_from"),
        ("system_from", b" \n", "found nothing but blanks"),
        ("system_from", b"{{ q", "expected a Jinja template"),
        ("system_from", b"\xff", "expected UTF-8"),
        ("system_from", b"x" * ((1 << 20) + 1), "expected at most 1,048,576 bytes"),
        ("examples", None, "expected a file for prompt.examples"),
        ("examples", b"\n", "expected at least one example"),
        ("examples", b'{"user": "a"}\n', "line 1: expected"),
        ("examples", b'{"user": "a", "assistant": "b"}\n[1]\n', "line 2: expected"),
        ("examples", b'{"user": "a", "assistant": 3}\n', "line 1: expected text in assistant"),
        ("examples", b'{"user": "a", "assistant": "b"}\n' * 600, "expected at most 500 examples"),
        ("examples", b"[" * 10_000, "line 1: expected"),
        ("examples", b'{"user": "a", "assistant": "b"}\n{"user": "a\x00", "assistant": "b"}', "line 2: expected"),
        ("examples", b'{"user": "a", "assistant": "\\ud800"}', "line 1: expected"),
        ("examples", b'{"role": "system", "content": "a"}', "found the keys 'role', 'content'"),
        ("examples", b'{"user": "a", "assistant": "b", "system": "c"}', "found the keys 'user', 'assistant', 'system'"),
    ],
)
def test_a_file_of_the_prompt_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    write(tmp_path, ASKED)
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(SourceError, match=r"file[:,] ") as found:
        first_rows(spec_of(tmp_path, prompt={name: "file", "user": "{{ q }}"}), tmp_path, 1)
    assert words in str(found.value)
    assert len(str(found.value)) < 400


def test_a_pipe_or_a_folder_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, ASKED)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(SourceError, match="found a folder, a pipe or a device"):
            first_rows(spec_of(tmp_path, prompt={"system_from": name, "user": "{{ q }}"}), tmp_path, 1)


def test_files_of_the_operating_system_are_not_sent_also_behind_a_link(tmp_path: Path) -> None:
    write(tmp_path, ASKED)
    (tmp_path / "link").symlink_to("/proc/self/environ")
    for key in ("system_from", "examples"):
        for name in ("/proc/self/environ", "link", "../" * 40 + "proc/self/environ"):
            with pytest.raises(SourceError, match="found one of the operating system's own"):
                first_rows(spec_of(tmp_path, prompt={key: name, "user": "{{ q }}"}), tmp_path, 1)


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85"])
def test_a_line_of_examples_ends_where_a_line_of_json_does(tmp_path: Path, sign: str) -> None:
    """As JSON writes them, U+2028 and others may stand in a text as they are."""
    write(tmp_path, ASKED)
    text = orjson.dumps({"user": f"a{sign}b", "assistant": "c"})
    (tmp_path / "shots").write_bytes(text + b"\r\n" + text)
    (row,) = first_rows(spec_of(tmp_path, prompt={"examples": "shots", "user": "{{ q }}"}), tmp_path, 1)
    assert [one["content"] for one in orjson.loads(row.prompt)] == [f"a{sign}b", "c"] * 2 + ["q0"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "type", "text", "id"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_value_is_a_conversation_or_has_one_reason(value: Any) -> None:
    try:
        found = read_conversation(value)
    except Unfit as error:
        assert 0 < len(str(error)) < 300
    else:
        assert read_conversation(json.loads(orjson.dumps(found))) == found


@pytest.mark.slow
def test_conversations_are_sent_as_they_are_and_stand_in_the_table(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "look"}]}]
    begun = [ASKED[1], {"role": "assistant", "content": "Well"}]
    lines = [{"id": name, "m": cell} for name, cell in (("a", WITH_TOOLS), ("b", parts), ("c", begun))]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompt = {"messages_from": "m", "system": "s"}
    with plain_engine(MODEL) as engine, dataset_project(tmp_path, prompt=prompt) as site:
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        asked = {one["messages"][-1]["role"]: one for one in engine.requests}
        assert {role: CONTINUES_ANSWER.items() <= one.items() for role, one in asked.items()} == {
            "tool": False,
            "user": False,
            "assistant": True,
        }
        assert asked["tool"]["messages"][2]["tool_calls"] == [CALL]
        assert asked["user"]["messages"][1]["content"] == parts[0]["content"]
        assert site.materialize("dataset").success
        table = published_table(site.store)
        assert table is not None
        (file,) = table.files
        data = pq.read_table(pa.BufferReader(site.store.objects.get(f"{table.path}/{file.name}")))
        shown = {line["row_id"]: line["prompt"] for line in data.to_pylist()}
        assert shown["a"][2]["tool_calls"] == [CALL] and shown["a"][2]["content"] is None
        assert shown["a"][3]["tool_call_id"] == "c1" and shown["c"][2]["content"] == "Well"
        assert orjson.loads(shown["b"][1]["content"]) == parts[0]["content"]
        assert "calls find" in sample_markdown(site.store, table)
