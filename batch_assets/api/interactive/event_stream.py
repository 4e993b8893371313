"""Reads along in a streamed answer (server-sent events) while it is passed on. Pure.

Bytes go through as they are, whole events at a time. One event is held back: the usage at the end, where we asked for
it and the caller did not. Source of the format: the HTML standard, section 9.2, and OpenAI's chunks.

Source of the events of `/v1/responses`: openai-python 3.54, `types/responses`: `response.output_text.delta` and others
with a `delta`, then one of `response.completed`, `response.incomplete`, `response.failed`, with `response.usage`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

MOST_HELD = 1 << 20  # of an event that does not end: from there on bytes go through unread
_END = re.compile(rb"\r?\n\r?\n")
_NO_USAGE = re.compile(rb'"usage"\s*:\s*null')


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer, as the engine counts them. `cached_tokens` are among `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.prompt_tokens + self.completion_tokens


def read_usage(found: Any) -> Usage | None:
    """The usage of an answer or chunk; None where it has none that can be one."""
    usage = found.get("usage") if isinstance(found, dict) else None
    if not isinstance(usage, dict):
        return None
    if "input_tokens" in usage:  # as in a response
        counts, details = [usage["input_tokens"], usage.get("output_tokens", 0)], usage.get("input_tokens_details")
    else:
        counts = [usage.get("prompt_tokens"), usage.get("completion_tokens", 0)]
        details = usage.get("prompt_tokens_details")
    if not all(_is_count(count) for count in counts):
        return None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(counts[0], counts[1], min(cached, counts[0]) if _is_count(cached) else 0)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


class StreamReader(ABC):
    """One answer on its way, read event by event. `generating`: a token has come. `usage`: what was said last. `done`:
    it ended by itself, or nobody can tell because it is not read any more. `on_usage` hears of the usage of the whole
    answer before the event that says it goes on.
    """

    def __init__(self, on_usage: Callable[[Usage], None] | None) -> None:
        self._on_usage = on_usage
        self._held = b""
        self._unread = False
        self.generating = False
        self.done = False
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        """What of the stream so far may go on to the caller now: whole events."""
        if self._unread:
            return data
        looked = max(0, len(self._held) - 3)  # an end may be cut
        held, passed = self._held + data, []
        begin = 0
        for match in _END.finditer(held, looked):
            event = held[begin : match.end()]
            begin = match.end()
            if self._passes(event):
                passed.append(event)
        self._held = held[begin:]
        if len(self._held) > MOST_HELD:
            self._unread = self.done = True
            passed.append(self.finish())
        return b"".join(passed)

    def finish(self) -> bytes:
        """What is left when the engine has closed the stream."""
        left, self._held = self._held, b""
        return left

    @abstractmethod
    def _passes(self, event: bytes) -> bool:
        """Look at one event; False for one that is not for the caller."""

    def _tell(self, usage: Usage | None) -> None:
        if usage is not None and self._on_usage is not None:
            self._on_usage(usage)


class EventStream(StreamReader):
    """A stream of chunks, as of chats and completions. `hold_usage`: its usage is not for the caller."""

    def __init__(self, *, hold_usage: bool, on_usage: Callable[[Usage], None] | None = None) -> None:
        super().__init__(on_usage)
        self._hold_usage = hold_usage

    def _passes(self, event: bytes) -> bool:
        """Look at one event; False for the one that is not for the caller."""
        wants_usage = b'"usage"' in event and _NO_USAGE.search(event) is None
        if self.generating and not wants_usage:
            return self._ends(event)
        chunk = event_object(event)
        if chunk is None:
            return self._ends(event)
        choices = chunk.get("choices")
        self.generating = self.generating or _has_token(choices)
        if (usage := read_usage(chunk)) is not None:
            self.usage = usage
            if choices == []:
                self._tell(usage)
            return not (self._hold_usage and choices == [])
        return True

    def _ends(self, event: bytes) -> bool:
        """Look whether this is the end of the stream; it passes."""
        if event.startswith(b"data: [DONE]"):
            self.done = True
            self._tell(self.usage)
        return True


def event_object(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event's data; None for other events."""
    lines = [line.removeprefix(b"data:") for line in event.splitlines() if line.startswith(b"data:")]
    try:
        found = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _has_token(choices: Any) -> bool:
    """Whether a chunk carries output: text, reasoning, a tool call, or the reason for which it ended."""
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        parts = [choice.get("text"), choice.get("finish_reason")]
        if isinstance(delta, dict):
            parts += [value for name, value in delta.items() if name != "role"]
        if any(parts):
            return True
    return False


_LAST = (b'"response.completed"', b'"response.incomplete"', b'"response.failed"')
_DELTA = re.compile(rb'"type"\s*:\s*"response\.[a-z_.]+\.delta"')


class ResponseStream(StreamReader):
    """One response on its way; all bytes go through."""

    def __init__(self, *, on_usage: Callable[[Usage], None] | None = None) -> None:
        super().__init__(on_usage)

    def _passes(self, event: bytes) -> bool:
        self.generating = self.generating or _DELTA.search(event) is not None
        found = event_object(event) if any(name in event for name in _LAST) else None
        kind = None if found is None else found.get("type")
        if found is not None and isinstance(kind, str) and f'"{kind}"'.encode() in _LAST:
            self.done = self.generating = True
            self.usage = read_usage(found.get("response"))
            self._tell(self.usage)
        return True
