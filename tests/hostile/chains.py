"""Keys, tables and columns of chains that somebody made in order to break what reads them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from typing import Any

import polars as pl
import pyarrow as pa

from hostile.case import cases

TYPE = "type: batch_assets.GeneratedDataset\n"
NAMED = {"dataset": "topics"}


def _nested(levels: int) -> Any:
    found: Any = "x"
    for _ in range(levels):
        found = [found]
    return found


def _one_list(values: pa.Array) -> pa.Array:
    """A column of one row, whose value is the list of these."""
    return pa.ListArray.from_arrays([0, len(values)], values)


def _declared(**sources: dict[str, Any]) -> str:
    """A file of datasets, each with its source."""
    prompt = {"user": "{{ output }}"}
    each = [{"name": name, "source": source, "prompt": prompt, "model": "m"} for name, source in sources.items()]
    return "---\n".join(f"{TYPE}attributes: {json.dumps(one)}\n" for one in each)


def _ring(size: int) -> dict[str, dict[str, Any]]:
    return {f"d{i}": {"dataset": f"d{(i + 1) % size}"} for i in range(size)}


# What stands in a file.
SPECS = cases(
    "spec",
    *[
        (f"source.{key}: {name}", {"source": {**NAMED, key: value}}, words)
        for key, name, value, words in [
            ("explode", "a list", ["a"], "source.explode: expected"),
            ("explode", "nothing but dots", "...", "a column, or names with dots"),
            ("explode", "a dot at the end", "output.", "a column, or names with dots"),
            ("explode", "100,000 letters", "x" * 100_000, "source.explode: expected"),
            ("explode", "500 names with dots", ".".join("a" for _ in range(500)), "source.explode: expected"),
            ("group_by", "a word", "topic", "source.group_by: expected"),
            ("group_by", "no column", [], "source.group_by: expected"),
            ("group_by", "100 columns", [f"c{i}" for i in range(100)], "source.group_by: expected"),
            ("group_by", "a column twice", ["a", "a"], "each column once"),
            ("group_by", "a mapping", [{"a": 1}], "source.group_by.0: expected"),
            ("min_group", "infinity", math.inf, "source.min_group: expected"),
            ("min_group", "true", True, "source.min_group: expected"),
            ("rename", "a list", ["a"], "source.rename: expected"),
            ("rename", "two to one", {"a": "x", "b": "x"}, "each new name once"),
            ("rename", "2,000 columns", {f"a{i}": f"b{i}" for i in range(2000)}, "source.rename: expected"),
            ("rename", "to nothing", {"a": ""}, "source.rename"),
            ("include_errors", "a word", "perhaps", "source.include_errors: expected"),
            ("dataset", "a path", "../../etc/passwd", "source.dataset: expected"),
            ("dataset", "capital letters", "Topics", "source.dataset: expected"),
            ("dataset", "letters that look alike", "t\u043epics", "source.dataset: expected"),
            ("dataset", "a list", ["topics"], "source.dataset: expected"),
            ("dataset", "1 MB", "a" * 1_000_000, "source.dataset: expected"),
            ("asset", "beside a dataset", "a/b", "exactly one of"),
            ("format", "beside a dataset", "csv", "no format beside a dataset"),
        ]
    ],
    ("source.asset: an empty part", {"source": {"asset": "a//b"}}, "the key of an asset"),
    ("source.asset: a line break", {"source": {"asset": "a\nb"}}, "the key of an asset"),
    ("source.asset: 10,000 letters", {"source": {"asset": "a" * 10_000}}, "source.asset: expected"),
    ("samples: 65", {"samples": 65}, "samples: expected"),
    ("samples: a text", {"samples": "3"}, "samples: expected"),
    ("samples with a temperature of 0", {"samples": 2, "sampling": {"temperature": 0}}, "1 with a temperature of 0"),
    ("refresh without a table", {"refresh": "when_upstream_changes"}, "a source that is the table of another"),
    ("refresh: always", {"source": NAMED, "refresh": "always"}, "refresh: expected"),
    ("an id beside group_by", {"source": {**NAMED, "group_by": ["a"]}, "id": "b"}, "no id beside group_by"),
)
DEFS = cases(
    "defs",
    ("a circle of two", _declared(**_ring(2)), "datasets that are no circle, found d1 → d0 → d1"),
    ("a circle of ten", _declared(**_ring(10)), "no circle, found d9 → d0 → d1 → d2"),
    ("a dataset that reads itself", _declared(a={"dataset": "a"}), "another dataset, found the dataset itself"),
    ("an asset of its own", _declared(a={"asset": "a/source"}), "no circle, found a → a"),
    ("a circle through assets", _declared(a={"asset": "b/rows"}, b={"dataset": "a"}), "no circle, found b → a → b"),
    ("one that is not declared", _declared(a={"dataset": "bb"}, b={"path": "x.csv"}), "the name of a declared dataset"),
    ("one of nearly this name", _declared(a={"dataset": "topic"}, topics={"path": "x.csv"}), "Did you mean 'topics'"),
    ("ten steps", _declared(**{f"d{i}": {"dataset": f"d{i - 1}"} if i else {"path": "x"} for i in range(10)}), None),
    ("a diamond", _declared(a={"path": "x"}, b={"dataset": "a"}, c={"dataset": "a"}, d={"dataset": "c"}), None),
)

# What stands in a table: (rows of JSONL, or a table), keys of the source.
LISTS = {"explode": "q"}
GROUPS = {"group_by": ["g"]}
BIG = 10**30
NOT_FINITE = [math.nan, math.inf, -math.inf]
DAY = datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999)
STRUCT = pa.struct([("a", pa.struct([("b", pa.list_(pa.int8()))])), ("", pa.string())])
# By what it is: three values, what is said of groups of them, and of a list of them.
VALUES: dict[str, tuple[pa.Array, str | None, str | None]] = {
    "NaN and infinity": (pa.array(NOT_FINITE), "expected a value of 'g', found nan", None),
    "decimals": (
        pa.array([decimal.Decimal("1e-30"), decimal.Decimal(BIG), None], pa.decimal256(76, 35)),
        "null",
        "column 'q' is null",
    ),
    "moments": (
        pa.array([DAY, None, DAY], pa.timestamp("us", "UTC")),
        "expected a value of 'g', found null",
        "column 'q' is null",
    ),
    "nanoseconds": (pa.array([2**62, 1, 1], pa.timestamp("ns")), None, "whole microseconds"),
    "moments beyond Python's": (pa.array([2**62, 1, 1], pa.timestamp("us")), "years 1 to 9999", "years 1 to 9999"),
    "spans": (pa.array([2**40, 1, 1], pa.duration("us")), None, None),
    "structs in structs": (pa.array([{"a": {"b": [1]}, "": "x"}] * 3, STRUCT), None, None),
    "a dictionary": (
        pa.array(["x", None, "x"]).dictionary_encode(),
        "expected a value of 'g', found null",
        "column 'q' is null",
    ),
    "large texts": (pa.array(["x", "y", "z"], pa.large_string()), None, None),
    "views": (pa.array(["x", "y", "z"], pa.string_view()), None, None),
    "bytes": (pa.array([b"\xff\x00", b"y", b"x"], pa.large_binary()), None, None),
    "bytes as text": (
        pa.Array.from_buffers(pa.string(), 3, pa.array([b"\xff", b"y", b"z"]).buffers()),
        "UTF-8",
        "UTF-8",
    ),
    "maps": (pa.array([[(1, "a")], [], [(2, None)]], pa.map_(pa.int8(), pa.string())), None, None),
    "nothing": (pa.nulls(3), "expected a value of 'g', found null", "column 'q' is null"),
    "texts of blanks": (pa.array([" ", "\u2003", "x"]), "nothing but blanks", "column 'q' is empty"),
    "a text of 2,000 letters": (pa.array(["x" * 2000, "y", "z"]), "at most 1024 characters", None),
}
BROKEN = ("moments beyond Python's", "bytes as text")
TABLES = cases(
    "chain_rows",
    ("a list 10,000 deep as text", ([{"q": "[" * 10_000 + "]" * 10_000}], LISTS), "found text that is no JSON"),
    ("10,000 open lists", ([{"q": "[" * 10_000}], LISTS), "found text that is no JSON"),
    ("a list 1,000 deep as text", ([{"q": "[" * 1000 + "]" * 1000}], LISTS), "at most 254 lists"),
    ("a list 500 deep in JSONL", ([{"q": _nested(500)}], LISTS), "nested at most 200 levels"),
    (
        "10,000,000 elements",
        (pa.table({"q": _one_list(pa.repeat(pa.scalar(1, pa.int8()), 10_000_000))}), LISTS),
        "100,000 elements",
    ),
    ("1,000,000 elements as text", ([{"q": json.dumps([1] * 1_000_000)}], LISTS), "at most 100,000 elements"),
    ("17 MiB of text", (pa.table({"q": ['["' + "x" * (17 << 20) + '"]']}), LISTS), "at most 16 MiB of JSON"),
    ("whole numbers of 31 digits", ([{"q": [BIG, BIG + 1], "i": "p"}], LISTS), None),
    ("a number of 5,000 digits", ([{"q": "[" + "9" * 5000 + "]"}], LISTS), "number is infinity"),
    ("NaN as JSON", ([{"q": "[NaN]"}], LISTS), "found text that is no JSON"),
    ("half a surrogate", ([{"q": '["\\ud800"]'}], LISTS), "found text that is no JSON"),
    ("the same key twice", ([{"q": '[{"q": 1, "q": 2}]'}], LISTS), None),
    ("an object", ([{"q": {"a": [1]}}], LISTS), "name its list with a dot: explode: COLUMN.a"),
    ("a number", ([{"q": 1}], LISTS), "expected a list, found a number"),
    ("a list of nothing", ([{"q": []}], LISTS), "expected at least one row"),
    ("a way that ends early", ([{"q": {"a": 1}}], {"explode": "q.a.b"}), "an object with the key 'b'"),
    ("ids that are lists", ([{"q": [1], "i": [1]}], LISTS), "a value of type list"),
    ("ids that are true", ([{"q": [1], "i": True}], LISTS), "a value of type bool"),
    ("no ids", ([{"q": [1]}, {"q": [1], "i": "x"}], LISTS), "found null"),
    ("an id twice", ([{"q": [1], "i": "p"}, {"q": [1], "i": "p"}], LISTS), "id: the same as in"),
    (
        "40 MiB in a group",
        (pa.table({"g": ["a"] * 40, "q": ["x" * ((1 << 20) - 100)] * 40}), GROUPS),
        "16 MiB in a group",
    ),
    ("2 MiB in a row of a group", (pa.table({"g": ["a"], "q": ["x" * (2 << 20)]}), GROUPS), "1,048,576 bytes in a row"),
    ("10,001 rows in a group", (pa.table({"g": ["a"] * 10_001, "q": ["x"] * 10_001}), GROUPS), "10,000 rows and"),
    ("groups of nobody", ([{"g": "a", "q": 1}], {**GROUPS, "min_group": 10_000}), "groups of 10000 rows or more"),
    ("a group of a column that is nowhere", ([{"h": "a", "q": 1}], GROUPS), "expected column 'g'"),
    ("a list in a column that is nowhere", ([{"h": "a"}], LISTS), "expected column 'q'"),
    ("a column that is renamed and nowhere", ([{"h": "a"}], {"rename": {"nope": "q"}}), "nope"),
    ("columns that swap their names", ([{"q": "a", "r": "b"}], {"rename": {"q": "r", "r": "q"}}), None),
    *[
        (f"a column that is called {name!r:.30}", (pa.table({name: ["a"]}), {"rename": {name: "q"}}), None)
        for name in ('a.b."c"', "' OR 1=1 --", "q\u0430", "\u202egnp", " ", "{{ q }}", "a\nb", "\U0001f600" * 60)
    ],
    ("two columns of one name", (pa.table([["a"], ["b"]], names=["q", "q"]), LISTS), "expected one column 'q'"),
    *[
        (f"a list of {name}", (pa.table({"q": _one_list(array)}), LISTS), words)
        for name, (array, _, words) in VALUES.items()
    ],
    *[
        (
            f"a kept column of {name}",
            (pa.table({"g": array, "q": [1, 2, 3]}), {}, ["g"]),
            words if name in BROKEN else None,
        )
        for name, (array, _, words) in VALUES.items()
    ],
    *[
        (f"groups of {name}", (pa.table({"g": array, "q": [1, 2, 3]}), GROUPS), words)
        for name, (array, words, _) in VALUES.items()
    ],
)

# What stands in outputs of a JSON schema, behind `output.columns`.
ANY = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "number"}}}}
OUTPUTS = cases(
    "output_row",
    ("10,000 levels", (ANY, '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"), "no match"),
    ("a number beyond 64 bits", (ANY, f'{{"a": {BIG}}}'), "no match"),
    ("a number of 5,000 digits", (ANY, '{"a": ' + "9" * 5000 + "}"), "no match"),
    ("100,000 numbers", (ANY, json.dumps({"b": [1] * 100_000})), None),
    ("NaN", (ANY, '{"b": [NaN]}'), "no match"),
    ("1e400", (ANY, '{"b": [1e400]}'), "no match"),
    ("true as a number", (ANY, '{"a": true}'), "no match"),
    ("no object", (ANY, "[1]"), "no match"),
    ("no JSON", (ANY, "as you wish: {"), "no match"),
    ("10,000 keys that nobody asked for", (ANY, json.dumps({f"k{i}": 1 for i in range(10_000)})), None),
)
PLACES = cases(
    "asset_place",
    ("no place", {"rows": 3}, "found neither; its metadata: rows"),
    ("a key in the address", {"path": "s3://id:secret@bucket/k"}, "without user, password or query"),
    ("a query", {"dagster/uri": "https://x/y?token=secret"}, "without user, password or query"),
    (
        "another scheme",
        {"dagster/uri": "ftp://bucket/secret"},
        "a file, s3://bucket/key or gs://bucket/key, found ftp://",
    ),
    ("a relative path", {"path": "data/q.parquet"}, "a whole path"),
    ("a place that is a number", {"path": 7}, "found neither"),
    ("nothing", {"path": ""}, "found neither"),
    ("a null byte", {"path": "/tmp/\0x"}, None),
    ("100,000 letters", {"path": "/" + "x" * 100_000}, None),
    ("100 names of metadata", {f"m{i}": 1 for i in range(100)}, "its metadata"),
)
PYTHON = cases(
    "python",
    ("a frame without rows", {"source": pl.DataFrame({"q": []})}, "a frame with rows"),
    ("a frame without columns", {"source": pl.DataFrame()}, "a frame with rows"),
    (
        "a frame of objects",
        {"source": pl.DataFrame({"q": [object()]}, schema={"q": pl.Object})},
        "columns that Parquet has",
    ),
    ("a number as source", {"source": 7}, "source: expected"),
    ("a path with a null byte", {"source": "a\0b.jsonl"}, None),
    ("a name that leaves the folder", {"name": "../x", "source": pl.DataFrame({"q": ["x"]})}, "name: expected"),
    ("a key that is none", {"sources": 1}, "sources"),
    ("a prompt that is a number", {"prompt": 7}, "prompt: expected"),
)
OPENED = cases(
    "opened",
    ("a name that leaves the store", ("../../etc", None), "expected the name of a dataset"),
    ("1 MB as name", ("a" * 1_000_000, None), "expected the name of a dataset"),
    ("a version that leaves the store", ("d", "../../../../x"), "a version of 16 hex digits"),
    ("none", ("d", None), "no table in"),
    ("a version that is gone", ("d", "0" * 16), "no table in"),
)
CHAINS = [*SPECS, *DEFS, *TABLES, *OUTPUTS, *PLACES, *PYTHON, *OPENED]
