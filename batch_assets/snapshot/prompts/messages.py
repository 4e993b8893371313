"""A conversation in a column (or documents to rank): a list of messages as OpenAI's chat API has them. Pure functions.

It comes as JSON text, as a list of objects (JSONL), or as a list of structs (Arrow), whose fields without a value are
null. Fields that are null are left out, so that the same conversation is the same prompt whatever the format. Reasons
name the message and what is wrong, and never quote its text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from batch_assets.spec.sampling_values import MAX_TURNS, Unfit, without_nulls
from gpu_runner.client.answers.pooled_outputs import MOST_DOCUMENTS

MAX_MESSAGES = 2_000
MAX_JSON = 1 << 20  # characters of a conversation that is JSON text
MAX_DEPTH = 16  # levels of a message
MAX_CALLS = 128  # of tools, in one message

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTS = frozenset({"system", "developer"})
_TEXTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("system", "developer", "user"), frozenset({"name"})),
    "assistant": frozenset({"name", "refusal", "reasoning", "reasoning_content"}),
    "tool": frozenset({"name", "tool_call_id"}),
}
PART_TYPES = ("text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "file")
_SHOWN_KEYS = 6

Message = dict[str, Any]


def read_conversation(value: Any) -> list[Message]:
    """The messages in a cell, without fields that are null. Raises Unfit."""
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, list):
        raise Unfit(f"expected a list of messages, or its JSON text, found {_kind(value)}")
    if not value:
        raise Unfit("expected at least one message, found an empty list")
    if len(value) > MAX_MESSAGES:
        raise Unfit(f"expected at most {MAX_MESSAGES:,} messages, found {len(value):,}")
    messages: list[Message] = []
    called: set[str] = set()
    for number, one in enumerate(value, 1):
        try:
            messages.append(_message(one, called))
        except Unfit as error:
            raise Unfit(f"message {number}: {error}") from None
    return messages


def read_turns(value: Any) -> list[str]:
    """What the user says in a conversation, by a cell: a list of texts, or its JSON text. Raises Unfit."""
    if isinstance(value, str):
        value = _parsed(value, "texts")
    if not isinstance(value, list):
        raise Unfit(f"expected a list of texts, or its JSON text, found {_kind(value)}")
    if not 1 <= len(value) <= MAX_TURNS:
        found = f"{len(value):,}" if value else "an empty list"
        raise Unfit(f"expected 1 to {MAX_TURNS} turns, found {found}")
    return [_text(one, f"turn {number}") for number, one in enumerate(value, 1)]


def read_documents(value: Any) -> list[str]:
    """The documents to rank in a cell. Raises Unfit."""
    if isinstance(value, str):
        value = _parsed(value, "texts")
    if not isinstance(value, list):
        raise Unfit(f"expected a list of documents, or its JSON text, found {_kind(value)}")
    if not 0 < len(value) <= MOST_DOCUMENTS:
        raise Unfit(f"expected 1 to {MOST_DOCUMENTS:,} documents, found {len(value):,}")
    return [_numbered("document", number, _document, one) for number, one in enumerate(value, 1)]


def _document(value: Any) -> str:
    return _text(value, "it")


def check_whole(messages: Sequence[Message]) -> None:
    """A conversation as it is sent, with what stands before and after the column. Raises Unfit."""
    if len(messages) > MAX_MESSAGES:
        raise Unfit(f"expected at most {MAX_MESSAGES:,} messages, found {len(messages):,}")
    last = messages[-1]
    if last["role"] in INSTRUCTS:
        raise Unfit(f"expected a last message of role user, tool or assistant, found {last['role']}")
    if last["role"] == "assistant" and ("tool_calls" in last or not isinstance(last.get("content"), str)):
        found = "tool calls" if "tool_calls" in last else "none"
        raise Unfit(f"expected text in the last message of role assistant, which the model continues, found {found}")


def continues(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the answer, which the model continues."""
    return bool(messages[-1]["role"] == "assistant")


def without_media_bytes(messages: Sequence[Message]) -> list[Message]:
    """The messages with the digest of each image and sound in place of its bytes."""
    return [
        {**one, "content": [_part_without_bytes(part) for part in one["content"]]}
        if isinstance(one.get("content"), list)
        else one
        for one in messages
    ]


def _part_without_bytes(part: Message) -> Message:
    media, data = data_url_of(part)
    if not data:
        return part
    found = base64.b64decode(data)
    said = f"sha256:{hashlib.sha256(found).hexdigest()} ({media}, {len(found):,} bytes)"
    if part["type"] == "input_audio":
        return {**part, "input_audio": {**part["input_audio"], "data": said}}
    return {**part, part["type"]: {"url": said}}


def data_url_of(part: Any) -> tuple[str, str]:
    """Media type and base64 of the image or sound in a content part; empty where it has none."""
    kind = part.get("type") if isinstance(part, dict) else None
    held = part.get(kind) if kind in ("image_url", "audio_url", "input_audio") else None
    if kind == "input_audio" and isinstance(held, dict):
        return f"audio/{held.get('format')}", str(held.get("data") or "")
    url = held.get("url") if isinstance(held, dict) else None
    if not isinstance(url, str) or not url.startswith("data:"):
        return "", ""
    media, found, data = url[5:].partition(";base64,")
    return (media, data) if found else ("", "")


