"""Records of each format, and lines of which there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_assets.exports.training_formats import LeftOut, record_of
from batch_assets.spec.export_options import BadOption, ExportError, Format, checked_options, is_validation

KNOWN = (
    "row_id",
    "prompt",
    "output",
    "reasoning",
    "tool_calls",
    "error",
    "finish_reason",
    "topic",
    "worse",
    "question",
)
JUDGED = (*KNOWN, "answers", "best", "worst")
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
LINE: Mapping[str, Any] = {
    **dict.fromkeys(KNOWN),
    "row_id": "a",
    "prompt": ASKED,
    "output": "Because.",
    "topic": "tea",
    "worse": "No idea.",
    "question": "How?",
}
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]


def made(form: str, line: Mapping[str, Any] = LINE, **options: Any) -> dict[str, Any]:
    return record_of(line, checked_options(KNOWN, form, **options))


def test_a_conversation_with_tool_calls_is_left_out_in_every_format() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    answer = {"role": "tool", "content": "found", "tool_call_id": "1", "tool_calls": None}
    for form in ("messages", "sharegpt", "alpaca", "prompt-completion"):
        for prompt in ([ASKED[1], call, answer], [ASKED[1], answer]):
            with pytest.raises(LeftOut, match="tool_calls"):
                made(form, {**LINE, "prompt": prompt})


@pytest.mark.parametrize("form", ["messages", "sharegpt", "alpaca", "prompt-completion", "preference"])
@pytest.mark.parametrize(
    "cell",
    [["a"], [None], [[]], 7, {"role": "user"}, [{"from": "human", "value": "x"}], [{"role": "user", "content": [1]}]],
)
def test_a_column_that_holds_no_prompt_leaves_its_line_out(cell: Any, form: str) -> None:
    mapping = ["prompt=topic", *(["chosen=output", "rejected=worse"] if form == "preference" else [])]
    with pytest.raises(LeftOut, match="no_prompt"):
        made(form, {**LINE, "topic": cell}, mapping=mapping)


@pytest.mark.parametrize(
    ("begun", "output", "engine"),
    [
        ("Be", "cause it is.", "0.12.0"),
        ("Be", "cause it is.", "llama.cpp b6000"),
        ("Be", "Because it is.", "llama.cpp b6000"),
        ("B", "ecause it is.", None),
        ("", "Because it is.", "0.12.0"),
    ],
)
def test_an_answer_that_was_begun_is_one_message_with_its_beginning(
    begun: str, output: str, engine: str | None
) -> None:
    line = {**LINE, "prompt": [*ASKED, {"role": "assistant", "content": begun}], "output": output, "engine": engine}
    twice = {**line, "prompt": [*ASKED, {"role": "assistant", "content": "I"}], "output": "I", "engine": "0.12.0"}
    assert made("messages", twice)["messages"][-1]["content"] == "II"  # "II" is the second of its name
    answer = {"role": "assistant", "content": "Because it is."}
    assert made("messages", line) == {"messages": [*ASKED, answer]}
    assert made("prompt-completion", line) == {"prompt": ASKED, "completion": [answer]}
    assert made("sharegpt", line)["conversations"][-1] == {"from": "gpt", "value": "Because it is."}
    developer = [{"role": "developer", "content": "Be brief."}, ASKED[1]]
    assert made("messages", {**LINE, "prompt": developer})["messages"][0] == ASKED[0]


def test_each_format_is_as_its_readers_document_it() -> None:
    answer = {"role": "assistant", "content": "Because."}
    assert made("messages") == {"messages": [*ASKED, answer]}
    assert made("prompt-completion") == {"prompt": ASKED, "completion": [answer]}
    assert made("sharegpt") == {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "Because."},
        ]
    }
    assert made("alpaca") == {
        "instruction": "Why?",
        "input": "",
        "output": "Because.",
        "system": "Be brief.",
        "history": [],
    }
    assert made("alpaca", {**LINE, "prompt": TALK})["history"] == [["Hi", "Hello"]]
    assert made("preference", mapping=["chosen=output", "rejected=worse"]) == {
        "prompt": ASKED,
        "chosen": [answer],
        "rejected": [{"role": "assistant", "content": "No idea."}],
    }


def test_a_prompt_that_is_a_text_makes_standard_records_and_one_message() -> None:
    assert made("prompt-completion", mapping=["prompt=question"]) == {"prompt": "How?", "completion": "Because."}
    pair = made("preference", mapping=["prompt=question", "chosen=output", "rejected=worse"])
    assert pair == {"prompt": "How?", "chosen": "Because.", "rejected": "No idea."}
    assert made("messages", mapping=["prompt=question"])["messages"][0] == {"role": "user", "content": "How?"}


@pytest.mark.parametrize(
    ("form", "name", "mapping"),
    [
        ("messages", "messages", []),
        ("sharegpt", "conversations", []),
        *(("alpaca", name, []) for name in ("instruction", "input", "system", "history")),
        ("alpaca", "output", ["completion=worse"]),
        ("prompt-completion", "completion", []),
        ("prompt-completion", "prompt", ["prompt=question"]),
        ("preference", "rejected", ["chosen=output", "rejected=worse"]),
        ("preference", "chosen", ["chosen=chosen[best]", "rejected=worse"]),
    ],
)
def test_a_column_called_like_a_field_of_the_format_is_not_lost_in_silence(
    form: str, name: str, mapping: list[str]
) -> None:
    known = [*dict.fromkeys([*JUDGED, name])]
    with pytest.raises(BadOption) as error:
        checked_options(known, form, kept=["row_id", name], mapping=mapping)
    said = f"--columns: expected columns that records of {form} do not have themselves ("
    assert str(error.value).startswith(said) and f", found {name!r}; Leave it out" in str(error.value)
    assert checked_options(known, "jsonl", kept=[name]).kept == (name,)


def test_ranked_pairs_have_no_column_called_like_their_answers() -> None:
    ranks = {"group_by": "topic", "rank_by": "row_id"}
    with pytest.raises(BadOption, match="of preference do not have themselves"):
        checked_options([*KNOWN, "chosen"], "preference", kept=["chosen"], **ranks)
    assert checked_options(KNOWN, "preference", kept=["prompt"], **ranks).kept == ("prompt",)


@pytest.mark.parametrize(("form", "name"), [("alpaca", "output"), ("prompt-completion", "prompt")])
def test_a_column_that_a_record_holds_anyway_may_be_named(form: str, name: str) -> None:
    assert made(form, kept=[name]) == made(form)


def test_a_field_may_be_the_element_of_a_list_that_another_column_names() -> None:
    mapping = ["chosen=answers[best]", "rejected=answers[worst]", "prompt=question"]
    options = checked_options(JUDGED, "preference", mapping=mapping)
    assert {"answers", "best", "worst"} <= set(options.read_columns(JUDGED))
    line = {**LINE, "answers": ["So.", "As it is.", "No."], "best": 1, "worst": 2}
    pair = {"prompt": "How?", "chosen": "As it is.", "rejected": "No."}
    assert record_of(line, options) == pair
    for change, reason in [
        ({"worst": 1}, "equal"),
        ({"worst": 3}, "no_element"),
        ({"best": -1}, "no_element"),
        ({"best": None}, "no_element"),
        ({"answers": "So."}, "no_element"),
        ({"answers": None}, "empty"),
    ]:
        with pytest.raises(LeftOut, match=reason):
            record_of({**line, **change}, options)
    # The last --map of a field counts, and a column of just that name comes first.
    again = checked_options(JUDGED, "preference", mapping=[*mapping, "chosen=output"])
    assert record_of(line, again) == {**pair, "chosen": "Because."}
    odd = checked_options([*JUDGED, "answers[best]"], "preference", mapping=mapping)
    assert record_of({**line, "answers[best]": "Odd."}, odd) == {**pair, "chosen": "Odd."}


def test_thinking_that_was_cut_is_no_answer() -> None:
    cut = {**LINE, "output": " <think>\nLet me see"}
    with pytest.raises(LeftOut, match="empty"):
        made("messages", cut)
    assert made("messages", cut, reasoning=True)["messages"][-1]["content"] == cut["output"]


@pytest.mark.parametrize(
    ("model", "output"),
    [
        ("Qwen/Qwen3-4B-Thinking-2507", "They ask why.\n</think>\n\nBecause."),
        ("Qwen/Qwen3-4B-Thinking-2507", "\n</think>\n\nBecause."),
        ("mistralai/Magistral-Small-2509", "[THINK]They ask why.[/THINK]Because."),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", "They ask why.</seed:think>Because."),
        ("openai/gpt-oss-20b", "analysisThey ask why.assistantfinalBecause."),
    ],
)
def test_thinking_in_the_text_is_left_out_as_the_models_family_writes_it(model: str, output: str) -> None:
    line, known = {**LINE, "model": model, "output": output}, [*KNOWN, "model"]
    options = checked_options(known, "messages")
    assert "model" in options.read_columns(known)
    assert record_of(line, options)["messages"][-1]["content"] == "Because."
    whole = record_of(line, checked_options(known, "messages", reasoning=True))
    assert whole["messages"][-1]["content"] == output


def test_an_answer_about_the_tag_is_exported_whole() -> None:
    said = "Use `text.split('</think>')` to cut it."
    assert made("messages", {**LINE, "output": said})["messages"][-1]["content"] == said


def test_system_messages_reasoning_and_columns_that_are_carried_along() -> None:
    assert made("messages", system=False)["messages"][0]["role"] == "user"
    assert made("messages", kept=["topic", "row_id"])["topic"] == "tea"
    thought = {**LINE, "reasoning": " Hm. "}
    assert made("messages", thought)["messages"][-1]["content"] == "Because."
    said = made("messages", thought, reasoning=True)["messages"][-1]["content"]
    assert said == "<think>\nHm.\n</think>\n\nBecause."
    inline = {**LINE, "output": "<think>\nHm.\n</think>\n\nBecause."}
    assert made("prompt-completion", inline)["completion"][0]["content"] == "Because."
    assert made("messages", inline, reasoning=True)["messages"][-1]["content"] == inline["output"]


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("messages", {"error": "timeout", "output": None}, "error"),
        ("messages", {"tool_calls": [{"id": "1"}], "output": ""}, "tool_calls"),
        ("messages", {"output": " \n"}, "empty"),
        ("messages", {"output": "<think>all of it</think>"}, "empty"),
        ("messages", {"prompt": None}, "no_prompt"),
        ("prompt-completion", {"prompt": []}, "no_prompt"),
        ("preference", {"worse": "Because."}, "equal"),
        ("preference", {"worse": None}, "empty"),
        ("alpaca", {"prompt": [*TALK[:2], *TALK]}, None),
        ("alpaca", {"prompt": [TALK[0], TALK[2]]}, "turns"),
        ("alpaca", {"prompt": TALK[1:]}, "turns"),
    ],
)
def test_a_line_that_makes_no_record_says_why(form: str, change: dict[str, Any], reason: str | None) -> None:
    mapping = ["chosen=output", "rejected=worse"] if form == "preference" else []
    if reason is None:
        assert made(form, {**LINE, **change}, mapping=mapping)["history"] == [["Hi", "Hello"], ["Hi", "Hello"]]
        return
    with pytest.raises(LeftOut, match=f"^{reason}$"):
        made(form, {**LINE, **change}, mapping=mapping)


@pytest.mark.parametrize(
    ("form", "options", "said"),
    [
        ("csv", {}, "--format: expected one of messages, sharegpt"),
        ("preference", {}, "expected a column for chosen of preference, found none; name it by map, chosen=COLUMN"),
        ("messages", {"mapping": ["output=worse"]}, "--map: expected prompt=COLUMN, completion=COLUMN"),
        ("messages", {"mapping": ["prompt"]}, "--map: expected prompt=COLUMN"),
        ("messages", {"mapping": ["prompt=nothing"]}, "--map: no column is called 'nothing'. Columns: row_id"),
        ("messages", {"mapping": ["prompt=nothing[topic]"]}, "--map: no column is called 'nothing'"),
        ("messages", {"mapping": ["prompt=topic[nothing]"]}, "--map: no column is called 'nothing'"),
        (
            "preference",
            {"group_by": "topic", "rank_by": "row_id", "mapping": ["completion=worse[topic]"]},
            "--map: expected columns beside group_by, found an element of a list",
        ),
        ("jsonl", {"mapping": ["prompt=output"]}, "--map: expected nothing for this format"),
        (
            "preference",
            {"group_by": "topic"},
            "--group-by: expected both, with rank_by, and format preference",
        ),
        (
            "messages",
            {"group_by": "topic", "rank_by": "row_id"},
            "expected both, with rank_by, and format preference",
        ),
        ("preference", {"group_by": "topic", "rank_by": "nothing"}, "--rank-by: no column is called 'nothing'"),
        (
            "preference",
            {"group_by": "topic", "rank_by": "row_id", "mapping": ["chosen=output"]},
            "expected prompt=COLUMN",
        ),
        ("messages", {"kept": ["nothing"]}, "--columns: no column is called 'nothing'"),
        ("messages", {"where": "DROP TABLE x"}, "--where: expected an SQL condition, found 'DROP TABLE x'"),
        ("messages", {"where": "wisdom > 3"}, "--where: no column is called 'wisdom'"),
        ("messages", {"validation": 1.0}, "--validation: expected a share from 0 to below 1"),
        ("messages", {"validation": float("nan")}, "--validation: expected a share"),
        ("messages", {"split_by": "topic"}, "--split-by: expected with --validation"),
        ("messages", {"split_by": "nothing", "validation": 0.1}, "--split-by: no column is called 'nothing'"),
    ],
)
def test_what_cannot_be_exported_is_said_before_anything_is_written(
    form: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ExportError) as error:
        checked_options(KNOWN, form, **options)
    assert said in str(error.value)


def test_a_table_without_prompts_needs_a_column_for_them() -> None:
    known = [name for name in KNOWN if name != "prompt"]
    with pytest.raises(ExportError, match="a column for prompt of messages, found none; name it by map, prompt=COLUMN"):
        checked_options(known, "messages")
    assert checked_options(known, "messages", mapping=["prompt=question"]).columns["prompt"] == "question"


@given(st.one_of(st.text(), st.integers(-(2**63), 2**63 - 1), st.none()), st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_larger_share_only_adds_to_validation(value: Any, first: float, second: float) -> None:
    small, large = sorted((first, second))
    assert is_validation(value, large) or not is_validation(value, small)
    assert not is_validation(value, 0.0)


def test_the_sides_do_not_change_from_version_to_version() -> None:
    """The hash is part of the format: what was trained on must never be validated on."""
    assert [n for n in range(200) if is_validation(f"parent-{n}", 0.05)] == [4, 69, 85, 134, 156, 198]
    assert 400 < sum(is_validation(f"id-{n}", 0.05) for n in range(10_000)) < 600


@given(st.text(min_size=1), st.text(min_size=1), st.sampled_from([one for one in Format if one.is_training]))
def test_texts_arrive_as_they_are(question: str, answer: str, form: Format) -> None:
    line = {**LINE, "prompt": [{"role": "user", "content": question}], "output": answer}
    mapping = ["chosen=output", "rejected=worse"] if form is Format.PREFERENCE else []
    try:
        record = made(form.value, line, mapping=mapping, reasoning=True)
    except LeftOut:
        assert not answer.strip() or answer == LINE["worse"]
    else:
        assert question in _texts(record) and answer in _texts(record)


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for one in value.values() for text in _texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value]
