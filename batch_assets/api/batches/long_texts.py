"""Lines whose prompt is a text that may exceed the model's context, for an engine to count the tokens of. Pure.

How many tokens a text has, only the model's tokenizer says. There is no sound lower bound by bytes: one token may stand
for any number of them (a run of spaces). An upper bound is a token for each byte, as tokenizers with a vocabulary of
bytes have it; what a chat template adds comes on top. So a line of no more bytes than the context has tokens is never
asked about, and no line is refused by its bytes. Of the others the longest are kept, MOST_LINES and MOST_BYTES of them:
lines that are not asked about are refused by their engine, if they are too long.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

MOST_LINES = 256
MOST_BYTES = 32 << 20
# What changes the number of tokens of a chat, where the engine is told (vLLM's TokenizeChatRequest).
_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True, order=True)
class LongText:
    """The longest text of a line, in bytes, and the body of a request to `/tokenize`. `param`: its field."""

    size: int
    line: int
    request: bytes = field(compare=False, repr=False)
    param: str = field(compare=False)


class LongTexts:
    """The longest texts of a file."""

    def __init__(self, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> None:
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._kept: list[LongText] = []  # a heap: the shortest first
        self._bytes = 0

    def consider(self, line: int, model: str, name: str, body: Mapping[str, Any], context: int) -> None:
        """A valid line; `name` is the field of its prompt."""
        try:
            found = _long_text(line, model, name, body, context)
        except orjson.JSONEncodeError:  # nested more deeply than it writes: the line is refused for that
            return
        if found is None or (len(self._kept) == self._most_lines and found < self._kept[0]):
            return
        heapq.heappush(self._kept, found)
        self._bytes += len(found.request)
        while len(self._kept) > self._most_lines or (self._bytes > self._most_bytes and len(self._kept) > 1):
            self._bytes -= len(heapq.heappop(self._kept).request)

    def longest_first(self) -> list[LongText]:
        """Those that are kept."""
        return sorted(self._kept, reverse=True)


def _long_text(line: int, model: str, name: str, body: Mapping[str, Any], context: int) -> LongText | None:
    """The text that is to be counted; None: there is none, or it fits as it is or when it is cut."""
    if body.get("truncate_prompt_tokens") is not None:
        return None
    if name == "messages":
        fields = {key: body[key] for key in _CHAT_FIELDS if body.get(key) is not None}
        if body.get("tool_choice") == "none":  # an engine may leave them out then
            fields.pop("tools", None)
        size = len(orjson.dumps(fields))
    else:
        prompt = body[name]
        texts = [prompt] if isinstance(prompt, str) else [text for text in prompt if isinstance(text, str)]
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        size = max(sizes, default=0)
        fields = {"prompt": texts[sizes.index(size)]} if texts else {}
        if body.get("add_special_tokens") is not None:
            fields["add_special_tokens"] = body["add_special_tokens"]
    if size <= context:
        return None
    return LongText(size, line, orjson.dumps({"model": model, **fields}), f"body.{name}")
