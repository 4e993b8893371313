"""A model's thinking that a server left in the text of its answer, between tags. Pure.

A server with a reasoning parser writes it into a field of its own. One without leaves it in the text,
between tags that differ by model family. A chat template may write the first tag itself, so that the text has only the
last one; a text that was cut has only the first one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, cast

from gpu_runner.client.protocol import Completion

ReasoningTags = Literal["think", "mistral", "seed_oss"]

# First and last tag of each family. `think`: Qwen3, QwQ, DeepSeek-R1 and its distillates, GLM-4.5 and many others.
TAGS: Mapping[ReasoningTags, tuple[str, str]] = MappingProxyType(
    {
        "think": ("<think>", "</think>"),
        "mistral": ("[THINK]", "[/THINK]"),
        "seed_oss": ("<seed:think>", "</seed:think>"),
    }
)
_BY_MODEL = (("seed_oss", re.compile(r"seed-?oss", re.I)), ("mistral", re.compile(r"magistral|ministral", re.I)))


def tags_of(model: str) -> ReasoningTags:
    """The rule for a model, by its name; `think` where the name says nothing."""
    return cast(ReasoningTags, next((rule for rule, named in _BY_MODEL if named.search(model)), "think"))


def without_reasoning(completion: Completion, rule: ReasoningTags) -> Completion:
    """The answer with its thinking in `parts.reasoning`; as it is where there is none, or the server has split it."""
    text = completion.output
    if not isinstance(text, str) or completion.parts.reasoning is not None:
        return completion
    first, last = TAGS[rule]
    begun = text.lstrip()
    opened = begun.startswith(first)
    thought, closed, rest = (begun.removeprefix(first) if opened else text).partition(last)
    if not (opened or closed) or (not opened and first in thought):
        return completion
    parts = replace(completion.parts, reasoning=thought.strip() or None)
    return replace(completion, output=rest.lstrip(), parts=parts)
