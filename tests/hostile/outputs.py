"""Outputs for typed columns, engines and exports that somebody asks for, and files of examples."""

from __future__ import annotations

import json
from typing import Any

from hostile.case import cases

TOOL = {"type": "function", "function": {"name": "f"}}
NESTED: Any = {"type": "integer"}
for _ in range(40):
    NESTED = {"type": "array", "items": NESTED}
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "t": {"type": "string"},
        "l": {"type": "array", "items": {"type": "integer"}},
        "o": {"type": "object", "properties": {"a": {"type": "boolean"}}},
        "any": {},
        "deep": NESTED,
    },
}
MISFIT = "does not match"
TYPED = cases(
    "typed",
    ("the largest number of 64 bits", '{"n": 9223372036854775807}', None),
    ("one more", '{"n": 9223372036854775808}', MISFIT),
    ("one less than the least", '{"n": -9223372036854775809}', MISFIT),
    ("20,000 digits", '{"n": ' + "9" * 20_000 + "}", MISFIT),
    ("a fraction of zero", '{"n": 3.0}', None),
    ("a fraction", '{"n": 3.5}', MISFIT),
    ("1e308 as a whole number", '{"n": 1e308}', MISFIT),
    ("1e400", '{"x": 1e400}', MISFIT),
    ("NaN", '{"x": NaN}', MISFIT),
    ("an integer as a number", '{"x": 123456789012345678901234567890}', None),
    ("true as a number", '{"x": true}', MISFIT),
    ("a number as text", '{"t": 1}', MISFIT),
    ("a lone surrogate", '{"t": "\\ud800"}', MISFIT),
    ("NUL", '{"t": "\\u0000"}', None),
    ("null in a list", '{"l": [null, 1]}', None),
    ("text in a list", '{"l": [1, "2"]}', MISFIT),
    ("a mapping as a list", '{"l": {"0": 1}}', MISFIT),
    ("200,001 elements", '{"l": [' + "1," * 200_000 + "1]}", None),
    ("an object with more than its fields", '{"o": {"a": true, "b": 1}}', None),
    ("an object without its fields", '{"o": {}}', None),
    ("a list as an object", '{"o": []}', MISFIT),
    ("a key twice", '{"n": "x", "n": 1}', None),
    ("10,000 levels", '{"any": ' + "[" * 10_000 + "]" * 10_000 + "}", MISFIT),
    ("500 levels", '{"any": ' + "[" * 500 + "]" * 500 + "}", MISFIT),
    ("40 levels of lists", json.dumps({"deep": json.loads("[" * 40 + "1" + "]" * 40)}), None),
    ("a list at the top", "[1]", MISFIT),
    ("nothing", "", MISFIT),
    ("fenced", '```json\n{"n": 1}\n```', MISFIT),
    ("two values", '{"n": 1} {"n": 2}', MISFIT),
)
EXPORTS = cases(
    "export",
    ("no such format", {"form": "xml"}, "--format"),
    ("a format with a line break", {"form": "jsonl\n"}, "--format"),
    ("a map of nothing", {"mapping": [""]}, "--map"),
    ("a map to nothing", {"mapping": ["prompt="]}, "no column is called ''"),
    ("a map of no field", {"mapping": ["answer=output"]}, "--map"),
    ("a map to no column", {"mapping": ["prompt=" + "x" * 10_000]}, "no column is called"),
    ("a map of lines", {"form": "jsonl", "mapping": ["prompt=output"]}, "nothing for this format"),
    ("no such column", {"kept": ["../x"]}, "--columns"),
    *[(f"a share of {one}", {"validation": one}, "--validation") for one in (-0.1, 1, float("nan"), float("inf"))],
    ("a split without a share", {"split_by": "topic"}, "--split-by"),
    ("a split by no column", {"validation": 0.1, "split_by": "nope"}, "--split-by"),
    ("groups without ranks", {"form": "preference", "group_by": "topic"}, "expected both"),
    ("ranks of messages", {"group_by": "topic", "rank_by": "topic"}, "expected both"),
    ("groups of no column", {"form": "preference", "group_by": "nope", "rank_by": "topic"}, "--group-by"),
    ("an open quote", {"where": "output = 'x"}, "--where"),
    ("quotes in quotes", {"where": "output LIKE '%it''s%' AND \"topic\" <> '\"'"}, None),
    ("two conditions", {"where": "topic = 'a'; DROP TABLE x"}, "--where"),
    ("a condition on a file", {"where": "topic = (SELECT x FROM read_csv('/etc/passwd'))"}, "--where"),
    ("a mean of all rows", {"where": "length(output) > avg(length(output))"}, "one row at a time"),
    ("10,000 ORs", {"where": " OR ".join(["topic = 'a'"] * 10_000)}, "--where"),
    ("1,000 parentheses", {"where": "(" * 1000 + "topic = 'a'" + ")" * 1000}, "--where"),
)
EXAMPLE = b'{"user": "a", "assistant": "b"}'
EXAMPLES = cases(
    "examples",
    ("roles of chats", b'{"messages": [{"role": "user", "content": "a"}]}', "found the keys 'messages'"),
    ("a system text", b'{"user": "a", "assistant": "b", "system": "c"}', "line 1"),
    ("an answer that is a list", b'{"user": "a", "assistant": ["b"]}', "text in assistant"),
    ("an answer of blanks", b'{"user": "a", "assistant": " "}', "text in assistant"),
    ("a lone surrogate", b'{"user": "a", "assistant": "\\udfff"}', "line 1"),
    ("bytes that are no UTF-8", b'{"user": "\xff", "assistant": "b"}', "UTF-8"),
    ("UTF-16", EXAMPLE.decode().encode("utf-16"), "UTF-8"),
    ("a list of examples", b"[" + EXAMPLE + b"]", "line 1"),
    ("an open line", EXAMPLE + b"\n" + EXAMPLE[:20], "line 2"),
    ("10,000 levels", b"[" * 10_000, "line 1"),
    ("10,000 examples", (EXAMPLE + b"\n") * 10_000, "at most 500 examples"),
    ("100,000 keys", json.dumps({f"k{i}": i for i in range(60_000)}).encode(), "found the keys 'k0'"),
    ("2 MB", b" " * (2 << 20), "at most 1,048,576 bytes"),
    ("a byte order mark", b"\xef\xbb\xbf" + EXAMPLE, None),
    ("ends of lines of Windows", EXAMPLE + b"\r\n" + EXAMPLE + b"\r\n", None),
)
ENGINE = (
    *("api_key", "ssl_keyfile", "ssl-certfile", "ssl_ca_certs", "allowed_origins", "load_format", "download_dir"),
    *("hf_token", "port", "host", "served_model_name", "logits_processors", "root_path", "enable_lora"),
)
SPECS = cases(
    "spec",
    *[(f"engine.{key}", {"engine": {key: "x"}}, f"engine.{key}: expected a known key") for key in ENGINE],
    *[
        (f"a template that would {word} another", {"engine": {"chat_template": text}}, "a template by itself")
        for word, text in (
            ("include", "{% include '/etc/passwd' %}"),
            ("import", "{% import 'os' as os %}{{ os }}"),
            ("import from", "{% from 'os' import x %}"),
            ("extend", "{% extends '/etc/passwd' %}"),
        )
    ],
    *[
        (f"{key} at {path}", {"engine": {key: value}}, f"engine.{key}")
        for path in ("~/x", "file:///etc/passwd", "http://h/x", "s3://b/k", "a/b/c", "/x\u200b", "/{home}", "..")
        for key, value in (("lora", {"name": "a", "path": path}), ("tokenizer", path), ("chat_template", path))
    ],
    ("tools of 10 MB", {"sampling": {"extra": {"tools": [TOOL | {"a": "x" * 10_000_000}]}}}, "1,048,576 bytes"),
    ("fields of 10 MB", {"sampling": {"chat_template_kwargs": {"a": "x" * 10_000_000}}}, "1,048,576 bytes"),
    ("129 tools", {"sampling": {"extra": {"tools": [TOOL] * 129}}}, "1 to 128 tools"),
    ("a choice of no tool", {"sampling": {"extra": {"tools": [TOOL], "tool_choice": []}}}, "tool_choice"),
    ("400 levels", {"sampling": {"extra": {"a": json.loads("[" * 400 + "]" * 400)}}}, "what JSON can carry"),
    *[
        (f"{key} {value!r:.20}", {"sampling": {key: value}}, f"sampling.{key}: expected a")
        for key in ("temperature", "max_tokens", "seed", "stop")
        for value in ({}, "nan", "1e999", True, b"x")
    ],
    *[
        (f"{key} {value!r:.20}", {"output": {"on_truncated": "retry_longer", **{key: value}}}, f"output.{key}")
        for key in ("retry_max_tokens", "max_tokens_may_grow", "on_truncated", "reasoning_tags")
        for value in (0, -1, 1 << 70, 1.5, "maybe", [1], {})
    ],
    *[(f"a regex {text!r}", {"output": {"regex": text}}, "a regular expression") for text in ("a)|(b", "a|b)", ")(")],
    ("a grammar of blanks", {"output": {"grammar": " \n"}}, "nothing but blanks"),
    ("a grammar of 1 MB", {"output": {"grammar": "a" * (1 << 20)}}, "output.grammar"),
    ("501 messages", {"prompt": {"messages": [{"role": "user", "content": "x"}] * 501}}, "prompt.messages"),
    ("a message of a tool", {"prompt": {"messages": [{"role": "tool", "content": "{{ q }}"}]}}, "role"),
    ("a name with a lone surrogate", {"prompt": {"messages_from": "\ud800"}}, "text that UTF-8 can carry"),
)
OUTPUTS = [*TYPED, *EXPORTS, *EXAMPLES, *SPECS]
