"""What an answer holds besides its text: tool calls, reasoning, a refusal, log-probabilities. Pure parsing.

OpenAI's shapes and vLLM's, where `reasoning` was `reasoning_content` before pull request 27752. Chat and text
completions write log-probabilities in two shapes; here they have one. Everything is outside data: what has another
type than the protocol says raises TypeError or ValueError, and the answer then counts as garbage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

import orjson

from gpu_runner.answers import NO_PARTS, AnswerParts, Logprobs, ToolCall

MOST_TOOL_CALLS = 1024
MOST_ALTERNATIVES = 128  # a server allows 20 unless it was started with more
_LARGEST_FLOAT = 3.4e38  # of 32 bits, as they are stored


def at_index_0(entries: Any) -> Any:
    """The entry of `choices` or `data` whose `index` is 0: the answer to the one prompt that was sent.

    A server that sends one entry may leave its index out. Raises ValueError when there is none of index 0 or more than
    one, and LookupError when one of several has no index.
    """
    if not isinstance(entries, list):
        raise TypeError("expected a list of choices")
    if len(entries) == 1 and isinstance(entries[0], dict) and "index" not in entries[0]:
        return entries[0]
    found = [entry for entry in entries if _whole_number(entry["index"]) == 0]
    if len(found) != 1:
        raise ValueError(f"expected one choice of index 0, found {len(found)}")
    return found[0]


def chat_parts(choice: Mapping[str, Any]) -> AnswerParts:
    """The parts of a chat choice. Raises TypeError, ValueError, LookupError or AttributeError."""
    message = choice["message"]
    reasoning = _text(message.get("reasoning"))
    if reasoning is None:
        reasoning = _text(message.get("reasoning_content"))
    calls = _tool_calls(message.get("tool_calls"))
    given = choice.get("logprobs") or {}
    tokens = given.get("content")
    if tokens is None:
        tokens = given.get("refusal")
    logprobs = None if tokens is None else Logprobs(orjson.dumps([_chat_token(token) for token in _list(tokens)]))
    refusal = _text(message.get("refusal"))
    if calls is None and reasoning is None and refusal is None and logprobs is None:
        return NO_PARTS
    return AnswerParts(calls, reasoning, refusal, logprobs)


def completion_parts(choice: Mapping[str, Any]) -> AnswerParts:
    """The parts of a text completion's choice: its log-probabilities. Raises as `chat_parts` does."""
    given = choice.get("logprobs")
    if given is None:
        return NO_PARTS
    tokens, numbers = _list(given["tokens"]), _list(given["token_logprobs"])
    top = _list_or_nones(given.get("top_logprobs"), len(tokens))
    offsets = _list_or_nones(given.get("text_offset"), len(tokens))
    found = [
        [
            _str(token),
            _logprob(number),
            None,
            None if offset is None else _whole_number(offset),
            [[_str(word), _logprob(value), None] for word, value in _few((others or {}).items())],
        ]
        for token, number, others, offset in zip(tokens, numbers, top, offsets, strict=True)
    ]
    return AnswerParts(logprobs=Logprobs(orjson.dumps(found)))


def _tool_calls(calls: Any) -> tuple[ToolCall, ...] | None:
    """vLLM writes an empty list where there is no call."""
    if not calls:
        return None
    if len(_list(calls)) > MOST_TOOL_CALLS:
        raise ValueError(f"expected at most {MOST_TOOL_CALLS} tool calls, found {len(calls)}")
    return tuple([_tool_call(call) for call in calls])


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    kind = _text(call.get("type")) or "function"
    called, words = call[kind], "input" if kind == "custom" else "arguments"
    return ToolCall(_text(call.get("id")), kind, _str(called["name"]), _str(called[words]))


def _chat_token(token: Mapping[str, Any]) -> list[Any]:
    """A token as it is packed."""
    top = [_chat_entry(other) for other in _few(token.get("top_logprobs") or ())]
    return [*_chat_entry(token), None, top]


def _chat_entry(entry: Mapping[str, Any]) -> list[Any]:
    raw = entry.get("bytes")
    if raw is not None:
        bytes(_list(raw))  # of numbers from 0 to 255
    return [_str(entry["token"]), _logprob(entry["logprob"]), raw]


def _few(alternatives: Collection[Any]) -> Collection[Any]:
    if len(alternatives) > MOST_ALTERNATIVES:
        raise ValueError(f"expected at most {MOST_ALTERNATIVES} alternatives of a token, found {len(alternatives)}")
    return alternatives


def _logprob(value: Any) -> float | None:
    """Null stands before the first token of an echoed prompt. vLLM writes -9999 for minus infinity, as JSON must."""
    if value is None:
        return None
    if type(value) is not float and type(value) is not int:  # a bool is an int to isinstance
        raise TypeError("a log-probability is no number")
    number = float(value)
    if not isfinite(number) or abs(number) > _LARGEST_FLOAT:
        raise ValueError("a log-probability is not finite")
    return number


def _whole_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("expected a whole number")
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError("expected a number of 32 bits")
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _text(value: Any) -> str | None:
    return None if value is None else _str(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def _list_or_nones(value: Any, length: int) -> list[Any]:
    return [None] * length if value is None else _list(value)
