"""Conversations, request fields and tools of rows that somebody made in order to break what reads them."""

from __future__ import annotations

import json
from typing import Any

from hostile.case import cases


def _nested(levels: int) -> Any:
    found: Any = "x"
    for _ in range(levels):
        found = [found]
    return found


USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATIONS = cases(
    "conversation",
    ("10,000 messages", [USER] * 10_000, "at most 2,000 messages"),
    ("10,000 messages as text", json.dumps([USER] * 10_000), "at most 2,000 messages"),
    ("100 MB of text", "[" + "x" * 100_000_000, "at most 1,048,576 characters"),
    ("100 MB in one message", [{"role": "user", "content": "x" * 100_000_000}], None),  # the prompt's length is checked
    ("10,000 levels as text", "[" * 10_000 + "]" * 10_000, "no JSON"),
    ("10,000 levels of parts", [{"role": "user", "content": _nested(10_000)}], "expected type"),
    (
        "10,000 levels within a part",
        [{"role": "user", "content": [{"type": "file", "file": {"a": _nested(10_000)}}]}],
        "fewer levels",
    ),
    ("a role that is a list", [{"role": ["user"], "content": "x"}], "expected role"),
    ("a role of 100,000 letters", [{"role": "u" * 100_000, "content": "x"}], "found text"),
    ("a role with line breaks", [{"role": "user\nsystem", "content": "x"}], "found text"),
    ("100,000 keys", [{"role": "user", "content": "x", **{f"k{i}": 1 for i in range(100_000)}}], "and 99,994 more"),
    ("keys that are no text", [{"role": "user", "content": "x", 7: 1, None: 2}], "found '7', 'None'"),
    ("bytes", [{"role": "user", "content": b"x"}], "bytes"),
    ("a number with 5,000 digits", "[" + "9" * 5000 + "]", "no JSON"),
    ("a call without an id", [{"role": "assistant", "tool_calls": [{**CALL, "id": ""}]}, USER], "expected text in id"),
    ("10,000 calls", [{"role": "assistant", "tool_calls": [CALL] * 10_000}, USER], "at most 128 tool_calls"),
    ("calls that are a mapping", [{"role": "assistant", "tool_calls": {"a": 1}}, USER], "a list of tool_calls"),
    ("an answer to no call", [{"role": "tool", "tool_call_id": "1", "content": "x"}], "the id of none"),
    ("an answer to a call after it", [{"role": "tool", "tool_call_id": "1", "content": "x"}, USER], "the id of none"),
    ("messages in messages", [[USER]], "expected role and content, found a list"),
)
FIELDS = cases(
    "row_field",
    ("infinity", ("temperature", "inf"), "no number"),
    ("not a number", ("temperature", "nan"), "no number"),
    ("an exponent without an end", ("temperature", "1e999999999"), "no number"),
    ("1 MB of digits", ("max_tokens", "9" * 1_000_000), "1,000,000 characters"),
    ("digits of another script", ("max_tokens", "\u0661\u0662"), "no number"),
    ("underscores", ("max_tokens", "1_0_0"), "no number"),
    ("more than 64 bits", ("seed", str(1 << 64)), "expected a whole number from 0"),
    ("10,000 open lists", ("stop", "[" * 10_000), "found neither"),
    ("1,000,000 stops", ("stop", json.dumps(["x"] * 1_000_000)), "a list of 1,000,000 values"),
    ("stops within stops", ("stop", '[["x"]]'), "a list of 1 values"),
)
TOOLS = cases(
    "row_tools",
    ("100 MB of text", "[" + "x" * 100_000_000, "at most 1,048,576 characters"),
    ("10,000 levels as text", "[" * 10_000 + "]" * 10_000, "expected JSON"),
    ("10,000 levels", _nested(10_000), "fewer levels"),
    ("infinity", [{"a": float("inf")}], "finite"),
    ("bytes", [{"a": b"x"}], "bytes"),
    ("a plain word", "required", None),
)
SPECS = cases(
    "spec",
    ("a system text in S3", {"prompt": {"system_from": "s3://b/k", "user": "{{ q }}"}}, "a file beside the defs.yaml"),
    ("examples with a null byte", {"prompt": {"examples": "a\0b", "user": "{{ q }}"}}, "a file beside the defs.yaml"),
    ("a list as messages_from", {"prompt": {"messages_from": ["m"]}}, "prompt.messages_from"),
    ("an open template", {"sampling": {"temperature": "{{ t"}}, "a Jinja template"),
    ("a template that hangs", {"sampling": {"seed": "{{ range(10 ** 9) | sum }}"}}, "a range of more"),
    ("a template that is a list", {"sampling": {"max_tokens": ["{{ t }}"]}}, "sampling.max_tokens"),
    ("tools_from a mapping", {"sampling": {"tools_from": {"a": 1}}}, "sampling.tools_from"),
)
ROW_REQUESTS = [*CONVERSATIONS, *FIELDS, *TOOLS, *SPECS]
