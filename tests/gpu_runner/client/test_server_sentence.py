"""What a server said is shown on one line, without what it repeats of the request."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gpu_runner.client.server_sentence import SENTENCE_LENGTH, says, server_sentence


def chat(text: Any) -> bytes:
    return orjson.dumps([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("message", "request_body", "shown"),
    [
        ("Insufficient  credits\n", None, "Insufficient credits"),
        ("a\x1b[31mb\u2028c", None, "a [31mb c"),
        ("Invalid text 'Zorn'", chat("Say Zorn twice"), "Invalid text […]"),
        ("Invalid text 'Zorn'", chat("Say it twice"), "Invalid text 'Zorn'"),
        ("bad: the heron stood in the rain!", chat("Here the heron stood in the rain."), "bad:[…]!"),
        ("bad: Zorn", chat("Zorn"), "bad: […]"),
        ("bad: Zorn", b'"Zorn"', "bad: […]"),
        ("role user is unknown", chat([{"type": "text", "text": "user"}]), "role […] is unknown"),
        ("role user is unknown", chat("hello"), "role user is unknown"),
        ("", chat("x"), ""),
        ("anything", b'"' + b"x" * (5 << 20) + b'"', "[…]"),
        ("bad", b"no json", "bad"),
    ],
)
def test_the_sentence(message: str, request_body: bytes | None, shown: str) -> None:
    assert server_sentence(message, request_body) == shown


def test_a_long_message_is_cut_and_an_empty_one_is_not_told() -> None:
    assert len(server_sentence("x " * 5000)) == SENTENCE_LENGTH
    assert says(" \n") == "" and says("no") == ' The server says: "no"'
