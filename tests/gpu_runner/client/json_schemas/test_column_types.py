"""Which columns a JSON schema makes, and which values fit them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.client.json_schemas.column_types import (
    ColumnType,
    Kind,
    Misfit,
    column_descriptions,
    column_types,
    fitted,
    fitted_row,
)
from gpu_runner.client.json_schemas.output_schema import compile_check
from gpu_runner.client.json_schemas.schema_limits import SchemaProblem

STRING, INTEGER, NUMBER, BOOLEAN, JSON = (
    ColumnType(kind) for kind in (Kind.STRING, Kind.INTEGER, Kind.NUMBER, Kind.BOOLEAN, Kind.JSON)
)


def of_one(schema: Any, **top: Any) -> ColumnType:
    return column_types({"type": "object", "properties": {"a": schema}, **top})["a"]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, STRING),
        ({"type": ["string", "null"]}, STRING),
        ({"type": ["integer", "number"]}, NUMBER),
        ({"enum": ["a", "b"]}, STRING),
        ({"enum": ["a", None]}, STRING),
        ({"enum": [1, 2]}, INTEGER),
        ({"enum": [1, 2.5]}, NUMBER),
        ({"enum": [1, "a"]}, JSON),
        ({"enum": [True, False]}, BOOLEAN),
        ({"const": "x"}, STRING),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, INTEGER),
        ({"oneOf": [{"type": "null"}, {"enum": ["a"]}, {"const": "b"}]}, STRING),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, JSON),
        ({"type": ["integer", "string"]}, JSON),
        ({"allOf": [{"type": "boolean"}]}, BOOLEAN),
        ({"type": "array", "items": {"type": "number"}}, ColumnType(Kind.LIST, NUMBER)),
        ({"type": "array", "items": {"type": ["number", "string"]}}, ColumnType(Kind.LIST, JSON)),
        ({"type": "array"}, JSON),
        ({"type": "array", "prefixItems": [{"type": "number"}], "items": {"type": "string"}}, JSON),
        ({"type": "object", "properties": {"b": {"type": "string"}}}, ColumnType(Kind.STRUCT, fields=(("b", STRING),))),
        ({"type": "object", "properties": {"b": {}}, "additionalProperties": {"type": "string"}}, JSON),
        ({"type": "object", "properties": {"b": {}, "B": {}}}, JSON),
        ({"type": "object", "properties": {"b\0c": {}}}, JSON),
        ({"type": "object"}, JSON),
        ({}, JSON),
        (True, JSON),
        ({"type": "null"}, JSON),
        ({"$ref": "#/$defs/x"}, INTEGER),
        ({"$ref": "#"}, JSON),
        ({"$ref": "#/$defs/tree"}, ColumnType(Kind.STRUCT, fields=(("value", STRING), ("inner", JSON)))),
    ],
)
def test_the_type_of_a_property(schema: Any, kind: ColumnType) -> None:
    tree = {"type": "object", "properties": {"value": {"type": "string"}, "inner": {"$ref": "#/$defs/tree"}}}
    assert of_one(schema, **{"$defs": {"x": {"type": "integer"}, "tree": tree}}) == kind


def test_columns_come_in_the_order_of_the_schema_with_what_it_says_of_them() -> None:
    schema = {
        "$ref": "#/$defs/Answer",
        "$defs": {
            "Answer": {
                "type": "object",
                "properties": {"z": {"type": "string", "description": "the last"}, "a": {"type": "integer"}},
            }
        },
    }
    assert list(column_types(schema)) == ["z", "a"]
    assert column_descriptions(schema) == {"z": "the last"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": {}}, "an object with properties"),
        ({"type": "object"}, "an object with properties"),
        ({"type": "object", "properties": {}}, "an object with properties"),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "string"}]}, "an object with properties"),
        ({"type": ["object", "string"], "properties": {"a": {}}}, None),
        ({"type": "object", "properties": {f"a{i}": {} for i in range(501)}}, "at most 500 properties"),
        (
            {
                "type": "object",
                "properties": {
                    f"a{i}": {"type": "object", "properties": {f"b{j}": {} for j in range(50)}} for i in range(50)
                },
            },
            "at most 2,000 fields",
        ),
        (
            {
                "type": "object",
                "properties": {f"p{i}": {"$ref": "#/$defs/a10"} for i in range(100)},
                "$defs": {"a0": {"type": "string"}}
                | {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i - 1}"}] * 2} for i in range(1, 11)},
            },
            "found in 50,000 steps",
        ),
    ],
)
def test_a_schema_that_makes_no_columns_is_refused(schema: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert list(column_types(schema)) == ["a"]
        return
    with pytest.raises(SchemaProblem, match=words):
        column_types(schema)


def test_lists_in_lists_end_in_json_text() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(20):
        schema = {"type": "array", "items": schema}
    kind, levels = of_one(schema), 0
    while kind.item is not None:
        kind, levels = kind.item, levels + 1
    assert kind == JSON and levels == 8


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (None, INTEGER, None),
        (3, INTEGER, 3),
        (3.0, INTEGER, 3),
        (3, NUMBER, 3.0),
        ({"b": [1]}, JSON, '{"b":[1]}'),
        ([None, "a"], ColumnType(Kind.LIST, STRING), [None, "a"]),
        ({"b": "x", "more": 1}, ColumnType(Kind.STRUCT, fields=(("b", STRING), ("c", NUMBER))), {"b": "x", "c": None}),
    ],
)
def test_a_value_that_fits(value: Any, kind: ColumnType, found: Any) -> None:
    assert fitted(value, kind) == found


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("3", INTEGER),
        (3.5, INTEGER),
        (True, INTEGER),
        (1 << 63, INTEGER),
        (1e300, INTEGER),
        (True, NUMBER),
        (1, BOOLEAN),
        (1, STRING),
        ("a", ColumnType(Kind.LIST, STRING)),
        ([1], ColumnType(Kind.LIST, STRING)),
        ([], ColumnType(Kind.STRUCT, fields=(("b", STRING),))),
    ],
)
def test_a_value_that_does_not_fit(value: Any, kind: ColumnType) -> None:
    with pytest.raises(Misfit):
        fitted(value, kind)


@pytest.mark.parametrize("text", ["", "no", "[]", "3", '{"a": 3', '{"a": "x"}', "[" * 2000, '{"a": 1e999}'])
def test_an_output_that_is_no_such_object_is_a_misfit(text: str) -> None:
    with pytest.raises(Misfit):
        fitted_row(text, {"a": INTEGER})


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    plain = st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean")])
    inner = st.recursive(
        plain | st.just({"type": ["string", "null"]}),
        lambda one: (
            st.builds(lambda item: {"type": "array", "items": item}, one)
            | st.builds(
                lambda fields: {"type": "object", "properties": fields, "additionalProperties": False},
                st.dictionaries(st.sampled_from("abc"), one, min_size=1),
            )
        ),
        max_leaves=5,
    )
    return {"type": "object", "properties": draw(st.dictionaries(st.sampled_from("pqr"), inner, min_size=1))}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-3, 3) | st.sampled_from(["", "a"]),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.sampled_from("abcpqr"), one, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(schema=schemas(), value=json_values)
def test_what_the_schema_takes_fits_its_columns_and_keeps_its_values(schema: dict[str, Any], value: Any) -> None:
    text = orjson.dumps(value).decode()
    if compile_check(schema)(text) is not None:
        return
    row = fitted_row(text, column_types(schema))
    assert row.keys() == schema["properties"].keys()
    assert same(value, row)


def same(value: Any, found: Any) -> bool:
    """Whether a column has what the answer has; a struct has all its fields."""
    if isinstance(found, dict):
        return all(same(value.get(name), one) for name, one in found.items())
    if isinstance(found, list):
        return len(value) == len(found) and all(map(same, value, found))
    return bool(value == found)
