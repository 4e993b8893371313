"""Thinking that a server left in the text goes to the column for it, whole and nothing else."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.http_server import http_server

from gpu_runner.answers import AnswerParts
from gpu_runner.client.engine_client import EngineClient
from gpu_runner.client.protocol import Completion
from gpu_runner.client.reasoning_tags import TAGS, ReasoningTags, tags_of, without_reasoning
from gpu_runner.rows import Generation


def split(text: str, rule: ReasoningTags = "think") -> tuple[object, str | None]:
    found = without_reasoning(Completion(text, "stop", 1, 2), rule)
    return found.output, found.parts.reasoning


@pytest.mark.parametrize(
    ("text", "output", "reasoning"),
    [
        ("<think>\nfirst\n</think>\n\n42", "42", "first"),
        ("\n<think>first</think>42\n", "42\n", "first"),
        ("first\n</think>\n\n42", "42", "first"),
        ("<think>\n\n</think>\n\n42", "42", None),
        ("<think>it goes on and on", "", "it goes on and on"),
        ("<think>a</think>b</think>c", "b</think>c", "a"),
        ("42", "42", None),
        ("", "", None),
        ("Write <think> and </think> around it", "Write <think> and </think> around it", None),
        ("It is <think>", "It is <think>", None),
        ("[THINK]a[/THINK]b", "[THINK]a[/THINK]b", None),
    ],
)
def test_the_text_without_its_thinking(text: str, output: str, reasoning: str | None) -> None:
    assert split(text) == (output, reasoning)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So it is 42.\n</think>\n\n42", "42"),
        ("So it is 42.</think>**42**", "**42**"),
        ('They want JSON.</think>{"a": 1}', '{"a": 1}'),
        ("They want code.</think>```python\n1\n```", "```python\n1\n```"),
        ("The tag is `</think>`. I say so.\n</think>\nIt is `</think>`.", "It is `</think>`."),
        ("Like this:\n```\nx</think>\n```\nGood. </think>\nDone", "Done"),
        ("It goes on, and ends here\n</think>", ""),
        ("\n</think>\n\n42", "42"),
    ],
)
def test_a_last_tag_without_the_first_one_ends_thinking(text: str, answer: str) -> None:
    assert split(text)[0] == answer


@pytest.mark.parametrize(
    "text",
    [
        "Use `text.split('</think>')` to cut it.",
        'def cut(text):\n    return text.split("</think>")[-1]',
        "Cut it:\n```python\nif line.strip() ==\n</think>\n```\nDone",
        "End the block with </think> and go on.",
        "The last tag is </think>, which ends it.",
        "The pattern is (.*?)</think>(.*)",
        "`a\u00a0</think>\n`",
        '{"text": "so</think>42"}',
        "<p>so</think>42</p>",
        "```\nso\n</think>\n```",
        "[so</think>42]",
    ],
)
def test_an_answer_that_writes_about_the_tag_is_no_thinking(text: str) -> None:
    assert split(text) == (text, None)


@given(st.sampled_from(sorted(TAGS)), st.text(max_size=20), st.text(max_size=20), st.booleans())
def test_what_stands_between_the_tags_is_thinking_and_the_rest_the_answer(
    rule: ReasoningTags, thought: str, answer: str, opened: bool
) -> None:
    first, last = TAGS[rule]
    if any(tag in thought + answer for tags in TAGS.values() for tag in tags):
        return
    if not opened:  # words, and no code around the tag
        thought, answer = f"Hm.\n{re.sub('[`~]', '', thought)}\n", f"\n\n{answer}"
    found = split(f"{first if opened else ''}{thought}{last}{answer}", rule)
    assert found == (answer.lstrip(), thought.strip() or None)
    assert split(answer, rule) == (answer, None)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "output", "reasoning"),
    [
        (f"{ANALYSIS}Simple.<|end|>{FINAL}42<|return|>", "42", "Simple."),
        (f"\n{ANALYSIS}Simple.<|end|>{FINAL}4<2>\n", "4<2>\n", "Simple."),
        (f"<|start|>assistant{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "c", "a\nb"),
        (f"{ANALYSIS}it goes on", "", "it goes on"),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>fi", "", "a"),  # cut in a header
        (f"{ANALYSIS}a{FINAL}b", "b", "a"),  # its end was left out
        ("<|channel|>final<|message|>b", "b", None),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}", None),
        ("<|start|>assistant<|message|>b<|end|>", "b", None),
        (f"{ANALYSIS}<|end|>{FINAL}b", "b", None),
        ("<|channel|>commentary<|message|>First a plan.<|end|>" + FINAL + "b", "First a plan.\nb", None),
        ("analysisWe count.assistantfinal42", "42", "We count."),
        ("analysisWe count.", None, None),
        ("analysis of it: the assistant finally spoke", None, None),
        ("42", None, None),
        ("", None, None),
        (f"It is {ANALYSIS}", None, None),
        ("<|channel|>poetry<|message|>x", None, None),
        ("<|start|>user<|message|>x", None, None),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", None, None),
        (f"{ANALYSIS}a<|end|>between{FINAL}b", None, None),
        (f"{ANALYSIS}a<|end|>after", None, None),
        (f"{ANALYSIS}a<|message|>b", None, None),
        ("<|channel|>" * 20_000, None, None),
        (f"{ANALYSIS}a<|end|>" * 20_000, None, None),
        ("<|start|>", "", None),
    ],
)
def test_channels_of_gpt_oss(text: str, output: str | None, reasoning: str | None) -> None:
    """None: the text stays as it is."""
    assert split(text, "harmony") == (text if output is None else output, reasoning)


@given(st.lists(st.sampled_from([ANALYSIS, FINAL, "<|end|>", "<|", "analysis", "assistantfinal", "x", "\ud83d"])))
def test_any_text_in_channels_is_split_or_stays_as_it_is(pieces: list[str]) -> None:
    text = "".join(pieces)
    output, reasoning = split(text, "harmony")
    assert output == text or len(str(output)) + len(reasoning or "") <= len(text)


def test_an_answer_that_the_server_split_and_a_vector_stay_as_they_are() -> None:
    parsed = Completion("<think>a</think>b", "stop", 1, 2, AnswerParts(reasoning="c"))
    assert without_reasoning(parsed, "think") is parsed
    vector = Completion((1.0,), "stop", 1, 0)
    assert without_reasoning(vector, "think") is vector


def test_the_rule_follows_from_the_name_of_the_model() -> None:
    names = [
        "mistralai/Magistral-Small-2509",
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "Qwen/Qwen3-8B",
        "m",
        "openai/gpt-oss-20b",
    ]
    assert [tags_of(name) for name in names] == ["mistral", "seed_oss", "think", "think", "harmony"]


@pytest.mark.parametrize(("rule", "output"), [("think", '{"a":1}'), (None, '<think>x</think>{"a":1}')])
def test_the_client_splits_where_the_dataset_says_so(rule: ReasoningTags | None, output: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": '<think>x</think>{"a":1}'}
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    async def main() -> None:
        generation = Generation("chat", "m", {"max_tokens": 5}, reasoning_tags=rule)
        async with http_server({"/v1/chat/completions": answer}) as url, EngineClient(url, generation) as engine:
            found = [await engine.generate(b"[]", fields=fields) for fields in (b"", b'{"seed":1}')]
        assert [(one.output, one.parts.reasoning) for one in found] == 2 * [(output, "x" if rule else None)]

    asyncio.run(main())
