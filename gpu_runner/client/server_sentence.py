"""What a server said, fit for logs, events and status pages: short, on one line, without the text that it was sent."""

from __future__ import annotations

import re
from typing import Any

import orjson

SENTENCE_LENGTH = 300
# So many characters in a row that the request has too are taken for an echo of it. Quoted text may be shorter.
ECHO_LENGTH = 16
REQUEST_LENGTH = 4 << 20
DEPTH = 6
OMITTED = "[…]"

_QUOTED = re.compile(r"""'([^']+)'|"([^"]+)"|`([^`]+)`""")
_SPACE = re.compile(r"\s+")


def server_sentence(message: str, request: bytes | None = None) -> str:
    """`message` on one line of 300 characters at most. What it repeats of `request` (JSON) is left out.

    Parts of a request of more than 4 MiB are not looked for: its message is left out as a whole.
    """
    if request is not None:
        message = _without_echo(message, request)
    words = _SPACE.sub(" ", "".join(char if char.isprintable() else " " for char in message)).strip()
    return words if len(words) <= SENTENCE_LENGTH else words[: SENTENCE_LENGTH - 1] + "…"


def says(message: str, request: bytes | None = None) -> str:
    """The sentence to put behind another one: " The server says: …"; "" where it said nothing."""
    words = server_sentence(message, request)
    return f' The server says: "{words}"' if words else ""


def _without_echo(message: str, request: bytes) -> str:
    if len(request) > REQUEST_LENGTH:
        return OMITTED
    try:
        text = "\n".join(_texts(orjson.loads(request), DEPTH))
    except orjson.JSONDecodeError:
        text = request.decode("utf-8", "replace")
    if text.strip() and text.strip() in message:
        message = message.replace(text.strip(), OMITTED)

    def unless_echo(found: re.Match[str]) -> str:
        return OMITTED if found.group()[1:-1] in text else found.group()

    message = _QUOTED.sub(unless_echo, message)
    hidden = bytearray(len(message))
    for start in range(len(message) - ECHO_LENGTH + 1):
        if message[start : start + ECHO_LENGTH] in text:
            hidden[start : start + ECHO_LENGTH] = b"\x01" * ECHO_LENGTH
    shown = "".join("\0" if hide else char for char, hide in zip(message, hidden, strict=True))
    return re.sub("\0+", OMITTED, shown)


def _texts(value: Any, depth: int) -> list[str]:
    """The texts of a prompt: a string, messages, or parts of messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and depth:
        return [text for one in value for text in _texts(one, depth - 1)]
    if isinstance(value, dict) and depth:
        return [text for name, one in value.items() if name not in ("role", "type") for text in _texts(one, depth - 1)]
    return []
