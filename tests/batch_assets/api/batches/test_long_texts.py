"""Which texts an engine is asked about: never those that fit for sure, and not more than a bound."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from batch_assets.api.batches.lines import Line, LineChecker
from batch_assets.api.batches.long_texts import LongText, LongTexts

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def kept(endpoint: str, *bodies: dict[str, Any], context: int = 100) -> list[LongText]:
    checker = LineChecker(endpoint, None, contexts={"m": context})
    for number, body in enumerate(bodies, 1):
        line = {"custom_id": f"{number}", "method": "POST", "url": endpoint, "body": {"model": "m", **body}}
        assert isinstance(checker.check(orjson.dumps(line), number), Line)
    return checker.long_texts.longest_first()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_a_text_of_no_more_bytes_than_the_context_has_tokens_is_not_asked_about() -> None:
    found = kept(TEXT, {"prompt": "x" * 100}, {"prompt": "x" * 101}, {"prompt": "é" * 51}, {"prompt": "x" * 500})
    assert [(text.line, text.size, text.param) for text in found] == [
        (4, 500, "body.prompt"),
        (3, 102, "body.prompt"),
        (2, 101, "body.prompt"),
    ]


@pytest.mark.parametrize(
    "body", [{"truncate_prompt_tokens": 50, "prompt": "x" * 500}, {"prompt": [1] * 90}, {"prompt": [[1, 2], [3] * 90]}]
)
def test_prompts_that_are_cut_or_are_token_ids_are_not_asked_about(body: dict[str, Any]) -> None:
    assert kept(TEXT, body) == []


def test_what_changes_the_length_of_a_chat_is_sent_and_nothing_else() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    (found,) = kept(CHAT, chat("x" * 300, tools=tools, temperature=0.5, user="somebody"))
    assert orjson.loads(found.request) == {"model": "m", **chat("x" * 300), "tools": tools}
    (found,) = kept(CHAT, chat("x" * 300, tools=tools, tool_choice="none"))
    assert orjson.loads(found.request) == {"model": "m", **chat("x" * 300)}


def test_of_several_inputs_the_longest_is_asked_about() -> None:
    (found,) = kept(VECTORS, {"input": ["x" * 120, "y" * 130, "z"]})
    assert orjson.loads(found.request) == {"model": "m", "prompt": "y" * 130}


def test_without_a_known_context_nothing_is_asked() -> None:
    checker = LineChecker(TEXT, None)
    line = {"custom_id": "1", "method": "POST", "url": TEXT, "body": {"model": "m", "prompt": "x" * 10**6}}
    assert isinstance(checker.check(orjson.dumps(line), 1), Line) and checker.long_texts.longest_first() == []


def test_only_the_longest_are_kept_within_bounds_of_number_and_bytes() -> None:
    few = LongTexts(most_lines=3, most_bytes=10**6)
    for line in range(1, 1001):
        few.consider(line, "m", "prompt", {"prompt": "x" * (100 + line * 7 % 997)}, 100)
    assert [text.size for text in few.longest_first()] == [1096, 1095, 1094]
    small = LongTexts(most_lines=100, most_bytes=1000)
    for line in range(1, 100):
        small.consider(line, "m", "prompt", {"prompt": "x" * 300}, 100)
    assert len(small.longest_first()) == 3
    small.consider(100, "m", "prompt", {"prompt": "x" * 5000}, 100)
    assert [text.line for text in small.longest_first()] == [100], "the longest always"


def test_a_line_that_is_nested_too_deeply_is_refused_as_before() -> None:
    deep = b"[" * 1000 + b"]" * 1000
    line = b'{"custom_id":"1","method":"POST","url":"%s","body":{"model":"m","messages":[%s]}}' % (CHAT.encode(), deep)
    found = LineChecker(CHAT, None, contexts={"m": 10}).check(line, 1)
    assert isinstance(found, list) and [error.code for error in found] == ["invalid_json_line"]
