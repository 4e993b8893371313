"""Tool calls, reasoning, refusals and log-probabilities: from an engine's answer to the published table."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from support.dataset_project import DatasetProject, dataset_project
from support.simulated_engine import simulated_engine
from support.snapshots import MODEL, commit, questions, write_snapshot

from batch_assets.generation.range_run import Intent, plan_range
from batch_assets.publishing.published_table import published_table
from batch_assets.publishing.quality import Thresholds, quality
from batch_assets.publishing.verify import verify
from gpu_runner.answers import Alternative, AnswerParts, Logprobs, TokenLogprob, ToolCall
from gpu_runner.client.protocol import Completion, Transient, read_answer
from gpu_runner.rows import Outcome
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore
from resources.store.outcome_columns import PART_COLUMNS

CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOKEN = {
    "token": " Ja",
    "logprob": -0.5,
    "bytes": [32, 74, 97],
    "top_logprobs": [
        {"token": " Ja", "logprob": -0.5, "bytes": [32, 74, 97]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def choice(index: Any = 0, content: Any = "Ja", finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    return {"index": index, "message": message, "finish_reason": finish_reason, **more}


def read(*choices: Any, task: Any = "chat") -> Completion:
    return read_answer(task, 200, {}, orjson.dumps({"choices": choices, "usage": {}}))


def test_a_tool_call_is_kept_beside_an_empty_text() -> None:
    found = read(choice(content=None, finish_reason="tool_calls", message={"tool_calls": [CALL]}))
    assert (found.output, found.finish_reason) == ("", "tool_calls")
    assert found.parts.tool_calls == (ToolCall("call-1", "function", "weather", '{"city": "Oslo"}'),)


def test_a_custom_tool_call_is_kept_with_its_input() -> None:
    called = {"id": "c", "type": "custom", "custom": {"name": "code", "input": "print(1)"}}
    assert read(choice(message={"tool_calls": [called]})).parts.tool_calls == (
        ToolCall("c", "custom", "code", "print(1)"),
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_under_its_new_and_its_old_name(name: str) -> None:
    assert read(choice(message={name: "hmm", "tool_calls": []})).parts == AnswerParts(reasoning="hmm")
    both = {"reasoning": "hmm", "reasoning_content": "hmm"}
    assert read(choice(message=both)).parts.reasoning == "hmm"


def test_a_refusal_is_kept() -> None:
    found = read(choice(content=None, message={"refusal": "No."}))
    assert (found.output, found.parts.refusal) == ("", "No.")


def test_log_probabilities_of_chat_and_text_completions_have_one_form() -> None:
    chat = read(choice(logprobs={"content": [TOKEN]})).parts.logprobs
    top = (Alternative(" Ja", -0.5, b" Ja"), Alternative("\ufffd", -9999.0, b"\xc3"))
    assert chat is not None and list(chat) == [TokenLogprob(" Ja", -0.5, b" Ja", None, top)]
    given = {
        "tokens": ["Ja", "!"],
        "token_logprobs": [None, -1],
        "top_logprobs": [None, {"!": -1.0, "?": -2.5}],
        "text_offset": [0, 2],
    }
    text = {"index": 0, "text": "Ja!", "finish_reason": "stop", "logprobs": given}
    completion = read(text, task="completion").parts.logprobs
    assert completion is not None and list(completion) == [
        TokenLogprob("Ja", None, None, 0, ()),
        TokenLogprob("!", -1.0, None, 2, (Alternative("!", -1.0), Alternative("?", -2.5))),
    ]


def test_an_answer_without_parts_has_none() -> None:
    empty = {"tool_calls": [], "reasoning": None, "refusal": None, "function_call": None, "audio": None}
    assert read(choice(message=empty, logprobs=None)).parts == AnswerParts()


def test_the_choice_is_taken_by_its_index() -> None:
    assert read(choice(1, "second"), choice(0, "first")).output == "first"
    vectors = {"data": [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]}
    assert read_answer("embedding", 200, {}, orjson.dumps(vectors)).output == (1.0,)


def test_a_server_that_sends_one_choice_may_leave_its_index_out() -> None:
    assert read({"message": {"content": "only"}, "finish_reason": "stop"}).output == "only"


WRONG: list[list[Any]] = [
    [choice(1)],
    [choice(0, "a"), choice(0, "b")],
    [choice(None)],
    [choice(False)],
    [choice("0")],
    [{"message": {"content": "a"}, "finish_reason": "stop"}, choice(0)],
    [choice(message={"tool_calls": [CALL | {"function": {"name": "f", "arguments": {"city": "Oslo"}}}]})],
    [choice(message={"tool_calls": [CALL | {"function": {"name": None, "arguments": ""}}]})],
    [choice(message={"tool_calls": [CALL | {"type": "id"}]})],
    [choice(message={"tool_calls": [CALL] * 1025})],
    [choice(message={"tool_calls": CALL})],
    [choice(message={"reasoning": ["hmm"]})],
    [choice(message={"refusal": 3})],
    [choice(logprobs={"content": [TOKEN | {"logprob": "x"}]})],
    [choice(logprobs={"content": [TOKEN | {"logprob": True}]})],
    [choice(logprobs={"content": [TOKEN | {"logprob": -1e300}]})],
    [choice(logprobs={"content": [TOKEN | {"bytes": [256]}]})],
    [choice(logprobs={"content": [TOKEN | {"top_logprobs": [TOKEN] * 129}]})],
    [choice(logprobs=[TOKEN])],
    [choice(logprobs={"content": {"token": "a"}})],
]


@pytest.mark.parametrize("choices", WRONG)
def test_parts_of_another_type_than_the_protocol_says_are_garbage(choices: list[Any]) -> None:
    with pytest.raises(Transient) as raised:
        read(*choices)
    assert raised.value.code == "garbage_body"


@pytest.mark.parametrize(
    "given",
    [{"tokens": ["a"], "token_logprobs": []}, {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{}, {}]},
     {"tokens": ["a"], "token_logprobs": [-1], "text_offset": [1 << 40]}, {"tokens": [1], "token_logprobs": [-1]}],
)  # fmt: skip
def test_text_completions_with_lists_that_do_not_fit_are_garbage(given: Any) -> None:
    with pytest.raises(Transient):
        read({"index": 0, "text": "a", "finish_reason": "stop", "logprobs": given}, task="completion")


# --- the table ---


@contextlib.contextmanager
def generated(folder: Path, *arguments: str, **attributes: Any) -> Any:
    """A dataset of twelve questions and one that is asked twice, generated and published."""
    with dataset_project(folder, **attributes) as site:
        site.source([f"What is {i} plus {i}?" for i in [*range(12), 5]])
        assert site.materialize("prompts").success
        with simulated_engine("--speed", "200", *arguments, model=MODEL) as engine:
            assert site.run_rows("00000", "00001", engine.url).success
        assert site.materialize("dataset").success
        yield site


def table_of(site: DatasetProject) -> list[dict[str, Any]]:
    table = published_table(site.store)
    assert table is not None
    read = pq.read_table(io.BytesIO(site.store.objects.get(f"{table.path}/{table.files[0].name}")))
    lines: list[dict[str, Any]] = read.to_pylist()
    return lines


@pytest.mark.slow
def test_every_part_that_was_asked_for_stands_in_the_published_table(tmp_path: Path) -> None:
    extra = {"tools": TOOLS, "logprobs": True, "top_logprobs": 20}
    sampling = {"temperature": 0, "max_tokens": 64, "chat_template_kwargs": {"enable_thinking": True}, "extra": extra}
    with generated(tmp_path, sampling=sampling) as site:
        *lines, repeated = table_of(site)
        assert repeated["duplicate_of"] == "id-0005"
        assert all(repeated[name] == lines[5][name] for name in PART_COLUMNS)
        assert all(line["reasoning"] and line["refusal"] is None for line in lines)
        calls = [line for line in lines if line["tool_calls"]]
        texts = [line for line in lines if line["output"]]
        assert len(calls) + len(texts) == 12 and calls and texts
        for line in calls:
            ((call,), said) = line["tool_calls"], (line["output"], line["finish_reason"])
            assert said == ("", "tool_calls")
            assert (call["type"], call["name"]) == ("function", "weather")
            assert orjson.loads(call["arguments"]).keys() == {"city"}
        for line in texts:
            assert "".join(token["token"] for token in line["logprobs"]) == line["output"]
            assert all(token["bytes"].decode() == token["token"] for token in line["logprobs"])
            assert {len(token["top_logprobs"]) for token in line["logprobs"]} == {20}
            assert min(other["logprob"] for other in line["logprobs"][0]["top_logprobs"]) == -9999.0
        assert verify(site.store, {}).differences[0].kind == "missing_catalog_entry"  # and nothing is corrupt
        table = published_table(site.store)
        assert table is not None
        figures = {one.name: one for one in quality(site.store, table, site.manifest(), Thresholds())}
        assert (figures["empty_output_rate"].value, figures["repeated_output_rate"].value) == (0.0, 0.0)


@pytest.mark.slow
def test_text_completions_have_their_log_probabilities_with_offsets(tmp_path: Path) -> None:
    sampling = {"max_tokens": 8, "extra": {"logprobs": 2}}
    with generated(tmp_path, task="completion", prompt={"text": "{{ question }}"}, sampling=sampling) as site:
        for line in table_of(site):
            for token in line["logprobs"]:
                at = token["text_offset"]
                assert line["output"][at : at + len(token["token"])] == token["token"]
            assert {len(token["top_logprobs"]) for token in line["logprobs"]} == {2}


@pytest.mark.slow
def test_a_plain_dataset_has_the_columns_and_nothing_in_them(tmp_path: Path) -> None:
    with generated(tmp_path) as site:
        assert all(line[name] is None for line in table_of(site) for name in PART_COLUMNS)


# --- the store ---


def parts() -> AnswerParts:
    token = TokenLogprob("a", -0.25, b"a", 3, (Alternative("a", -0.25, b"a"), Alternative("b", None)))
    return AnswerParts((ToolCall(None, "function", "f", "{}"),), "hmm", "no", Logprobs.of([token]))


@pytest.mark.slow
def test_objects_and_journal_hold_every_part(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "d")
    manifest = write_snapshot(store, questions(20))
    plain = commit(store, manifest, keys=["00000"])
    assert plain.keys() == {"00000"}
    ((entry, rows),) = store.rows(manifest, store.entries(manifest.snapshot)[1:])
    (batch,) = store.objects_by_batch()["00000"]
    like = store.outcomes(batch)[0]
    outcomes = [with_parts_of(like, row.row_id, row.row_key, number) for number, row in enumerate(rows)]
    path = store.journal.append(("00000", "00001"), "", "run", 1, {entry.key: outcomes}, "chat")
    assert store.journal.read(path) == {entry.key: outcomes}
    footer = plain["00000"].model_copy(update={"key": entry.key, "data_version": entry.data_version})
    assert store.commit(footer, outcomes, "chat")[1]
    assert store.outcomes(store.objects_by_batch()[entry.key][0]) == outcomes


def with_parts_of(like: Outcome, row_id: str, row_key: str, number: int) -> Outcome:
    return replace(like, row_id=row_id, row_key=row_key, parts=parts() if number == 3 else AnswerParts())


def test_objects_of_plain_texts_are_what_earlier_versions_wrote(local_objects: Objects) -> None:
    """So a store that was written before there were parts is read, keeps its data versions, and asks for nothing."""
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(20))
    commit(store, manifest)
    (path,) = [store.batch_path(found[0]) for key, found in store.objects_by_batch().items() if key == "00000"]
    written = pq.read_table(io.BytesIO(local_objects.get(path)))
    assert not set(written.schema.names) & set(PART_COLUMNS)
    assert plan_range(store, store.entries(manifest.snapshot), Intent("next")).todo == []
    read = store.batch_table(store.objects_by_batch()["00000"][0])
    assert all(read.column(name).null_count == 10 for name in PART_COLUMNS)
