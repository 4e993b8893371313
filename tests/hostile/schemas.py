"""JSON schemas and conditions that reach outside, hang or swell."""

from __future__ import annotations

from typing import Any

from hostile.case import cases


def nested(levels: int, key: str = "not") -> Any:
    """A schema in a schema in a schema."""
    found: Any = {"type": "object"}
    for _ in range(levels):
        found = {key: found}
    return found


def doubling(times: int, key: str = "allOf") -> Any:
    """Each definition refers twice to the one before."""
    definitions: dict[str, Any] = {"a0": {"type": "object"}}
    for i in range(1, times + 1):
        definitions[f"a{i}"] = {key: [{"$ref": f"#/$defs/a{i - 1}"}] * 2}
    return {"$defs": definitions, "$ref": f"#/$defs/a{times}"}


OUTSIDE, DRAFT = "references within the schema", "a known draft"
REFERENCES = cases(
    "schema",
    *[
        (f"$schema {address}", {"$schema": address, "type": "object"}, DRAFT)
        for address in (
            *("http://127.0.0.1:9/x", "https://example.com/schema", "file:///etc/hostname", "/etc/hostname", "x"),
            *("http://json-schema.org/draft-03/schema#", "https://json-schema.org/draft/next/schema", ""),
            *(
                "https://json-schema.org/draft/2020-12/schema/../x",
                "http://json-schema.org.evil.example/draft-07/schema",
            ),
        )
    ],
    *[
        (f"{key} {address}", {key: address}, OUTSIDE)
        for key in ("$ref", "$dynamicRef", "$recursiveRef")
        for address in ("http://127.0.0.1:9/x", "file:///etc/hostname", "other.json", "")
    ],
    ("$schema is a number", {"$schema": 7}, DRAFT),
    ("$schema is a list", {"$schema": ["http://127.0.0.1:9/x"]}, DRAFT),
    ("$schema below the top", {"properties": {"a": {"$schema": "http://127.0.0.1:9/x"}}}, DRAFT),
    ("$ref is a number", {"$ref": 7}, OUTSIDE),
    ("$ref that is not there", {"$ref": "#/$defs/nope"}, "not there"),
    ("$ref to an anchor that is not there", {"$ref": "#nope"}, "not there"),
    ("$ref below the top", {"items": {"$ref": "http://127.0.0.1:9/x"}}, OUTSIDE),
    ("$ref in patternProperties", {"patternProperties": {"a": {"$ref": "//127.0.0.1:9/x"}}}, OUTSIDE),
    ("$ref in dependencies", {"dependencies": {"a": {"$ref": "x"}}}, OUTSIDE),
    ("$id below the top", {"properties": {"a": {"$id": "http://127.0.0.1:9/x", "$ref": "#/b"}}}, "no $id"),
    ("$id at the top and a $ref to it", {"$id": "http://127.0.0.1:9/x", "$ref": "http://127.0.0.1:9/x#/a"}, OUTSIDE),
    ("$id at the top", {"$id": "http://127.0.0.1:9/x", "type": "object"}, None),
    ("$ref that leads to itself", {"$ref": "#"}, "leads to itself"),
    (
        "two $ref in a circle",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "leads to itself",
    ),
    (
        "a circle through anyOf",
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        "leads to itself",
    ),
    ("a circle through not", {"not": {"$ref": "#"}}, "leads to itself"),
    ("a property called $ref", {"properties": {"$ref": {"type": "string"}}}, None),
    ("an enum of references", {"enum": [{"$ref": "http://127.0.0.1:9/x"}]}, None),
    ("a known draft with #", {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, None),
)
SIZES = cases(
    "schema",
    *[
        (f"{key} in {key}, 500 times", nested(500, key), "levels")
        for key in ("not", "items", "additionalProperties", "if")
    ],
    ("60 levels", nested(60), None),
    *[(f"{key} doubled 40 times", doubling(40, key), "schemas for one value") for key in ("allOf", "anyOf", "oneOf")],
    (
        "$ref in a row",
        {"$defs": {"a0": {}} | {f"a{i}": {"$ref": f"#/$defs/a{i - 1}"} for i in range(1, 300)}, "$ref": "#/$defs/a299"},
        None,
    ),
    ("a wide anyOf in a wide anyOf", {"anyOf": [{"anyOf": [{}] * 110}] * 110}, "schemas for one value"),
    ("an enum of 60,000 numbers", {"enum": list(range(60_000))}, "values"),
    ("an enum of 200 kB", {"enum": ["x" * 200_000]}, "bytes"),
    ("19,000 properties", {"properties": {f"p{i}": {} for i in range(18_000)}}, "bytes"),
    ("enum of an infinity", {"enum": [float("inf")]}, "finite"),
    ("minimum nan", {"minimum": float("nan")}, "finite"),
    ("minLength 1e400", {"minLength": 1e400}, "finite"),
    ("a number of 400 bits", {"maximum": 1 << 400}, "64 bits"),
    ("keys that are numbers", {"properties": {1: {}}}, "keys that are text"),
    ("a negative minLength", {"minLength": -1}, "valid JSON schema"),
    ("multipleOf 0", {"multipleOf": 0}, "valid JSON schema"),
    ("type of nothing", {"type": "objekt"}, "valid JSON schema"),
    ("a pattern that is none", {"pattern": "("}, "valid JSON schema"),
    ("a pattern of 10^9 letters", {"pattern": "((a{1000}){1000}){1000}"}, "valid JSON schema"),
    ("300 patterns", {"anyOf": [{"pattern": f"^{i}$"} for i in range(300)]}, "patterns"),
    ("300 patternProperties", {"patternProperties": {f"^{i}$": {} for i in range(300)}}, "patterns"),
)
BRANCH = {"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "required": ["x"]}
ANSWERS = cases(
    "answer",
    ("a branching schema, 40 levels", (BRANCH, '{"x":' * 40 + "1" + "}" * 40), "nested deeper"),
    ("a branching schema, 400 levels", (BRANCH, '{"x":' * 400 + "1" + "}" * 400), "nested deeper"),
    ("lists in lists", ({"items": {"$ref": "#"}}, "[" * 1000 + "]" * 1000), None),
    ("lists in lists without an end", ({"items": {"$ref": "#"}}, "[" * 100_000), "not JSON"),
    ("a pattern that searches for ever", ({"pattern": r"^(?=(a+)+$)(a|aa)+$"}, '"' + "a" * 60 + 'b"'), "match"),
    ("a pattern with a reference back", ({"pattern": r"(a*)*\1b"}, '"' + "a" * 100_000 + '"'), "at the top"),
    ("a pattern that is linear", ({"pattern": "^(a+)+$"}, '"' + "a" * 100_000 + 'b"'), "at the top"),
    (
        "20,000 unique objects",
        ({"uniqueItems": True}, "[" + ",".join(f'{{"a":{i}}}' for i in range(20_000)) + "]"),
        None,
    ),
    ("a number of 4,000 digits", ({"type": "integer"}, "9" * 4000), "not JSON"),
    ("a number of 30 digits", ({"type": "integer"}, "9" * 30), None),
    ("multiples of nearly nothing", ({"multipleOf": 1e-300}, "1e300"), None),
    ("NaN", ({"type": "number"}, "NaN"), "not JSON"),
    ("Infinity", ({"type": "number"}, "-Infinity"), "not JSON"),
    ("half a character", ({"type": "string"}, '"\\ud800"'), "not JSON"),
    ("a null byte", ({"type": "string"}, '"a\x00b"'), "not JSON"),
    ("the same key twice", ({"type": "object"}, '{"a":1,"a":2}'), None),
    ("two documents", ({"type": "object"}, "{}{}"), "not JSON"),
    ("nothing", ({"type": "object"}, ""), "not JSON"),
    ("an error that quotes all", ({"type": "integer"}, '"' + "x" * 1_000_000 + '"'), "at the top"),
)
CONDITIONS = cases(
    "where",
    ("5,000 ORs", " OR ".join(["a=1"] * 5000), "characters"),
    ("1,000 ORs", " OR ".join(["a=1"] * 1000), "operators"),
    ("50,000 ORs", " OR ".join(["a=1"] * 50_000), "characters"),
    ("600 sums", "a = 1" + "+1" * 600, "operators"),
    ("600 NOTs", "NOT " * 600 + "a = 1", "operators"),
    ("600 CASTs", "a" + "::int" * 600 + " = 1", "operators"),
    ("600 negations", "a = " + "- " * 600 + "1", "operators"),
    ("5,000 parentheses", "(" * 5000 + "a = 1" + ")" * 5000, "parentheses"),
    ("60 parentheses", "(" * 60 + "a = 1" + ")" * 60, "parentheses"),
    ("60 calls", "upper(" * 60 + "a" + ")" * 60 + " = 'X'", "parentheses"),
    ("60 CASEs", "CASE WHEN a=1 THEN " * 300 + "TRUE" + " END" * 300, "operators"),
    ("repeat", "repeat('a', 2000000000) = a", "not longer"),
    ("lpad", "lpad(a, 2000000000, 'x') = a", "not longer"),
    ("RPAD in capitals", "RPAD (a, 2000000000) = 'x'", "not longer"),
    ("replace of nothing", "replace(a, '', '" + "x" * 9000 + "') = 'b'", "may make it longer"),
    ("replace that grows", "replace(a, 'a', 'aa') = 'b'", "may make it longer"),
    ("replace in replace", "replace(replace(a, 'a', 'aa'), 'a', 'aa') = 'b'", "may make it longer"),
    ("replace that shrinks", "replace(a, ',', '') = 'b'", None),
    ("100 texts joined", "a" + " || a" * 100 + " = 'x'", "joined"),
    ("concat of 100", "concat(" + ", ".join(["a"] * 100) + ") = 'x'", "joined"),
    ("read_csv", "read_csv('/etc/passwd') = a", "SQL condition"),
    ("read_parquet", "a IN (SELECT x FROM read_parquet('/etc/passwd'))", "SQL condition"),
    ("a subquery", "a IN (SELECT a FROM self)", "SQL condition"),
    ("exists", "EXISTS (SELECT 1)", "SQL condition"),
    ("two statements", "a = 1; DROP TABLE x", "SQL condition"),
    ("a comment", "a = 1 -- and more", None),
    ("a count", "count(a) > 1", "one row at a time"),
    ("a window", "a > 1 OVER (PARTITION BY b)", "one row at a time"),
    ("no column", "1 = 1", "names a column"),
    ("nothing", "", "SQL condition"),
    ("an open quote", "a = 'x", "SQL condition"),
    ("a null byte", "a = '\x00'", None),
    ("explode", "explode(a) = 1", "not longer"),
    ("1,000 values", "a IN (" + ",".join(map(str, range(1000))) + ")", None),
    ("a pattern of 10^9 letters", "regexp_like(a, '((a{1000}){1000}){1000}')", None),
)
FORMS = cases(
    "spec",
    *[
        (f"regex {pattern[:30]!r}", {"output": {"regex": pattern}}, "output.regex")
        for pattern in (
            *("(", "(?=a)b", "(?<!a)b", r"(a)\1", "a{1,999999999}", "((((a{0,99}){0,99}){0,99}){0,99})", ""),
            *("(" * 900 + ")" * 900, "a" * 2001, r"\p{Nope}", "\ud800"),
        )
    ],
    *[
        (f"columns of {name}", {"output": {"columns": True, "json_schema": schema}}, "output.columns")
        for name, schema in (
            ("a list", {"type": "array"}),
            ("a property called model", {"properties": {"model": {}}}),
            ("a property without a name", {"properties": {"": {}}}),
            ("501 properties", {"properties": {f"p{i}": {} for i in range(501)}}),
        )
    ],
    ("columns of a tree", {"output": {"columns": True, "json_schema": {"properties": {"t": {"$ref": "#"}}}}}, None),
    ("columns without a schema", {"output": {"columns": True}}, "output.columns"),
    ("columns: 1", {"output": {"columns": 1}}, "output.columns"),
    ("a regex of many groups", {"output": {"regex": "(a*)*(b*)*" * 20}}, None),
    ("choices: 1,001", {"output": {"choice": [str(i) for i in range(1001)]}}, "output.choice"),
    ("choices: 1,000 of 1,000 letters", {"output": {"choice": [f"{i:01000}" for i in range(1000)]}}, "100,000 bytes"),
    ("a choice of 1,001 letters", {"output": {"choice": ["a" * 1001]}}, "output.choice.0"),
    ("a choice with a lone surrogate", {"output": {"choice": ["\ud800"]}}, "output.choice"),
    ("a choice that is a list", {"output": {"choice": [["a"]]}}, "output.choice.0"),
    ("a grammar of 50,001 letters", {"output": {"grammar": "a" * 50_001}}, "output.grammar"),
    ("a grammar that is a mapping", {"output": {"grammar": {"root": "a"}}}, "output.grammar"),
    ("a grammar with a lone surrogate", {"output": {"grammar": "\udfff"}}, "output.grammar"),
    *[
        (f"samples {found!r}", {"samples": found}, "samples")
        for found in (-1, 65, 1 << 70, 2.0, "2", [2], float("nan"), True)
    ],
)
SCHEMAS = [*REFERENCES, *SIZES, *ANSWERS, *CONDITIONS, *FORMS]
