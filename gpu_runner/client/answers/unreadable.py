"""Answers of status 200 that are none: an error in place of an answer, or what is wrong with it. Pure functions.

Nothing that a server sent is repeated here but the message of its error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

NAN_BYTES = 1 << 20  # a larger body is not read a second time


def error_in(answer: Any) -> Any:
    """The error that an answer of status 200 consists of; None for an answer.

    OpenAI's Responses have a field `error` beside their output: those are answers.
    """
    if not isinstance(answer, dict):
        return None
    if answer.get("object") == "error":
        return answer
    is_answer = any(name in answer for name in ("choices", "data", "output"))
    return None if is_answer else answer.get("error") or None


def status_in(error: Any) -> int | None:
    """The status that an error names for itself, as gateways write it; None where it names none."""
    if not isinstance(error, Mapping):
        return None
    for name in ("code", "status"):
        value = error.get(name)
        if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdigit():
            value = int(value)
        if type(value) is int and 400 <= value <= 599:
            return value
    return None


def what_is_wrong(body: bytes, task: str) -> str:
    """Why these bytes are no answer to a request of this task, for people."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return f"{len(body):,} bytes of {_not_json(body)}"
    if not isinstance(answer, dict):
        return "JSON that is no object"
    problem = _of_vector(answer) if task == "embedding" else _of_text(answer, task)
    return problem or _of_usage(answer) or f"{len(body):,} bytes that are no {task} answer"


def _not_json(body: bytes) -> str:
    if not body.strip():
        return "nothing"
    if body.lstrip()[:1] == b"<":
        return "a web page (HTML), no JSON"
    if len(body) <= NAN_BYTES and (b"NaN" in body or b"Infinity" in body):
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            return "what is no JSON"
        return "JSON with NaN or Infinity, which JSON has not"
    return "what is no JSON"


def _of_text(answer: Mapping[str, Any], task: str) -> str:
    choice = _only(answer, "choices")
    if isinstance(choice, str):
        return choice
    holder = choice.get("message") if task == "chat" else choice
    if not isinstance(holder, Mapping):
        return "a choice without a message"
    content = holder.get("content" if task == "chat" else "text")
    if isinstance(content, list):
        return f"content in {len(content):,} parts, expected one text"
    return "" if content is None or isinstance(content, str) else "content that is no text"


def _of_vector(answer: Mapping[str, Any]) -> str:
    entry = _only(answer, "data")
    if isinstance(entry, str):
        return entry
    if isinstance(entry.get("embedding"), str):
        return "a vector written as text (base64), expected a list of numbers"
    return "" if isinstance(entry.get("embedding"), list) else "an entry without a vector"


def _only(answer: Mapping[str, Any], name: str) -> Mapping[str, Any] | str:
    found = answer.get(name)
    if not isinstance(found, list):
        return f"an answer without `{name}`"
    if not found:
        return f"an answer whose `{name}` are empty"
    return found[0] if isinstance(found[0], Mapping) else f"`{name}` that are no objects"


def _of_usage(answer: Mapping[str, Any]) -> str:
    usage = answer.get("usage")
    if usage is None:
        return ""
    if not isinstance(usage, Mapping):
        return "`usage` that is no object"
    wrong = next((name for name in ("prompt_tokens", "completion_tokens") if isinstance(usage.get(name), str)), None)
    return "" if wrong is None else f"`usage.{wrong}` written as text, expected a number"