def words_of(message: Mapping[str, Any]) -> str:
    """All that a message says as one text, for counts of its tokens."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [_part_words(part) for part in content or ()]
    texts += [str(message[name]) for name in ("reasoning", "reasoning_content") if message.get(name)]
    if message.get("tool_calls"):
        texts.append(orjson.dumps(message["tool_calls"]).decode())
    return "\n".join(texts)


def _part_words(part: Mapping[str, Any]) -> str:
    return str(part.get("text") or part.get("refusal") or "")


def _parsed(text: str, of: str = "messages") -> Any:
    if len(text) > MAX_JSON:
        raise Unfit(f"expected JSON text of at most {MAX_JSON:,} characters, found {len(text):,}")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Unfit(f"expected the JSON text of a list of {of}, found text that is no JSON ({error})") from None


def _message(value: Any, called: set[str]) -> Message:
    """One message; `called` are the ids of tool calls of the messages before, and gets those of this one."""
    if not isinstance(value, dict):
        raise Unfit(f"expected role and content, found {_kind(value)}")
    given = {name: one for name, one in value.items() if one is not None}
    role = given.get("role")
    if role not in ROLES:
        raise Unfit(f"expected role {', '.join(ROLES[:-1])} or {ROLES[-1]}, found {_role(role, given)}")
    known = {"role", "content", *_TEXTS[role], *(("tool_calls",) if role == "assistant" else ())}
    if unknown := sorted(str(name) for name in given.keys() - known):
        raise Unfit(f"expected {', '.join(sorted(known))} in a message of role {role}, found {_names(unknown)}")
    message: Message = {"role": role}
    for name in sorted(_TEXTS[role] & given.keys()):
        message[name] = _text(given[name], name)
    if (calls := given.get("tool_calls", [])) != []:
        message["tool_calls"] = _tool_calls(calls)
        called.update(call["id"] for call in message["tool_calls"])
    if role == "tool" and message.get("tool_call_id") not in called:
        found = "the id of none" if "tool_call_id" in message else "no tool_call_id"
        raise Unfit(f"expected tool_call_id to name a tool call of a message before, found {found}")
    if "content" in given:
        message["content"] = _content(given["content"], may_be_blank=role in ("assistant", "tool"))
    elif role != "assistant" or not (message.keys() - {"role", "name"}):
        raise Unfit(f"expected content in a message of role {role}, found none")
    return message


def _content(value: Any, *, may_be_blank: bool) -> Any:
    if isinstance(value, str):
        if not value.strip() and not may_be_blank:
            raise Unfit("expected content, found nothing but blanks")
        return value
    if not isinstance(value, list):
        raise Unfit(f"expected content that is text or a list of parts, found {_kind(value)}")
    if not value and not may_be_blank:
        raise Unfit("expected content, found an empty list of parts")
    return [_numbered("part", number, _part, one) for number, one in enumerate(value, 1)]


def _part(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in PART_TYPES:
        raise Unfit(f"expected type {', '.join(PART_TYPES[:-1])} or {PART_TYPES[-1]}, found {_kind(kind)}")
    part = without_nulls(value, MAX_DEPTH)
    if kind in ("text", "refusal"):
        _text(part.get(kind), kind)
    elif not isinstance(part.get(kind), dict | str):
        raise Unfit(f"expected {kind}, found {_kind(part.get(kind))}")
    return part


def _tool_calls(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise Unfit(f"expected a list of tool_calls, found {_kind(value)}")
    if len(value) > MAX_CALLS:
        raise Unfit(f"expected at most {MAX_CALLS} tool_calls, found {len(value):,}")
    calls = [_numbered("tool call", number, _tool_call, one) for number, one in enumerate(value, 1)]
    if len({call["id"] for call in calls}) < len(calls):
        raise Unfit("expected tool_calls with an id each, found one id twice")
    return calls


def _tool_call(value: Any) -> Message:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise Unfit("expected {id, type: function, function: {name, arguments}}, found " + _kind(value))
    if value.get("type", "function") not in ("function", None):
        raise Unfit(f"expected type function, found {_kind(value['type'])}")
    return {
        "id": _text(value.get("id"), "id"),
        "type": "function",
        "function": {
            "name": _text(function.get("name"), "function.name"),
            "arguments": _text(function.get("arguments"), "function.arguments", may_be_blank=True),
        },
    }


def _numbered(what: str, number: int, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except Unfit as error:
        raise Unfit(f"{what} {number}: {error}") from None


def _text(value: Any, name: str, *, may_be_blank: bool = False) -> str:
    if not isinstance(value, str):
        raise Unfit(f"expected text in {name}, found {_kind(value)}")
    if not value.strip() and not may_be_blank:
        raise Unfit(f"expected text in {name}, found nothing but blanks")
    return value


def _role(role: Any, given: Mapping[Any, Any]) -> str:
    if role is None:
        return f"none, but {_names(sorted(map(str, given)))}" if given else "none"
    if isinstance(role, str) and len(role) <= 20 and role.isidentifier():
        return role
    return _kind(role)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_KEYS:,} more" if len(names) > _SHOWN_KEYS else ""
    return ", ".join(repr(name[:40]) for name in names[:_SHOWN_KEYS]) + more


def _kind(value: Any) -> str:
    """What a value is, without what it says."""
    if value is None:
        return "nothing"
    kinds = ((bool, "true or false"), (str, "text"), (int | float, "a number"), (list, "a list"), (dict, "a mapping"))
    return next((name for kind, name in kinds if isinstance(value, kind)), f"a value of type {type(value).__name__}")
