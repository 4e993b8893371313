"""A model's thinking that a server left in the text of its answer, between tags. Pure.

A server with a reasoning parser writes it into a field of its own. One without leaves it in the text,
between tags that differ by model family. A chat template may write the first tag itself, so that the text has only the
last one; a text that was cut has only the first one. A last tag without the first one may as well be what an answer
writes about. It counts where all of this holds:

- The text begins as words do: not with `<`, `{`, `[` or a backtick, as markup, JSON and code do.
- There is no first tag before it.
- It stands in no code (between backticks, in a fenced block), nor behind a quote or a bracket that opens.
- Behind it the line ends, or an answer begins at once (a letter, a digit, or what begins Markdown, JSON or markup): in
  the middle of a sentence a blank or a comma follows.

gpt-oss writes messages in channels instead (`harmony`; format: OpenAI's cookbook, articles/openai-harmony.md):
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`. A server that leaves
special tokens out of its text leaves `analysis…assistantfinal…`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, cast

from gpu_runner.client.protocol import Completion

ReasoningTags = Literal["think", "mistral", "seed_oss", "harmony"]

# First and last tag of each family. `think`: Qwen3, QwQ, DeepSeek-R1 and its distillates, GLM-4.5 and many others.
TAGS: Mapping[ReasoningTags, tuple[str, str]] = MappingProxyType(
    {
        "think": ("<think>", "</think>"),
        "mistral": ("[THINK]", "[/THINK]"),
        "seed_oss": ("<seed:think>", "</seed:think>"),
    }
)
_BY_MODEL = (
    ("seed_oss", re.compile(r"seed-?oss", re.I)),
    ("mistral", re.compile(r"magistral|ministral", re.I)),
    ("harmony", re.compile(r"gpt-?oss", re.I)),
)
_WORDS = re.compile(r"\s*[^\s<{\[`]")
_STRUCTURE = (
    r"(?P<fence>^ {{0,3}}(?:```+|~~~+))|(?P<line>\n)|(?P<tick>`)|(?P<mention>(?<=[\"'(\[{{\\])(?:{0}))|(?P<tag>{0})"
)
_BEHIND = re.compile(r"[^\S\n]*(?:\n|\Z)|[\w*#{\[$|<>-]|```")
_MARK = re.compile(r"<\|(start|channel|message|end|return|call)\|>")
_HEADER = re.compile(r"(?:assistant)?\s*(analysis|commentary|final)?(?:\s*<\|constrain\|>\s*\w+)?")  # of a message
_BARE = ("analysis", "assistantfinal")  # what is left of two messages' headers without special tokens
_MOST_MARKS = 10_000


def tags_of(model: str) -> ReasoningTags:
    """The rule for a model, by its name; `think` where the name says nothing."""
    return cast(ReasoningTags, next((rule for rule, named in _BY_MODEL if named.search(model)), "think"))


def without_reasoning(completion: Completion, rule: ReasoningTags) -> Completion:
    """The answer with its thinking in `parts.reasoning`; as it is where there is none, or the server has split it."""
    text = completion.output
    if not isinstance(text, str) or completion.parts.reasoning is not None:
        return completion
    thought, rest = split_text(text, rule)
    if thought is None:
        return completion
    return replace(completion, output=rest, parts=replace(completion.parts, reasoning=thought.strip() or None))


def split_text(text: str, rule: ReasoningTags) -> tuple[str | None, str]:
    """What a text thinks, and what it answers; (None, the text) where no thinking is found. One pass over the text."""
    if rule == "harmony":
        return _of_channels(text)
    first, last = TAGS[rule]
    begun = text.lstrip()
    if begun.startswith(first):
        thought, _, rest = begun.removeprefix(first).partition(last)
        return thought, rest.lstrip()
    at = _closing(text, last)
    if at is None or first in text[:at]:
        return None, text
    return text[:at], text[at + len(last) :].lstrip()


def _closing(text: str, last: str) -> int | None:
    """Where the first last tag stands that is not written about; None: nowhere."""
    if last not in text:
        return None
    if text.lstrip().startswith(last):  # the model thought nothing
        return text.index(last)
    if _WORDS.match(text) is None:
        return None
    fenced = ticked = False
    for found in re.finditer(_STRUCTURE.format(re.escape(last)), text, re.M):
        kind = found.lastgroup
        if kind == "fence":
            fenced = not fenced
        elif kind == "line":
            ticked = False
        elif kind == "tick":
            ticked = not ticked
        elif kind == "tag" and not fenced and not ticked and _BEHIND.match(text, found.end()):
            return found.start()
    return None


def _of_channels(text: str) -> tuple[str | None, str]:
    """What a text in channels thinks, and what it answers; (None, the text) where it is not written in channels as a
    whole, or calls a tool: that is left to a parser of the server. One pass over the text.
    """
    begun = text.lstrip()
    first, last = _BARE
    if begun.startswith(first) and last in begun:
        thought, _, answer = begun.removeprefix(first).partition(last)
        return thought, answer
    if not begun.startswith(("<|channel|>", "<|start|>")):
        return None, text
    said: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
    header, channel, at, opened = "", "", 0, False  # `channel`: of the message that is read; `opened`: a header is
    for number, mark in enumerate(_MARK.finditer(begun)):
        piece, at, kind = begun[at : mark.start()], mark.end(), mark[1]
        if number == _MOST_MARKS or (channel and kind == "message"):
            return None, text
        if channel:
            said[channel].append(piece)
            header, channel = "", ""
        elif kind == "message":
            found = _HEADER.fullmatch((header + piece).strip())
            if found is None or not opened:
                return None, text  # another role, a tool that is called, or an unknown channel
            channel = found[1] or "final"
        else:
            header += piece
        opened = kind in ("start", "channel")
    if channel:
        said[channel].append(begun[at:])  # it was cut, or its last mark was left out
    elif begun[at:].strip() and not opened:
        return None, text
    return "\n".join(said["analysis"]), "\n".join([*said["commentary"], *said["final"]])
